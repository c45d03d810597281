"""Dropout: masks that are the same however a step is recomputed and divided, and their rates."""

import json

import pytest
import torch
from torch._dynamo.testing import CompileCounter

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from ranks import run_modes
from shapes import SHAPES
from training import MOE, QWEN3, rows, run, write_config

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.trainer import loop
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.models import masks as of_masks
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.masks import AFTER_ATTENTION, AFTER_MLP, Masks, Span, key_of, spans
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.shared import TensorParallel
from tilewright.trainer.plugins import dropout

pytestmark = pytest.mark.packages

RATES = {
    "train__hidden_dropout": 0.2,
    "train__attention_dropout": 0.3,
    "train__ffn_dropout": 0.25,
}
SHORT = {"train__max_steps": 3, "train__save_hf_weights": False}


def masks_of(rates, key, *bins):
    """The masks of one process."""
    bins = tuple(Span(*one) for one in bins)
    return Masks(*rates, key, bins, bins, bins)


def losses(folder):
    return [(row["loss"], row["grad_norm"]) for row in rows(folder) if "loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses and norms of three steps of two bins each in one process."""
    return trained(tmp_path_factory.mktemp("alone"), train__micro_batch_size=2)


def trained(folder, shape=QWEN3, **changes):
    run(write_config(folder, shape, **{**SHORT, **RATES, **changes}))
    return losses(folder)


# ---- the same masks


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"train__enable_reentrant": True},
        {"train__recompute_modules": ["self_attn"]},
        {"train__recompute_modules": ["mlp"]},
    ],
    ids=["layers", "reentrant", "attention", "mlp"],
)
def test_recomputation_draws_the_same_masks(how, alone, tmp_path):
    changes = {"train__enable_gradient_checkpointing": True, "train__micro_batch_size": 2, **how}
    assert trained(tmp_path, **changes) == alone


def test_masks_do_not_depend_on_micro_batches(alone, tmp_path):
    found = trained(tmp_path, train__gradient_accumulation_steps=2)
    assert found == [pytest.approx(want, rel=1e-5) for want in alone]
    without = trained(tmp_path / "without", train__micro_batch_size=2, **dict.fromkeys(RATES, 0.0))
    for one, other in zip(alone, without, strict=True):
        assert one != pytest.approx(other, rel=1e-4)


def test_auto_takes_cpp_whose_masks_are_those_of_eager(alone, tmp_path):
    if reason := platform.no_cpp("cpu"):
        pytest.skip(reason)
    cpp, eager = (
        trained(tmp_path / name, train__micro_batch_size=2, model__attn_implementation=name)
        for name in ("cpp", "eager")
    )
    assert cpp == alone
    assert eager == [pytest.approx(want, rel=1e-4) for want in alone]


@pytest.mark.parametrize("recomputed", [False, True], ids=["saved", "recomputed"])
def test_compiled_layers_draw_the_same_masks_in_one_graph_for_all_steps(
    recomputed, alone, tmp_path, monkeypatch
):
    torch._dynamo.reset()
    counter, real, counts = CompileCounter(), torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda *a, **o: real(*a, **o, backend=counter))
    step = loop.Metrics.step
    monkeypatch.setattr(
        loop.Metrics, "step", lambda *a, **k: counts.append(counter.frame_count) or step(*a, **k)
    )
    changes = {"train__micro_batch_size": 2, "train__enable_gradient_checkpointing": recomputed}
    found = trained(tmp_path, **changes, train__enable_compile=True)
    assert found == [pytest.approx(want, rel=1e-5) for want in alone]
    assert counts[0] > 0 and counts[1] == counts[2]


STAGES = {"pipeline_parallel_size": 2}
TWO = {
    "shards": {},
    "replicas": {"data_parallel_mode": "ddp"},
    "stages": {**STAGES, "gradient_accumulation_steps": 2},
    "recomputed stages": {**STAGES, "micro_batch_size": 2, "enable_gradient_checkpointing": True},
}


