"""What heads have in common; and that of a language model: the losses of tokens, and logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tilewright import ops as tw
from tilewright.nn import ROWS, linear_in_row_blocks
from tilewright.ops.loss.head import Head as Products
from tilewright.ops.loss.head import Plan, low_rank
from tilewright.ops.loss.policy import Formula as PolicyFormula
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.models.listed import How, Listed, listed, most_probable
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.shared import TensorParallel

LABELED = 128  # the number of rows that a head computes is a multiple of it
SCORED = 1024  # tokens whose logits are in memory at a time: a multiple of the blocks of rows


class Shaping(NamedTuple):
    """What losses of tokens are beside cross-entropy: those of training, and what
    `Engine.evaluating` leaves of it.

    loss_temperature: divides the logits.   z_loss: times the squared log-sum-exp of the logits, in
    nats, is added (arXiv:2204.02311, section 5).
    """

    loss_temperature: float = 1.0
    z_loss: float = 0.0


class _SumOverRanks(torch.autograd.Function):
    """Each rank's result depends on every rank's argument, so gradients are added as well."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, *grads):
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def by_document(
    values: torch.Tensor, lengths: torch.Tensor, reduction: str = "sum"
) -> torch.Tensor:
    """[documents], float64, of values [T]; 0 for a document without a token here.

    lengths: the number of these tokens that each document has, in order.
    """
    return torch.segment_reduce(values.double(), reduction, lengths=lengths, initial=0, unsafe=True)


