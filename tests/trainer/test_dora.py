"""Runs with DoRA: every layout as one process, checkpoints, files for peft, references."""

import functools
import json
import math

import pytest
import torch

pytest.importorskip("pydantic")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import distributed_worker  # noqa: E402
import pairs  # noqa: E402
from pairs import trained as preferred  # noqa: E402
from ranks import STEEP, fsdp2, metrics, run_modes, same_training, selected  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from training import (  # noqa: E402
    MOE,
    QWEN3,
    make_bins,
    rows,
    run,
    same,
    step_in_one_process,
    tensors,
    write_config,
)
from whole import planned  # noqa: E402

from tilewright import nn  # noqa: E402
from tilewright.nn import LoRALinear  # noqa: E402
from tilewright.trainer.config import ConfigError, load  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh  # noqa: E402
from tilewright.trainer.parallel.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
)

pytestmark = pytest.mark.packages
settings = pairs.settings

DORA = {"lora__enable_lora": True, "lora__lora_rank": 4, "lora__use_dora": True}
NF4 = {"enable_qlora": True, "quant_format": "nf4", "quant_group_size": 64}
SHARDED = {
    **QWEN3,
    "vocab_size": 100,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
}
ON = [f"--{name.replace('__', '.')}={value}" for name, value in DORA.items()]
ON += ["--train.optimizer=adamw", "--lora.lora_plus_scale=4"]
# By folder: what the one process has too. Merges make the third step train on what they left.
KINDS = {
    "fused": [],
    "apart": ["--model.merge_qkv=false", "--lora.merge_lora_interval=2"],
    "odd": ["--model.merge_qkv=false"],
    "quantized": [f"--lora.{name}={value}" for name, value in NF4.items()],
}
SHAPES = {"odd": {**SHARDED, "num_attention_heads": 3, "num_key_value_heads": 1}}
TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
RECOMPUTED = {"enable_gradient_checkpointing": True}
MODES = {
    "fused/train_ddp": ["--train.data_parallel_mode=ddp"],
    "fused/train_and_save": fsdp2(**STAGES),
    "fused/train_ring": fsdp2(ringattn_parallel_size=2),
    "fused/train_recompute": fsdp2(**RECOMPUTED),
    "apart/train_tp": fsdp2(**TENSOR),
    "apart/train_tp_pp": fsdp2(**TENSOR, **STAGES, **RECOMPUTED),
    "odd/train_tp": fsdp2(**TENSOR),
    "quantized/train_fsdp2": fsdp2(),
}
# In two processes: each compiles, which takes as long as all else.
COMPILED = {"apart/train_tp_compiled": fsdp2(**TENSOR, enable_compile=True)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, settings, request):
    """Three steps in four processes in each mode, or two; and a run against a reference."""
    root, paths, modes = tmp_path_factory.mktemp("dora"), {}, {2: {}, 4: {}}
    for kind in KINDS:
        paths[kind] = write_config(
            root / kind,
            SHAPES.get(kind, SHARDED),
            data__sample_packing_sequence_len=16,
            **{**STEEP, "train__max_steps": 3},
            **DORA,
        )
        torch.save(make_bins(), root / kind / "bins.pt")
    wanted = selected(request, MODES | COMPILED, "fused/train_and_save")
    for mode, layout in wanted.items():
        number = 2 if mode in COMPILED else 4
        sizes = (int(a.partition("=")[2]) for a in layout if "parallel_size" in a)
        ranks = number // math.prod(sizes)
        accumulated = 4 if any("pipeline" in a for a in layout) else 1
        size = 8 // ranks // accumulated
        cut = [f"--train.micro_batch_size={size}"]
        cut += [f"--train.gradient_accumulation_steps={accumulated}"]
        modes[number][mode] = [*layout, *cut, *KINDS[mode.partition("/")[0]]]
    modes[4]["preference/run"] = [
        settings[1],
        *fsdp2(),
        *ON,
        "--model.merge_qkv=false",
        "--train.tensor_parallel_size=2",
        "--train.enable_mixed_precision=true",
        "--train.gradient_accumulation_steps=4",
        f"--train.output_dir={root / 'preference'}",
    ]
    for number, chosen in modes.items():
        if chosen:
            run_modes(number, root, chosen)
    return root, paths, {mode: torch.load(root / f"{mode}.pt") for mode in wanted}