def test_masks_do_not_depend_on_ranks(alone, tmp_path):
    modes = {}
    for name, changes in TWO.items():
        # With 1F1B two stages need two micro-batches; GPipe takes one.
        settings = {"data_parallel_mode": "fsdp2", **changes}
        if "pipeline_parallel_size" in settings:
            settings["pipeline_parallel_schedule"] = "GPipe"
        arguments = [f"--train.{k}={json.dumps(v)}" for k, v in settings.items()]
        modes[f"{name}/run"] = [write_config(tmp_path / name, **SHORT, **RATES), *arguments]
    routed = SHORT | RATES | {"train__ffn_dropout": 0.0}
    on_two = ["--train.data_parallel_mode=fsdp2", "--train.expert_parallel_size=2"]
    modes["experts/run"] = [write_config(tmp_path / "experts", MOE, **routed), *on_two]
    run_modes(2, tmp_path, modes)
    of_one = trained(tmp_path / "one", MOE, **routed, train__micro_batch_size=2)
    for name, want in {**dict.fromkeys(TWO, alone), "experts": of_one}.items():
        assert losses(tmp_path / name) == [pytest.approx(one, rel=1e-4) for one in want], name


# Heads and tokens of the vocabulary that two ranks can share.
SHARED = {**QWEN3, "vocab_size": 96}
RING = {k: v for k, v in RATES.items() if "attention" not in k}
RECOMPUTED = {"enable_gradient_checkpointing": True}
TENSOR, ULYSSES, ROUND = (
    {f"{name}_parallel_size": 2} for name in ("tensor", "ulysses", "ringattn")
)
# Layouts of four ranks, in two pairs with a batch each, or all with the same one.
SAME = {"micro_batch_size": 2}
FOUR = {
    "matrices": (RATES, TENSOR),
    "whole attention": (RATES, {"tensor_parallel_size": 4, **SAME}),
    "Ulysses": (RATES, {**ULYSSES, **RECOMPUTED}),
    "ring": (RING, ROUND),
    "matrices and Ulysses": (RATES, {**TENSOR, **ULYSSES, **SAME, **RECOMPUTED}),
    "matrices and ring": (RING, {**TENSOR, **ROUND, **SAME}),
}


def test_ranks_that_share_sequences_and_matrices_have_the_masks_of_one(tmp_path):
    modes = {}
    for name, (rates, changes) in FOUR.items():
        settings = {"data_parallel_mode": "fsdp2", **changes}
        arguments = [f"--train.{k}={json.dumps(v)}" for k, v in settings.items()]
        path = write_config(tmp_path / name, SHARED, **SHORT, **rates, model__merge_qkv=False)
        modes[f"{name}/run"] = [path, *arguments]
    run_modes(4, tmp_path, modes)
    options = {"train__micro_batch_size": 2, "model__merge_qkv": False}
    want = {
        kind: trained(tmp_path / kind, SHARED, **dict.fromkeys(RATES, 0.0) | rates, **options)
        for kind, rates in (("all", RATES), ("of rows", RING))
    }
    for name, (rates, _) in FOUR.items():
        of_one = want["all" if rates is RATES else "of rows"]
        assert losses(tmp_path / name) == [pytest.approx(one, rel=1e-4) for one in of_one], name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__data_parallel_mode": "fsdp2", "train__enable_gradient_checkpointing": True},
        {"lora__enable_lora": True, "lora__lora_rank": 2},
    ],
    ids=["autocast", "fsdp2", "adapters"],
)
def test_in_bfloat16_and_with_adapters_the_losses_are_near(changes, alone, tmp_path):
    changes = {"train__enable_mixed_precision": True, "train__micro_batch_size": 2, **changes}
    found = trained(tmp_path, **changes)
    # Later steps follow from what is trained.
    assert found[0][0] == pytest.approx(alone[0][0], rel=2e-3)


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(alone, tmp_path):
    changes = {**RATES, "train__save_hf_weights": False, "train__micro_batch_size": 2}
    run(write_config(tmp_path, **changes, train__max_steps=1))
    run(write_config(tmp_path, **changes, train__max_steps=3, train__load_checkpoint_path="auto"))
    assert losses(tmp_path) == alone


def test_runs_are_what_a_rank_has_of_whole_bins():
    bins = Span(7, 0, 5), Span(8, 5, 5), Span(9, 5, 16)
    assert spans(bins, torch.arange(16)) == (Span(7, 0, 5), Span(9, 5, 16))
    at = torch.tensor([2, 3, 4, 5, 12, 13])  # two intervals, the first over a bound
    assert spans(bins, at) == (Span(7, 0, 3, 2), Span(9, 3, 4, 0), Span(9, 4, 6, 7))


