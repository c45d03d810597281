"""Log-probability, entropy and argmax of rows of logits, and of a language model's head without
materializing its logits:

    p       = softmax(z / temperature), z = softcap * tanh(logits / softcap), or the logits
    logprob = log p_y
    entropy = -sum_c p_c log p_c
    argmax  = the first index of the largest logit

T = tokens, V = vocabulary, y = target. They are what policy-gradient, preference and distillation
losses need. Both ops are one kind of loss on the statistics of `softmax_stats.py`: `results`. A
low-rank adapter on the head adds scale B (A x) to a chunk's logits; with a frozen weight that costs
6 T H V flops, and no memory that grows with V but the gradient of B.
"""

from __future__ import annotations

import functools

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import Goal, Judged, Op, in_cpp, in_triton
from tilewright.core.takes import LARGEST, SMALLEST, takes
from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss.operators import Scaling, Stats, Wanted
from tilewright.ops import cases
from tilewright.ops.loss import rows
from tilewright.ops.loss.cross_entropy import COLUMNS, LOGITS, SOFTCAP, logits_case
from tilewright.ops.loss.head import (
    ADAPTER,
    HEAD,
    HEAD_OPTIONS,
    RANKS,
    SIZES,
    HeadRows,
    head_op,
)
from tilewright.ops.loss.head_cases import atol, case, offsets, timed
from tilewright.ops.loss.softmax_stats import reshaped, stats_eager, without_gradient
from tilewright.ops.loss.targets import IGNORE_INDEX, presence
from tilewright.ops.loss.vocabulary import world_size

SCALING = {"temperature": "number (0, inf)", "softcap": SOFTCAP, "ignore_index": IGNORE_INDEX}
ARGMAX = {"return_argmax": "bool"}
# Declarations of what the head's losses of log-probabilities take, beside `HEAD` and their own.
SHARED = {**HEAD_OPTIONS, **ADAPTER, **SCALING}


@checks.autocast("float32")
@checks.torch_names(input="logits")
@takes(COLUMNS, **LOGITS, **SCALING, **ARGMAX, inplace="bool")
def logprob_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_argmax: bool = False,
    inplace: bool = False,
    group: ProcessGroup | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Log-probability of each target and the entropy of its distribution, and the argmax, in one
    read of given logits; temperature, softcap, vocabulary-parallel.

    Statistics are computed in float32, relative to the largest logit of a row; the gradient is
    rounded once, on store. Both results are differentiable once in logits. What backward saves
    beside the logits is [T].

    Args:
        logits: [..., V] fp32 | bf16 | fp16 (fp64 with eager). The stride of rows may be larger than
            V.
        target: [...] int64, each in [0, V) or ignore_index. Others are treated as in
            `cross_entropy`: NaN results on CUDA tensors, an IndexError on a CPU.
        temperature: > 0, divides the (capped) logits.
        softcap: > 0, or None: no softcap. temperature, softcap and softcap / temperature must be
            finite in float32.
        ignore_index: the target that marks ignored tokens.
        return_argmax: also return the index of the largest logit, for token accuracy.
        inplace: lets backward overwrite the logits with the gradient; as in `cross_entropy`.
        group: logits are this rank's shard of the vocabulary, as in `cross_entropy`; costs two
            all-reduces of at most [3, T] (four with return_argmax).
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (logprob [...], entropy [...]), fp32 (fp64 for fp64), in nats; with return_argmax also
        argmax [...] int64, of every token, also ignored ones (the first, on ties; undefined in a
        row with a NaN). logprob is never above 0 and entropy never below 0. Both are 0 where target
        is ignore_index.

    Raises:
        TypeError, ValueError: invalid arguments.
        IndexError: a target out of range, as stated above.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> logprob, entropy = tilewright.ops.logprob_entropy(logits, torch.tensor([0, 3]))
        >>> f"{logprob[0].item():.4f} {entropy[0].item():.4f}"
        '-1.3863 1.3863'

    Source: the quantities that policy-gradient losses with an entropy bonus need (arXiv:1602.01783,
    section 4; arXiv:2402.03300, section 4.1).
    """
    scaling = scaling_of(temperature, softcap)
    if inplace:
        checks.overwritable("logits", logits)
    V = world_size(group) * logits.shape[-1]
    valid = presence(target, V, ignore_index).reshape(-1)
    fn = LOGPROB_ENTROPY.pick(implementation, logits)
    flat = logits.reshape(-1, logits.shape[-1])
    wanted = Wanted(mean=True, argmax=return_argmax)
    outputs = fn(flat, target.reshape(-1), valid, scaling, wanted, inplace, group)
    return tuple(reshaped(t, target.shape) for t in outputs if t is not None)


# Wide: what logprob_entropy takes, the head's options, and its adapter.
@checks.autocast("products", "x", "weight", "bias", "lora_A", "lora_B")
@takes(*SIZES, *RANKS, **HEAD, **SHARED, **ARGMAX)
def linear_logprob(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    lora_A: torch.Tensor | None = None,
    lora_B: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_argmax: bool = False,
    group: ProcessGroup | None = None,
    fp32_logits: bool = False,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Log-probability of each target, and the entropy of its distribution, from hidden states
    without all logits, for reinforcement learning, preference and distillation losses; with a
    low-rank adapter on the head.

    Both results are differentiable once in x, weight, bias, lora_A and lora_B; backward recomputes
    the logits. The gradients of weight, bias and lora_B are summed over chunks in float32. Autocast
    as in `linear_cross_entropy`.

    Args:
        x, weight, target, bias, ignore_index: as in `linear_cross_entropy`.
        lora_A: [r, H] in x's dtype, or None. An adapter on the head: its logits are those of weight
            + lora_scale * lora_B lora_A, which is not materialized. x lora_A^T is rounded to x's
            dtype, and so is the sum of the logits (except with fp32_logits).
        lora_B: [V, r] in x's dtype, with lora_A.
        lora_scale: a finite number.
        temperature: > 0, divides the (capped) logits.
        softcap: > 0, or None: no softcap. temperature, softcap and softcap / temperature must be
            finite in float32.
        return_argmax: also return the index of the largest logit, for token accuracy.
        group: weight, bias and lora_B are this rank's shard of the vocabulary, as in
            `linear_cross_entropy`; x, target and lora_A are replicated.
        fp32_logits, chunk_size: as in `linear_cross_entropy`.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (logprob [...], entropy [...]), fp32 (fp64 for fp64), in nats. They are log softmax(z /
        temperature)_y, never above 0, and the entropy of softmax(z / temperature), never below 0.
        Both are 0 where target is ignore_index. With return_argmax also argmax [...] int64, of
        every token, as in `logprob_entropy`.

    Raises:
        TypeError, ValueError, IndexError, ImplementationUnavailable: as `linear_cross_entropy`.

    Example:
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> logprob, entropy = tilewright.ops.linear_logprob(x, weight, torch.tensor([0, 3]))
        >>> f"{logprob[0].item():.4f} {entropy[0].item():.4f}"
        '-1.3863 1.3863'
    """
    scaling = scaling_of(temperature, softcap)
    of = HeadRows.of(
        x,
        weight,
        target,
        bias=bias,
        adapter=(lora_A, lora_B, lora_scale),
        ignore_index=ignore_index,
        fp32_logits=fp32_logits,
        chunk_size=chunk_size,
        group=group,
    )
    fn = LINEAR_LOGPROB.pick(implementation, x)
    with checks.no_autocast(x):
        return fn(of, scaling, Wanted(mean=True, argmax=return_argmax))


