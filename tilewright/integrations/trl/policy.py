"""The policy loss of TRL's GRPOTrainer, whose gradient the head computes in its forward pass.

TRL computes the loss from log-probabilities, so that their gradients are known only in backward,
which then recomputes the logits: 8 T H V flops. Where a formula of `ops.linear_policy_loss` is the
loss of each token, its gradient is computed in forward, 6 T H V, up to the one factor that TRL's
division and accelerate's scaling are. Backward takes that factor from the gradient that TRL's own
loss gives the log-probabilities. Loss and metrics stay TRL's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch

from tilewright.ops.loss import policy
from tilewright.ops.loss.policy import CISPO, PPO, DrGRPO, Formula, GuardedPPO, Reinforce, Tokens

EXPECTED = "_tilewright_policy"
CHECKED = 16  # losses of a run, the first ones
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")


class Expected(NamedTuple):
    """What a forward is told of the loss: a formula, and further fields of `ops.SampledTokens`,
    [B, C], of the last C tokens of each row.   check: see `Carried`.
    """

    formula: Formula
    tokens: Mapping[str, torch.Tensor]
    check: bool = False

    def at(self, mask: torch.Tensor) -> Expected:
        """The same, with fields [T]: the tokens of `mask` [B, S], which are computed."""

        def flat(t: torch.Tensor) -> torch.Tensor:
            whole = t.new_zeros(mask.shape)
            whole[:, -t.shape[1] :] = t
            return whole[mask]

        given = {name: flat(t.to(mask.device)) for name, t in self.tokens.items()}
        return self._replace(tokens=given)

    def slopes(self, logprob: torch.Tensor) -> torch.Tensor:
        """The derivatives of the sum of losses in log-probabilities [T]."""
        given = {name: t.to(logprob.dtype) for name, t in self.tokens.items()}
        tokens = Tokens(logprob.detach(), torch.ones_like(logprob), **given)
        return policy.slopes(self.formula, tokens)


class Carried(torch.autograd.Function):
    """Log-probabilities [T], whose gradient goes to `total`, the sum of losses with these slopes.

    check: backward, which then waits for the device, raises RuntimeError where the gradient is not
    a multiple of the slopes: the loss is another one.
    """

    @staticmethod
    def forward(ctx: Any, logprob, total, slopes, check):
        ctx.save_for_backward(slopes)
        ctx.check = check
        return logprob.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad):
        [slopes] = ctx.saved_tensors
        factor = (grad * slopes).sum() / slopes.square().sum().clamp_min(torch.finfo().tiny)
        if ctx.check:
            rest, size = (grad - factor * slopes).norm(), grad.norm()
            if rest > 1e-3 * size:
                raise RuntimeError(
                    "the loss of TRL's trainer is not that of its settings: the gradients of "
                    f"log-probabilities differ from a policy's by {float(rest / size):.1e} of their "
                    "norm; pass policy=False to accelerate_trainer"
                )
        return None, factor, None, None


def formula_of(trainer: Any, inputs: Mapping[str, Any]) -> Formula | None:
    """The loss of each token, or None if no formula of this library is."""
    args = trainer.args
    if (
        trainer.importance_sampling_level != "token"
        or trainer.off_policy_mask_threshold is not None
        or trainer.top_entropy_quantile < 1.0
        or trainer._entropy_bonus_enabled
    ):
        return None
    plain, old = trainer.beta == 0.0, inputs.get("old_per_token_logps")
    if not plain and args.use_bias_correction_kl:
        return None
    if old is None:  # ratios are 1
        return Reinforce() if plain and trainer.loss_type in (*CLIPPED, "cispo") else None
    high = 1 + trainer.epsilon_high
    clip = {"clip_low_threshold": 1 - trainer.epsilon_low, "clip_high_threshold": high}
    if trainer.loss_type == "cispo":
        return CISPO(clip_high_threshold=trainer.epsilon_high) if plain else None
    if trainer.loss_type not in CLIPPED:
        return None
    if args.delta is not None:
        return GuardedPPO(**clip, dual_clip=args.delta) if plain and args.delta >= high else None
    if _sampler_weights(trainer, inputs) is not None and not plain:
        return None  # TRL weighs the ratio's part alone
    return PPO(**clip) if plain else DrGRPO(**clip, beta=trainer.beta)


def _sampler_weights(trainer: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return inputs["importance_sampling_ratio"]
    return None


def expected(trainer: Any, inputs: Mapping[str, Any]) -> Expected | None:
    formula = formula_of(trainer, inputs)
    if formula is None:
        return None
    weight = inputs["completion_mask"].float()
    if "tool_mask" in inputs:
        weight = weight * inputs["tool_mask"]
    if trainer.loss_type == "grpo":  # means over rows; other types divide by one number
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1.0)
    if (ratio := _sampler_weights(trainer, inputs)) is not None:
        weight = weight * ratio
    advantages = inputs["advantages"]
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    columns = {
        "advantage": advantages,
        "old_logprob": inputs.get("old_per_token_logps"),
        "ref_logprob": inputs.get("ref_per_token_logps"),
    }
    reads = {name: columns[name] for name in formula.needed}
    tokens = {name: t.float().expand(weight.shape) for name, t in reads.items() if t is not None}
    return Expected(formula, {**tokens, "token_weight": weight})


def tell(trainer: Any, model: Any) -> None:
    """Makes a GRPOTrainer tell its model what loss follows."""
    if hasattr(trainer._compute_loss, "tilewright"):
        return
    theirs: Callable = trainer._compute_loss
    calls = itertools.count()

    def _compute_loss(self: Any, wrapped: Any, inputs: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled() and (told := expected(self, inputs)) is not None:
            model.__dict__[EXPECTED] = told._replace(check=next(calls) < CHECKED)
        try:
            return theirs(wrapped, inputs)
        finally:
            model.__dict__.pop(EXPECTED, None)

    vars(_compute_loss)["tilewright"] = True
    trainer._compute_loss = MethodType(_compute_loss, trainer)
