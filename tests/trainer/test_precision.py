"""The section precision: dtypes of parameters, gradients, moments; bits that no layout changes."""

import logging
import re

import distributed_worker
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("pydantic")
pytest.importorskip("datasets")

from ranks import fsdp2, run_modes
from training import (
    LEAST,
    MOE,
    QWEN3,
    fake_group,
    make_bins,
    resumed_equals_never_stopped,
    rows,
    run,
    write_config,
)
from whole import dtypes_of, planned, scored

from tilewright.core import torch_names
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.config.config import resolved
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.stored import QKV
from tilewright.trainer.optim.places import pieces
from tilewright.trainer.parallel.mesh import Mesh, join
from tilewright.trainer.parallel.tensor_parallel import shard_matrices

pytestmark = pytest.mark.packages
F32, BF16 = torch.float32, torch.bfloat16
TYPES = ("mixed_precisionSR", "bf16SR", "manual")
MIXED = {"train__enable_mixed_precision": True}
MANUAL = {
    "precision__master_weights": True,
    "precision__fp32_grad_acc": False,
    "precision__stochastic_rounding": True,
}


# ---- a configuration

RESOLVED = {
    (): (F32, F32, BF16, F32, False, False),
    ("type=fp32",): (F32, F32, F32, F32, False, False),
    ("type=mixed_precision",): (F32, F32, BF16, F32, False, False),
    ("type=mixed_precisionSR",): (BF16, F32, BF16, F32, True, True),
    ("type=bf16SR",): (BF16, BF16, BF16, BF16, False, True),
    ("type=manual",): (BF16, BF16, BF16, BF16, False, False),
    ("type=manual", "master_weights=true"): (BF16, BF16, BF16, F32, True, False),
    ("type=manual", "fp32_grad_acc=true"): (BF16, F32, BF16, BF16, False, False),
    ("type=manual", "stochastic_rounding=true"): (BF16, BF16, BF16, BF16, False, True),
}


@pytest.mark.parametrize("given", RESOLVED)
def test_what_a_type_resolves_to(given):
    arguments = [*LEAST, *(f"--precision.{g}" for g in given)]
    slow = ["--train.adam_beta2=0.99"]  # nearest keeps what decays slower
    config = load(None, [*arguments, *slow])
    assert dtypes_of(config)[:6] == RESOLVED[given]
    again = load(None, [*arguments, *slow])
    assert resolved(again) == resolved(config)
    if given:  # float32 moments beside any parameters
        optimizer = ["--train.optimizer=anyprecision_adamw", "--train.optimizer_dtype=fp32"]
        assert dtypes_of(load(None, [*arguments, *slow, *optimizer])).states == F32


def test_the_resolved_file_is_read_again(tmp_path):
    for kind in ("fp32", "bf16SR"):
        file = tmp_path / "again.yaml"
        file.write_text(resolved(load(None, [*LEAST, f"--precision.type={kind}"])))
        assert load(str(file)).train.enable_mixed_precision == (kind != "fp32")


@pytest.mark.parametrize(
    "given, said",
    [
        (
            ["type=fp32", "train.enable_mixed_precision=true"],
            r"train.enable_mixed_precision = true, precision.type = fp32: fp32 computes in float32",
        ),
        (
            ["type=bf16SR", "train.enable_mixed_precision=false"],
            "precision.type = bf16SR: bf16SR computes in bfloat16",
        ),
        (["type=autocast", "train.data_parallel_mode=fsdp2"], "FSDP2 casts by itself"),
        (["type=bf16SR", "train.optimizer=sgd"], "adamw and anyprecision_adamw can"),
        (["type=mixed_precisionSR", "train.optimizer=muon"], "cannot write parameters in bfloat16"),
        (["type=bf16SR", "lora.enable_qlora=true"], "adapters of quantized weights are trained in"),
        (["type=bf16SR", "master_weights=true"], "master_weights.*every other type sets it"),
        (["fp32_grad_acc=true"], "fp32_grad_acc.*every other type sets it"),
        (["type=bf16SR", "stochastic_rounding=true"], "every other type sets it"),
        (["type=manual", "tensor_parallel_reduce_dtype=fp32"], "no layer is summed over processes"),
        (["type=manual", "train.adam_beta2=0.999"], "adam_beta2 = 0.999.*must be at most 0.996"),
        (["type=bf16"], "mixed_precisionSR"),
    ],
)
def test_what_contradicts_is_refused(given, said):
    arguments = [f"--{g}" if g.startswith(("train", "lora")) else f"--precision.{g}" for g in given]
    with pytest.raises(ConfigError, match=said):
        load(None, [*LEAST, *arguments])


