"""What another version of transformers may change: decorators, names of arguments, places of
modules. A model computes the same, or one sentence names the version.
"""

import copy
import functools
import sys

import pytest
import small_models
import torch
from helpers import keep_tables
from torch import nn

transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
)

from transformers.models.llama import modeling_llama  # noqa: E402

from tilewright import ImplementationUnavailable, ops  # noqa: E402
from tilewright.core import explain, platform  # noqa: E402
from tilewright.integrations.transformers import (  # noqa: E402
    PARTS,
    accelerate,
    layers,
    register,
    restore,
)

pytestmark = pytest.mark.packages

IDS = torch.arange(3, 21).view(2, 9)
ABSENT = {"experts", "linear_attention"}  # parts that the model here does not have
SENTENCE = rf"transformers {transformers.__version__} has no .*; 5\.17 to \S+ were tested"


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    keep_tables(monkeypatch)


def tiny():
    return small_models.build("llama", "causal").train()


def gradients(model):
    model.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_same(model, expected):
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


# ---- decorators


def counted(calls):
    def decorator(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            calls.append("counted")
            return function(*args, **kwargs)

        return wrapper

    return decorator


def renamed(old, new):
    def decorator(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorator


def kept_elsewhere(function):
    functions = {"forward": function}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return functions["forward"](*args, **kwargs)

    return wrapper


def count_rope(monkeypatch):
    calls = []
    own = ops.rope
    monkeypatch.setattr(layers.ops, "rope", lambda *a, **k: (calls.append(1), own(*a, **k))[1])
    return calls


def test_rope_is_accelerated_below_decorators(monkeypatch):
    decorators = []
    forward = modeling_llama.LlamaAttention.forward
    for decorator in (torch.enable_grad(), renamed("a_cache", "another"), counted(decorators)):
        forward = decorator(forward)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    model = tiny()
    expected = gradients(model)
    decorators.clear()
    calls = count_rope(monkeypatch)
    report = accelerate(model, parts=("rope",), quiet=True)
    assert [change.part for change in report.changed] == ["rope"]
    assert_same(model, expected)
    assert len(calls) == len(decorators) == 2, "one call and one decorator a layer"
    copied = copy.deepcopy(model)
    assert_same(copied, expected)
    assert len(calls) == 4
    restore(model)
    assert_same(model, expected)
    assert len(calls) == 4
    assert modeling_llama.LlamaAttention.forward is forward


def test_a_decorated_forward_is_one_graph(monkeypatch):
    forward = renamed("a_cache", "another")(modeling_llama.LlamaAttention.forward)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    model = tiny()
    expected = gradients(model)
    accelerate(model, parts=("rope",), quiet=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    model.zero_grad()
    compiled(IDS, labels=IDS, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_a_decorator_that_cannot_be_followed_is_left_with_the_version(monkeypatch):
    forward = kept_elsewhere(modeling_llama.LlamaAttention.forward)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    model = tiny()
    expected = gradients(model)
    calls = count_rope(monkeypatch)
    report = accelerate(model, parts=PARTS, quiet=True)
    assert {change.part for change in report.changed} == set(PARTS) - {"rope", *ABSENT}
    assert_left(report, "rope")
    assert_same(model, expected)
    assert not calls


def assert_left(report, part):
    with pytest.raises(ImplementationUnavailable, match=SENTENCE):
        raise ImplementationUnavailable(report.left[part])
    assert "\n" not in report.left[part]


# ---- arguments of other names


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def apply_rotary_pos_emb(query, key, cosine, sine, heads_dim=1):
    return rotate(query, cosine, sine), rotate(key, cosine, sine)


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(sine=sin, cosine=cos, query=q, key=k)


def test_arguments_of_another_name_are_rotated_all_the_same(monkeypatch):
    module = Attention()
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    inputs = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), angles.cos(), angles.sin()
    expected = module(*inputs)
    calls = count_rope(monkeypatch)
    assert [c.part for c in accelerate(module, parts=("rope",), quiet=True).changed] == ["rope"]
    for found, want in zip(module(*inputs), expected, strict=True):
        torch.testing.assert_close(found, want)
    assert len(calls) == 1


class Planted(nn.Module):
    """Calls the rotation of its module with arguments of the test's choice."""

    call = staticmethod(lambda rotation, *inputs: rotation(*inputs))

    def forward(self, q, k, cos, sin):
        return self.call(apply_rotary_pos_emb, q, k, cos, sin)


def heads_first(q, k, cos, sin, *rest):
    """With a dimension of the heads behind an argument that is not used, all positional."""
    dim = rest[1] if len(rest) > 1 else 1
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return tuple(
        x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin for x in (q, k)
    )


ROTATIONS = {
    "a signature that tells no names": (lambda *a, **k: heads_first(*a, **k), lambda f, *x: f(*x)),
    "and names": (
        lambda *a, **k: heads_first(*a, **k),
        lambda f, q, k, cos, sin: f(q=q, k=k, cos=cos, sin=sin),
    ),
    "more positions than names": (
        heads_first,
        lambda f, q, k, cos, sin: tuple(
            t.transpose(1, 2) for t in f(q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 2)
        ),
    ),
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_a_rotation_is_called_as_before(kind, monkeypatch):
    rotation, call = ROTATIONS[kind]
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", rotation)
    monkeypatch.setattr(Planted, "call", staticmethod(call))
    module = Planted()
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    inputs = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), angles.cos(), angles.sin()
    expected = module(*inputs)
    assert [c.part for c in accelerate(module, parts=("rope",), quiet=True).changed] == ["rope"]
    for found, want in zip(module(*inputs), expected, strict=True):
        torch.testing.assert_close(found, want)


# ---- families that only newer versions have, or have changed

# By the version: those that a version of the lock has not (`make newer` runs these), and Mistral
# Large 4, whose rotary embedding learns.
FAMILIES = {
    "5.24": ("mistral_large4", "apertus1p5_text", "exaone", "lara_mini", "sarvam_mla", "sarvam_moe")
}


@pytest.mark.parametrize("kind", [kind for kinds in FAMILIES.values() for kind in kinds])
def test_every_parameter_of_a_newer_family_gets_its_gradient(kind):
    version = next(v for v, kinds in FAMILIES.items() if kind in kinds)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(
        map(int, version.split("."))
    ):
        pytest.skip(f"transformers {transformers.__version__} is older than {version}")
    head = next(head for head in small_models.EVERY if kind in small_models.kinds(head))
    model = small_models.build(kind, head)
    expected = gradients(model)
    if kind == "mistral_large4":
        assert expected["model.language_model.rotary_emb.alpha"].any()
    report = accelerate(model, parts=PARTS, quiet=True)
    assert {"norm", "loss"} <= {change.part for change in report.changed}, str(report)
    for name, grad in gradients(model).items():
        assert (grad is None) == (expected[name] is None), name
        if grad is not None:
            least = 1e-6 + 1e-3 * float(expected[name].norm())
            assert float((grad - expected[name]).norm()) <= least, name


# ---- modules and functions that have moved

MOVED = {
    "transformers.loss.loss_utils": ("loss",),
    "transformers.integrations.moe": ("attention",),
    "transformers.utils.output_capturing": ("attention",),
    "transformers.masking_utils.causal_mask_function": ("attention",),
    "transformers.masking_utils.bidirectional_mask_function": ("attention",),
    "transformers.modeling_utils.AttentionInterface": ("attention",),
}


@pytest.mark.parametrize("moved", MOVED)
def test_what_has_moved_is_left_with_the_version(moved, monkeypatch):
    model = tiny()
    expected = gradients(model)
    parent, _, name = moved.rpartition(".")
    left = {*MOVED[moved], *ABSENT}
    with monkeypatch.context() as planted:
        if moved in sys.modules:
            planted.setitem(sys.modules, moved, None)
        else:
            planted.delattr(sys.modules[parent], name)
        report = accelerate(model, parts=PARTS, quiet=True)
        if "attention" in left:
            with pytest.raises(ImplementationUnavailable, match=SENTENCE):
                register()
    assert {change.part for change in report.changed} == set(PARTS) - left
    for part in MOVED[moved]:
        assert_left(report, part)
        assert name in report.left[part]
    assert ("tilewright" in transformers.AttentionInterface().valid_keys()) == (
        "attention" not in left
    )
    assert_same(model, expected)


# ---- versions


def test_a_version_newer_than_those_tested_is_named(monkeypatch, capsys):
    version = transformers.__version__
    monkeypatch.setattr(platform, "TESTED", {**platform.TESTED, "transformers": "5.16"})
    sentence = f"transformers {version} is newer than 5.16, the newest that was tested"
    accelerate(tiny(), parts=("norm",))
    assert capsys.readouterr().out.splitlines()[-1] == f"  note     {sentence}"
    assert sentence in explain.heading("cpu", torch.float32).splitlines()
    assert sentence in explain.as_json([], "cpu", torch.float32)


def test_these_versions_are_among_those_tested(capsys):
    """Raise `platform.TESTED` when the tests pass with a newer version."""
    assert platform.newer_than_tested() == []
    accelerate(tiny(), parts=("norm",))
    assert "note" not in capsys.readouterr().out
