"""Policy losses of a language model's head, without materializing its logits. `policy.py` has the
formulas, of the log-probabilities of `logprob.py`.

Where the loss is summed and a token's depends on no other token, forward computes the gradients
too, as in `linear_cross_entropy.py`: 6 T H V flops. A loss of whole documents, or one for each
token, recomputes the logits in backward: 8 T H V.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import Operator, declare
from tilewright.core.registry import Judged, Op, in_cpp, in_triton
from tilewright.core.takes import spread, takes
from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss.operators import (
    Scaling,
    Softmax,
    StatsGradients,
    Wanted,
    empty_rows,
)
from tilewright.ops import cases
from tilewright.ops.loss import policy, softmax_stats
from tilewright.ops.loss.cross_entropy import REDUCTIONS
from tilewright.ops.loss.documents import Documents
from tilewright.ops.loss.head import (
    CHUNK,
    HEAD,
    RANKS,
    SIZES,
    Chunks,
    Head,
    HeadOptions,
    HeadRows,
    Needs,
    Plan,
    statistics_of,
    summed_dtype,
)
from tilewright.ops.loss.head_cases import atol, case
from tilewright.ops.loss.linear_cross_entropy import scale_in_torch_, times_upstream
from tilewright.ops.loss.logprob import SHARED, linear_logprob, results, scaling_of
from tilewright.ops.loss.policy import (
    CISPO,
    DRO,
    FORMULAS,
    GSPO,
    OPD,
    PPO,
    DrGRPO,
    Formula,
    GuardedPPO,
    ImportanceSampling,
    Options,
    Reinforce,
    Tokens,
)
from tilewright.ops.loss.softmax_stats import reshaped
from tilewright.ops.loss.targets import divisor

# Declaration (core.takes) of what tokens have.
PER_TOKEN = dict.fromkeys(
    (
        "advantage",
        "old_logprob",
        "rollout_logprob",
        "ref_logprob",
        "teacher_logprob",
        "clip_low_threshold",
        "clip_high_threshold",
        "token_weight",
    ),
    "constant float [*T]",
)


class SampledTokens(NamedTuple):
    """target: [...] int64, each in [0, V) or the head's ignore_index.

    advantage, old_logprob, rollout_logprob, ref_logprob, teacher_logprob: [...] float: advantages,
    and log-probabilities under the policy before the update, the sampler, the reference and the
    teacher. A formula refuses to run without what it reads.
    clip_low_threshold, clip_high_threshold: [...] float, in place of the loss's.
    token_weight: [...] float, what a token's loss is multiplied by; None: 1.
    cu_seqlens: int32 or int64 [documents + 1], 0 .. T: documents of the tokens in order,
    flattened; for losses of documents.

    No field is differentiated: a tensor that requires a gradient is refused.
    """

    target: torch.Tensor
    advantage: torch.Tensor | None = None
    old_logprob: torch.Tensor | None = None
    rollout_logprob: torch.Tensor | None = None
    ref_logprob: torch.Tensor | None = None
    teacher_logprob: torch.Tensor | None = None
    clip_low_threshold: torch.Tensor | None = None
    clip_high_threshold: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None


class PolicyLoss(NamedTuple):
    """loss: [], or [...] with reduction "none".   logprob, entropy: [...], of the tokens, without
    gradient.   statistics: by name, see `linear_policy_loss`; None unless asked for.
    """

    loss: torch.Tensor
    logprob: torch.Tensor
    entropy: torch.Tensor
    statistics: dict[str, torch.Tensor] | None = None


@checks.autocast("products", "x", "weight", "bias", "lora_A", "lora_B")
@takes(
    *SIZES,
    *RANKS,
    **HEAD,
    **PER_TOKEN,
    cu_seqlens="int32 | int64 [n]",
    loss="a loss of tilewright.ops.loss.policy",
    **SHARED,
    reduction=REDUCTIONS,
    return_statistics="bool",
)
def linear_policy_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    tokens: SampledTokens,
    loss: Formula = PPO(),  # noqa: B008
    head: HeadOptions = HeadOptions(),  # noqa: B008
    *,
    reduction: str = "sum",
    return_statistics: bool = False,
    implementation: str = "auto",
) -> PolicyLoss:
    """Policy-gradient and on-policy distillation losses of sampled tokens, of single ones or of
    documents, from hidden states without all logits.

    With lp a target's log-probability, r = exp(lp - old_logprob), A the advantage, sg() a constant,
    and clip(r) between the two thresholds, the loss of a token is

        Reinforce           -lp A
        ImportanceSampling  -r A
        PPO                 -min(r A, clip(r) A); thresholds 0.8 and 1.2
        CISPO               -sg(clip(r)) lp A; thresholds 0 and 4
        DRO                 -(lp A - beta / 2 (lp - old)^2); beta 0.05
        GSPO                PPO with the ratio of a document, exp(mean(lp - old))
        DrGRPO              PPO, thresholds 0.8 and 1.28, + beta KL to ref_logprob
        GuardedPPO          PPO with dual_clip, use_tis and icepop_beta
        OPD                 r sg(lp - teacher_logprob); without old_logprob r = exp(lp - sg(lp))

    Arithmetic on tokens is float32 (float64 for fp64), means over documents are float64. No value
    is replaced: an infinite or NaN log-probability gives an infinite or NaN loss. Differentiable
    once in x, weight, bias, lora_A and lora_B. With reduction "sum" and "mean" forward computes the
    gradients of a loss of single tokens, and backward scales them: 6 T H V flops. With GSPO,
    ratio_type "sequence" and "none" backward recomputes the logits: 8 T H V. The gradients of a
    frozen head cost nothing.

    Args:
        x: [..., H] fp32 | bf16 | fp16 (fp64 with eager), hidden states.
        weight: [V, H] in x's dtype, the head's.
        tokens: SampledTokens(target, advantage, old_logprob, ...).
        loss: a formula and its options, such as PPO(clip=0.2) or DrGRPO(beta=0.1). All are in
            `tilewright.ops`.
        head: HeadOptions(bias, lora_A, lora_B, lora_scale, temperature, softcap, ignore_index,
            fp32_logits, chunk_size, group), each as in `linear_logprob`.
        reduction: "sum", "mean" over the targets that are not ignored, or "none".
        return_statistics: also return means over the tokens that are not ignored, without gradient:
            ratio_mean, ratio_max, clipped_low and clipped_high (shares of ratios beyond a
            threshold), tis_weight, entropy, and k1_OTHER, k2_OTHER and k3_OTHER, estimates of the
            KL to old, ref and rollout; those of which the inputs are given.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        PolicyLoss(loss, logprob, entropy, statistics), fp32 (fp64 for fp64). Ignored tokens have 0.

    Raises:
        TypeError, IndexError, ImplementationUnavailable: as `linear_cross_entropy`.
        ValueError: as `linear_cross_entropy`; a tensor that the loss reads is missing, or
            advantage, teacher_logprob or cu_seqlens is given and the loss does not read it.

    Example:
        >>> x, weight, target = torch.zeros(2, 8), torch.zeros(4, 8), torch.tensor([0, 3])
        >>> tokens = tilewright.ops.SampledTokens(
        ...     target, torch.tensor([1.0, 3.0]), torch.full((2,), 0.25).log()
        ... )
        >>> result = tilewright.ops.linear_policy_loss(
        ...     x, weight, tokens, tilewright.ops.PPO(clip=0.2)
        ... )
        >>> f"{result.loss.item():.4f}"  # all ratios are 1
        '-4.0000'

    Source: `policy.py` has each formula's.
    """
    of = HeadRows.with_options(x, weight, tokens.target, head)
    own = Own.of(of.valid.to(torch.promote_types(x.dtype, torch.float32)), tokens)
    documents = _documents(tokens.cu_seqlens, of.target.shape[0])
    policy.check(loss, own.tokens(own.valid, documents))
    by = divisor(of.valid, None, None) if reduction == "mean" else 1.0
    fn = LINEAR_POLICY_LOSS.pick(implementation, x)
    scaling = scaling_of(head.temperature, head.softcap)
    with checks.no_autocast(x):
        total, *parts = fn(of, scaling, loss, own, documents, reduction, by)
    logprob, entropy = (t.detach() for t in parts)
    numbers = None
    if return_statistics:
        numbers = policy.statistics(loss, own.tokens(logprob, documents))
        numbers["entropy"] = entropy.sum() / (own.valid != 0).sum().clamp_min(1)
    if reduction == "none":
        total = reshaped(total, of.shape)
    return PolicyLoss(total, reshaped(logprob, of.shape), reshaped(entropy, of.shape), numbers)


def _documents(cu_seqlens: torch.Tensor | None, T: int) -> Documents | None:
    if cu_seqlens is None:
        return None
    return Documents.of(checks.cu_seqlens(cu_seqlens, T, wait=False), T)


class Own(NamedTuple):
    """What tokens have beside their log-probability: the fields of `policy.Tokens`, in order."""

    valid: torch.Tensor
    advantage: torch.Tensor | None
    old_logprob: torch.Tensor | None
    rollout_logprob: torch.Tensor | None
    ref_logprob: torch.Tensor | None
    teacher_logprob: torch.Tensor | None
    ratio_low: torch.Tensor | None
    ratio_high: torch.Tensor | None
    token_weight: torch.Tensor | None

    @classmethod
    def of(cls, valid: torch.Tensor, given: SampledTokens) -> Own:
        """Constants [T] in valid's dtype."""
        _, *tensors, _ = given
        return cls(
            valid, *(t if t is None else t.detach().to(valid.dtype).reshape(-1) for t in tensors)
        )

    def tokens(self, logprob: torch.Tensor, documents: Documents | None = None) -> Tokens:
        return Tokens(logprob, *self, documents)


