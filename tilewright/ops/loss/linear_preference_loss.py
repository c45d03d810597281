"""Preference losses of a language model's head, without materializing its logits. `preference.py`
has the formulas, of sums over documents of the log-probabilities of `logprob.py`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.registry import Judged
from tilewright.core.takes import spread, takes
from tilewright.kernels.loss.operators import Stats, Wanted
from tilewright.ops import cases
from tilewright.ops.loss.cross_entropy import REDUCTIONS
from tilewright.ops.loss.documents import Documents
from tilewright.ops.loss.head import HEAD, RANKS, SIZES, HeadOptions, HeadRows, head_op
from tilewright.ops.loss.head_cases import case
from tilewright.ops.loss.logprob import SHARED, logprob_of, scaling_of
from tilewright.ops.loss.preference import (
    DPO,
    FORMULAS,
    IPO,
    NCA,
    ORPO,
    SPPO,
    Formula,
    Pairs,
    SimPO,
)

PAIRED = tuple(name for name, row in FORMULAS.items() if row.paired)


class PairedAnswers(NamedTuple):
    """target: [...] int64, each in [0, V) or the head's ignore_index, as that of prompts is.

    cu_seqlens: int32 or int64 [documents + 1], 0 .. T, non-decreasing: documents of the tokens in
    order, flattened. Documents 2 i and 2 i + 1 are the chosen and the rejected answer of pair i.
    ref_logprob: [documents] float: sums over each document's tokens under the reference. (Formulas
    read nothing else of the reference, and a sum is one number to store.) None for SimPO and ORPO,
    which have no reference.
    score: [documents] float, how good answers are: for DPO with offset_alpha.

    No field is differentiated: a tensor that requires a gradient is refused.
    """

    target: torch.Tensor
    cu_seqlens: torch.Tensor
    ref_logprob: torch.Tensor | None = None
    score: torch.Tensor | None = None


class PreferenceLoss(NamedTuple):
    """loss: [], or [pairs] with reduction "none".   Without gradient, [documents]: logprob, sums
    over the tokens that are not ignored; tokens, their numbers; reward.
    """

    loss: torch.Tensor
    logprob: torch.Tensor
    tokens: torch.Tensor
    reward: torch.Tensor


@checks.autocast("products", "x", "weight", "bias", "lora_A", "lora_B")
@takes(
    *SIZES,
    *RANKS,
    "n % 2 == 1",
    **HEAD,
    cu_seqlens="int32 | int64 [n]",
    ref_logprob="constant float [n-1]",
    score="constant float [n-1]",
    loss="a loss of tilewright.ops.loss.preference",
    **SHARED,
    sft_ratio="number [0, inf)",
    reduction=REDUCTIONS,
)
def linear_preference_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    answers: PairedAnswers,
    loss: Formula = DPO(),  # noqa: B008
    head: HeadOptions = HeadOptions(),  # noqa: B008
    *,
    sft_ratio: float = 0.0,
    reduction: str = "mean",
    implementation: str = "auto",
) -> PreferenceLoss:
    """Preference losses of pairs of answers (DPO and its relatives, SimPO, ORPO), chosen and
    rejected in one pass, from hidden states without all logits.

    Log-probabilities are float32, their sums over documents and the arithmetic on pairs float64, in
    a fixed order. An infinite or NaN log-probability gives an infinite or NaN loss. Differentiable
    once in x, weight, bias, lora_A and lora_B; backward recomputes the logits: 8 T H V flops. The
    gradients of a frozen head cost nothing.

    Args:
        x: [..., H] fp32 | bf16 | fp16 (fp64 with eager), hidden states.
        weight: [V, H] in x's dtype, the head's.
        answers: PairedAnswers(target, cu_seqlens, ref_logprob, score).
        loss: a formula and its options, such as DPO(beta=0.1): one of DPO, RobustDPO,
            NormalizedDPO, Hinge, IPO, EXO, NCA, BCO, SPPO, APOZero, APODown, KTOPair (whose mean
            log-ratios are over these pairs), DPOP, SimPO, ORPO of `tilewright.ops`.
        head: HeadOptions, as in `linear_policy_loss`.
        sft_ratio: the factor of a term that is added to the mean over pairs: the mean negative
            log-probability over the tokens of all chosen answers. A pair's loss has the part of its
            tokens.
        reduction: "mean" over pairs (0 without any), "sum" or "none".
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        PreferenceLoss(loss, logprob, tokens, reward), fp32 (fp64 for fp64), tokens int64. reward is
        beta times the difference to the reference, or without one the mean over tokens.

    Raises:
        TypeError, IndexError, ImplementationUnavailable: as `linear_cross_entropy`.
        ValueError: as `linear_cross_entropy`; or a reference or scores are missing, or are given
            and the loss does not read them.

    Example:
        >>> x, weight = torch.zeros(3, 8), torch.zeros(4, 8)
        >>> target, ends = torch.tensor([0, 3, 1]), torch.tensor([0, 2, 3])
        >>> ref = torch.tensor([2.0, 1.0]) * torch.tensor(0.25).log()
        >>> answers = tilewright.ops.PairedAnswers(target, ends, ref)
        >>> result = tilewright.ops.linear_preference_loss(
        ...     x, weight, answers, tilewright.ops.DPO(beta=0.1)
        ... )
        >>> f"{result.loss.item():.4f}"  # log 2: the policy is the reference
        '0.6931'

    Source: `preference.py` has each formula's.
    """
    check(loss, answers)
    of = HeadRows.with_options(x, weight, answers.target, head)
    T = of.target.shape[0]
    documents = Documents.of(checks.cu_seqlens(answers.cu_seqlens, T, wait=False), T)
    fn = LINEAR_PREFERENCE_LOSS.pick(implementation, x)
    scaling = scaling_of(head.temperature, head.softcap)
    # The rows of a kind have the shape of the targets.
    with checks.no_autocast(x):
        [logprob] = fn(of, scaling, Wanted())
    sums = documents.sums(logprob.reshape(-1))
    tokens = documents.sums((of.valid != 0).to(logprob.dtype))
    ref, score = (t if t is None else t.detach() for t in (answers.ref_logprob, answers.score))
    values, reward = losses(loss, sums, tokens, ref, score, sft_ratio)
    if reduction != "none":
        values = values.sum() / (max(values.shape[0], 1) if reduction == "mean" else 1)
    small = logprob.dtype
    return PreferenceLoss(
        values.to(small), sums.detach().to(small), tokens.long(), reward.to(small)
    )


def check(loss: Formula, answers: PairedAnswers) -> None:
    """Raises ValueError for a loss of single answers, for a missing tensor that the loss reads, and
    for one that is given and that it does not read.
    """
    name = type(loss).__name__
    if not loss.paired:
        raise ValueError(f"loss must be one of pairs, got {name}")
    reads = ["ref_logprob"] if loss.reference else []
    if getattr(loss, "offset_alpha", 0.0):
        reads.append("score")
    for part in ("ref_logprob", "score"):
        read, there = part in reads, getattr(answers, part) is not None
        if read != there:
            accepted, got = ("a torch.Tensor", "None") if read else ("None", "a torch.Tensor")
            raise ValueError(f"{part} must be {accepted} for {loss!r}, got {got}")


def losses(
    loss: Formula,
    sums: torch.Tensor,
    tokens: torch.Tensor,
    ref: torch.Tensor | None,
    score: torch.Tensor | None,
    sft_ratio: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair and the reward of each document, from float64 [documents]: sums of
    log-probabilities, numbers of tokens, and the reference's sums.
    """
    counts = tokens.clamp_min(1)
    ref = sums.detach() if ref is None else ref.double()
    parts = [t[i::2] for t in (sums, ref, counts) for i in (0, 1)]
    gap = None if score is None else (score[::2].double() - score[1::2].double()).clamp_min(0.0)
    pairs = Pairs._make((*parts, gap, 0.0, 0.0))
    if loss.kl:
        both = (t.detach().sum() / max(t.shape[0], 1) for t in (pairs.up, pairs.down))
        kl_chosen, kl_rejected = (t.clamp_min(0.0) for t in both)
        pairs = pairs._replace(kl_chosen=kl_chosen, kl_rejected=kl_rejected)
    values = loss(pairs)
    if sft_ratio:
        each = values.shape[0] / tokens[::2].sum().clamp_min(1)
        values = values - sft_ratio * each * pairs.chosen
    reward = sums - ref if loss.reference else sums / counts
    return values, loss.beta * reward.detach()