def scaling_of(temperature: float, softcap: float | None) -> Scaling:
    """Raises ValueError unless softcap / temperature is a finite number > 0 in float32."""
    if softcap and not SMALLEST <= softcap / temperature <= LARGEST:
        raise ValueError(
            "softcap / temperature must be a finite number > 0 (in float32), got "
            f"{softcap!r} / {temperature!r}"
        )
    return Scaling(0.0 if softcap is None else float(softcap), float(temperature))


# ---- the kind of loss


def logprob_of(stats: Stats, valid: torch.Tensor) -> torch.Tensor:
    """Log-probability per row, 0 where `valid` is 0."""
    # A capped logit is rounded: z_y may be an ulp above the peak, and lse an ulp below z_y, where
    # p = 1 and the gradient is 0.
    return torch.where(valid == 0, 0.0, (stats.picked - stats.log_sum).clamp_max(0.0) * valid)


def results(
    stats: Stats, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probability and entropy per row, 0 where `valid` is 0, and argmax."""
    return (
        logprob_of(stats, valid),
        torch.where(valid == 0, 0.0, stats.softmax.entropy.clamp_min(0.0) * valid),
        stats.argmax,
    )


def _eager(logits, target, valid, scaling, wanted, inplace=False, group=None):
    logits = without_gradient(logits, valid == 0)
    return results(stats_eager(logits, target, None, scaling, wanted, group), valid)


def _of_logits(statistics, logits, target, valid, scaling, wanted, inplace, group):
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    target = target.contiguous()
    return results(statistics(logits, target, None, scaling, wanted, inplace, group), valid)


# ---- cases of logits


_logit_case = functools.partial(logits_case, flops=(6, 8))


def _logit_cases():
    listed = [
        _logit_case("ragged", (3, 7, 1003)),
        _logit_case("tiny", (5, 7), temperature=0.5),
        _logit_case("one_class", (3, 1), return_argmax=True),
        _logit_case("all_ignored", (4, 100), ignored="all", return_argmax=True),
        _logit_case("no_rows", (0, 64)),
        _logit_case("temperature", (2, 5, 1003), temperature=0.7, return_argmax=True),
        _logit_case("softcap", (6, 300), softcap=5.0),
        _logit_case("inplace", (6, 100), inplace=True, temperature=1.5),
        _logit_case("offset_1e4", (6, 100), offset=1e4, temperature=0.5),
        _logit_case("everything_wide", (3, 9001), softcap=5.0, temperature=0.7, return_argmax=True),
        # An ulp of the largest z is more than the exponential's range.
        _logit_case("tiny_temperature", (6, 300), temperature=1e-9, return_argmax=True),
        _logit_case("tiny_temperature_softcap", (6, 300), softcap=5.0, temperature=1e-11),
    ]
    for tags, T in ((cases.CUDA, 8192), (cases.CPU, 256)):
        for name in ("qwen3-8b", "llama-3-8b"):
            shape = (T, cases.MODELS[name].vocab)
            listed.append(_logit_case(name, shape, tags=tags, ignored="none", return_argmax=True))
    listed.append(_logit_case("big", (2**13 + 3, 2**18), tags=cases.BIG, ignored="none"))
    return tuple(listed)


LOGPROB_ENTROPY = Op(
    "logprob_entropy",
    logprob_entropy,
    _eager,
    (
        in_triton(
            lambda: functools.partial(_of_logits, rows.operator("triton")),
            batch_invariant=cases.ANYWHERE,
            gate=from_kernels("loss.softmax_stats_triton", "gate_scaled"),
            tunables=from_kernels("loss.softmax_stats_triton", "TUNABLES"),
        ),
        in_cpp(
            lambda: functools.partial(_of_logits, rows.operator("cpp")), batch_invariant=("cpu",)
        ),
    ),
    _logit_cases(),
    # A sum of exponentials in any order, its logarithm and a difference: where the twin is lucky
    # its double and 2 eps are too little (once in 12 seeds of all cases, by 0.8 eps).
    atol={torch.float32: 4 * torch.finfo(torch.float32).eps},
    goals=cases.near_copy(92, "forward", "forward_backward"),
)


# ---- cases of a head


BF16 = ("bfloat16",)


def _logprob_atol(dtype, kwargs, name):
    """In float32 the entropy's gradient has the factor z - mean, which cancels where the two are
    close, and in a case of five rows the twin's error may be small by chance: the others exceed
    twice it by up to 13 eps (AVX2).
    """
    return 16 * torch.finfo(dtype).eps if dtype == torch.float32 else atol(dtype, kwargs, name)


def _head_cases():
    return (
        case("ragged", ((3, 7), 33, 203), logprob=True),
        case("tiny", (5, 3, 7), chunk_size=2, logprob=True),
        case("all_ignored", (6, 32, 100), ignored="all", chunk_size=4, logprob=True),
        case("no_rows", (0, 16, 64), logprob=True),
        case(
            "everything",
            ((2, 5), 32, 300),
            chunk_size=4,
            bias=True,
            temperature=0.7,
            softcap=5.0,
            logprob=True,
        ),
        case(
            "fp32_logits",
            (11, 32, 100),
            chunk_size=4,
            bias=True,
            temperature=0.7,
            fp32_logits=True,
            logprob=True,
        ),
        case("lora", (11, 32, 100), chunk_size=4, lora=5, frozen=True, logprob=True),
        case(
            "lora_everything",
            ((2, 5), 32, 300),
            chunk_size=4,
            bias=True,
            temperature=0.7,
            softcap=5.0,
            lora=3,
            lora_scale=0.5,
            return_argmax=True,
            logprob=True,
        ),
        *offsets(chunk_size=4, temperature=0.5, logprob=True),
        *timed(logprob=True),
    )


LINEAR_LOGPROB = head_op(
    "linear_logprob",
    linear_logprob,
    results,
    _head_cases(),
    ignores=True,
    # Classes that are no row's target have elements of the weight's gradient that are 20 to 40
    # times smaller than its root mean square: sums of small terms of either sign, which the twin
    # computes from rounded logits too. There its own error is a quarter to a third in bfloat16.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "grad x": 0.11,
                "grad weight": 1.3,
                "grad bias": 0.55,
                "grad lora_A": 0.094,
                "grad lora_B": 1.2,
            },
            torch.float16: {"grad weight": 0.14, "grad bias": 0.087, "grad lora_B": 0.21},
        },
    ),
    atol=_logprob_atol,
    # (8192, 4096, 151936): the products alone take 42 ms there (huggingface/trl, issue 7244), and
    # the logits' recomputation a third of that. The gradients of x and weight take 1.3 GiB.
    goals=(
        Goal(
            "H100",
            "forward_backward",
            "median_ms",
            at_most=60,
            cases=("qwen3-8b",),
            dtypes=BF16,
            within_mib=4096,
        ),
        Goal("H200", "forward_backward", "median_ms", at_most=56, cases=("qwen3-8b",), dtypes=BF16),
    ),
)