@functools.cache
def in_one_process(path, options):
    config = load(path, ["--train.micro_batch_size=8", *options])
    return distributed_worker.several_steps(config, Mesh(), make_bins())


@pytest.mark.parametrize("mode", MODES | COMPILED)
def test_every_layout_trains_as_one_process(mode, trained):
    kind = mode.partition("/")[0]
    _, want = in_one_process(trained[1][kind], tuple(KINDS[kind]))
    changes = [n for n in want["weights"] if n.endswith("lora_magnitude_change")]
    assert len(changes) == (8 if kind in ("fused", "quantized") else 12)
    assert all(want["weights"][n].any() and want["grads"][n].any() for n in changes)
    same_training(trained[2][mode], want, rel=1e-4 if kind == "quantized" else 2e-5)


def test_adapters_of_all_stages_are_exported(trained, tmp_path):
    root, paths, _ = trained
    engine, _ = in_one_process(paths["fused"], ())
    nn.save_adapter(engine.model, tmp_path, base_model="base")
    found, want = (load_file(at / nn.ADAPTER_FILE) for at in (root / "fused/adapter", tmp_path))
    assert found.keys() == want.keys() and any("magnitude" in name for name in want)
    for name, t in want.items():
        torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-6)
    said = [(at / nn.ADAPTER_CONFIG).read_text() for at in (root / "fused/adapter", tmp_path)]
    assert json.loads(said[0]) == json.loads(said[1]) and '"use_dora": true' in said[0]


class Others:
    """A rank of two, which knows what the sums of both are."""

    size = 2

    def __init__(self, rank):
        self.rank, self.totals = rank, None

    def own(self, t):
        return t.chunk(2)[self.rank]

    def total(self, t):
        self.given = t
        return t if self.totals is None else self.totals


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_biases_of_shared_matrices_are_not_scaled(kind):
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(8, 12), 2, 4, use_dora=True)
    for p in (layer.lora_B, layer.lora_magnitude_change):
        torch.nn.init.normal_(p)
    x, columns = torch.randn(5, 8), kind is RowParallelLinear
    ranks = []
    for rank in range(2):
        own = LoRALinear(nn.Linear(8, 12), 2, 4, use_dora=True)
        own.load_state_dict(layer.state_dict())
        own.tp = own.base.tp = Others(rank)
        own.base.__class__ = kind
        own.base.weight.data = layer.base.weight.data.chunk(2, int(columns))[rank]
        factor = own.lora_A if columns else own.lora_B
        factor.data = factor.data.chunk(2, int(columns))[rank]
        own(x.chunk(2, 1)[rank] if columns else x)
        ranks.append(own)
    if columns:
        total = sum(own.tp.given for own in ranks)
        for own in ranks:
            own.tp.totals = total
        y = sum(own(part) for own, part in zip(ranks, x.chunk(2, 1), strict=True))
    else:
        y = torch.cat([own(x) for own in ranks], 1)
    torch.testing.assert_close(y, layer(x))


def test_compiled_layers_give_the_same_gradients(tmp_path, backend):
    path = write_config(tmp_path, train__micro_batch_size=8, **DORA)
    plain, compiled = (
        step_in_one_process(path, make_bins(), f"--train.enable_compile={c}")
        for c in ("false", "true")
    )
    assert backend.frame_count > 0
    same(compiled, plain, 1e-4)


# ---- runs


