"""PyTorch's optimizers and NovoGrad by name: their options, two ranks against one process, resumed
runs.
"""

import inspect
import re
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("datasets")

import distributed_worker
from ranks import run_modes, same_training
from shapes import SHAPES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from training import MOE, QWEN3, fake_group, make_bins, run, tensors, write_config
from whole import planned

from tilewright.nn.adapt import add_lora
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.optim.novograd import NovoGrad
from tilewright.trainer.optim.of_torch import Rprop
from tilewright.trainer.optim.optim import build_optimizer
from tilewright.trainer.optim.row import OPTIMIZERS
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages

# Other options than the defaults, and a rate at which weights move by some percent.
OPTIONS = {
    "sgd": (0.5, "{momentum: 0.9, nesterov: true}"),
    "adam": (1e-3, "{amsgrad: true, decoupled_weight_decay: true}"),
    "adamax": (1e-3, "{}"),
    "nadam": (1e-3, "{momentum_decay: 0.1}"),
    "radam": (0.1, "{decoupled_weight_decay: true}"),
    "adagrad": (1e-2, "{lr_decay: 0.1, initial_accumulator_value: 0.01}"),
    "adadelta": (5.0, "{rho: 0.8, eps: 1e-5}"),
    "rmsprop": (1e-3, "{alpha: 0.9, momentum: 0.5, centered: true}"),
    "rprop": (1e-3, "{etas: [0.4, 1.3], step_sizes: [1e-5, 1.0]}"),
    "adafactor": (1e-2, "{beta2_decay: -0.7, d: 2.0}"),
    "novograd": (1e-3, "{}"),
}
LEAST = ["--train.output_dir=-", '--data.datasets=[{"path": "dummy"}]', "--model.config_path=-"]


def chosen(name):
    rate, options = OPTIONS[name]
    decay = [] if name == "rprop" else ["--train.weight_decay=0.1"]
    args = [] if options == "{}" else [f"--train.optimizer_args={options}"]
    return [f"--train.optimizer={name}", f"--train.lr={rate}", *decay, *args]


def test_every_optimizer_of_torch_is_here_and_the_others_have_their_own_tests():
    assert {*OPTIMIZERS.names()} == {*OPTIONS, "adamw", "anyprecision_adamw", "muon"}


# ---- options


@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "novograd"])
def test_options_and_fields_reach_the_class(name):
    arguments = [*chosen(name), "--train.data_parallel_mode=ddp"]
    row = OPTIMIZERS[name]
    if row.fields:
        arguments += [f"--train.adam_{n}" for n in ("beta1=0.8", "beta2=0.7", "epsilon=1e-5")]
    train = load(None, [*LEAST, *arguments]).train
    model = torch.nn.Linear(4, 3)
    made = build_optimizer(model, train)
    kinds = {"sgd": "SGD", "rmsprop": "RMSprop", "nadam": "NAdam", "radam": "RAdam"}
    assert isinstance(made, getattr(torch.optim, kinds.get(name, name.capitalize())))
    [group] = made.param_groups
    given = row.options.model_validate(train.optimizer_args).model_dump() if row.options else {}
    assert {k: group[k] for k in given} == given
    assert group["lr"] == train.lr and group["weight_decay"] == train.weight_decay
    if row.fields:
        assert group["betas"] == (0.8, 0.7) and group["eps"] == 1e-5


@pytest.mark.parametrize(
    "name, given, said",
    [
        ("sgd", "{fused: true}", "fused is no option of the optimizer, which has momentum, damp"),
        ("sgd", "{nesterov: true}", "Nesterov momentum requires a momentum and zero dampening"),
        ("sgd", "{momentum: true}", "momentum: a boolean does not fit here"),
        ("rmsprop", "{alpha: -1}", "Invalid alpha value: -1.0"),
        ("rmsprop", "{eps: .nan}", "eps: Input should be a finite number"),
        ("adamax", "{rho: 0.5}", "only .* sgd read this"),
    ],
)
def test_options_that_the_class_does_not_take_are_refused(name, given, said):
    with pytest.raises(ConfigError, match=rf"^train\.optimizer_args = .*: {said}"):
        load(None, [*LEAST, f"--train.optimizer={name}", f"--train.optimizer_args={given}"])


