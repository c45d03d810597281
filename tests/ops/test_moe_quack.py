"""moe_mlp on QuACK's GEMMs: how it calls them. The kernels need a GPU; here stand-in functions take
the same arguments, leave the same parts unwritten, and compute in float32.
"""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from tilewright import __main__ as cli
from tilewright import use
from tilewright.bench import contract
from tilewright.core import platform
from tilewright.core.registry import Op
from tilewright.ops.moe import moe_quack
from tilewright.ops.moe.moe import MOE_MLP

CASES = [c for c in MOE_MLP.cases if "contract" in c.tags]


def _operand(t, index=None):
    assert t.dtype in (torch.bfloat16, torch.float16) and t.dim() in (2, 3)
    strides = sorted(t.stride())
    assert strides[0] == 1 and all(s % 8 == 0 for s in strides[1:]) and t.data_ptr() % 16 == 0
    if index is not None:
        assert index.dtype == torch.int32 and index.dim() == 1 and index.is_contiguous()
    return t.float()


def _paired(t, names, name):
    """Splits the non-contiguous dimension, gates before ups, into pairs: gate, up, gate, up, ..."""
    if names is None or name not in names:
        return t
    dim = t.dim() - 1 if t.stride(-1) != 1 else t.dim() - 2
    return torch.stack(t.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def _rows(A, B, ends, index, bias=None):
    """float32 products of each expert's rows, NaN beyond the last."""
    assert ends.dtype == torch.int32 and A.stride(-1) == 1
    assert B.shape[0] == len(ends) - 1 and A.shape[1] == B.shape[1]
    A = _operand(A, index)
    A = A if index is None else A[index]
    out = torch.full((A.shape[0], B.shape[2]), float("nan"))
    for e, (a, b) in enumerate(zip(ends.tolist(), ends[1:].tolist(), strict=False)):
        out[a:b] = A[a:b] @ B[e].float() + (0 if bias is None else bias[e].float())
    return out


class Fake:
    """A stand-in for quack.gemm_interface. calls: names of the functions called."""

    def __init__(self):
        self.calls = []
        self.module = ModuleType("quack.gemm_interface")
        for name in moe_quack.PARAMETERS:
            setattr(self.module, name, getattr(self, name))

    def gemm(
        self,
        A,
        B,
        out=None,
        bias=None,
        cu_seqlens_m=None,
        cu_seqlens_k=None,
        A_idx=None,
        tuned=True,
        concat_layout=None,
    ):
        self.calls.append("gemm")
        assert tuned is False and (cu_seqlens_m is None) != (cu_seqlens_k is None)
        _operand(B)
        if cu_seqlens_m is not None:
            assert out is None and concat_layout in (None, ("B",))
            return _rows(A, _paired(B, concat_layout, "B"), cu_seqlens_m, A_idx, bias).to(A.dtype)
        ends = cu_seqlens_k
        assert (
            ends.dtype == torch.int32 and A.stride(-2) == 1 and B.stride(-1) == 1 and bias is None
        )
        assert concat_layout in (None, ("out",))
        left = _operand(A, A_idx)
        left = left if A_idx is None else left[:, A_idx]
        found = torch.full((len(ends) - 1, A.shape[0], B.shape[1]), float("nan"))
        for e, (a, b) in enumerate(zip(ends.tolist(), ends[1:].tolist(), strict=False)):
            if b > a:  # a sum over no rows is not written
                found[e] = left[:, a:b] @ B[a:b].float()
        out = torch.empty(found.shape, dtype=A.dtype) if out is None else out
        _operand(out)
        if concat_layout:  # pairs are split again in the non-contiguous dimension of the output
            assert out.stride(-2) == 1
            found = torch.cat((found[..., ::2], found[..., 1::2]), -1)
        return out.copy_(found)

    def gemm_gated(
        self,
        A,
        B,
        bias=None,
        activation=None,
        cu_seqlens_m=None,
        A_idx=None,
        store_preact=True,
        tuned=True,
        concat_layout=None,
    ):
        self.calls.append("gemm_gated")
        assert activation == "swiglu" and tuned is False
        _operand(B)
        if bias is not None and concat_layout:
            assert "bias" in concat_layout
            bias = torch.stack(bias.chunk(2, -1), -1).flatten(-2)
        pre = _rows(A, _paired(B, concat_layout, "B"), cu_seqlens_m, A_idx, bias)
        h = torch.nn.functional.silu(pre[:, ::2]) * pre[:, 1::2]
        return pre.to(A.dtype) if store_preact else None, h.to(A.dtype)

    def gemm_dgated(
        self,
        A,
        B,
        PreAct,
        activation=None,
        colvec_scale=None,
        colvec_reduce=False,
        cu_seqlens_m=None,
        A_idx=None,
        tuned=True,
    ):
        self.calls.append("gemm_dgated")
        assert (
            activation == "swiglu" and tuned is False and colvec_reduce and PreAct.is_contiguous()
        )
        _operand(B)
        assert colvec_scale.dtype == torch.float32 and colvec_scale.shape == A_idx.shape
        dh, pre, scale = _rows(A, B, cu_seqlens_m, A_idx), PreAct.float(), colvec_scale[:, None]
        gate, up = pre[:, ::2], pre[:, 1::2]
        s = torch.sigmoid(gate)
        h = gate * s * up
        dgate, dup = scale * dh * up * s * (1 + gate * (1 - s)), scale * dh * gate * s
        dpre = torch.stack((dgate, dup), -1).flatten(1)
        return dpre.to(A.dtype), (scale * h).to(A.dtype), (dh * h).sum(1)


@pytest.fixture(scope="module")
def quack():
    """Replaces quack, and makes its implementation usable on a CPU."""
    if importlib.util.find_spec("quack") is not None:
        pytest.skip("quack itself is installed")
    fake, package = Fake(), ModuleType("quack")
    package.gemm_interface = fake.module
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "quack", package)
        patch.setitem(sys.modules, "quack.gemm_interface", fake.module)
        patch.setattr(MOE_MLP, "_table", {})
        implementation = MOE_MLP.implementation("quack")
        missing = implementation.missing
        object.__setattr__(implementation, "missing", lambda device: None)
        yield fake
        object.__setattr__(implementation, "missing", missing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_contract(quack, case, dtype):
    """Including cases that QuACK's epilogues do not support, which use separate products."""
    quack.calls.clear()
    assert not contract.check(MOE_MLP, "quack", case, "cpu", dtype)
    kwargs = case.make("cpu", dtype, 0)
    fused = fits(kwargs) and kwargs["x"].numel() > 0
    assert ("gemm_gated" in quack.calls) == ("gemm_dgated" in quack.calls) == fused


def fits(kwargs):
    return moe_quack.fits(kwargs["gate_up_proj"], 2, kwargs.get("gate", moe_quack.Gate()))


def test_which_cases_are_fused():
    fused = {c.name for c in CASES if fits(c.make("cpu", torch.bfloat16, 0))}
    assert fused >= {"aligned", "half_idle", "skewed", "frozen_aligned"}
    assert not fused & {"ragged", "gpt_oss_aligned"}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_both_orders_of_gates_and_ups_with_and_without_biases(quack, interleaved, biases):
    from tilewright.ops.moe import moe_cases

    options = {"biases": biases, "gate": moe_quack.Gate(interleaved=interleaved)}
    case = moe_cases.case("of_this_test", (29, 4, 2, 32, 16), "sentinels", **options)
    quack.calls.clear()
    assert not contract.check(MOE_MLP, "quack", case, "cpu", torch.bfloat16)
    assert "gemm_dgated" in quack.calls


@pytest.mark.parametrize("name", ["aligned", "ragged"])
def test_parts_do_not_follow_use(quack, name, monkeypatch):
    """Neither those of the fused launches nor, for "ragged", those of separate products."""
    asked, pick = [], Op.pick
    monkeypatch.setattr(
        Op, "pick", lambda op, part, *a: (asked.append((op.name, part)), pick(op, part, *a))[1]
    )
    [case] = [c for c in CASES if c.name == name]
    with use("eager"):
        y = MOE_MLP.public(**case.make("cpu", torch.bfloat16, 0), implementation="quack")
        y.sum().backward()
    assert {op for op, _ in asked} >= {"moe_mlp", "permute", "unpermute"}
    assert not [ask for ask in asked if ask[1] == "auto"]


def test_a_version_without_these_epilogues_is_said_and_composed(quack, monkeypatch, capsys):
    assert moe_quack.missing_from(quack.module) is None
    monkeypatch.setattr(platform, "no_cuda", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    assert cli.main(["explain", "moe_mlp", "--device", "cuda", "--dtype", "bfloat16"]) == 0
    assert f"usable; {moe_quack.FUSED}" in capsys.readouterr().out
    monkeypatch.setattr(quack.module, "gemm_gated", lambda A, B, activation=None: None)
    reason = moe_quack.missing_from(quack.module)
    assert "gemm_gated of this version of quack takes no bias, cu_seqlens_m" in reason
    assert moe_quack.explain("cuda") == f"{moe_quack.NOT_FUSED} ({reason})"
    monkeypatch.delattr(quack.module, "gemm_dgated")
    monkeypatch.setattr(quack.module, "gemm_gated", quack.gemm_gated)
    assert moe_quack.missing_from(quack.module) == "this version of quack has no gemm_dgated"


def test_the_version_that_is_installed_has_them():
    interface = pytest.importorskip("quack.gemm_interface")
    assert moe_quack.missing_from(interface) is None
