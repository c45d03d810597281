"""Which modules of others' making `accelerate` replaces: those that compute the same in each dtype,
for each length and in each mode that they will meet, whatever is set later.
"""

import copy
import math
import types

import pytest
import small_models
import torch
import torch.nn.functional as F
from helpers import keep_tables
from torch import nn

transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
)

from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm  # noqa: E402

from tilewright.integrations.transformers import accelerate, known  # noqa: E402

pytestmark = pytest.mark.packages


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    keep_tables(monkeypatch)


def tiny():
    return small_models.build("llama", "causal")


def rms(self, x):
    return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def swiglu(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def in_float32(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * x.to(dtype)


class NarrowRMSNorm(LlamaRMSNorm):
    """Squares overflow in float16."""

    forward = rms


class InFloat32RMSNorm(LlamaRMSNorm):
    forward = in_float32


class InPartsRMSNorm(LlamaRMSNorm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        return self.weight * self._norm(x.float()).type_as(x)


class PlainMLP(LlamaMLP):
    forward = swiglu


class SiluMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("cls", [InFloat32RMSNorm, InPartsRMSNorm, PlainMLP, SiluMLP])
def test_plain_arithmetic_is_replaced(cls):
    part = "mlp" if issubclass(cls, LlamaMLP) else "norm"
    model = tiny()
    of(model, part)[0].__class__ = cls
    expected = model(IDS).logits
    report = accelerate(model, quiet=True)
    changed = {c.part: c.modules for c in report.changed}
    assert changed[part][cls.__name__] == 1 and part not in report.left, str(report)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)


IDS = torch.arange(3, 21).view(2, 9)


def of(model, part):
    if part == "mlp":
        return [layer.mlp for layer in model.model.layers]
    return [model.model.norm, *(layer.input_layernorm for layer in model.model.layers)]


FACTOR = 1.0


class DepthRMSNorm(LlamaRMSNorm):
    depth = 1.0

    def forward(self, x):
        return self.depth * rms(self, x)


class OwnDepthRMSNorm(LlamaRMSNorm):
    depth = 1.0

    def forward(self, x):
        eps = self.variance_epsilon
        return self.depth * self.weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


class OfMeanRMSNorm(OwnDepthRMSNorm):
    """Its attribute has the name of a method of tensors."""

    def forward(self, x):
        square = (x * x).mean(-1, keepdim=True) + self.variance_epsilon
        return self.weight * x * torch.rsqrt(square) * self.mean


class OfGlobalRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        eps = self.variance_epsilon
        return FACTOR * self.weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


class ClampingRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        x = x.clamp(-1e3, 1e3)
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


class WideningRMSNorm(LlamaRMSNorm):
    """Its result is float32 in each dtype."""

    def forward(self, x):
        x = x.float()
        x = x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight.float() * x


class ByLengthRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return rms(self, x) * (2.0 if x.shape[-2] > 16 else 1.0)


class InBfloat16(LlamaMLP):
    def forward(self, x):
        if x.dtype == torch.bfloat16:
            return self.down_proj(self.act_fn(self.gate_proj(x)))
        return swiglu(self, x)


class LongMLP(LlamaMLP):
    def forward(self, x):
        return swiglu(self, x) if x.shape[1] < 16 else self.down_proj(self.up_proj(x))


class WithoutGrad(LlamaMLP):
    def forward(self, x):
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y * (2 - torch.is_grad_enabled())


class InEvaluation(LlamaMLP):
    def forward(self, x):
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y * (2 - self.training)


class ByMethod(LlamaMLP):
    def factor(self, x):
        return 1.0 if x.dtype == torch.float32 else 2.0

    def forward(self, x):
        return self.factor(x) * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Activation(nn.Module):
    def forward(self, x):
        return F.silu(x) if x.dtype == torch.float32 else F.relu(x)


def without_grad(model):
    with torch.no_grad():
        return model(IDS).logits


def set_all(part, **attributes):
    def change(model):
        for module in of(model, part):
            for name, value in attributes.items():
                setattr(module, name, value)
        return model(IDS).logits

    return change


def later_global(model):
    global FACTOR
    FACTOR = 2.0
    try:
        return model(IDS).logits
    finally:
        FACTOR = 1.0


def longer(model):
    return model(torch.arange(40).view(1, 40)).logits


def in_bfloat16(model):
    return model.bfloat16()(IDS).logits


def larger(model):
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e5)
    return model(IDS).logits


ROWS = torch.linspace(-500, 500, 3 * 32).view(3, 32)
OTHERWISE = {
    DepthRMSNorm: set_all("norm", depth=2.0),
    OwnDepthRMSNorm: set_all("norm", depth=2.0),
    OfMeanRMSNorm: set_all("norm", mean=2.0),
    OfGlobalRMSNorm: later_global,
    ClampingRMSNorm: larger,
    WideningRMSNorm: lambda model: model.model.norm.bfloat16()(ROWS.bfloat16()),
    NarrowRMSNorm: lambda model: model.model.norm.half()(ROWS.half()),
    ByLengthRMSNorm: longer,
    InBfloat16: in_bfloat16,
    LongMLP: longer,
    WithoutGrad: without_grad,
    InEvaluation: lambda model: model.eval()(IDS).logits,
    ByMethod: in_bfloat16,
    Activation: in_bfloat16,
}


@pytest.mark.parametrize("cls", OTHERWISE, ids=lambda cls: cls.__name__)
def test_what_may_compute_something_else_later_is_left_with_the_reason(cls):
    part = "norm" if issubclass(cls, LlamaRMSNorm) else "mlp"
    theirs = tiny().train()
    for module in of(theirs, part):
        if cls is Activation:
            module.act_fn = Activation()
        else:
            module.__class__ = cls
        if cls is OfMeanRMSNorm:
            module.mean = 1.0
    ours = copy.deepcopy(theirs)
    before = theirs(IDS).logits
    report = accelerate(ours, quiet=True)
    assert f"{len(of(ours, part))} x " in report.left[part], str(report)
    torch.testing.assert_close(ours(IDS).logits, before, rtol=1e-4, atol=1e-5)
    found, expected = OTHERWISE[cls](ours), OTHERWISE[cls](theirs)
    within = 1e-4 if expected.dtype == torch.float32 else 0.05
    assert expected.shape != before.shape or not torch.allclose(expected.float(), before, rtol=0.01)
    assert found.dtype == expected.dtype
    assert (found - expected).norm() <= within * expected.norm()


def test_a_class_of_transformers_that_was_patched_is_none_of_its_own(monkeypatch):
    assert known.is_known_class(LlamaMLP) and known.is_known_class(nn.RMSNorm)
    for function in (InBfloat16.forward, lambda self, x: InBfloat16.forward(self, x)):
        monkeypatch.setattr(LlamaMLP, "forward", function)
        assert not known.is_known_class(LlamaMLP)
        assert "LlamaMLP" in accelerate(tiny(), quiet=True).left["mlp"]


def test_a_function_of_an_instance_is_read_too():
    model = tiny()
    mlp = model.model.layers[0].mlp
    del mlp._modules["act_fn"]
    mlp.act_fn = lambda x: F.silu(x) if x.dtype == torch.float32 else F.relu(x)
    assert "act_fn" in accelerate(model, quiet=True).left["mlp"]
    mlp.act_fn = F.silu  # PyTorch's
    assert "mlp" not in accelerate(model, quiet=True).left
    mlp.forward = types.MethodType(InBfloat16.forward, mlp)
    assert "of its own instance" in accelerate(model, quiet=True).left["mlp"]


class Scaled(LlamaMLP):
    """As a class of transformers (Falcon-H1's): a number that is 1 at first."""

    __module__ = LlamaMLP.__module__


def test_a_number_that_transformers_own_forward_reads_may_be_set_later():
    names = {**vars(modeling_llama)}
    source = "def forward(self, x): return swiglu(self, x) * self.multiplier"
    exec(source, names | {"swiglu": swiglu}, made := {})
    scope = types.FunctionType(made["forward"].__code__, {**names, "swiglu": swiglu})
    Scaled.forward = scope
    theirs = tiny()
    theirs.model.layers[0].mlp.__class__ = Scaled
    theirs.model.layers[0].mlp.multiplier = 1.0
    ours = copy.deepcopy(theirs)
    assert "mlp" in {c.part for c in accelerate(ours, quiet=True).changed}
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)
    for model in (theirs, ours):
        model.model.layers[0].mlp.multiplier = 3.0
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)


# ---- functions


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotation(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (half(q) * sin), (k * cos) + (half(k) * sin)


def rotation_of_short_rows(q, k, cos, sin, unsqueeze_dim=1):
    if q.shape[-2] > 16:
        return q, k
    return rotation(q, k, cos, sin, unsqueeze_dim)


def rotation_with_grad(q, k, cos, sin, unsqueeze_dim=1):
    q, k = rotation(q, k, cos, sin, unsqueeze_dim)
    return q * (2 - torch.is_grad_enabled()), k


@pytest.mark.parametrize("own", [rotation, rotation_of_short_rows, rotation_with_grad])
def test_a_rotation_that_depends_on_more_than_values_is_left(own, monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)
    report = accelerate(tiny(), quiet=True)
    assert ("rope" in report.left) == (own is not rotation), str(report)


def test_every_class_of_transformers_models_is_known():
    """Its norms and MLPs, with their decorators."""
    assert math.prod(known.is_known_class(c) for c in (LlamaRMSNorm, LlamaMLP)) == 1
    for cls in vars(modeling_llama).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            assert known.is_known_class(cls), cls