# ---- rates


def test_the_rate_of_each_site_is_the_probability():
    p, n = 0.3, 2**18
    masks = masks_of((p, 0.0, p), key_of(2**32 - 1, 2**31 - 1), (5, 0, n // 64))
    x = torch.ones(1, n // 64, 64)
    for dropped in (
        masks.add(x, torch.zeros_like(x), 3, AFTER_MLP),
        masks.within(x, 3, TensorParallel()),
    ):
        assert dropped.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
        # Five standard deviations of a mean of n draws.
        assert abs(float((dropped == 0).double().mean()) - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_masks_of_other_steps_layers_sites_and_bins_are_others():
    p, n = 0.5, 2**14
    x = torch.ones(1, n // 64, 64)

    def mask(key=(7, 1), layer=2, site=AFTER_MLP, number=4):
        masks = masks_of((p, 0.0, p), key_of(*key), (number, 0, n // 64))
        return masks.add(x, torch.zeros_like(x), layer, site) == 0

    first = mask()
    assert torch.equal(first, mask())
    for other in (
        mask(key=(7, 2)),
        mask(key=(8, 1)),
        mask(layer=3),
        mask(site=AFTER_ATTENTION),
        mask(number=5),
        masks_of((p, 0.0, p), key_of(7, 1), (4, 0, n // 64)).within(x, 2, TensorParallel()) == 0,
    ):
        both = float((first & other).double().mean())
        assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / n) ** 0.5


def test_attention_of_other_layers_and_bins_has_other_masks():
    masks, drawn = masks_of((0.0, 0.5, 0.0), key_of(7, 1), (0, 0, 4), (9, 4, 6)), []

    def attention(a, b, options):
        drawn.append((a, b, options))
        return torch.zeros(1, 2, b - a, 8)

    for layer in (0, of_masks.MOST_LAYERS - 1):
        assert masks.attend(attention, layer, 0).shape == (1, 2, 6, 8)
    assert [(a, b) for a, b, _ in drawn] == [(0, 4), (4, 6)] * 2
    assert len({options["offset"] for *_, options in drawn}) == 4
    assert all(0 <= options["offset"] < 2**29 for *_, options in drawn)
    assert all(o["dropout_p"] == 0.5 and o["seed"] == key_of(7, 1) for *_, o in drawn)


def test_probabilities_rise_linearly_from_no_dropout(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(dropout, "Masks", lambda **k: seen.append(k) or Masks(**k))
    # Without dropout `auto` would take another implementation.
    changes = {"train__max_steps": 4, "model__attn_implementation": "eager", **RATES}
    warm = trained(tmp_path / "warm", **changes, train__dropout_warmup_steps=2)
    assert [one["hidden"] for one in seen] == [0.1, 0.2, 0.2]
    assert [one["ffn"] for one in seen] == [0.125, 0.25, 0.25]
    assert [one["key"] for one in seen] == [key_of(42, done) for done in (1, 2, 3)]
    none = trained(tmp_path / "none", **changes | dict.fromkeys(RATES, 0.0))
    assert warm[0] == none[0] and warm[1] != none[1]


# ---- where it is


NEARLY_ALL = 1 - 1e-9


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "deepseek", "olmo2", "glm4"])
@pytest.mark.parametrize("site", ["hidden", "attention", "ffn"])
def test_a_site_that_drops_nearly_all_adds_nothing(family, site):
    """The logits are those of a model whose matrices behind the site are zero."""
    shapes = {"qwen3": QWEN3, "qwen3_moe": MOE, **SHAPES}
    shape = next(shape for name, shape in shapes.items() if name.startswith(family))
    shape = ModelConfig.from_hf(shape)
    if site == "ffn" and shape.num_experts:
        pytest.skip("experts compute their inner activations within one op")
    model = Transformer(shape, Ops.resolve("eager"))
    init_weights(model, 3)
    ids, ends = torch.arange(12)[None] % shape.vocab_size, (0, 5, 12)
    batch = {"input_ids": ids, "cu_seqlens": torch.tensor(ends, dtype=torch.int32), "ends": ends}
    rates = (NEARLY_ALL if one == site else 0.0 for one in ("hidden", "attention", "ffn"))
    masks = masks_of(rates, 5, (0, 0, 5), (1, 5, 12))
    behind = {"attention": ["o_proj"], "ffn": ["down_proj"]}.get(site, ["o_proj", "down_proj"])
    with torch.no_grad():
        dropped, whole = model(**batch, masks=masks), model(**batch)
        evaluated = model.eval()(**batch, masks=masks)
        for name, p in model.named_parameters():
            if any(part in name for part in behind):
                p.zero_()
        want = model(**batch)
    assert torch.equal(evaluated, whole)
    torch.testing.assert_close(dropped, want)
    assert not torch.allclose(want, whole, atol=1e-3)


def test_evaluation_drops_nothing(tmp_path):
    # The implementation that drops, in both.
    both = {**SHORT, "model__attn_implementation": "eager", "data__val_set_size": 6}
    found = {}
    for name, changes in (("with", RATES), ("without", {})):
        run(write_config(tmp_path / name, **both, **changes))
        found[name] = rows(tmp_path / name)
    assert found["with"][0]["eval_loss"] == found["without"][0]["eval_loss"]
    assert found["with"][1]["loss"] != found["without"][1]["loss"]


# ---- what is refused


@pytest.mark.parametrize(
    "shape, changes, error, said",
    [
        (
            QWEN3,
            {"attention_dropout": 0.1, "data_parallel_mode": "fsdp2", **ROUND},
            ConfigError,
            r"attention_dropout = 0.1, train.ringattn_parallel_size = 2.* draws the bits of four",
        ),
        (
            QWEN3,
            {"dropout_warmup_steps": 3},
            ConfigError,
            r"dropout_warmup_steps = 3, .*is dropped",
        ),
        (QWEN3, {"attention_dropout": 0.1}, ImplementationUnavailable, r"n\[sdpa\].*dropout"),
        (MOE, {"ffn_dropout": 0.1}, ValueError, r"^train.ffn_dropout = 0.1: the model has experts"),
    ],
    ids=["a ring", "no dropout", "an implementation", "experts"],
)
def test_what_cannot_drop_is_refused(shape, changes, error, said, tmp_path):
    train = {f"train__{name}": value for name, value in changes.items()}
    path = write_config(tmp_path, shape, **SHORT, model__attn_implementation="sdpa", **train)
    with pytest.raises(error, match=said):
        run(path)


def settings(*arguments):
    given = ["--train.output_dir=-", "--model.config_path=-", '--data.datasets=[{"path": "dummy"}]']
    return load(None, [*given, *arguments]).train


@pytest.mark.parametrize(
    ("field", "sizes", "columns"),
    [("hidden", {"hidden_size": 30}, 30), ("ffn", {"intermediate_size": 36}, 18)],
)
def test_columns_that_ranks_cannot_share_are_refused(field, sizes, columns):
    rate, shape = f"--train.{field}_dropout=0.1", ModelConfig.from_hf({**QWEN3, **sizes})
    dropout.check(settings(rate), settings(rate), shape, 1)
    shared = ["--train.data_parallel_mode=fsdp2", "--train.tensor_parallel_size=2"]
    train = settings(rate, *shared, "--model.merge_qkv=false")
    with pytest.raises(ValueError, match=f"^train.{field}_dropout = 0.1: .* and have {columns}"):
        dropout.check(train, train, shape, 1)


def test_more_bins_than_masks_can_tell_apart_are_refused():
    train, shape = settings("--train.attention_dropout=0.1"), ModelConfig.from_hf(QWEN3)
    dropout.check(train, train, shape, of_masks.MOST_BINS)
    with pytest.raises(ValueError, match="1048576 bins of a step apart, and there are 1048577"):
        dropout.check(train, train, shape, of_masks.MOST_BINS + 1)


def test_a_comparison_of_layouts_refuses_it(tmp_path):
    from tilewright_lab.check_layout.trainer_step import trainer_step

    step = trainer_step(write_config(tmp_path, train__hidden_dropout=0.1), {})
    with pytest.raises(ConfigError, match=r"^train.hidden_dropout, .* must be 0 here"):
        step("alone", 0, 1)