def test_what_an_optimizer_cannot_do_is_refused():
    def refused(name, *arguments):
        with pytest.raises(ConfigError) as caught:
            load(None, [*LEAST, f"--train.optimizer={name}", *arguments])
        return str(caught.value)

    assert "whole rows and columns, which no process has of a shard" in refused("adafactor")
    load(None, [*LEAST, "--train.optimizer=adafactor", "--train.data_parallel_mode=ddp"])
    assert "rprop has no weight decay" in refused("rprop", "--train.weight_decay=0.1")
    for schedule in ("decay_style=linear", "warmup_ratio=0.1", "warmup_steps=3"):
        assert "of its first step alone" in refused("rprop", f"--train.lr_{schedule}")
    load(None, [*LEAST, "--train.optimizer=rprop"])


# ---- NovoGrad by hand


def test_novograd_follows_the_paper():
    """Algorithm 1 in float64, with two tensors; one has no weight decay."""
    draw = np.random.default_rng(0)
    start = [draw.normal(size=(3, 4)), draw.normal(size=5)]
    gradients = [[draw.normal(size=w.shape) for w in start] for _ in range(4)]
    rate, decays, (beta1, beta2), eps = 0.1, (0.3, 0.0), (0.9, 0.75), 1e-3
    want = [w.copy() for w in start]
    m, v = [None, None], [None, None]
    for t, step in enumerate(gradients):
        for i, g in enumerate(step):
            square = (g**2).sum()
            v[i] = square if t == 0 else beta2 * v[i] + (1 - beta2) * square
            scaled = g / (v[i] ** 0.5 + eps) + decays[i] * want[i]
            m[i] = scaled if t == 0 else beta1 * m[i] + scaled
            want[i] = want[i] - rate * m[i]
    ps = [torch.nn.Parameter(torch.tensor(w)) for w in start]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(ps, decays, strict=True)]
    made = NovoGrad(groups, {"lr": rate, "betas": (beta1, beta2), "eps": eps})
    for step in gradients:
        for p, g in zip(ps, step, strict=True):
            p.grad = torch.tensor(g)
        made.step()
    for p, w in zip(ps, want, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-5)  # norms are in float32


def test_rprop_has_the_bits_of_torchs():
    """Which cannot be computed on DTensors: here its steps compute on shards."""
    draw = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3, generator=draw)) for _ in range(2)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.1, "etas": (0.3, 2.0), "step_sizes": (1e-3, 0.15)}
    one, other = Rprop(ours, **options), torch.optim.Rprop(theirs, **options)
    for _ in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(5, 3, generator=draw)
            q.grad = p.grad.clone()
        one.step()
        other.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


# ---- the model's own tensors

FAMILIES = {**SHAPES, "qwen3": QWEN3, "qwen3_moe": MOE}


def own_tensors(model, name, t):
    """The parts of a parameter as a checkpoint of transformers has them, an expert at a time."""
    sizes = model.config.num_attention_heads, *[model.config.num_key_value_heads] * 2
    for one in t.unbind() if ".experts." in name else [t]:
        if "qkv_proj" in name:
            yield from one.split([n * model.config.head_dim for n in sizes])
        elif "gate_up_proj" in name:
            yield from one.chunk(2)
        else:
            yield one


def steps_of(optimizer, parameters, gradients):
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.clone()
        optimizer.step()


CASES = [(family, name) for family in FAMILIES for name in ("novograd", "adafactor")]
CASES += [("qwen2", name) for name in OPTIMIZERS.names() if name != "muon"]


