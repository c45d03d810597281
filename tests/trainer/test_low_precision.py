"""Recipes of low precision in a run: which products they compute, and what else they work with."""

import functools
import math

import distributed_worker
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("datasets")

from ranks import fsdp2, run_modes
from training import (
    LEAST,
    MOE,
    QWEN3,
    engine_of,
    make_bins,
    resumed_equals_never_stopped,
    rows,
    run,
    write_config,
)
from whole import dtypes_of, planned

from tilewright import ops as tw
from tilewright.trainer import build
from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data.batches import collate
from tilewright.trainer.engine import Engine
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models.low_precision import last_layers, seed_of
from tilewright.trainer.parallel.low_precision import products_of, set_seeds
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages
RECIPES = ("block_fp8", "mxfp8", "nvfp4")
PROJECTIONS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


# ---- a configuration


@pytest.mark.parametrize(
    "given, said",
    [
        (["recipe=fp8"], "block_fp8"),
        (["exclude=[o_proj]"], "exclude.*no product is in low precision"),
        (["experts=false"], "experts.*no product is in low precision"),
        (["implementation=eager"], "implementation.*no product is in low precision"),
        (["recipe=nvfp4", "hadamard=true"], "hadamard.*nvfp4 has a transform of its own"),
        (["recipe=mxfp8", "lora.enable_lora=true"], "lora.enable_lora.*no gradient to round"),
        (["recipe=mxfp8", "model.batch_invariant=true"], "batch_invariant.*do not depend on the"),
        (
            ["recipe=mxfp8", "model.moe_implementation=cpp"],
            "moe_implementation.*precision.implementation names how",
        ),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    arguments = [f"--{g}" if "." in g.partition("=")[0] else f"--precision.{g}" for g in given]
    with pytest.raises(ConfigError, match=said):
        load(None, [*LEAST, *arguments])


@pytest.mark.parametrize(
    "given, said",
    [
        ({"exclude": ["q_norms"]}, "precision.exclude = .*'q_norms' match no module"),
        ({"exclude": ["q_proj"]}, "names model.layers.0.self_attn.q_proj and not the rest of"),
        ({"exclude": ["layers"]}, "leaves no product"),
        ({"experts": False}, "precision.experts = False: the model has no experts"),
        ({"implementation": "cuda"}, "precision.implementation = cuda.*unknown implementation"),
        ({"implementation": "gluon"}, "precision.implementation = gluon"),
        ({"hadamard": True}, "mlp.gate_up_proj has a width of 48 on a process"),
    ],
)
def test_a_model_that_a_recipe_cannot_have_is_refused_before_weights_are_read(
    tmp_path, monkeypatch, given, said
):
    monkeypatch.setattr(build, "init_weights", lambda *_: pytest.fail("weights have values"))
    shape = {**QWEN3, "intermediate_size": 24}
    path = write_config(tmp_path, shape, precision__recipe="block_fp8")
    arguments = [f"--precision.{name}={value}" for name, value in given.items()]
    with pytest.raises(ValueError, match=said):
        run(path, *arguments)


def test_a_run_tells_its_recipe():
    told = dtypes_of(load(None, [*LEAST, "--precision.recipe=mxfp8", "--precision.hadamard=true"]))
    assert told.told().endswith("products of layers in mxfp8 of transformed operands")
    told = dtypes_of(load(None, [*LEAST, "--precision.recipe=nvfp4", "--precision.experts=false"]))
    assert told.told().endswith("products of layers but those of experts in nvfp4")


# ---- which layers


def converted(folder, shape=QWEN3, **given):
    fields = {f"precision__{name}": value for name, value in given.items()}
    return products_of(engine_of(load(write_config(folder, shape, **fields))).model)


def test_projections_and_experts_are_converted_and_nothing_else(tmp_path):
    layers = [f"model.layers.{i}." for i in range(2)]
    every = {layer + name for layer in layers for name in PROJECTIONS}
    assert {*converted(tmp_path, recipe="mxfp8")} == every
    assert {*converted(tmp_path, recipe="mxfp8", exclude=["o_proj", "layers.1.mlp"])} == {
        n for n in every if not n.endswith("o_proj") and "layers.1.mlp" not in n
    }
    experts = {layer + name for layer in layers for name in (*PROJECTIONS[:2], "mlp.experts")}
    assert {*converted(tmp_path, MOE, recipe="mxfp8")} == experts
    dense = {n for n in experts if "experts" not in n}
    assert {*converted(tmp_path, MOE, recipe="mxfp8", experts=False)} == dense


def test_nvfp4_leaves_the_last_layers(tmp_path):
    assert {n.split(".")[2] for n in converted(tmp_path, recipe="nvfp4")} == {"0"}
    assert len(converted(tmp_path, recipe="nvfp4", exclude=[])) == 8
    assert last_layers(28) == [f"layers.{i}" for i in range(23, 28)]


# ---- the operands of all three products


class Seen:
    """x, w, dy, y, dx and dw of each product of one forward and backward pass, by layer."""

    def __init__(self, monkeypatch):
        self.calls = []
        for name in ("low_precision_linear", "low_precision_grouped_gemm"):
            monkeypatch.setattr(tw, name, functools.partial(self.call, getattr(tw, name)))

    def call(self, op, x, w, *rest, **options):
        own = {"op": op, "options": options, "rest": rest, "x": x.detach(), "w": w.detach()}
        self.calls.append(own)
        x, w = x.view_as(x), w.view_as(w)
        if x.requires_grad:
            x.register_hook(functools.partial(own.__setitem__, "dx"))
        w.register_hook(functools.partial(own.__setitem__, "dw"))
        y = op(x, w, *rest, **options)
        y.register_hook(functools.partial(own.__setitem__, "dy"))
        own["y"] = y.detach()
        return y


def rounded(t, recipe, rows):
    """t's values as the recipe has them.   rows: of a block of block_fp8's scales."""
    if recipe == "block_fp8":
        return tw.dequantize_block_fp8(tw.quantize_block_fp8(t.contiguous(), block=(rows, 128)))
    return tw.dequantize_mxfp8(tw.quantize_mxfp8(t.contiguous()))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["dense", "experts"])
def test_both_operands_of_all_three_products_are_rounded(tmp_path, monkeypatch, shape, recipe):
    """Beside the products of operands rounded by the ops that round; and away from those of
    operands that are not.
    """
    path = write_config(tmp_path, shape, precision__recipe=recipe, precision__exclude=[])
    engine, seen = engine_of(load(path)), Seen(monkeypatch)
    set_seeds(engine.parts, Mesh(), 1, 0)
    engine.forward_backward([collate(make_bins()[:2], 8)], language_modeling)
    assert len(seen.calls) == 8
    for call in seen.calls:
        assert call["options"]["recipe"] == recipe
        wanted = by_definition(call, recipe)
        for name, exact in unrounded(call).items():
            found, size = call[name], exact.norm()
            assert (found - wanted[name]).norm() < 1e-5 * size, name
            assert (found - exact).norm() > (0.05 if recipe == "nvfp4" else 0.005) * size, name


def by_definition(call, recipe):
    """y, dx and dw: nvfp4's, and those of experts, by the twin, with the same random numbers."""
    offsets = call["rest"][0]
    x, w, dy = call["x"], call["w"], call["dy"]
    if recipe == "nvfp4" or w.dim() == 3:
        x, w = (t.clone().requires_grad_() for t in (x, w))
        y = call["op"](x, w, *call["rest"], **{**call["options"], "implementation": "eager"})
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": w.grad}
    assert offsets is None  # no bias
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    own = functools.partial(rounded, recipe=recipe)
    y = own(x, rows=1) @ own(w, rows=128).T
    dx = own(dy, rows=1) @ own(w.T, rows=128).T
    dw = own(dy.T, rows=1) @ own(x.T, rows=1).T
    return {"y": y.view(call["y"].shape), "dx": dx.view(call["x"].shape), "dw": dw}


def unrounded(call):
    x, w, dy = call["x"], call["w"], call["dy"]
    if w.dim() == 3:
        x, w = (t.clone().requires_grad_() for t in (x, w))
        y = tw.grouped_gemm(x, w, *call["rest"])
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": w.grad}
    dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
    return {"y": x @ w.T, "dx": dy @ w, "dw": dw}


@pytest.mark.parametrize("recipe", RECIPES[:2])
@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["dense", "experts"])
def test_a_transform_changes_what_is_rounded(tmp_path, shape, recipe):
    """Gradients are others, and as near to those of products that are not rounded."""
    wide = {**shape, "intermediate_size": 64, "moe_intermediate_size": 32}
    grads = {}
    for kind, given in (
        ("dense", {}),
        ("plain", {"recipe": recipe}),
        ("transformed", {"recipe": recipe, "hadamard": True}),
    ):
        fields = {f"precision__{name}": value for name, value in given.items()}
        engine = engine_of(load(write_config(tmp_path / kind, wide, **fields)))
        engine.forward_backward([collate(make_bins()[:2], 8)], language_modeling)
        grads[kind] = distributed_worker.gradients(engine)
    rounding = apart(grads["plain"], grads["dense"])
    assert 0.5 * rounding < apart(grads["transformed"], grads["dense"]) < 2 * rounding
    assert apart(grads["transformed"], grads["plain"]) > 0.5 * rounding