def test_moments_in_bfloat16_may_decay_slowly_where_they_are_rounded_stochastically():
    slow = ["--train.adam_beta2=0.999", "--precision.type=bf16SR"]
    assert dtypes_of(load(None, [*LEAST, *slow])).states == BF16


# ---- a run


def stored(folder, step):
    """Dtypes in a checkpoint, by name."""
    reader = FileSystemReader(folder / f"out/checkpoints/global_step_{step}/dcp")
    kinds = reader.read_metadata().state_dict_metadata
    return {n: t.properties.dtype for n, t in kinds.items() if hasattr(t, "properties")}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Of 30 steps, by type; with the dtypes in the checkpoint and what was said."""
    found = {}
    handler = logging.Handler()
    for kind in ("fp32", "mixed_precision", *TYPES):
        said = []
        handler.emit = lambda record, said=said: said.append(record.getMessage())
        log = logging.getLogger("tilewright")
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        root = tmp_path_factory.mktemp(kind)
        options = MANUAL if kind == "manual" else {}
        options = {"train__enable_mixed_precision": kind != "fp32", **options}
        options |= {"train__max_steps": 30, "train__lr": 1e-3, "precision__type": kind}
        run(write_config(root, **options))
        log.removeHandler(handler)
        log.setLevel(level)
        found[kind] = [r["loss"] for r in rows(root) if "loss" in r], stored(root, 30), said
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_trains_as_in_float32(losses, kind):
    """Losses of every step are as near as those of products in bfloat16 alone, within a factor."""
    wanted, (found, weights, said) = losses["fp32"][0], losses[kind]

    def away(those):
        return max(abs(a - b) for a, b in zip(those, wanted, strict=True))

    assert 0 < away(found) < max(4 * away(losses["mixed_precision"][0]), 0.01)
    assert {t for name, t in weights.items() if name.startswith("model.")} == {BF16}
    states = {n.rpartition(".")[2]: t for n, t in weights.items() if n.startswith("optimizer")}
    assert states["exp_avg_sq"] == (BF16 if kind == "bf16SR" else F32)
    assert ("master" in states) == (kind != "bf16SR")
    [line] = [s for s in said if s.startswith("precision: ")]
    assert "parameters bfloat16" in line and "stochastic rounding" in line


@pytest.mark.parametrize("kind", TYPES[:2])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path, kind):
    resumed_equals_never_stopped(tmp_path, precision__type=kind, **MIXED)


def test_a_checkpoint_of_another_type_is_refused_before_weights_are_read(tmp_path):
    path = write_config(tmp_path, **MIXED, train__save_steps=2, train__max_steps=2)
    run(path)
    folder = tmp_path / "out/checkpoints/global_step_2"
    more = [f"--train.load_checkpoint_path={folder}", "--precision.type=bf16SR"]
    with pytest.raises(ValueError, match="precision"):
        run(path, *more)
    other = f"--train.output_dir={tmp_path / 'other/out'}"
    run(path, *more, "--train.load_optimizer=false", other)
    assert stored(tmp_path / "other", 2)["model.model.norm.weight"] == BF16


# ---- gradients


@pytest.mark.parametrize("mode", ["none", "fsdp2"])
@pytest.mark.parametrize("kind", TYPES[:2])
def test_many_small_gradients_are_summed_in_float32(tmp_path, kind, mode):
    """64 micro-batches, beside float64; in bfloat16 the later ones are lost in part."""
    path = write_config(tmp_path, **MIXED, precision__type=kind, train__data_parallel_mode=mode)
    config = load(path)
    ranks = join(config.train)
    try:
        engine = distributed_worker.engine_of(config, ranks)
        [batch] = distributed_worker.micro_batches(config, ranks, make_bins())
        names = [n for n, p in engine.model.named_parameters() if "down_proj" in n]

        def summed(batches):
            engine.zero()
            engine.forward_backward(batches, language_modeling)
            grads = distributed_worker.gradients(engine)
            return {n: grads[n] for n in names}

        one, all64 = summed([batch]), summed([batch] * 64)
    finally:
        torch.distributed.destroy_process_group()
    exact = kind == "mixed_precisionSR"
    for name in names:
        assert all64[name].dtype == (F32 if exact else BF16)
        wanted = one[name].double() * 64
        away = (all64[name].double() - wanted).norm() / wanted.norm()
        # A micro-batch's own gradient is rounded to bfloat16, by 2^-9 at most.
        assert away < 1e-6 if exact else away > 1e-3


RANKS = {"train_ddp": ["--train.data_parallel_mode=ddp"], "train_fsdp2": fsdp2()}


@pytest.mark.parametrize("kind", TYPES[:2])
def test_ranks_train_as_one_process_with_their_batches(tmp_path, kind):
    """Gradients are averaged over ranks, and summed over the calls of a step."""
    options = {"train__max_steps": 2, "train__gradient_accumulation_steps": 2, **MIXED}
    path = write_config(tmp_path, **options, precision__type=kind)
    torch.save(make_bins(), tmp_path / "bins.pt")
    modes = {mode + end: given for mode, given in RANKS.items() for end in ("", "_calls")}
    run_modes(2, tmp_path, modes)
    alone = load(path, ["--train.micro_batch_size=2"])
    _, wanted = distributed_worker.several_steps(alone, Mesh(), make_bins())
    for mode in modes:
        found = torch.load(tmp_path / f"{mode}.pt")
        torch.testing.assert_close(found["loss"], wanted["loss"], rtol=1e-3, atol=0)
        torch.testing.assert_close(found["norm"], wanted["norm"], rtol=1e-2, atol=0)
        for name, grad in wanted["grads"].items():
            away = (found["grads"][name].float() - grad.float()).norm() / grad.float().norm()
            assert away < 0.03, (mode, name)


def test_evaluate_computes_as_the_run_did(tmp_path, capsys):
    """The loss of a checkpoint is the one that its run has reported."""
    held = {"data__val_set_size": 6, "train__max_steps": 2, "precision__type": "bf16SR"}
    path = write_config(tmp_path, **MIXED, **held, train__save_steps=2)
    run(path)
    reported = [r["eval_loss"] for r in rows(tmp_path) if "eval_loss" in r][-1]
    config = load(path, ["--train.load_checkpoint_path=auto"], training=False)
    ranks = join(config.train)
    try:
        capsys.readouterr()
        scored(config, ranks)
    finally:
        torch.distributed.destroy_process_group()
    [loss] = re.findall(r"^held_out: .*\bloss=(\S+)", capsys.readouterr().out, re.M)
    assert float(loss) == pytest.approx(reported, rel=2e-6)  # it prints six digits


# ---- the same bits under every layout

ALIKE = {
    "rounds_alone": (1, ["--train.data_parallel_mode=none"]),
    "rounds_fsdp2_2": (2, fsdp2()),
    "rounds_ddp_2": (2, ["--train.data_parallel_mode=ddp"]),
    "rounds_tensor_2": (2, fsdp2(tensor_parallel_size=2, model__merge_qkv=False)),
    "rounds_experts_2": (2, fsdp2(expert_parallel_size=2)),
    "rounds_fsdp2_4": (4, fsdp2()),
    "rounds_hsdp_4": (4, fsdp2(data_parallel_replicate_size=2)),
    "rounds_tensor_4": (4, fsdp2(tensor_parallel_size=2, model__merge_qkv=False)),
    "rounds_experts_4": (4, fsdp2(expert_parallel_size=2)),
    "rounds_pipeline_4": (
        4,
        fsdp2(pipeline_parallel_size=2, gradient_accumulation_steps=2),
    ),
    "rounds_projections": (1, ["--train.data_parallel_mode=none", "--model.merge_qkv=false"]),
}
SHAPES = {
    "moe": {**MOE, "hidden_size": 36, "vocab_size": 98},  # rows that no block of eight divides
    "dense": {**QWEN3, "vocab_size": 98},
}


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Weights and states after three steps of the same gradients, by shape, type and layout."""
    root = tmp_path_factory.mktemp("alike")
    found = {}
    for number in (2, 4):
        modes = {}
        for shape, kind in (("moe", "bf16SR"), ("dense", "mixed_precisionSR")):
            folder = root / str(number) / shape
            options = {"train__max_steps": 3, "train__lr": 1e-3, **MIXED}
            path = write_config(folder, SHAPES[shape], **options, precision__type=kind)
            distributed_worker.engine_of(load(path), Mesh()).export(folder / "hf")
            options["model__model_path"] = str(folder / "hf")
            write_config(folder, SHAPES[shape], **options, precision__type=kind)
            torch.save(make_bins(), folder / "bins.pt")
            for mode, (ranks, arguments) in ALIKE.items():
                if ranks in (1, number) and ("experts" not in mode or shape == "moe"):
                    if ranks == 1 and number == 2:
                        config = load(str(folder / "config.yaml"), arguments)
                        found[shape, mode] = distributed_worker.rounded(config, Mesh())
                    elif ranks == number:
                        modes[f"{shape}/{mode}"] = arguments
        run_modes(number, root / str(number), modes)
        for mode in modes:
            found[tuple(mode.split("/"))] = torch.load(root / str(number) / f"{mode}.pt")
    return found


