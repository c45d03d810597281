"""Scaled dot-product attention over one sequence or over packed documents:

    softmax(mask(cap(scale q k^T))) v

Shapes: B = batch, Hq / Hk = query / key heads (Hq a multiple of Hk), S = query positions, Sk = key
positions (S unless stated otherwise), D = the width of a query's and key's head, Dv = that of a
value's (D, but in latent attention).

Implementations support different subsets. A call makes a `Request`, and each implementation returns
one sentence if the request is unsupported. A named implementation then raises
ImplementationUnavailable with that sentence; `auto` takes the next implementation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from tilewright.core import checks, torch_names
from tilewright.core.library import from_kernels
from tilewright.core.registry import (
    Case,
    Cost,
    Goal,
    Implementation,
    Judged,
    Op,
    in_cpp,
    in_gluon,
    in_triton,
)
from tilewright.core.takes import FLOAT, takes
from tilewright.ops import cases
from tilewright.ops.attention import fused, vendors
from tilewright.ops.attention.eager import attention_eager
from tilewright.ops.attention.options import (
    DOCUMENTS,
    DROPOUT,
    HEADS,
    OPTIONS,
    PACKED,
    QKV,
    Request,
    check_heads,
    dropout_of,
    layout_hint,
    request_of,
    variant_of,
)
from tilewright.ops.attention.prefixes import Prefix, attend_prefixed, check_prefixes

__all__ = ["ATTENTION", "Request", "attention", "attention_part", "attention_part_backward"]


# Wide: all that models ask of attention, under the names that PyTorch and flash-attn have.
# Long: a third of it is its signature; the rest makes the request and variant of it.
@checks.autocast("products", "q", "k", "v")
@checks.torch_names(
    query="q",
    key="k",
    value="v",
    is_causal="causal (default: True)",
    softmax_scale="scale",
    window_size="window, the number of keys that a query sees, itself included",
    attn_mask="packed documents are cu_seqlens, windows are window; for other masks use "
    "torch.nn.functional.scaled_dot_product_attention",
    enable_gqa="k and v may always have fewer heads than q",
)
@takes(
    *HEADS,
    *PACKED,
    "first_head == 0 or B == 1",
    **QKV,
    cu_seqlens=DOCUMENTS,
    **OPTIONS,
    sinks="float [Hq]",
    **DROPOUT,
    max_seqlen="int [0, inf)",
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    first_head: int = 0,
    max_seqlen: int | None = None,
    prefixes: Sequence[Prefix] = (),
    implementation: str = "auto",
) -> torch.Tensor:
    """Attention with grouped queries: isolated packed documents, sliding windows, softcap, sinks,
    dropout, fewer queries than keys, documents that share a prefix.

    The softmax is computed in float32. Only eager allocates an S x Sk tensor (and sdpa, for a
    document with a prefix, a mask of its queries by its keys). Differentiable in q, k, v and sinks.
    Under torch.autocast q, k and v are cast to its dtype. Deterministic, forward and backward,
    except for the backward of PyTorch and flash-attn on CUDA, which are deterministic under
    torch.use_deterministic_algorithms.

    Gradients of q and k contain the difference dp - sum(dout out), for which kernels read the
    output as it is stored, rounded. In 16 bits they are therefore off by up to half an eps of
    sum(dout out), with dropout even where a query sees a single key, whose gradients are 0 in the
    twin.

    With eager (not compiled), sdpa, triton and cpp, NaN and infinity in one document do not reach
    other documents or their gradients (with native and flash-attn that depends on their kernels).
    Within a document, or a sequence, they may reach positions that do not see them, since masked
    positions are multiplied by 0: with eager and sdpa all positions, with triton and cpp those that
    share a block of keys.

    Dropout is as in torch.nn.functional.scaled_dot_product_attention: each of the softmax's
    probabilities is dropped with probability dropout_p, and the others are divided by
    1 - dropout_p. The mask is a function of counters: in batch b and query head h, query i of the
    sequence and key j of its document (of the sequence, without cu_seqlens) have the 32 bits of
    word j % 4 of Philox4x32-10 (Salmon et al., SC 2011) with key seed and counter words (j // 4, i,
    b Hq + first_head + h, 2^29 + offset). The pair is dropped if these bits are below dropout_p
    2^32, rounded to an integer. So the mask is the same in every implementation that has dropout,
    on any device and with any launch configuration; backward draws it again, and nothing is saved
    for it. A document has another mask elsewhere in the sequence.

    Args:
        q: [B, Hq, S, D] fp32 | bf16 | fp16 (fp64 too).
        k: [B, Hk, Sk, D] in q's dtype. With `causal` Sk >= S: the queries are the last S of the
            Sk positions, as with a key cache.
        v: [B, Hk, Sk, Dv] in q's dtype. Where Dv is not D, as in multi-head latent attention,
            native and flash-attn 2 do not support it, and flash-attn 3 and 4 support some pairs of
            widths; on a CPU sdpa pads.
        cu_seqlens: int32 or int64 [n + 1], 0 .. S, non-decreasing: packed documents of a sequence
            with B = 1 and Sk = S, which never see each other. Values are checked on a CPU, and on
            CUDA by implementations that read them on the host (all but triton), which synchronizes.
            `max_seqlen` spares flash-attn and native the synchronization.
        causal: position i sees positions up to i of its own document.
        window: an int >= 1: position i sees the last `window` positions up to itself; requires
            `causal`. None: all.
        softcap: a number > 0 (in float32): logits become softcap tanh(logit / softcap). None: no
            cap.
        sinks: [Hq], any floating dtype, used in float32: one more logit per head, which takes its
            share of the softmax and has no value (gpt-oss).
        scale: a finite number > 0 (in float32); default D ** -0.5.
        dropout_p: probability in [0, 1) that a pair is dropped. Only triton, cpp and eager support
            more than 0. 0 has the bits of a call without it.
        seed: 0 to 2^63 - 1, required where dropout_p is not 0.
        offset: 0 to 2^29 - 1: the call's number. Calls with another one (other layers, other
            micro-batches) have another mask; a recomputation needs the same.
        first_head: the index of q's first head, for the mask of dropout, if q has a part of the
            heads: 0 to 2^31 - 1, and 0 unless B = 1.
        max_seqlen: length of the longest document, or an upper bound, where it is known on the
            host; used with cu_seqlens only.
        prefixes: (first, end, key_first, key_end), four ints on the host, for each document that
            begins with the first tokens of an earlier document, which are not repeated; in order.
            The document in rows first .. end is computed as if rows key_first .. key_end stood
            before it; they begin a document that has no prefix itself. Requires causal, no dropout,
            and cu_seqlens, against which prefixes are checked on a CPU. Unsupported by native.
        implementation: "auto", or one of flash_attention_4, flash_attention_3, native,
            flash_attention_2, triton, sdpa, cpp, eager.

    Returns:
        [B, Hq, S, Dv] in q's dtype.

    Raises:
        TypeError, ValueError: invalid arguments, dropout without a seed, or with prefixes.
        ImplementationUnavailable: a named implementation that cannot run here, or for which the
            request is unsupported.

    Example:
        >>> q, k = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
        >>> out = tilewright.ops.attention(q, k, k, cu_seqlens=torch.tensor([0, 1, 3]))
        >>> tuple(out.shape), bool((out == 1).all())
        ((1, 4, 3, 8), True)

    Source: arXiv:1706.03762; grouped queries arXiv:2305.13245; windows arXiv:2004.05150; softcap
    arXiv:2408.00118; sinks arXiv:2309.17453, as gpt-oss trains them (arXiv:2508.10925);
    dropout JMLR 15:1929, 2014.
    """
    check_heads(q, k)
    S, Sk, D = q.shape[2], k.shape[2], q.shape[3]
    if causal and Sk < S:
        raise ValueError(
            f"k must have at least q's {S} positions for causal attention, got {Sk}{layout_hint(q, k)}"
        )
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens(cu_seqlens, S, wait=cu_seqlens.is_meta)
    gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, sinks)
    )
    # Under dynamic shapes this makes them constants, which a Request requires.
    shorter, drops = False, False
    if Sk != S:
        shorter = True
    dropout = dropout_of(dropout_p, seed, offset, first_head)
    if dropout.threshold > 0:
        drops = True
    if prefixes:
        if drops or not causal:
            raise ValueError(
                f"prefixes need causal=True and dropout_p = 0, got {causal} and {dropout_p}"
            )
        prefixes = check_prefixes(prefixes, cu_seqlens, S)
    request = request_of(
        (D, v.shape[3]),
        causal,
        window,
        softcap,
        packed=cu_seqlens is not None,
        sinks=sinks is not None,
        shorter=shorter,
        gradient=gradient,
        dropout=drops,
    )
    if prefixes:
        request = request._replace(shorter=True, prefixes=True)
    fn = ATTENTION.pick(implementation, q, request)
    variant = variant_of(D, causal, window, softcap, scale, dropout)
    if not prefixes:
        return fn(q, k, v, cu_seqlens, variant, sinks, max_seqlen)
    assert cu_seqlens is not None  # checked
    prefixed = getattr(fn, "prefixed", functools.partial(attend_prefixed, fn))
    return prefixed(q, k, v, cu_seqlens, variant, sinks, max_seqlen, prefixes)


PART = "cu_seqlens is None or offset == 0"


@takes(*HEADS, *PACKED, PART, **QKV, cu_seqlens=DOCUMENTS, **OPTIONS, offset="int")
def attention_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offset: int = 0,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to a part of the keys, for ring attention to combine. Not differentiable; the
    gradient is `attention_part_backward`.

    Args:
        q, k, v, cu_seqlens, causal, window, softcap, scale, implementation: as in `attention`.
        offset: position of the first query minus that of the first key, within one document; 0 with
            cu_seqlens. A query may see no key at all: its output is then 0.

    Returns:
        out [B, Hq, S, Dv] in q's dtype and the natural log-sum-exp of the logits, [B, Hq, S] in
        float32 (float64 for float64), -inf where no key is seen.

    Raises:
        TypeError, ValueError: as `attention`.
        ImplementationUnavailable: also for a named implementation that returns no log-sum-exp.

    Example:
        >>> q = torch.zeros(1, 1, 2, 8)
        >>> out, lse = attention_part(q, q, q)
        >>> [f"{x:.4f}" for x in lse.flatten().tolist()]  # of one and of two keys
        ['0.0000', '0.6931']
    """
    check_heads(q, k)
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens(cu_seqlens, q.shape[2], wait=False)
    variant = variant_of(q.shape[3], causal, window, softcap, scale)
    request = request_of(
        (q.shape[3], v.shape[3]),
        causal,
        window,
        softcap,
        packed=cu_seqlens is not None,
        shorter=offset != 0,
        part=True,
    )
    fn = ATTENTION.pick(implementation, q, request)
    return fn.part(q, k, v, cu_seqlens, variant, offset)