# ---- a step, in every layout

HALF = {"train__lr": 1e-3, "train__max_steps": 3, "train__enable_mixed_precision": True}
LITTLE = {"train__lr": 1e-3, "train__max_steps": 2}
# Micro-batches, weights and rounding are those of one process.
EXACT = {
    "train_ddp": (2, ["--train.data_parallel_mode=ddp"]),
    "train_fsdp2": (2, fsdp2()),
    "train_pipeline": (2, fsdp2(pipeline_parallel_size=2, gradient_accumulation_steps=2)),
    "train_recomputed": (2, fsdp2(enable_gradient_checkpointing=True)),
    "train_hsdp": (4, fsdp2(data_parallel_replicate_size=2)),
}
# Ranks share a sequence, matrices or experts: blocks of scales are others.
OTHER_BLOCKS = {
    "train_tensor": (2, fsdp2(tensor_parallel_size=2, model__merge_qkv=False)),
    "train_experts": (2, fsdp2(expert_parallel_size=2)),
    "train_ulysses": (2, fsdp2(ulysses_parallel_size=2)),
    "train_ring": (2, fsdp2(ringattn_parallel_size=2)),
}

# The same batch in one process.
ALONE = {
    "train_tensor": ["--model.merge_qkv=false"],
    "train_experts": ["--train.gradient_accumulation_steps=2"],
    "train_ulysses": [],
    "train_ring": [],
}