def test_adapters_that_are_written_alone_give_what_merging_writes(tmp_path):
    """Whole runs, of which peft reads the one's files and transformers the other's; and one that
    was stopped has the bits of one that was not.
    """
    run(write_config(tmp_path / "start", train__max_steps=1))
    start = tmp_path / "start/out/checkpoints/global_step_1/hf"
    (start / "tokenizer.json").write_text("{}")
    options = {**DORA, "model__model_path": str(start), "model__config_path": None}
    merged = write_config(tmp_path / "merged", **options)
    run(merged)
    run(write_config(tmp_path / "alone", lora__save_lora_only=True, **options))
    base, on = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        for folder in (tmp_path / "merged/out/checkpoints/global_step_6/hf", start)
    )
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want, before = base(ids).logits, on(ids).logits
        folder = tmp_path / "alone/out/checkpoints/global_step_6/hf"
        loaded = peft.PeftModel.from_pretrained(on, folder)
        torch.testing.assert_close(loaded(ids).logits, want, rtol=1e-4, atol=1e-5)
        assert (before - want).abs().max() > 1e-2
    options |= {"train__save_steps": 3, "train__max_steps": 3}
    stopped = write_config(tmp_path / "stopped", **options)
    run(stopped)
    run(stopped, "--train.max_steps=6", "--train.load_checkpoint_path=auto")
    pairs = zip(rows(tmp_path / "stopped"), rows(tmp_path / "merged"), strict=True)
    assert all(a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] for a, b in pairs)
    again, whole = tensors(tmp_path / "stopped", 6), tensors(tmp_path / "merged", 6)
    assert all(torch.equal(again[name], t) for name, t in whole.items())
    with pytest.raises(ValueError, match=r"another model: \{'lora': .*use_dora"):
        run(stopped, "--lora.use_dora=false", "--train.load_checkpoint_path=auto")


@pytest.mark.parametrize(
    "options",
    [
        ["--train.enable_mixed_precision=true"],
        [*KINDS["quantized"], "--lora.quant_group_size=32"],
    ],
    ids=["bfloat16", "quantized"],
)
def test_a_run_begins_at_its_reference_bit_for_bit(options, settings):
    name = "_".join(o.partition(".")[2][:20] for o in options)
    first, *_, last = preferred(settings, name, *options, *ON)
    assert first["loss"] == math.log(2) and first["drift"] == 0.0 < last["drift"]
    moving = ["--preference.reference_update_steps=1", *ON]
    second = preferred(settings, f"{name}_moved", *options, *moving)
    assert second[0]["loss"] == math.log(2) and second[1]["loss"] != last["loss"]


def test_sharded_ranks_in_bfloat16_begin_at_their_reference(trained):
    first, *_, last = metrics(trained[0] / "preference")
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-12)  # a mean over ranks
    assert first["drift"] == 0.0 < last["drift"]


def test_the_plan_of_memory_has_what_magnitudes_take(tmp_path):
    path = write_config(tmp_path, **DORA)
    plain, scaled = (
        planned(config, 1)
        for config in (load(path, [f"--lora.use_dora={on}"]) for on in ("false", "true"))
    )
    # Results before they are scaled.
    assert scaled.peak["activations"] > plain.peak["activations"]
    assert scaled.whole["gradients"] > plain.whole["gradients"]


@pytest.mark.parametrize(
    "shape, arguments, message",
    [
        (QWEN3, ["--lora.enable_lora=false"], r"lora\.use_dora = true, lora\.enable_lora = false"),
        (MOE, [], "lora.lora_target_modules: use_dora must be False for .*, got True"),
        (
            QWEN3,
            [*fsdp2(), "--model.basic_modules=[base]"],
            r"basic_modules: .*\.base .*cannot be a unit of its own: another module's kernel reads",
        ),
    ],
)
def test_what_cannot_be_is_refused(shape, arguments, message, tmp_path):
    path = write_config(tmp_path, shape, train__max_steps=1, **DORA)
    with pytest.raises((ValueError, ConfigError), match=message):
        run(path, *arguments)