# ---- from the statistics of all rows: 8 T H V flops


def from_statistics(statistics: Callable) -> Callable:
    """(HeadRows, Scaling, Formula, Own, Documents | None, reduction, divisor) -> loss [] or [T],
    log-probability and entropy [T].
    """

    def computed(of, scaling, formula, own, documents, reduction, by):
        wanted = Wanted(mean=True)
        stats = statistics(of.head, of.target, of.valid, None, scaling, wanted, of.plan, of.group)
        logprob, entropy, _ = results(stats, of.valid)
        losses = policy.losses(formula, own.tokens(logprob, documents))
        return losses if reduction == "none" else losses.sum() / by, logprob, entropy

    return computed


# ---- the sum of the losses, whose forward computes the gradients too: 6 T H V


class PolicyHead(NamedTuple):
    """total: the sum of the losses.   logprob, entropy: [T].   dx, dweight, dbias, dlow, dup: the
    total's gradients, of the vocabulary's in `summed_dtype`.
    """

    total: torch.Tensor
    logprob: torch.Tensor
    entropy: torch.Tensor
    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None
    dlow: torch.Tensor | None
    dup: torch.Tensor | None


@declare
def policy_head(
    head: Head,
    target: torch.Tensor,
    own: Own,
    scaling: Scaling,
    name: str,
    options: Options,
    plan: Plan,
    needs: Needs,
    group: ProcessGroup | None,
) -> PolicyHead:
    """The formula of this name and these options, which is `by_token`."""
    x = head.x
    return PolicyHead(
        x.new_empty((), dtype=torch.float32),
        empty_rows(x),
        empty_rows(x),
        *(
            t.new_empty(
                t.shape,
                dtype=t.dtype if part in ("x", "low") else summed_dtype(t.dtype, plan.fp32_sums),
            )
            if t is not None and need
            else None
            for part, t, need in zip(Head._fields, head, needs, strict=True)
        ),
    )