@pytest.fixture(scope="module", params=("block_fp8", "nvfp4"))
def steps(request, tmp_path_factory):
    root, found = tmp_path_factory.mktemp("steps"), {}
    options = {"precision__recipe": request.param, "precision__exclude": []}
    for number in (2, 4):
        folder = root / str(number)
        path = write_config(folder, {**MOE, "vocab_size": 98}, **LITTLE, **options)
        torch.save(make_bins(), folder / "bins.pt")
        every = (EXACT | OTHER_BLOCKS).items()
        modes = {mode: given for mode, (ranks, given) in every if ranks == number}
        run_modes(number, folder, modes)
        found |= {mode: torch.load(folder / f"{mode}.pt") for mode in modes}
    alone = functools.partial(alone_with, path)
    found["alone"] = alone("--train.gradient_accumulation_steps=2")
    found["alone_4"] = alone("--train.gradient_accumulation_steps=4")
    off = ["--precision.recipe=none", "--precision.exclude=null"]
    for mode, given in ALONE.items():
        found[mode, "rounded"], found[mode, "dense"] = alone(*given), alone(*given, *off)
    return found


def alone_with(path, *arguments):
    return distributed_worker.several_steps(load(path, [*arguments]), Mesh(), make_bins())[1]


def apart(a, b):
    """The norm of the difference of gradients, relative to b's."""
    total = math.sqrt(sum(float((a[n] - t).norm() ** 2) for n, t in b.items()))
    return total / math.sqrt(sum(float(t.norm() ** 2) for t in b.values()))


@pytest.mark.parametrize("mode", EXACT)
def test_a_layout_computes_the_products_of_one_process(steps, mode):
    found, wanted = steps[mode], steps["alone_4" if EXACT[mode][0] == 4 else "alone"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert apart(found["grads"], wanted["grads"]) < 1e-4


@pytest.mark.parametrize("mode", OTHER_BLOCKS)
def test_ranks_that_share_a_product_round_their_parts_of_it(steps, mode):
    """Away from one process, and from its products that are not rounded, by the rounding."""
    found, wanted, dense = steps[mode], steps[mode, "rounded"], steps[mode, "dense"]
    rounding = apart(wanted["grads"], dense["grads"])
    assert rounding > 0.01
    assert 0.5 * rounding < apart(found["grads"], dense["grads"]) < 2 * rounding
    assert apart(found["grads"], wanted["grads"]) < 1.6 * rounding
    assert found["loss"] == pytest.approx(wanted["loss"], rel=0.01)


# ---- runs


def losses(folder, path, *arguments):
    run(path, *arguments)
    return [r["loss"] for r in rows(folder) if "loss" in r]


@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["dense", "experts"])
def test_recomputation_draws_the_same_numbers(tmp_path, shape):
    """The bits of a run that recomputes nothing: whole layers, and experts alone."""
    options = {**HALF, "precision__recipe": "nvfp4", "precision__exclude": []}
    path = write_config(tmp_path, shape, **options)
    wanted = losses(tmp_path, path)
    kinds = [[]] if shape is QWEN3 else [[], ["--train.moe_checkpoint_method=moe_act"]]
    for i, kind in enumerate(kinds):
        other = f"--train.output_dir={tmp_path / str(i) / 'out'}"
        recomputing = ["--train.enable_gradient_checkpointing=true", *kind, other]
        assert losses(tmp_path / str(i), path, *recomputing) == wanted


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path, recipe):
    resumed_equals_never_stopped(
        tmp_path,
        precision__recipe=recipe,
        precision__exclude=[],
        train__enable_mixed_precision=True,
    )


