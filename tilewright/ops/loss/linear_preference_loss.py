"""Preference losses of a language model's head, without materializing its logits. `preference.py`
has the formulas, of sums over documents of the log-probabilities of `logprob.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.registry import Judged
from tilewright.core.takes import takes
from tilewright.core.torch_names import ProcessGroup
from tilewright.kernels.loss.operators import Stats, Wanted
from tilewright.ops import cases
from tilewright.ops.loss.cross_entropy import REDUCTIONS
from tilewright.ops.loss.documents import Documents
from tilewright.ops.loss.head import HEAD, RANKS, SIZES, HeadRows, head_op
from tilewright.ops.loss.head_cases import case
from tilewright.ops.loss.logprob import SHARED, logprob_of, scaling_of
from tilewright.ops.loss.preference import FORMULAS, Options, Pairs

# An answer that is not in a pair is another row of FORMULAS.
PAIRED = tuple(name for name, row in FORMULAS.items() if row.paired)


class PreferenceLoss(NamedTuple):
    """loss: [], or [pairs] with reduction "none".   Without gradient, [documents]: logprob, sums
    over the tokens that are not ignored; tokens, their numbers; reward.
    """

    loss: torch.Tensor
    logprob: torch.Tensor
    tokens: torch.Tensor
    reward: torch.Tensor


# Wide: what formulas read, and what the head's other losses take.
@checks.autocast("products", "x", "weight", "bias", "lora_A", "lora_B")
@takes(
    *SIZES,
    *RANKS,
    "n % 2 == 1",
    **HEAD,
    cu_seqlens="int32 | int64 [n]",
    ref_logprob="constant float [n-1]",
    loss=PAIRED,
    beta="number (0, inf)",
    label_smoothing="number [0, 0.5)",
    simpo_gamma="number [0, inf)",
    dpop_lambda="number [0, inf)",
    sft_ratio="number [0, inf)",
    **SHARED,
    reduction=REDUCTIONS,
)
def linear_preference_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ref_logprob: torch.Tensor | None = None,
    *,
    loss: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float | None = None,
    simpo_gamma: float | None = None,
    dpop_lambda: float | None = None,
    sft_ratio: float = 0.0,
    bias: torch.Tensor | None = None,
    lora_A: torch.Tensor | None = None,
    lora_B: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: ProcessGroup | None = None,
    fp32_logits: bool = False,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> PreferenceLoss:
    """Preference losses of pairs of answers (DPO and its relatives, SimPO, ORPO), chosen and
    rejected in one pass, from hidden states without all logits.

    Documents 2 i and 2 i + 1 are the chosen and the rejected answer of pair i, prompts with targets
    that are ignored. Log-probabilities are float32, their sums over documents and the arithmetic on
    pairs float64, in a fixed order. A log-probability that is infinite or NaN gives such a loss.
    Differentiable once in x, weight, bias, lora_A and lora_B; backward recomputes the logits: 8 T H
    V flops. A frozen head costs nothing.

    Args:
        x, weight, target, bias, ignore_index: as in `linear_cross_entropy`.
        cu_seqlens: int32 or int64 [documents + 1], 0 .. T, non-decreasing: documents of the tokens
            in order, flattened; two a pair.
        ref_logprob: [documents] float, not differentiated (refused if it requires a gradient):
            sums over each document's tokens under the reference. (Formulas read nothing else of it,
            and it is one number to store.) None for simpo and orpo, which have no reference.
        loss: one of sigmoid (DPO), robust, sigmoid_norm, hinge, ipo, exo_pair, nca_pair, bco_pair,
            sppo_hard, apo_zero, apo_down, kto_pair (whose mean log-ratios are over these pairs),
            dpop, simpo, orpo.
        beta: > 0.
        label_smoothing: in [0, 0.5), of sigmoid, robust, sigmoid_norm and exo_pair; default 0.
        simpo_gamma: of simpo; default 0.5.
        dpop_lambda: of dpop; default 50.
        sft_ratio: times the negative log-probability of the tokens of all chosen answers, a mean
            over them, is added to the mean over pairs; a pair has its tokens' part.
        lora_A, lora_B, lora_scale, temperature, softcap: as in `linear_logprob`.
        reduction: "mean" over pairs (0 without any), "sum" or "none".
        group: as in `linear_logprob`.
        fp32_logits, chunk_size: as in `linear_cross_entropy`.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        PreferenceLoss(loss, logprob, tokens, reward), fp32 (fp64 for fp64), tokens int64. reward is
        beta times the difference to the reference, or without one the mean over tokens.

    Raises:
        TypeError, IndexError, ImplementationUnavailable: as `linear_cross_entropy`.
        ValueError: so; and an option or a reference that the formula does not read, or a reference
            that is missing.

    Example:
        >>> x, weight = torch.zeros(3, 8), torch.zeros(4, 8)
        >>> target, ends = torch.tensor([0, 3, 1]), torch.tensor([0, 2, 3])
        >>> ref = torch.tensor([2.0, 1.0]) * torch.tensor(0.25).log()
        >>> found = tilewright.ops.linear_preference_loss(x, weight, target, ends, ref)
        >>> f"{found.loss.item():.4f}"  # log 2: the policy is the reference
        '0.6931'

    Source: `preference.py` has each formula's.
    """
    given = {
        "beta": beta,
        "label_smoothing": label_smoothing,
        "simpo_gamma": simpo_gamma,
        "dpop_lambda": dpop_lambda,
    }
    options = _settled(loss, given, ref_logprob)
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
    T = of.target.shape[0]
    documents = Documents.of(checks.cu_seqlens(cu_seqlens, T, wait=False), T)
    fn = LINEAR_PREFERENCE_LOSS.pick(implementation, x)
    scaling = scaling_of(temperature, softcap)
    # The rows of a kind have the shape of the targets.
    with checks.no_autocast(x):
        [logprob] = fn(of, scaling, Wanted())
    sums = documents.sums(logprob.reshape(-1))
    tokens = documents.sums((of.valid != 0).to(logprob.dtype))
    ref = None if ref_logprob is None else ref_logprob.detach()
    found, reward = losses(loss, options, sums, tokens, ref, sft_ratio)
    if reduction != "none":
        found = found.sum() / (max(found.shape[0], 1) if reduction == "mean" else 1)
    small = logprob.dtype
    return PreferenceLoss(found.to(small), sums.detach().to(small), tokens.long(), reward.to(small))


def _settled(
    loss: str, given: Mapping[str, float | None], ref_logprob: torch.Tensor | None
) -> Options:
    row = FORMULAS[loss]
    reads = [name for name in given if name in row.reads]
    for name, value in given.items():
        if value is not None and name not in reads:
            raise ValueError(
                f"{name} must be None for loss={loss!r}, which reads {', '.join(reads)}; got "
                f"{value!r}"
            )
    if row.reference != (ref_logprob is not None):
        accepted = "a torch.Tensor" if row.reference else "None"
        got = "None" if row.reference else "a torch.Tensor"
        raise ValueError(f"ref_logprob must be {accepted} for loss={loss!r}, got {got}")
    return Options(**{name: value for name, value in given.items() if value is not None})


def losses(
    loss: str,
    options: Options,
    sums: torch.Tensor,
    tokens: torch.Tensor,
    ref: torch.Tensor | None,
    sft_ratio: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair and the reward of each document, from float64 [documents]: sums of
    log-probabilities, numbers of tokens, and the reference's sums.
    """
    counts = tokens.clamp_min(1)
    ref = sums.detach() if ref is None else ref.double()
    parts = (t[i::2] for t in (sums, ref, counts) for i in (0, 1))
    pairs = Pairs(*parts)
    if FORMULAS[loss].kl:
        both = (t.detach().sum() / max(t.shape[0], 1) for t in (pairs.up, pairs.down))
        kl_chosen, kl_rejected = (t.clamp_min(0.0) for t in both)
        pairs = pairs._replace(kl_chosen=kl_chosen, kl_rejected=kl_rejected)
    found = FORMULAS[loss].function(pairs, options)
    if sft_ratio:
        each = found.shape[0] / tokens[::2].sum().clamp_min(1)
        found = found - sft_ratio * each * pairs.chosen
    reward = sums - ref if FORMULAS[loss].reference else sums / counts
    return found, options.beta * reward.detach()