@pytest.mark.parametrize("family, name", dict.fromkeys(CASES))
def test_a_merged_parameter_is_trained_as_the_models_own_tensors(family, name):
    """Each of them a parameter by itself, beside PyTorch's class where the row has one. Muon's
    parts have tests of their own.
    """
    arguments = [*LEAST, "--train.data_parallel_mode=none", f"--train.optimizer={name}"]
    train = load(None, [*arguments, *(chosen(name) if name in OPTIONS else [])]).train
    model = Transformer(ModelConfig.from_hf(FAMILIES[family]), Ops.resolve())
    draw = torch.Generator().manual_seed(0)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for p in named.values():
        torch.nn.init.normal_(p, 0.1, 0.1, generator=draw)
    gradients = [
        [torch.randn(p.shape, generator=draw) * p.detach() for p in named.values()]
        for _ in range(3)
    ]
    apart = torch.nn.ParameterList(
        part.detach().clone() for n, p in named.items() for part in own_tensors(model, n, p)
    )
    of_apart = [
        [part for n, g in zip(named, step, strict=True) for part in own_tensors(model, n, g)]
        for step in gradients
    ]
    start = [p.detach().clone() for p in apart]
    other = build_optimizer(apart, train)
    if hasattr(torch.optim, name.capitalize()):
        kind = getattr(torch.optim, name.capitalize())
        options = {k: v for k, v in other.param_groups[0].items() if k != "params"}
        accepted = set(inspect.signature(kind).parameters)
        other = kind([*apart], **{k: v for k, v in options.items() if k in accepted})
    steps_of(build_optimizer(model, train), named.values(), gradients)
    steps_of(other, apart, of_apart)
    found = [part for n, p in named.items() for part in own_tensors(model, n, p.detach())]
    for part, want, before in zip(found, apart, start, strict=True):
        assert not torch.equal(want, before)
        torch.testing.assert_close(part, want.detach(), rtol=1e-6, atol=1e-7)


# ---- groups


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_parameter_is_in_one_group_at_the_rate_of_its_depth(family, optimizer):
    shape = FAMILIES[family]
    changes = [f"--train.optimizer={optimizer}", "--train.lr=0.5", "--train.weight_decay=0.1"]
    changes += ['--train.no_decay_modules=["norm"]']
    changes += ["--train.muon_lr=0.25"] * (optimizer == "muon")
    plain = load(None, [*LEAST, *changes]).train
    train = load(None, [*LEAST, *changes, "--train.layerwise_lr_bound=0.25"]).train
    model = Transformer(ModelConfig.from_hf(shape), Ops.resolve())
    made = build_optimizer(model, train)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    depths = shape["num_hidden_layers"] + 2
    of = {}
    for group in made.param_groups:
        for p in group["params"]:
            assert p not in of
            of[p] = group
    assert of.keys() == {*named.values()}
    matrices = getattr(made, "matrices", {})
    for name, p in named.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        depth = int(layer[1]) + 1 if layer else {"model.embed_tokens.weight": 0}.get(name, depths)
        peak = 0.25 if p in matrices else 0.5
        assert of[p]["lr"] == pytest.approx(peak * (0.25 + 0.75 * depth / depths)), name
        assert of[p]["weight_decay"] == (0.0 if "norm" in name else 0.1), name
    # Without a bound one group for each rate and decay, as ever.
    kinds = [(g["lr"], g["weight_decay"]) for g in build_optimizer(model, plain).param_groups]
    assert len(kinds) == len({*kinds}) == (3 if optimizer == "muon" else 2)


@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["dense", "experts"])
def test_b_of_an_adapter_has_its_own_rate(shape):
    """One step of Adam, whose size is the rate: LoRA+ by hand."""
    model = Transformer(ModelConfig.from_hf(shape), Ops.resolve())
    add_lora(model, None, rank=2, alpha=2)
    arguments = ["--train.lr=0.125", "--train.adam_epsilon=1e-30", "--lora.enable_lora=true"]
    config = load(None, [*LEAST, *arguments, "--lora.lora_plus_scale=8"])
    optimizer = build_optimizer(model, config.train, plus=config.lora.lora_plus_scale)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(trained)
    before = {n: p.detach().clone() for n, p in trained.items()}
    for p in trained.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in trained.items():
        moved = before[name] - p.detach()
        want = torch.full_like(moved, 1.0 if name.endswith("_B") else 0.125)
        torch.testing.assert_close(moved, want, rtol=1e-4, atol=1e-6, msg=name)
    assert {name[-2:] for name in trained} == {"_A", "_B"}