@policy_head.formula(
    constants=PolicyHead._fields[1:],
    dtype=lambda head: head.x.dtype,
    of_head=lambda result: result[3:],
)
def _backward(op, g, dtype, of_head, needs):
    if g.total is None:
        return {}
    return {
        part: times_upstream(t, g.total, dtype, op)
        for part, t in zip(Head._fields, of_head, strict=True)
        if needs[part]
    }


def _launch(kernels, head, target, own, scaling, name, options, plan, needs, group):
    x, capped = head.x, Scaling(scaling.cap)  # the GEMM divides by the temperature
    losses, logprob, entropy = (empty_rows(x) for _ in range(3))
    chunks = Chunks(head, plan, 1 / scaling.temperature, needs)
    formula = FORMULAS[name].of(options)
    for rows, logits in chunks:
        where = logits, target[rows], None, capped
        stats = kernels.of_rows(*where, Wanted(mean=True), group)
        logprob[rows], entropy[rows], _ = results(stats, own.valid[rows])
        here = Own._make(None if t is None else t[rows] for t in own)
        tokens = here.tokens(logprob[rows])
        losses[rows] = policy.losses(formula, tokens)
        if chunks.needed:
            # Where rounding put the log-probability above 0, p = 1 and the gradient is 0.
            slope = policy.slopes(formula, tokens)
            slope = slope.masked_fill(stats.picked > stats.log_sum, 0.0)
            softmax = Softmax(stats.peak, stats.log_sum)
            gradients = StatsGradients(-slope, slope)
            chunks.add(rows, kernels.gradient(*where, softmax, gradients, group, inplace=True))
    return PolicyHead(losses.sum(), logprob, entropy, *chunks.gradients(wide=True))