def logprobs(stats: Stats, valid: torch.Tensor) -> tuple[torch.Tensor]:
    return (logprob_of(stats, valid),)


# ---- cases


def _case(name, sizes, documents, *, loss: Formula = DPO(), spread=1.0, **options):  # noqa: B008
    """spread: the spread of the reference's log-probabilities around those of uniform logits."""
    made = case(name, sizes, **options)

    def make(device, dtype, seed):
        kw = made.make(device, dtype, seed)
        kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        kw["loss"] = loss
        if loss.reference:
            n = len(documents) - 1
            g = cases.generator(device, seed + 1)
            ends = kw["cu_seqlens"]
            kw["ref_logprob"] = -2.5 * (ends[1:] - ends[:-1]) + spread * torch.randn(
                n, device=device, generator=g
            )
        if getattr(loss, "offset_alpha", 0.0):
            kw["score"] = torch.randn(len(documents) - 1, device=device, generator=g)
        return kw

    return dataclasses.replace(made, make=make)


LLAMA = cases.MODELS["llama-3-8b"]
THREE = (0, 4, 5, 5, 6, 9, 11)  # of one token, of none, and ragged
SMOOTHED = DPO(label_smoothing=0.1, offset_alpha=0.2)
LINEAR_PREFERENCE_LOSS = head_op(
    "linear_preference_loss",
    spread(linear_preference_loss),
    logprobs,
    (
        _case("ragged", ((3, 7), 33, 203), (0, 5, 12, 13, 21), loss=DPO(beta=0.5)),
        _case("chunks", (11, 32, 100), THREE, loss=SMOOTHED, chunk_size=4, bias=True),
        _case("all_ignored", (6, 32, 100), (0, 3, 6), ignored="all", chunk_size=4),
        _case("no_rows", (0, 16, 64), (0,)),
        _case("no_tokens", (0, 16, 64), (0, 0, 0)),
        _case("none", (11, 32, 100), THREE, loss=IPO(), chunk_size=4, reduction="none"),
        _case("far", (11, 32, 100), THREE, loss=DPO(beta=1.0), spread=1e4, chunk_size=4),
        _case("simpo", (11, 32, 100), THREE, loss=SimPO(beta=0.5), chunk_size=4, frozen=True),
        _case("orpo", (11, 32, 100), THREE, loss=ORPO(), sft_ratio=1.0, chunk_size=4),
        _case("nca_pair", (11, 32, 100), THREE, loss=NCA(), chunk_size=4, lora=5, frozen=True),
        _case(
            "everything",
            ((2, 5), 32, 300),
            (0, 4, 10),
            loss=SPPO(),
            sft_ratio=0.5,
            reduction="sum",
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
            range(0, 8193, 1024),
            tags=frozenset({"predicted"}),
            ignored="none",
            logprob=True,  # backward computes the logits again
        ),
    ),
    ignores=True,
    # As linear_logprob's.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "out 0": 0.021,
                "out 1": 0.021,
                "out 3": 0.029,
                "grad x": 0.14,
                "grad weight": 1.0,
                "grad bias": 0.48,
                "grad lora_A": 0.058,
                "grad lora_B": 1.1,
            },
            torch.float16: {"grad weight": 0.13, "grad bias": 0.048, "grad lora_B": 0.12},
        },
    ),
)