def test_other_groups_are_refused_where_a_run_resumes(tmp_path):
    lora = {"lora__enable_lora": True, "lora__lora_rank": 2}
    path = write_config(tmp_path, train__max_steps=2, **lora)
    run(path)
    for name in ("train.layerwise_lr_bound", "lora.lora_plus_scale"):
        said = rf"another optimizer: {{'{name.partition('.')[2]}': \(1\.0, 0\.5\)}}"
        with pytest.raises(ValueError, match=said):
            run(path, f"--{name}=0.5", "--train.load_checkpoint_path=auto", "--train.max_steps=3")


@pytest.mark.parametrize("name, kind", [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_a_step_on_shards_has_the_bits_of_one_on_dtensors_and_compares_no_placements(name, kind):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if DTensor in types:
                seen.add(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    results = []
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        start, gradient = torch.randn(5, 3), torch.randn(5, 3)
        for on_shards in (False, True):
            p = DTensor.from_local(start.clone(), mesh, [Shard(0)])
            model = torch.nn.Module()
            model.weight = torch.nn.Parameter(p)
            made = build_optimizer(model, load(None, [*LEAST, f"--train.optimizer={name}"]).train)
            settings = {k: v for k, v in made.defaults.items() if k != "decoupled_weight_decay"}
            optimizer = made if on_shards else kind(made.param_groups, **settings)
            model.weight.grad = DTensor.from_local(gradient, mesh, [Shard(0)])
            seen = set()
            with Seen():
                optimizer.step()
            results.append(model.weight.to_local().detach())
            states = optimizer.state[model.weight]
            assert all(isinstance(t, DTensor) for key, t in states.items() if key != "step")
            assert any(op.endswith(("add_", "adamw_")) for op in seen) == (not on_shards)
    assert torch.equal(*results) and not torch.equal(results[0], start)


# ---- two ranks

# Whole matrices, which adafactor needs, are those of DDP: no optimizer sees that.
OF_TWO = {
    f"train_{name}": [*chosen(name), f"--train.data_parallel_mode={mode}"]
    for name in OPTIONS
    for mode in ["ddp" if name == "adafactor" else "fsdp2"]
}
# Each stage has a copy of a tied weight.
DEPTHS = ["--train.optimizer=sgd", "--train.lr=0.5", "--train.layerwise_lr_bound=0.1"]
SHARDS = [*DEPTHS, "--train.data_parallel_mode=fsdp2"]
STAGES = [*SHARDS, "--train.pipeline_parallel_size=2", "--train.gradient_accumulation_steps=2"]
BY_DEPTH = {"train_depths": SHARDS, "train_stages": STAGES}
# Norms of a merged parameter's parts, of which a rank has rows.
NORMS = [*chosen("novograd"), "--train.data_parallel_mode=fsdp2"]
APART = "--model.merge_qkv=false"  # which tensor parallelism needs
TENSOR = [*NORMS, "--train.tensor_parallel_size=2", "--train.micro_batch_size=2", APART]
LORA = ["--lora.enable_lora=true", "--lora.lora_rank=2"]
OF_PARTS = {
    "dense/train_norms_tp": TENSOR,
    "dense/train_norms_pp": [*NORMS, *STAGES[-2:]],
    "dense/train_norms_lora_tp": [*TENSOR, *LORA],
    "experts/train_norms_fsdp2": NORMS,
    "experts/train_norms_ep": [*NORMS, "--train.expert_parallel_size=2"],
    "experts/train_norms_tp": TENSOR,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Four steps of two ranks with each optimizer."""
    folder = tmp_path_factory.mktemp("optimizers")
    path = write_config(folder, data__pad_to_multiple_of=1, train__no_decay_modules=["norm"])
    torch.save(make_bins(), folder / "bins.pt")
    for name, shape in (("dense", QWEN3), ("experts", MOE)):
        # A vocabulary that two ranks divide.
        write_config(folder / name, {**shape, "vocab_size": 98}, data__pad_to_multiple_of=1)
        torch.save(make_bins(), folder / name / "bins.pt")
    run_modes(2, folder, OF_TWO | BY_DEPTH | OF_PARTS)
    return folder, path


def trained(path, arguments, steps):
    config = load(path, ["--train.micro_batch_size=2", *arguments])
    return distributed_worker.several_steps(config, Mesh(), make_bins(), steps)[1]


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_train_as_one_process(name, ranks):
    folder, path = ranks
    start = trained(path, chosen(name), 0)["weights"]
    want = trained(path, chosen(name), 4)
    found = torch.load(folder / f"train_{name}.pt")
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-4)
    for key, weight in want["weights"].items():
        moved = (weight - start[key]).norm()
        assert moved > (1e-3 if "proj" in key else 1e-5) * start[key].norm(), key
        # Small gradients differ in their last bits, which most of these divide by their size.
        away = (found["weights"][key] - weight).norm()
        assert away <= 1e-2 * moved + 1e-7 * weight.norm(), (key, away / moved)


@pytest.mark.parametrize("mode", OF_PARTS)
def test_norms_of_parts_are_over_all_shards(mode, ranks):
    folder, path = ranks[0], ranks[0] / mode.partition("/")[0] / "config.yaml"
    arguments = [*chosen("novograd"), *[a for a in OF_PARTS[mode] if a in (APART, *LORA)]]
    same_training(torch.load(folder / f"{mode}.pt"), trained(path, arguments, 4))


@pytest.mark.parametrize("mode", BY_DEPTH)
def test_rates_by_depth_are_those_of_the_whole_model(mode, ranks):
    folder, path = ranks
    same_training(torch.load(folder / f"{mode}.pt"), trained(path, DEPTHS, 4))


@pytest.fixture(scope="module")
def start(ranks):
    """A folder with the weights that a run begins with."""
    folder, path = ranks
    distributed_worker.engine_of(load(path, []), Mesh()).export(folder / "start")
    return folder / "start"


@pytest.mark.parametrize(
    "name", ["muon", "novograd", "adafactor", "novograd lora", "adafactor lora"]
)
def test_losses_do_not_depend_on_what_is_merged(name, ranks, start):
    """model.merge_qkv, and with adapters their parts."""
    name, *lora = name.split()
    arguments = chosen(name) if name in OPTIONS else [f"--train.optimizer={name}"]
    arguments += ["--train.data_parallel_mode=none", f"--model.model_path={start}"]
    arguments += ["--lora.enable_lora=true", "--lora.lora_rank=2"] if lora else []
    merged, apart = (
        trained(ranks[1], [*arguments, f"--model.merge_qkv={merge}"], 4)["loss"]
        for merge in ("true", "false")
    )
    assert len({*merged}) == 4 and merged == pytest.approx(apart, rel=1e-6)


# ---- checkpoints and plans


@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_has_the_bits_of_a_whole_one(name, tmp_path):
    """With shards, which states follow, where there may be some."""
    mode = "none" if name == "adafactor" else "fsdp2"
    path = write_config(
        tmp_path, train__max_steps=5, train__save_steps=3, train__data_parallel_mode=mode
    )
    run(path, *chosen(name))
    whole = tensors(tmp_path, 5)
    shutil.rmtree(tmp_path / "out/checkpoints/global_step_5")
    run(path, *chosen(name), "--train.load_checkpoint_path=auto")
    again = tensors(tmp_path, 5)
    assert all(torch.equal(again[key], weight) for key, weight in whole.items())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_plan_of_memory_counts_its_states(name, tmp_path):
    path = write_config(tmp_path, train__data_parallel_mode="none")
    config = load(path, chosen(name))
    made = planned(config, 1).peak
    engine = distributed_worker.several_steps(config, Mesh(), make_bins(), 2)[0]
    states = [s for state in engine.optimizer.state.values() for s in state.values()]
    held = sum(s.numel() * s.element_size() for s in states if s.dim())
    assert held <= made["optimizer"] <= held + 64 * len(states)


def test_fields_that_early_checkpoints_have_not_recorded_are_the_default():
    from tilewright.trainer.checkpoint.checkpoint import ADDED

    shared = {"moe_shared_lora": False, "moe_hybrid_shared_lora": False}
    assert ADDED["model"]["lora"] == {"rslora": False, "use_dora": False, **shared}
    later = {"optimizer_args": {}, "layerwise_lr_bound": 1.0, "lora_plus_scale": 1.0}
    later["precision"] = "torch.float32"
    assert ADDED["optimizer"] == later