@pytest.mark.parametrize(
    "shape, mode",
    [
        (shape, mode)
        for shape in SHAPES
        for mode in ALIKE
        if mode != "rounds_alone" and ("experts" not in mode or shape == "moe")
    ],
)
def test_the_same_gradients_give_the_same_bits(alike, shape, mode):
    wanted, found = alike[shape, "rounds_alone"], dict(alike[shape, mode])
    if "tensor" in mode or "projections" in mode:
        for name in [n for n in wanted if "qkv_proj" in n]:
            parts = [name.replace("qkv_proj", part) for part in QKV]
            found[name] = torch.cat([found.pop(part) for part in parts])
    assert wanted.keys() == found.keys()
    for name, t in wanted.items():
        assert torch.equal(t, found[name]), name
    moved = [n for n, t in wanted.items() if n.endswith("exp_avg_sq")]
    assert moved and all(wanted[n].float().abs().sum() > 0 for n in moved)


def test_replicas_have_the_same_bits_after_100_steps(tmp_path):
    options = {"train__max_steps": 100, "train__lr": 1e-3, "precision__type": "bf16SR", **MIXED}
    write_config(tmp_path, **options)
    torch.save(make_bins(), tmp_path / "bins.pt")
    run_modes(4, tmp_path, {"replicas": fsdp2(data_parallel_replicate_size=2)})
    found = torch.load(tmp_path / "replicas.pt")
    assert found["same"] and found["loss"] < 4


