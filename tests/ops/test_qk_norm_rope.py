"""Tests specific to qk_norm_rope; parity with the eager twin is in test_contract.py."""

import functools

import pytest
import torch
from helpers import DEVICE, OperatorNames, skip_unless_usable, threads

from tilewright.core import platform
from tilewright.kernels.rope.operators import HeadNorm, Heads, Rotation
from tilewright.ops import qk_norm_rope, rmsnorm, rope
from tilewright.ops.rope.qk_norm_rope import QK_NORM_ROPE

EVERY = pytest.mark.parametrize("name", QK_NORM_ROPE.names())
FUSED = pytest.mark.parametrize("name", [n for n in QK_NORM_ROPE.names() if n != "eager"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
# A sum of 16 squares and half a dozen operations per element, of values up to about 4.
CLOSE = {"rtol": 16 * torch.finfo(torch.float32).eps, "atol": 16 * torch.finfo(torch.float32).eps}
B, HQ, HK, S, D, P = 2, 4, 2, 6, 16, 24
W = (HQ + 2 * HK) * D
HEADS = {"num_heads": HQ, "num_kv_heads": HK}


def tables(rows=P, width=D, dtype=torch.float32):
    angle = torch.outer(
        torch.arange(rows).double(), 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    )
    return angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


COS, SIN = tables()


def call(qkv, q_weight=None, k_weight=None, cos=COS, sin=SIN, *, name, **options):
    options = {**HEADS, "q_weight": q_weight, "k_weight": k_weight, **options}
    return qk_norm_rope(qkv, cos, sin, **options, implementation=name)


def inputs(dtype=torch.float32, batch=B, seq=S):
    """qkv and the weights of the norms."""
    g = torch.Generator(device=DEVICE).manual_seed(0)
    qkv, *weights = (
        torch.randn(*shape, generator=g, device=DEVICE, dtype=torch.float64)
        for shape in ((batch, seq, W), (D,), (D,))
    )
    return [qkv.to(dtype), *((1 + 0.3 * w).to(dtype) for w in weights)]


def separately(
    qkv, q_weight, k_weight, cos=COS, sin=SIN, *, eps=1e-6, offset=0.0, cast="gemma", **options
):
    """Three separate ops on the split projection."""
    q, k, v = (t.unflatten(-1, (-1, D)) for t in qkv.split((HQ * D, HK * D, HK * D), -1))
    if q_weight is not None:
        q, k = (
            rmsnorm(x, w, eps, offset=offset, cast=cast, implementation="eager")
            for x, w in ((q, q_weight), (k, k_weight))
        )
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, implementation="eager", **options)
    return q, k, v.transpose(1, 2)


# ---- references


@EVERY
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eps": 0.1, "offset": 1.0},
        {"interleaved": True},
        {"rotary_dim": 6},
        {"rotary_dim": 6, "interleaved": True},
        {"position_ids": torch.tensor([5, 0, 23, 7, 7, 1], device=DEVICE)},
    ],
    ids=["plain", "offset", "interleaved", "partial", "partial_interleaved", "positions"],
)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_equals_norm_and_rotation_one_after_the_other(name, norm, options):
    """In results and gradients, whichever of the three results are used."""
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    cos, sin = tables(width=options.get("rotary_dim", D))
    given = [t.requires_grad_() for t in inputs()]
    if not norm:
        given[1:] = None, None
        options = {n: v for n, v in options.items() if n not in ("eps", "offset")}
    leaves = [t for t in given if t is not None]
    found = call(*given, cos, sin, name=name, **options)
    expected = separately(*given, cos, sin, **options)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, **CLOSE)
    grads = [torch.randn_like(e) for e in expected]
    for used in ((0, 1, 2),) if options else ((0, 1, 2), (0,), (1,), (2,), (0, 2)):
        f, e = (
            torch.autograd.grad(
                [outs[i] for i in used],
                leaves,
                [grads[i] for i in used],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for outs in (found, expected)
        )
        for a, b in zip(f, e, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_definition_is_that_composition_in_float64():
    cos, sin = tables(dtype=torch.float64)
    for given in (inputs(torch.float64), [inputs(torch.float64)[0], None, None]):
        found = call(*given, cos, sin, name="auto")
        for f, e in zip(found, separately(*given, cos, sin), strict=True):
            assert f.dtype == torch.float64
            torch.testing.assert_close(f, e, rtol=1e-14, atol=1e-14)


@pytest.mark.packages
@EVERY
def test_equals_transformers_qwen3(name):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    config = qwen3.Qwen3Config(
        hidden_size=24,
        num_attention_heads=HQ,
        num_key_value_heads=HK,
        head_dim=D,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    attention = qwen3.Qwen3Attention(config, 0).to(DEVICE)
    with torch.no_grad():
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.add_(0.3 * torch.randn_like(norm.weight))
    x = torch.randn(B, S, 24, device=DEVICE)
    positions = torch.randint(0, 64, (B, S), device=DEVICE)
    cos, sin = qwen3.Qwen3RotaryEmbedding(config).to(DEVICE)(
        x, positions
    )  # [B, S, D]: one row per token
    # As Qwen3Attention.forward before attention.
    shape = (B, S, -1, D)
    q = attention.q_norm(attention.q_proj(x).view(shape)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
    v = attention.v_proj(x).view(shape).transpose(1, 2)
    expected = *qwen3.apply_rotary_pos_emb(q, k, cos, sin), v
    merged = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    weights = attention.q_norm.weight, attention.k_norm.weight
    found = call(x @ merged.T, *weights, cos, sin, eps=1e-5, name=name)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cpp", "eager"])
def test_rounds_once(name):
    """The float32 result, rounded; two separate ops are further from it."""
    skip_unless_usable(QK_NORM_ROPE, name, torch.bfloat16)
    given = inputs(torch.bfloat16)
    cos, sin = (t.bfloat16() for t in (COS, SIN))

    found = call(*given, cos, sin, name=name)
    expected = call(*(t.float() for t in given), cos, sin, name=name)
    twice = separately(*given, cos, sin, cast="llama")
    for f, e, t in zip(found[:2], expected[:2], twice[:2], strict=True):
        assert torch.equal(f, e.bfloat16())
        assert (f - e).abs().mean() < 0.7 * (t - e).abs().mean()


# ---- positions


@EVERY
def test_positions_restart_in_each_packed_document(name):
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    lengths = [5, 1, 0, 6]
    qkv, *weights = inputs(batch=1, seq=12)
    cu = torch.tensor([0, 5, 6, 6, 12], dtype=torch.int32, device=DEVICE)
    packed = call(qkv, *weights, cu_seqlens=cu, name=name)
    alone = [call(part, *weights, name=name) for part in qkv.split(lengths, 1)]
    for whole, parts in zip(packed, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts, 2))


@EVERY
@pytest.mark.skipif(DEVICE != "cpu", reason="positions on a CUDA device are not looked at")
def test_position_outside_the_tables(name):
    """The same error as rope's, in compiled code too."""
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[1, 3] = P
    qkv = inputs()[0]
    before = qkv.clone()
    torch._dynamo.reset()
    for fn in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        for inplace in (False, True):
            said = rf"position_ids\[1, 3\] = {P} .* rows 0 to {P - 1}"
            with pytest.raises(IndexError, match=said):
                fn(qkv, position_ids=ids, inplace=inplace, name=name)
    assert torch.equal(qkv, before)
    with pytest.raises(IndexError, match=f"S is {S}: position 3 is outside the tables"):
        call(qkv, cos=COS[:3], sin=SIN[:3], name=name)


@pytest.mark.parametrize("name", ["triton", "eager"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_unchecked_positions_become_nan(name, norm):
    """The fallback for a device without synchronization."""
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    qkv, *weights = inputs()
    ids = torch.tensor([[0, P, 2, -1, 4, 2**40]] * B, device=DEVICE)
    cos, sin = tables(width=10)  # 5 pairs: not a power of two
    fn = QK_NORM_ROPE.resolve(name, DEVICE)
    q, k, v = fn(
        qkv, Heads(HQ, HK), HeadNorm(*weights) if norm else HeadNorm(), Rotation(cos, sin, ids)
    )
    wrong = torch.tensor([False, True, False, True, False, True], device=DEVICE)
    for x in (q, k):
        assert x[:, :, wrong, :10].isnan().all() and not x[:, :, ~wrong].isnan().any()
    assert not v.isnan().any()


# ---- memory


@EVERY
@pytest.mark.parametrize("inplace, grad", [(False, False), (False, True), (True, False)])
def test_results_lie_as_attention_reads_them(name, inplace, grad):
    """q and k in the layout [B, S, H, D], v as a view of the projection; in place all three."""
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    for width in (W, W + 8):  # a slice of wider rows is not copied either
        qkv = torch.randn(B, S, width, device=DEVICE)[..., :W].requires_grad_(grad)
        q, k, v = call(qkv, inplace=inplace, name=name)
        assert v.data_ptr() == qkv[..., (HQ + HK) * D :].data_ptr()
        assert v.stride() == (S * width, D, width, 1)
        if inplace:
            assert q.data_ptr() == qkv.data_ptr() and k.data_ptr() == qkv[..., HQ * D :].data_ptr()
            assert q.stride() == k.stride() == v.stride()
        else:
            for x, h in ((q, HQ), (k, HK)):
                assert x.shape == (B, h, S, D) and x.transpose(1, 2).is_contiguous()


@FUSED
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_what_is_kept_for_the_backward(name, norm):
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    qkv, *weights = (t.requires_grad_() for t in inputs())
    weights = weights if norm else [None, None]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call(qkv, *weights, name=name)
    size = {t.data_ptr(): t.nbytes for t in kept}
    assert sum(size.values()) == COS.nbytes + SIN.nbytes + norm * (
        qkv.nbytes + 4 * B * S * (HQ + HK) + 2 * 4 * D
    )
    assert (qkv.data_ptr() in size) == norm


@FUSED
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_one_operator_is_the_whole_backward(name, norm):
    """It writes v's gradient too, without padding and adding; also in compiled code."""
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    qkv, *weights = (t.requires_grad_() for t in inputs())
    weights = weights if norm else [None, None]
    leaves = [t for t in (qkv, *weights) if t is not None]
    fn = functools.partial(call, name=name)
    outs = fn(qkv, *weights)
    grads = [torch.randn_like(o) for o in outs]
    operator = f"tilewright::qk_norm_rope_{name}_backward"
    with OperatorNames() as seen:
        expected = torch.autograd.grad(outs, leaves, grads)
    assert [c for c in seen.names if c not in ("aten::detach", "aten::view")] == [operator]
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        fn, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
    )
    found = torch.autograd.grad(compiled(qkv, *weights), leaves, grads)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)
    nodes = [n.target for n in graphs[-1].graph.nodes if n.op == "call_function"]
    called = [t.name().split(".")[0] for t in nodes if hasattr(t, "name")]
    assert called == [operator], called


def test_backward_is_two_launches_and_no_other_kernel(monkeypatch):
    """The second sums the partial sums of both weights, and casts them."""
    if reason := platform.no_triton(DEVICE):
        pytest.skip(reason)
    from tilewright.kernels.norm import rmsnorm_triton
    from tilewright.kernels.rope import qk_norm_rope_triton as k

    qkv, w = torch.ones(1, 5, 32, device=DEVICE), torch.ones(8, device=DEVICE)
    q, k_and_v = (torch.ones(1, n, 5, 8, device=DEVICE) for n in (2, 1))
    rstd, table = torch.ones(1, 5, 3, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    for module in (k, rmsnorm_triton):
        monkeypatch.setattr(
            module, "launch", lambda kernel, *_, **__: seen.names.append(kernel.fn.__name__)
        )
    with OperatorNames() as seen:
        k.backward(
            q, k_and_v, k_and_v, qkv, rstd, Heads(2, 1), HeadNorm(w, w), Rotation(table, table)
        )
    allocations = "aten::empty.memory_format", "aten::empty_like", "aten::new_empty"
    launched = [name for name in seen.names if name not in allocations]
    assert launched == ["_backward", "_sum_programs"]


@pytest.mark.skipif(DEVICE != "cpu", reason="of the C++ kernels")
def test_the_same_bits_on_any_number_of_threads():
    skip_unless_usable(QK_NORM_ROPE, "cpp", torch.float32)
    found = []
    for n in (1, 2, 3):
        with threads(n):
            given = [t.requires_grad_() for t in inputs(batch=1, seq=700)]
            outs = call(*given, *tables(700), name="cpp")
            found.append([*outs, *torch.autograd.grad(sum(o.sin().sum() for o in outs), given)])
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


@EVERY
def test_no_tokens(name):
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    for batch, seq in ((0, 4), (2, 0)):
        given = [t.requires_grad_() for t in inputs(batch=batch, seq=seq)]
        outs = call(*given, name=name)
        grads = torch.autograd.grad(sum(o.sum() for o in outs), given)
        assert grads[0].shape == given[0].shape and not grads[1].any() and not grads[2].any()
        strided = torch.empty_strided(given[0].shape, (0, 0, 1), device=DEVICE)
        for qkv in (given[0].detach(), strided):
            outs = call(qkv, inplace=True, name=name)
            assert [tuple(o.shape) for o in outs] == [(batch, h, seq, D) for h in (HQ, HK, HK)]


# ---- in place


class Projection(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.qkv, self.name = torch.nn.Linear(12, W, device=DEVICE), name

    def forward(self, x, inplace, ids=None, again=False):
        qkv = self.qkv(x)
        q, k, v = call(qkv, position_ids=ids, inplace=inplace, name=self.name)
        # Later uses of qkv see the overwritten values.
        rest = qkv[..., : HQ * D].unflatten(-1, (HQ, D)).transpose(1, 2) if inplace else q
        return q, k, v, rest.square().sum() if again else q.new_zeros(())


@EVERY
@COMPILED
@pytest.mark.parametrize("again", [False, True])
def test_in_place_equals_not_in_place(name, again, compiled):
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    model, x = Projection(name), torch.randn(B, S, 12, device=DEVICE)
    ids = torch.randint(0, P, (B, S), device=DEVICE)
    torch._dynamo.reset()

    def step(fn, inplace):
        q, k, v, more = fn(x, inplace, ids, again)
        loss = q.square().mean() + k.pow(3).mean() + (q[:, :HK] * k * v).sum() + v.sin().sum()
        outs = [t.detach().clone() for t in (q, k, v)]
        return *outs, *torch.autograd.grad(loss + more, list(model.parameters()))

    expected = step(model, False)
    fn = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for f, e in zip(step(fn, True), expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


@EVERY
@COMPILED
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("R", [D, 6], ids=["whole", "partial"])
def test_in_place_without_grad_takes_weights_and_leaves(name, compiled, norm, R):
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    # (Compiled code may not return views of a leaf that it overwrites.)
    qkv, *weights = (t.requires_grad_(not compiled) for t in inputs())
    weights = weights if norm else [None, None]
    given = qkv, *weights, *tables(width=R)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = [t.clone() for t in call(*given, rotary_dim=R, name=name)]
        version = qkv._version
        fn = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
        found = fn(*given, rotary_dim=R, inplace=True, name=name)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)
    assert torch.equal(qkv, torch.cat([e.transpose(1, 2) for e in expected], 2).flatten(2))
    assert qkv._version > version


@EVERY
@pytest.mark.parametrize("who", [0, 1, 2])
def test_in_place_with_weights_is_refused_where_something_learns(name, who):
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    given = inputs()
    given[who].requires_grad_()
    qkv = given[0] * 1
    before = qkv.detach().clone()
    learns = ("qkv", "q_weight", "k_weight")[who]
    said = f"inplace=True with weights.* the gradient of {learns} is computed; pass inplace=False"
    with pytest.raises(ValueError, match=said):
        call(qkv, *given[1:], inplace=True, name=name)
    assert torch.equal(qkv, before)


IN_PLACE = {
    "leaf": (lambda: inputs()[0].requires_grad_(), "cannot overwrite qkv, a leaf that requires"),
    "split": (
        lambda: (inputs()[0].requires_grad_() * 1).split(1)[0],
        "cannot overwrite qkv.*as split",
    ),
    "stride": (
        lambda: torch.randn(B, S, 2 * W, device=DEVICE)[..., ::2],
        "needs qkv with a contiguous last",
    ),
    "expanded": (
        lambda: torch.randn(1, S, W, device=DEVICE).expand(B, S, W),
        "cannot overwrite qkv, an expanded",
    ),
}


@EVERY
@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place_where_it_is_not_possible(name, case):
    """One error, and nothing is written."""
    skip_unless_usable(QK_NORM_ROPE, name, torch.float32)
    make, message = IN_PLACE[case]
    qkv = make()
    before = qkv.detach().clone()
    with pytest.raises(ValueError, match=message):
        call(qkv, inplace=True, name=name)
    assert torch.equal(qkv, before)


# ---- bad input


BAD = [
    ({"qkv": torch.zeros(2, 6, W + 3)}, r"qkv must have shape \[B, S, \(num_heads \+ 2 \* num_kv"),
    ({"qkv": torch.zeros(2, 6, W + 8)}, r"q_weight must have shape \[D\], where D = 17, got \[16"),
    ({"qkv": torch.zeros(2, 6, 8)}, "qkv must have shape .* with 2 <= D <= 1024"),
    ({"qkv": torch.zeros(1, 1, 8 * 1026)}, "qkv must have shape .* with 2 <= D <= 1024"),
    ({"q_weight": None}, "given both or neither, got k_weight without q_weight"),
    ({"k_weight": None}, "given both or neither, got q_weight without k_weight"),
    ({"rotary_dim": 7}, r"rotary_dim must be even and 2 to 16 \(head width\), got 7"),
    ({"cos": torch.zeros(P, 5)}, r"sin must have shape \[cos\], where cos = \[24, 5\]"),
    ({"position_ids": torch.zeros(3, 6, dtype=torch.int64)}, r"position_ids must have shape \[S\]"),
    ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "cu_seqlens must end at 12"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_bad_input_is_named(change, message):
    given = dict(zip(("qkv", "q_weight", "k_weight"), inputs(), strict=True))
    with pytest.raises(ValueError, match=message):
        call(**{"name": "auto", **given, **change})


def test_cpp_operators_check_what_they_are_given():
    """Below the public function's checks: nothing is read or written outside a tensor."""
    skip_unless_usable(QK_NORM_ROPE, "cpp", torch.float32)
    QK_NORM_ROPE.resolve("cpp")
    ops = torch.ops.tilewright
    qkv, w, _ = (t.cpu() for t in inputs())
    cos, sin = (t.cpu() for t in (COS, SIN))
    q, k, rstd = torch.empty(B, HQ, S, D), torch.empty(B, HK, S, D), torch.empty(B, S, HQ + HK)

    def call(op, qkv=qkv, heads=(HQ, HK), q_weight=w, k_weight=w, cos=cos, positions=None):
        op(qkv, *heads, q_weight, k_weight, 1e-6, 0.0, cos, sin, positions, False)

    for op in (ops.qk_norm_rope_cpp, ops.qk_norm_rope_cpp_):
        call(op)
        for change, message in (
            ({"qkv": qkv[..., :-1]}, "qkv must be"),
            ({"qkv": qkv[0]}, "qkv must be"),
            ({"qkv": qkv.mT.contiguous().mT}, "qkv must be"),
            ({"heads": (0, HK)}, "qkv must be"),
            ({"k_weight": None}, "give both"),
            ({"q_weight": w[1:]}, r"weights must be \[D\]"),
            ({"cos": cos[1:]}, "cos and sin must be"),
            ({"positions": torch.full((B, S), P)}, r"position_ids\[0, 0\] = 24 is outside"),
        ):
            with pytest.raises(RuntimeError, match=message):
                call(op, **change)

    def back(dq=q, dk=k, dv=k, qkv=qkv, rstd=rstd, k_weight=w, heads=(HQ, HK)):
        return ops.qk_norm_rope_cpp_backward(
            dq, dk, dv, qkv, rstd, *heads, w, k_weight, 0.0, 0.0, cos, sin, None, False
        )

    back()
    assert not back(None, None)[0][..., : (HQ + HK) * D].any()
    for change, message in (
        (dict.fromkeys(("dq", "dk", "dv")), "one of dq, dk and dv must be given"),
        ({"dq": q[:, 1:]}, "dq must be"),
        ({"dk": k.double()}, "dk must be .* of one dtype"),
        ({"dv": k[..., :8]}, "dv must be"),
        ({"qkv": None}, "are needed, or none"),
        ({"rstd": None}, "are needed, or none"),
        ({"k_weight": None}, "are needed, or none"),
        ({"rstd": rstd[:, 1:].contiguous()}, "rstd must be"),
        ({"qkv": qkv[..., 1:].contiguous()}, "qkv must be"),
        ({"qkv": qkv[:, 1:]}, "qkv must have the gradients' sizes"),
        ({"heads": (0, HK)}, "must be given"),
        ({"qkv": qkv.double()}, "qkv must have the gradients' sizes and dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            back(**change)