# Wide: what attention_part takes and returns, and the gradient.
@takes(
    *HEADS,
    *PACKED,
    PART,
    **QKV,
    dout="float [B, Hq, S, Dv]",
    out="float [B, Hq, S, Dv]",
    lse="float [B, Hq, S]",
    cu_seqlens=DOCUMENTS,
    **OPTIONS,
    offset="int",
)
def attention_part_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offset: int = 0,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contribution of a part of the keys to the gradients of the whole attention.

    Args:
        dout, out: [B, Hq, S, Dv], of the whole softmax, over all parts (and a sink, if there is
            one).
        lse: [B, Hq, S], of the whole softmax.
        q, k, v, cu_seqlens, causal, window, softcap, scale, offset: as in `attention_part`.
        implementation: as in `attention_part`.

    Returns:
        dq, and dk and dv of this part, in q's dtype.

    Raises:
        TypeError, ValueError, ImplementationUnavailable: as `attention_part`.

    Example:
        >>> q = torch.zeros(1, 1, 2, 8)
        >>> out, lse = attention_part(q, q, q)
        >>> dq, dk, dv = attention_part_backward(torch.ones_like(q), q, q, q, out, lse)
        >>> dv[0, 0, :, 0].tolist()
        [1.5, 0.5]
    """
    check_heads(q, k)
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens(cu_seqlens, q.shape[2], wait=False)
    variant = variant_of(q.shape[3], causal, window, softcap, scale)
    request = request_of(
        (q.shape[3], v.shape[3]),
        causal,
        window,
        softcap,
        packed=cu_seqlens is not None,
        shorter=offset != 0,
        gradient=True,
        part=True,
    )
    fn = ATTENTION.pick(implementation, q, request)
    return fn.part_backward(dout, q, k, v, out, lse, cu_seqlens, variant, offset)


@torch_names.constant
def takes_values(implementation: str, D: int, Dv: int) -> bool:
    """Whether an implementation takes values of width Dv beside keys of width D as they are; else
    a caller may pad them. `auto` finds one that does.
    """
    request = Request(head_dim=D, value_dim=None if Dv == D else Dv)
    chosen = None if implementation == "auto" else ATTENTION.implementation(implementation)
    return chosen is None or chosen.refuses(request) is None


# ---- cases


def _case(
    name,
    B,
    hq,
    hk,
    S,
    widths,
    *,
    keys=None,
    documents=None,
    sinks=False,
    tags=cases.CONTRACT,
    **options,
):
    """widths: the widths of keys and of values, or one for both."""
    D, Dv = widths if isinstance(widths, tuple) else (widths, widths)

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        lengths = (S, keys or S, keys or S)
        q, k, v = (
            cases.randn(B, n, h, width, device=device, dtype=dtype, gen=g, requires_grad=False)
            .transpose(1, 2)
            .requires_grad_()
            for h, n, width in zip((hq, hk, hk), lengths, (D, D, Dv), strict=True)
        )
        kw = {"q": q, "k": k, "v": v, **options}
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        if sinks:
            kw["sinks"] = cases.randn(hq, device=device, dtype=dtype, gen=g)
        return kw

    def cost(itemsize):
        # Over the pairs that see each other two products forward, and five backward, of which three
        # are with keys or queries.
        longest = [b - a for a, b in itertools.pairwise(documents)] if documents else [S] * B
        window = options.get("window") or S
        pairs = sum(
            n * n
            if not options.get("causal", True)
            else min(n, window) * (2 * n - min(n, window)) // 2
            for n in longest
        ) + sum((b - a) * min(d - c, window) for a, b, c, d in options.get("prefixes", ()))
        forward = itemsize * B * S * (D + Dv) * (hq + hk)
        return Cost(
            forward, 2 * forward, 2 * hq * pairs * (D + Dv), 2 * hq * pairs * (3 * D + 2 * Dv)
        )

    return Case(name, make, cost, tags)


def _documents(tokens, *lengths):
    """cu_seqlens of documents whose lengths repeat."""
    ends, lengths = [0], itertools.cycle(lengths)
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + next(lengths)))
    return tuple(ends)


def _atol(dtype, kwargs, name):
    """dq and dk are sums of p (dp - delta), and delta is sum(dout out). PyTorch computes it from
    the output as stored, rounded, where the twin's softmax keeps float32. delta is as large as dp
    and cancels against it, wholly in a first row, so half an eps of the output is several eps of
    the gradients' root mean square. Rounding the output alone in a float64 backward gives the same
    errors. Measured beyond twice the twin's own, at S = 17: 5.6 eps in 16 bits (1,200 draws); 17.6
    eps in float32 (160 draws), where the probabilities too are recomputed from a rounded
    log-sum-exp.

    The output and dv have no such difference. Fused kernels round the probabilities to 16 bits for
    their products: half an eps of each of a row's terms, 0.3 eps of its root mean square, of whose
    elements the largest has three or four times as much.

    Rows of longer sequences mostly average over many keys, so the root mean square that errors are
    measured against falls as 1 / sqrt(S), while the first rows, with few keys, keep their errors.
    """
    few = dtype != torch.float32 and name in ("out 0", "grad v")
    number = 2 if few else 8 if dtype != torch.float32 else 32
    return number * torch.finfo(dtype).eps * max(1.0, (kwargs["q"].shape[2] / 17) ** 0.5)


_LONG = ("qwen3-30b-a3b_8k", "qwen3-30b-a3b_32k", "qwen3-30b-a3b_32k_packed")
ATTENTION = Op(
    "attention",
    attention,
    attention_eager,
    (
        vendors.flash("flash_attention_4"),
        vendors.flash("flash_attention_3"),
        # PyTorch's before those of Gluon and Triton, which support what PyTorch's and flash-attn do
        # not, but where Gluon's has been measured to be faster.
        Implementation(
            "native",
            vendors.native,
            vendors.no_native,
            dtypes=vendors.HALVES,
            refuses=vendors.native_refuses,
            reads_host="host",
            does=vendors.native_does,
            slower_than=vendors.slower_than_gluon,
        ),
        # After PyTorch's, whose cuDNN kernels are newer than it on Hopper and later.
        vendors.flash("flash_attention_2"),
        in_gluon(
            fused.gluon,
            vendors.gluon_does,
            batch_invariant=("cuda",),
            refuses=fused.gluon_refuses,
            slower_than=fused.gluon_slower_than,
            gate=from_kernels("attention.specialized", "gate"),
            tunables=from_kernels("attention.specialized", "TUNABLES"),
        ),
        in_triton(
            fused.triton,
            batch_invariant=cases.ANYWHERE,
            refuses=fused.triton_refuses,
            does=vendors.triton_does,
            gate=from_kernels("attention.attention_triton", "gate"),
            tunables=from_kernels("attention.attention_triton", "TUNABLES"),
        ),
        in_cpp(fused.cpp, batch_invariant=("cpu",), slower_than=vendors.slower_than_sdpa),
        # A CPU computes each head of a document by itself; a CUDA kernel may split by the device's
        # load.
        Implementation(
            "sdpa",
            lambda: vendors.attention_sdpa,
            devices=("cuda", "cpu"),
            dtypes=FLOAT,
            batch_invariant=("cpu",),
            refuses=vendors.sdpa_refuses,
            reads_host="host",
            does=vendors.sdpa_does,
            aliases=("torch",),
        ),
    ),
    (
        _case("gqa", 2, 4, 2, 9, 8),
        _case("full", 1, 2, 2, 7, 16, causal=False),
        _case("scaled", 2, 2, 1, 5, 8, scale=0.3),
        _case("documents", 1, 4, 2, 17, 8, documents=(0, 1, 6, 17), tags=cases.HOST),
        _case("window", 1, 4, 2, 21, 8, documents=(0, 3, 21), window=4, tags=cases.HOST),
        _case("softcap", 2, 2, 1, 9, 12, softcap=2.0),
        _case(
            "sinks", 1, 4, 2, 17, 8, documents=(0, 1, 6, 17), sinks=True, window=5, tags=cases.HOST
        ),
        _case(
            "dropout", 2, 4, 2, 13, 8, dropout_p=0.2, seed=2**40 + 11, offset=2**28 + 3, window=6
        ),
        _case(
            "dropout_documents",
            1,
            4,
            2,
            23,
            8,
            documents=(0, 1, 6, 23),
            dropout_p=0.5,
            seed=7,
            tags=cases.HOST,
        ),
        _case("cache", 2, 4, 2, 3, 8, keys=11),
        _case(
            "prefixes",
            1,
            4,
            2,
            17,
            8,
            documents=(0, 6, 10, 13, 17),
            prefixes=((6, 10, 0, 3), (10, 13, 0, 4)),
            tags=cases.HOST,
        ),
        _case(
            "prefixes_window",
            1,
            4,
            2,
            23,
            8,
            documents=(0, 12, 23),
            prefixes=((12, 23, 0, 7),),
            window=9,
            softcap=2.0,
            sinks=True,
            tags=cases.HOST,
        ),
        _case("latent", 1, 4, 4, 19, (24, 16), documents=(0, 7, 19), tags=cases.HOST),
        _case("qwen3-8b", 1, 32, 8, 4096, 128, tags=cases.CUDA),
        _case("qwen3-30b-a3b_8k", 1, 32, 4, 8192, 128, tags=cases.CUDA),
        _case("qwen3-30b-a3b_32k", 1, 32, 4, 32768, 128, tags=cases.CUDA),
        _case(
            "qwen3-30b-a3b_32k_packed",
            1,
            32,
            4,
            32768,
            128,
            tags=cases.CUDA,
            documents=_documents(32768, 4096, 512, 1024, 8192, 2560),
        ),
        _case("llama-3.2-1b_8k", 1, 32, 8, 8192, 64, tags=cases.CUDA),
        _case(
            "llama-3.2-1b_8k_packed",
            1,
            32,
            8,
            8192,
            64,
            tags=cases.CUDA,
            documents=_documents(8192, 1024, 512, 1792, 640, 1536),
        ),
        _case("gpt-oss-20b_8k", 1, 64, 8, 8192, 64, tags=cases.CUDA, sinks=True, window=128),
        _case("deepseek-v3_8k", 1, 16, 16, 8192, (192, 128), tags=cases.CUDA),
        _case("gemma-3-12b_8k", 1, 16, 8, 8192, 256, tags=cases.CUDA),
        _case("qwen3-8b", 1, 32, 8, 512, 128, tags=cases.CPU),
        # Short rows: the twin allocates every score.
        _case("big", 2**12 + 1, 64, 8, 64, 128, tags=cases.BIG),
    ),
    atol=_atol,
    # The slack of the gradients of q, k and sinks is relative to their root mean square, which is
    # two to five times as large as an ordinary element.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "out 0": 0.059,
                "grad q": 0.21,
                "grad k": 0.36,
                "grad v": 0.11,
                "grad sinks": 0.42,
            },
            torch.float16: {"grad q": 0.026, "grad k": 0.046, "grad sinks": 0.051},
        },
    ),
    # `auto` takes the best that is installed (2 % are the spread); our kernel, which is
    # deterministic, takes at most 1.3 times FlashAttention 3's time.
    goals=tuple(
        Goal(
            cases.HOPPER,
            "forward_backward",
            f"over {other}",
            at_least=least,
            cases=_LONG,
            dtypes=("bfloat16",),
            by=by,
        )
        for other, least, by in (("best", 0.98, ""), ("flash-attn", 1 / 1.3, "gluon"))
    ),
    eager_reads_host="host",
    requests=(
        *(
            Request(head_dim=64, **{f: True})
            for f in ("window", "softcap", "sinks", "shorter", "dropout", "part", "prefixes")
        ),
        Request(head_dim=512),
        Request(head_dim=128, value_dim=64),
    ),
)