@functools.cache
def operator(name: str) -> Operator:
    """`policy_head` on the kernels of this name."""
    kernels = softmax_stats.kernels(name)
    launch = functools.partial(_launch, kernels)
    return policy_head.define(
        f"linear_policy_loss_{name}_forward", launch, kernels.scale_ or scale_in_torch_
    )


def fused(name: str) -> Callable:
    """The implementation on the kernels of this name."""
    launch, recomputed = operator(name), from_statistics(statistics_of(name))

    def linear_policy_loss_fused(of, scaling, loss, own, documents, reduction, by):
        if reduction == "none" or not loss.by_token:
            return recomputed(of, scaling, loss, own, documents, reduction, by)
        head, on = of.head._replace(x=of.head.x.contiguous()), torch.is_grad_enabled()
        needs = Needs(*(on and t is not None and t.requires_grad for t in head))
        plan = of.plan._replace(learns=needs.need_weight)
        outputs = launch(
            head,
            of.target.contiguous(),
            own,
            scaling,
            loss.name,
            loss.options,
            plan,
            needs,
            of.group,
        )
        return outputs.total / by, outputs.logprob, outputs.entropy

    return linear_policy_loss_fused


# ---- cases


# From a log-probability to the token's. Ratios of 0.61, 0.95, 1.05 and 1.65 are far from
# thresholds, where gradients jump; a teacher is farther, since opd's loss is the difference itself.
STEPS = (-0.5, -0.05, 0.05, 0.5), (0.5, 1.0, 1.5, 2.0)

# The sign of advantages for which a loss is positive. opcheck differentiates the magnitude of a
# loss: where the loss is negative, opcheck finds gradients that forward returned and backward
# scaled in place.
SIGN = {"reinforce": 1, "cispo": 1, "dro": 1}


def _atol(dtype, kwargs, name):
    """In float32 the rounding of a log-probability of -6, 2 eps of 1, is multiplied by a ratio and
    an advantage, or a KL that it cancels in: over 8 seeds 6 eps beyond twice the twin's error. In
    16 bits a row's slope is rounded with its logits' gradient, the twin's after it: 0.9 eps.
    """
    if dtype == torch.float32:
        return 16 * torch.finfo(dtype).eps
    return max(atol(dtype, kwargs, name), torch.finfo(dtype).eps)


def _case(name, sizes, *, loss: Formula = PPO(), tokens=(), documents=(), edges=(), **options):  # noqa: B008
    """tokens: which other tensors of tokens there are.   edges: advantages of the first tokens, in
    place of random ones.
    """
    timed = "tags" in options
    made = case(name, sizes, **options)
    needs = (*loss.needs, *tokens)

    def make(device, dtype, seed):
        kw = made.make(device, dtype, seed)
        shape = kw["target"].shape
        g = cases.generator(device, seed + 1)
        near = _logprob(kw) if not timed else -11.0
        kw["loss"] = loss
        if "token_weight" in kw:
            kw["token_weight"] = kw["token_weight"].detach()
        for n in needs:
            if n == "advantage":
                kw[n] = torch.randn(shape, device=device, generator=g) + SIGN.get(loss.name, -1)
                kw[n].view(-1)[: len(edges)] = kw[n].new_tensor(edges)
            elif n in policy.THRESHOLDS:
                kw[n] = torch.full(shape, getattr(loss, n), device=device)
            elif n != "documents":
                which = torch.randint(4, shape, device=device, generator=g)
                kw[n] = near - torch.tensor(STEPS[n == "teacher_logprob"], device=device)[which]
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        return kw

    return dataclasses.replace(made, make=make)