def logprobs(stats: Stats, valid: torch.Tensor) -> tuple[torch.Tensor]:
    return (logprob_of(stats, valid),)


# ---- cases


def _case(name, sizes, documents, *, loss="sigmoid", spread=1.0, **options):
    """spread: of the reference's log-probabilities around those of uniform logits."""
    made = case(name, sizes, **options)

    def make(device, dtype, seed):
        kw = made.make(device, dtype, seed)
        kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        kw["loss"] = loss
        if FORMULAS[loss].reference:
            n = len(documents) - 1
            g = cases.generator(device, seed + 1)
            ends = kw["cu_seqlens"]
            kw["ref_logprob"] = -2.5 * (ends[1:] - ends[:-1]) + spread * torch.randn(
                n, device=device, generator=g
            )
        return kw

    return dataclasses.replace(made, make=make)


LLAMA = cases.MODELS["llama-3-8b"]
THREE = (0, 4, 5, 5, 6, 9, 11)  # of one token, of none, and ragged
LINEAR_PREFERENCE_LOSS = head_op(
    "linear_preference_loss",
    linear_preference_loss,
    logprobs,
    (
        _case("ragged", ((3, 7), 33, 203), (0, 5, 12, 13, 21), beta=0.5),
        _case("chunks", (11, 32, 100), THREE, chunk_size=4, bias=True, label_smoothing=0.1),
        _case("all_ignored", (6, 32, 100), (0, 3, 6), ignored="all", chunk_size=4),
        _case("no_rows", (0, 16, 64), (0,)),
        _case("no_tokens", (0, 16, 64), (0, 0, 0)),
        _case("none", (11, 32, 100), THREE, loss="ipo", chunk_size=4, reduction="none"),
        _case("far", (11, 32, 100), THREE, spread=1e4, beta=1.0, chunk_size=4),
        _case("simpo", (11, 32, 100), THREE, loss="simpo", chunk_size=4, beta=0.5, frozen=True),
        _case("orpo", (11, 32, 100), THREE, loss="orpo", sft_ratio=1.0, chunk_size=4),
        _case("nca_pair", (11, 32, 100), THREE, loss="nca_pair", chunk_size=4, lora=5, frozen=True),
        _case(
            "everything",
            ((2, 5), 32, 300),
            (0, 4, 10),
            loss="sppo_hard",
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
                "grad bias": 0.39,
                "grad lora_A": 0.058,
                "grad lora_B": 1.1,
            },
            torch.float16: {"grad weight": 0.13, "grad bias": 0.048, "grad lora_B": 0.12},
        },
    ),
)