def test_seeds_are_of_a_step_and_a_layer(tmp_path, monkeypatch):
    """Other ones in each step; the stage of a layer does not count."""
    seeds, plain = [], Engine.optim_step

    def told(engine, *arguments):
        seeds.append({p: own.seed for p, own in products_of(engine.model).items()})
        return plain(engine, *arguments)

    monkeypatch.setattr(Engine, "optim_step", told)
    options = {"precision__recipe": "nvfp4", "precision__exclude": []}
    run(write_config(tmp_path, MOE, train__max_steps=3, **options))
    every = [seed for step in seeds for seed in step.values()]
    assert len({*every}) == len(every) == 3 * 6 and all(0 <= s < 2**63 - 1 for s in every)
    assert not any(seed % 2 for seed in every)  # experts take the next one too
    assert seeds[2]["model.layers.1.mlp.experts"] == seed_of(
        load(write_config(tmp_path)).train.seed, 2, [0] * 5, "model.layers.1.mlp.experts"
    )


def test_compiled_code_does_not_specialize_on_seeds(tmp_path, monkeypatch):
    """The losses of uncompiled layers, and as many compilations as without rounding."""
    counts, options = {}, {**HALF, "train__max_steps": 6}
    backend = []

    def counted(graph, inputs):
        backend.append(graph)
        return graph.forward

    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiles(f, backend=counted, **how))
    for recipe in ("block_fp8", "nvfp4"):
        path = write_config(
            tmp_path / recipe, **options, precision__recipe=recipe, precision__exclude=[]
        )
        torch._dynamo.reset()
        wanted = losses(tmp_path / recipe, path)
        backend.clear()
        other = f"--train.output_dir={tmp_path / 'compiled' / recipe / 'out'}"
        found = losses(tmp_path / "compiled" / recipe, path, "--train.enable_compile=true", other)
        assert found == pytest.approx(wanted, rel=1e-3)
        counts[recipe] = len(backend)
    assert counts["nvfp4"] == counts["block_fp8"] > 0


def test_evaluation_computes_as_training_does(tmp_path):
    """The forward pass of a recipe, without random numbers: the same after any step's seeds."""
    path = write_config(tmp_path, precision__recipe="nvfp4", precision__exclude=[])
    engine, dense = engine_of(load(path)), engine_of(load(write_config(tmp_path / "dense")))
    batch = collate(make_bins()[:2], 8)
    first = engine.evaluate([batch], language_modeling)
    set_seeds(engine.parts, Mesh(), 3, 5)
    assert engine.evaluate([batch], language_modeling) == first
    assert engine.forward_backward([batch], language_modeling).mean == first
    assert abs(dense.evaluate([batch], language_modeling) - first) > 1e-4


# ---- values that are not finite


@pytest.mark.parametrize("recipe", ["none", *RECIPES, "compiled"])
def test_the_layer_that_is_not_finite_is_named(tmp_path, monkeypatch, recipe):
    """By forward passes of every recipe, and of none; compiled code is left for it."""
    plain = Engine.optim_step

    def spoiled(engine, *arguments):
        done = plain(engine, *arguments)
        if checkpoint.complete(tmp_path / "out"):
            return done
        with torch.no_grad():
            engine.model.model.layers[1].mlp.down_proj.weight[3, 5] = math.inf
        return done

    monkeypatch.setattr(Engine, "optim_step", spoiled)
    given = {"precision__recipe": recipe, "precision__exclude": []}
    if recipe == "compiled":  # graphs, without what a compiler takes
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        given = {"train__enable_compile": True}
    given = {} if recipe == "none" else given
    path = write_config(tmp_path, **HALF, **given)
    with pytest.raises(
        ValueError, match=r"the loss is nan.*model\.layers\.1\.mlp\.down_proj"
    ) as told:
        run(path)
    assert str(told.value).startswith("step 2: ") and "step was not taken" in str(told.value)


# ---- memory


def test_a_plan_counts_what_is_saved_in_codes(tmp_path):
    wide = {**QWEN3, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    path = write_config(
        tmp_path, wide, data__sample_packing_sequence_len=512, train__enable_mixed_precision=True
    )
    bytes_of = {
        recipe: sum(planned(load(path, [f"--precision.recipe={recipe}"]), 1).saved.values())
        for recipe in ("none", "block_fp8")
    }
    assert bytes_of["block_fp8"] < 0.95 * bytes_of["none"]