def _logprob(kw):
    """The log-probability of each target, in float64, as float32."""
    head = ("x", "weight", "target", "bias", "lora_A", "lora_B")
    more = ("temperature", "softcap", "lora_scale")
    given = {n: kw[n] for n in (*head, *more) if n in kw}
    wide = {n: v.detach().double() if n in head and n != "target" else v for n, v in given.items()}
    return linear_logprob(**wide, implementation="eager")[0].float()


LLAMA = cases.MODELS["llama-3-8b"]
CASES = (
    _case("ppo", ((3, 7), 33, 203), edges=(0.0, 0.0, 1.0)),
    _case(
        "chunks",
        (11, 32, 100),
        tokens=policy.THRESHOLDS,
        chunk_size=4,
        reduction="mean",
        bias=True,
    ),
    _case("tiny", (5, 3, 7), loss=Reinforce(), chunk_size=2),
    _case("all_ignored", (6, 32, 100), ignored="all", chunk_size=4),
    _case("no_rows", (0, 16, 64), loss=ImportanceSampling()),
    _case("none", (11, 32, 100), loss=ImportanceSampling(), chunk_size=4, reduction="none"),
    _case("frozen", (11, 32, 100), chunk_size=4, bias=True, frozen=True),
    _case("lora", (11, 32, 100), chunk_size=4, lora=5, frozen=True),
    # Constants in a formula are none to finite differences: more elements than those take.
    _case("cispo", (11, 32, 100), loss=CISPO(), chunk_size=4),
    _case("dro", (11, 32, 100), loss=DRO(), chunk_size=4, token_weight=True, reduction="mean"),
    _case("gspo", (11, 32, 100), loss=GSPO(), chunk_size=4, documents=(0, 3, 3, 4, 11)),
    _case(
        "dr_grpo",
        (11, 32, 100),
        loss=DrGRPO(beta=0.1),
        tokens=("ref_logprob",),
        chunk_size=4,
    ),
    _case("opd", (11, 32, 100), loss=OPD(), chunk_size=4),
    _case(
        "everything",
        ((4, 5), 32, 100),
        loss=GuardedPPO(dual_clip=1.5, use_tis=True, icepop_beta=3.0),
        tokens=("rollout_logprob",),
        edges=(-1.0, -2.0, 0.0),
        chunk_size=4,
        bias=True,
        temperature=0.7,
        softcap=5.0,
        lora=3,
        lora_scale=0.5,
        fp32_logits=True,
    ),
    _case(
        "llama-3-8b",
        (8192, LLAMA.hidden, LLAMA.vocab),
        tags=frozenset({"predicted"}),
        ignored="none",
    ),
)


LINEAR_POLICY_LOSS = Op(
    "linear_policy_loss",
    spread(linear_policy_loss),
    from_statistics(statistics_of("eager")),
    (
        in_triton(lambda: fused("triton"), tunables=lambda: (CHUNK,)),
        in_cpp(lambda: fused("cpp"), tunables=lambda: (CHUNK,)),
    ),
    CASES,
    _atol,
    # As linear_logprob's; and few rows of a case are not clipped.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "out 0": 0.027,
                "out 2": 0.023,
                "grad x": 0.14,
                "grad weight": 1.6,
                "grad bias": 0.27,
                "grad lora_A": 0.099,
                "grad lora_B": 0.61,
            },
            torch.float16: {
                "grad x": 0.025,
                "grad weight": 0.22,
                "grad bias": 0.033,
                "grad lora_B": 0.066,
            },
        },
    ),
)