def test_adapters_of_merged_projections_have_the_bits_of_their_own(tmp_path):
    """And all of them are in bfloat16, as the frozen weights are."""
    lora = {"lora__enable_lora": True, "lora__lora_rank": 4}
    path = write_config(tmp_path, **MIXED, precision__type="bf16SR", **lora)
    found = []
    for merged in ("true", "false"):
        config = load(path, [f"--model.merge_qkv={merged}"])
        model = distributed_worker.engine_of(config, Mesh()).model
        found.append({piece.place for own in pieces(model).values() for piece in own})
        assert {p.dtype for p in model.parameters()} == {BF16}
    assert found[0] == found[1] and len(found[0]) == 2 * 2 * (3 + 1 + 2)


def test_sums_of_a_layer_have_a_dtype(tmp_path, monkeypatch):
    """What tensor parallelism adds over processes, forward and backward."""
    kinds = []

    def add(x, size, name):
        kinds.append(x.dtype)
        return x.chunk(size)[0]

    monkeypatch.setattr(torch_names, "reduce_scatter", add)
    monkeypatch.setattr(torch_names, "all_gather", lambda x, size, name: torch.cat([x] * size))
    manual = ["--precision.type=manual", "--train.tensor_parallel_size=2"]
    manual += ["--model.merge_qkv=false", "--train.data_parallel_mode=fsdp2"]
    path = write_config(tmp_path, SHAPES["dense"], **MIXED)
    for given, wanted in (([], BF16), (["--precision.tensor_parallel_reduce_dtype=fp32"], F32)):
        sums = dtypes_of(load(path, [*manual, *given])).tensor_sums
        with fake_group(2), torch.device("meta"):
            model = Transformer(ModelConfig.from_hf(SHAPES["dense"]), Ops.resolve(), False)
            shard_matrices(model, init_device_mesh("cpu", (2,)), sums)
        tp = model.model.blocks[0].self_attn.tp
        kinds.clear()
        x = torch.ones(1, 4, 8, dtype=BF16, requires_grad=True)
        out = tp.reduce_scatter(tp.gather(x))
        assert out.dtype == BF16
        out.sum().backward()
        assert kinds == [wanted] * 2 and x.grad.dtype == BF16


# ---- memory


def test_a_plan_counts_what_a_type_needs(tmp_path):
    """Bytes of parameters and of states, in proportion to float32's."""
    path = write_config(tmp_path, **MIXED)
    bytes_of = {}
    for kind in ("mixed_precision", *TYPES[:2]):
        plan = planned(load(path, [f"--precision.type={kind}"]), 1)
        bytes_of[kind] = {part: plan.peak[part] for part in ("parameters", "optimizer")}
    full, master, half = bytes_of.values()
    assert master["parameters"] == half["parameters"] == full["parameters"] // 2
    assert half["optimizer"] == pytest.approx(full["optimizer"] / 2, rel=0.01)
    assert master["optimizer"] == pytest.approx(1.5 * full["optimizer"], rel=0.01)