@runtime_checkable
class AdaptedHead(Protocol):
    """A head's layer with an adapter."""

    base: nn.Linear

    def factors(self, *, repeated: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
        """As `LoRALinear.factors`."""
        ...


class Adapter(NamedTuple):
    """Adds scale * (x A^T) B^T to the logits.   A: [r, H].   B: [V, r], or this rank's rows."""

    A: torch.Tensor
    B: torch.Tensor
    scale: float

    def arguments(self, like: torch.Tensor) -> dict[str, Any]:
        """The arguments of an op, in the dtype of the head's operands."""
        A, B = (t.to(like.dtype) for t in self[:2])
        return {"lora_A": A, "lora_B": B, "lora_scale": self.scale}


class Around(NamedTuple):
    """What a head computes with, beside its weight.

    adapted: the head's layer, if it has an adapter.
    sequence: the groups over whose ranks the tokens of a sequence are sharded.
    everywhere: the ranks whose losses are added.
    padding: the padding token; None: there is none.
    labeled: see `labeled_rows`.
    """

    ops: Ops
    tp: TensorParallel = TensorParallel()
    sequence: tuple[dist.ProcessGroup, ...] = ()
    shaping: Shaping = Shaping()
    everywhere: dist.ProcessGroup | None = None
    adapted: AdaptedHead | None = None
    padding: int | None = None
    labeled: torch.Tensor | None = None

    def adapter(self, *, repeated: bool) -> Adapter | None:
        """repeated: as in `LoRALinear.factors`."""
        return None if self.adapted is None else Adapter(*self.adapted.factors(repeated=repeated))


class OfSequence:
    """What a loss reads of a head. Several ranks may share a sequence."""

    def __init__(
        self,
        sequence: tuple[dist.ProcessGroup, ...],
        everywhere: dist.ProcessGroup | None = None,
    ):
        self._sequence, self._everywhere = sequence, everywhere
        self.computed: torch.Tensor | None = None  # [B, S], values of tokens

    def over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums over the whole sequence of this rank's, differentiable: every rank gets them."""
        for group in self._sequence:
            sums = _SumOverRanks.apply(sums, group)
        return sums

    @torch.no_grad()
    def over_all(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums over all ranks, which compute a micro-batch each, detached. Every rank must call
        it.
        """
        sums = sums.detach().clone()
        if self._everywhere is not None:
            dist.all_reduce(sums, group=self._everywhere)
        return sums

    @property
    def share(self) -> float:
        """One over the number of ranks that `over_ranks` sums over: totals are added over them."""
        return 1.0 / math.prod(group.size() for group in self._sequence)


class TokenLosses(OfSequence):
    """Negative log-probabilities of labels [B, S], shaped, and 0 where a label is IGNORE.

    Either `sum()`, whose gradient the head computes in its forward pass, or `values()`, whose
    upstream gradient may differ per token: the backward pass then recomputes the logits.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        around: Around,
        adapter: Adapter | None = None,
    ) -> None:
        """hidden: the same on all ranks of `around.tp`, each of which has its rows of weight, and
        of the adapter.
        """
        shaping = around.shaping
        if shaping.loss_temperature != 1.0:
            # Not the logits, of which there are more; rounded to the dtype of the hidden states.
            hidden = hidden / shaping.loss_temperature
        super().__init__(around.sequence, around.everywhere)
        self._operands, self._labels, self._ops = (hidden, weight), labels, around.ops
        self._whole, self._labeled = hidden, around.labeled
        if self._labeled is not None:
            self._operands, self._labels = (self._own(hidden), weight), self._own(labels)
            self._tokens = labels.shape
        self._group, self._z_loss, self._adapter = around.tp.group, shaping.z_loss, adapter
        self._scored: torch.Tensor | None = None  # negative log-probabilities of `statistics`

    def sum(self) -> torch.Tensor:
        return self.reduced("sum")

    def values(self) -> torch.Tensor:
        """[B, S], float32. Computed once."""
        if self.computed is None:
            self.computed = self.reduced("none")
        return self.computed

    def policy(
        self, loss: PolicyFormula, **tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        """The sum of a policy loss of single tokens, whose gradient the head computes in its
        forward pass, and log-probabilities [B, S] without gradient. tokens: further fields of
        `ops.SampledTokens`, [B, S]. None where losses are to be made of `values`: for other losses,
        with `batch_invariant` or a z_loss, and after `statistics`.
        """
        numerics = self._ops.numerics
        scored = self._scored is not None and not torch.is_grad_enabled()
        if not loss.by_token or numerics.batch_invariant or self._z_loss or scored:
            return None
        x, weight = in_autocast(*self._operands)
        result = tw.linear_policy_loss(
            x,
            weight,
            tw.SampledTokens(self._labels, **{name: self._own(t) for name, t in tokens.items()}),
            loss,
            tw.HeadOptions(
                **self._adapted(x), fp32_logits=numerics.lm_head_fp32, group=self._group
            ),
            implementation=self._ops.linear_cross_entropy,
        )
        logprob = self._spread(result.logprob)
        self.computed = -logprob
        return result.loss, logprob

    @torch.no_grad()
    def statistics(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The log-probability of each label [B, S], the entropy of the distribution (float32, nats)
        and whether the label is the most probable token, all without gradients. They are 0 and
        False where the label is IGNORE. Losses that are asked for afterwards, without gradients,
        are made of these.
        """
        numerics, labels = self._ops.numerics, self._labels
        if numerics.batch_invariant:
            # Whole blocks of rows, in which a row's bits do not depend on the others.
            blocks = zip(self._operands[0].split(SCORED, 1), labels.split(SCORED, 1), strict=True)
            of_blocks = [
                tw.logprob_entropy(self._logits(x), y, return_argmax=True) for x, y in blocks
            ]
            logprob, entropy, best = (torch.cat(parts, 1) for parts in zip(*of_blocks, strict=True))
        else:
            x, weight = in_autocast(*self._operands)
            logprob, entropy, best = tw.linear_logprob(
                x,
                weight,
                labels,
                **self._adapted(x),
                return_argmax=True,
                fp32_logits=numerics.lm_head_fp32,
                group=self._group,
            )
        hit = (best == labels) & (labels != IGNORE)
        logprob, entropy, hit = (self._spread(t) for t in (logprob, entropy, hit))
        self._scored = -logprob
        return logprob, entropy, hit

    def listed(self, ids: torch.Tensor, temperature: float = 1.0) -> Listed:
        """Log-probabilities of the tokens ids [B, S, k], -1 for none, of all others together, and
        of labels, at a temperature; differentiable. The logits of a chunk of tokens are in memory
        at a time.
        """
        ids, (x, _) = self._own(ids), self._operands
        tokens = ids.shape[:2]
        head, how, pad = self._in_rows(x, temperature)
        given = (t.flatten(0, 1) for t in (ids, self._labels[..., None]))
        ids, labels = (F.pad(t, (0, 0, 0, pad), value=-1) for t in given)
        of_rows = listed(head, ids, labels[:, 0], how)
        return Listed(*(self._spread(t[: tokens.numel()].unflatten(0, tokens)) for t in of_rows))

    def most_probable(self, k: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens [B, S, k] that are most probable at a temperature, and their
        log-probabilities, in order; without gradients.
        """
        tokens = self._whole.shape[:2]
        head, how, _ = self._in_rows(self._whole, temperature)
        of_rows = most_probable(head, k, how)
        ids, logprobs = (t[: tokens.numel()].unflatten(0, tokens) for t in of_rows)
        return ids, logprobs

    @torch.no_grad()
    def logits_of(self, chosen: torch.Tensor) -> torch.Tensor:
        """The logits [n, V] of the tokens at which a mask [B, S] is true, float32, on every rank
        that has rows of the weight.
        """
        own = self._logits(self._whole[chosen][None])[0].float()
        if self._group is None:
            return own
        parts = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(parts, own.contiguous(), group=self._group)
        return torch.cat(parts, -1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden, self._operands[1], self._ops, self._adapter)

    def _adapted(self, like: torch.Tensor) -> dict[str, Any]:
        """The adapter as arguments of ops."""
        return {} if self._adapter is None else self._adapter.arguments(like)

    def _own(self, t: torch.Tensor) -> torch.Tensor:
        """What the head computes of a tensor [B, S, ...]: all of it, or the rows with a label
        [1, n, ...].
        """
        return t if self._labeled is None else t.flatten(0, 1)[self._labeled][None]

    def _spread(self, t: torch.Tensor) -> torch.Tensor:
        """The inverse, with zeros elsewhere."""
        if self._labeled is None:
            return t
        rows = t.new_zeros(self._tokens.numel(), *t.shape[2:])
        return rows.index_copy(0, self._labeled, t[0]).unflatten(0, self._tokens)

    def _in_rows(self, hidden: torch.Tensor, temperature: float) -> tuple[Products, How, int]:
        """The head of hidden states as rows [T, H], how its logits are computed, and the number of
        rows that are padding: with `batch_invariant` all products have as many rows as those of
        `linear_in_row_blocks`.
        """
        numerics = self._ops.numerics
        hidden, weight = in_autocast(hidden, self._operands[1])
        x = hidden.flatten(0, 1)
        block = ROWS if numerics.batch_invariant else None
        pad = -len(x) % (block or 1)
        how = How(
            self._ops.linear_cross_entropy,
            Plan(True, numerics.lm_head_fp32, chunk_size=block),
            temperature,
            self._group,
        )
        x = F.pad(x, (0, 0, 0, pad)) if pad else x
        A, B, scale = self._adapted(x).values() if self._adapter is not None else (None, None, 1.0)
        return Products(x, weight, None, low_rank(x, A, B, scale), B), how, pad

    def reduced(self, reduction: str) -> torch.Tensor:
        """reduction: as in `ops.cross_entropy`; "mean" is not made of `statistics`."""
        if self._scored is not None and not torch.is_grad_enabled() and reduction != "mean":
            return self._scored.sum() if reduction == "sum" else self._scored
        reduced = self._reduced(reduction)
        return self._spread(reduced) if reduction == "none" else reduced

    def _reduced(self, reduction: str) -> torch.Tensor:
        numerics = self._ops.numerics
        if numerics.batch_invariant:
            return tw.cross_entropy(
                self._logits(self._operands[0]),
                self._labels,
                z_loss=self._z_loss,
                reduction=reduction,
                implementation=self._ops.cross_entropy,
            )
        x, weight = in_autocast(*self._operands)
        return tw.linear_cross_entropy(
            x,
            weight,
            self._labels,
            **self._adapted(x),
            z_loss=self._z_loss,
            reduction=reduction,
            fp32_logits=numerics.lm_head_fp32,
            group=self._group,
            implementation=self._ops.linear_cross_entropy,
        )


def labeled_rows(labels: torch.Tensor) -> torch.Tensor | None:
    """The places, int64 [n], of the tokens of labels [B, S], on a CPU, that have one; and of enough
    others that n is a multiple of LABELED, so that few sizes occur. None for all tokens.
    """
    ignored = (labels.numpy() == IGNORE).ravel()
    n = math.ceil(max(1, len(ignored) - ignored.sum()) / LABELED) * LABELED
    if n >= len(ignored):
        return None
    return torch.from_numpy(np.sort(np.argsort(ignored, kind="stable")[:n]))


# (what the head gives losses, the batch's tensors by name) -> (sum, denominator, *further sums)
LossFunction = Callable[[Any, Mapping[str, Any]], tuple[torch.Tensor, ...]]


def logits(
    hidden: torch.Tensor, weight: torch.Tensor, ops: Ops, adapter: Adapter | None = None
) -> torch.Tensor:
    """[B, S, V], float32 with `Numerics.lm_head_fp32`."""
    hidden, weight = in_autocast(hidden, weight)
    if ops.numerics.lm_head_fp32:
        hidden, weight = hidden.float(), weight.float()
    product = linear_in_row_blocks if ops.numerics.batch_invariant else F.linear
    with torch.autocast(hidden.device.type, enabled=False):
        of_weight = product(hidden, weight)
        if adapter is None:
            return of_weight
        A, B, scale = adapter.arguments(hidden).values()
        return of_weight + product(product(hidden, A) * scale, B)


def in_autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts the head's operands to autocast's dtype; autocast is off around the product."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    return tuple(t.to(torch.get_autocast_dtype(device)) for t in operands)


class Head(NamedTuple):
    """A kind of head: a linear layer without a bias, by its name in the model and on disk.

    rows: rows of its weight.
    outputs: (hidden states [B, S, H], weight, around) -> [B, S, ...], what a model without a loss
        returns.
    values: (hidden states, weight, labels, around) -> what losses read. Hidden states are this
        rank's shard.
    """

    module: str
    rows: Callable[[ModelConfig], int]
    outputs: Callable[[torch.Tensor, torch.Tensor, Around], torch.Tensor]
    values: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Around], OfSequence]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, around: Around) -> torch.Tensor:
    tp = around.tp
    own = logits(tp.gather(hidden), weight, around.ops, around.adapter(repeated=False))
    return tp.gather_for_all(own.transpose(1, 2)).transpose(1, 2)


def _token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, around: Around
) -> TokenLosses:
    whole = around.tp.gather_for_all(hidden)
    return TokenLosses(whole, weight, labels, around, around.adapter(repeated=True))


LANGUAGE_MODEL = Head("lm_head", lambda config: config.vocab_size, _logits, _token_losses)
