"""`accelerate_trainer`: the fused head that TRL's trainers put on their models, by this library.

TRL gives the model a forward of its own: called with fused_lm_head=True and labels, it returns the
log-probability of each label and what else its trainer asked for, in place of logits. Here the
model gets another forward with the same contract, and TRL's serves the other calls. TRL's choices
(outputs, temperature, softcap, scale) are read from its forward, so that they are made once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.integrations.trl import head as heads
from tilewright.integrations.trl import policy as policies
from tilewright.integrations.trl.head import Scaling

TRL = "1.16"
# What TRL's forward decided when it was made.
CHOICES = (
    "backbone_attr",
    "cast_lm_head_to_fp32",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
    "temperature",
    "text_config",
)
OURS = "_tilewright_head"


class TrainerReport(NamedTuple):
    """What `accelerate_trainer` did.

    trainer: its class name.
    models: per model (the policy, then the reference) its class name and what its head returns.
    """

    trainer: str
    models: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        rows = [f"accelerate_trainer: {self.trainer}"]
        rows += [f"  {name}: {', '.join(outputs)}" for name, outputs in self.models]
        return "\n".join(rows)


def accelerate_trainer(trainer: Any, *, policy: bool = True, quiet: bool = False) -> TrainerReport:
    """Computes log-probabilities, entropies and token accuracies of a TRL trainer by
    `ops.linear_logprob`.

    Changes the models of this trainer alone: the policy and, if there is one, the reference. Call
    it before `train`; a second call does nothing. The head computes the tokens that have a label, a
    chunk of them at a time, and runs inside its modules' own forward, so that it is right wherever
    hooks gather their parameters: under FSDP2 (also where the head or its adapters are units of
    their own) and ZeRO-3. Statistics are float32, unless FSDP2's policy casts what a model returns.
    mean_logits (a metric of DPO and KTO) is the mean of logits that are not rounded.

    Args:
        trainer: A trainer of TRL 1.16 whose model has TRL's fused head: SFTTrainer, DPOTrainer,
            KTOTrainer, GRPOTrainer, RLOOTrainer, or one derived from them.
        policy: A GRPOTrainer's head computes the gradient of its loss in the forward pass (6 T H V
            flops, not 8), where `ops.linear_policy_loss` has that loss: loss_type dapo, bnpo, grpo,
            dr_grpo or cispo with ratios of tokens, without an entropy bonus and without masks of
            tokens by their entropy or policy.
        quiet: Prints no report. Only rank 0 prints.

    Returns:
        The report, which is also printed.

    Raises:
        ImplementationUnavailable: TRL is missing or of another version; the model has no fused
            head of TRL's; its head is no torch.nn.Linear with or without plain LoRA, or has a
            forward of its own; an adapter on the head has dropout, a bias or is a variant as DoRA;
            the logits are scaled by a number that is not positive.
        TypeError: trainer is no trainer.

    Example:
        >>> from tilewright.integrations.trl import accelerate_trainer
        >>> from trl import SFTTrainer  # doctest: +SKIP
        >>> accelerate_trainer(SFTTrainer(model, args=arguments))  # doctest: +SKIP
        accelerate_trainer: SFTTrainer
          LlamaForCausalLM: log_probs, entropy, is_top1
    """
    require_trl()
    if not hasattr(trainer, "accelerator"):
        raise TypeError(f"trainer must be a trainer of TRL, got {type(trainer).__name__}")
    unwrap = trainer.accelerator.unwrap_model
    models = [m for m in (trainer.model, getattr(trainer, "ref_model", None)) if m is not None]
    models = [getattr(m, "get_base_model", lambda m=m: m)() for m in map(unwrap, models)]
    for model in models:
        _check(type(trainer).__name__, model)
    reports = []
    for model in models:
        # accelerate's autocast is around TRL's forward, not around the one that replaces it.
        prepared = "_original_forward" in model.__dict__
        outputs = fuse(model, trainer.accelerator.autocast if prepared else contextlib.nullcontext)
        reports.append((type(model).__name__, outputs))
    if policy and hasattr(trainer, "loss_type") and hasattr(trainer, "epsilon_low"):
        policies.tell(trainer, models[0])
    report = TrainerReport(type(trainer).__name__, tuple(reports))
    if not quiet and trainer.accelerator.is_main_process:
        print(report)
    return report


def build_trainer(trainer_class: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Builds a TRL trainer and accelerates it, also with LoRA on the head.

    TRL rejects adapters on the head, since its own fused head does not compute them. They are
    hidden from it while it builds the trainer.

    Args:
        trainer_class: SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer.
        model: A transformers model or a `peft.PeftModel`, not a name: adapters of the head are
            those of `model`, or of peft_config.
        *args: Further positional arguments of the trainer.
        **kwargs: Further keyword arguments of the trainer.

    Returns:
        The trainer, after `accelerate_trainer(trainer, quiet=True)`.

    Raises:
        ImplementationUnavailable: As `accelerate_trainer`.
        TypeError: model is no torch.nn.Module.
        ValueError: precompute_ref_log_probs, with a model whose adapter on the head is the
            reference: TRL computes it while the trainer is built, without the head's adapter.

    Example:
        >>> from tilewright.integrations.trl import build_trainer
        >>> lora = LoraConfig(target_modules=["q_proj", "lm_head"])  # doctest: +SKIP
        >>> trainer = build_trainer(
        ...     SFTTrainer, model, args=arguments, peft_config=lora
        ... )  # doctest: +SKIP
    """
    require_trl()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {model!r}; load it by from_pretrained"
        )
    base = getattr(model, "get_base_model", lambda: model)()
    _check_reference(model, base, (*args, *kwargs.values()))
    with _adapters_hidden(base):
        trainer = trainer_class(model, *args, **kwargs)
    accelerate_trainer(trainer, quiet=True)
    return trainer


@contextlib.contextmanager
def _adapters_hidden(model: Any) -> Iterator[None]:
    """Inside, the model's output embeddings are its dense head."""

    def get_output_embeddings(self):
        head = type(self).get_output_embeddings(self)
        return getattr(head, "base_layer", head)

    model.get_output_embeddings = MethodType(get_output_embeddings, model)
    try:
        yield
    finally:
        del model.get_output_embeddings


# ---- what is checked


def _check_reference(model: Any, base: Any, given: tuple) -> None:
    """TRL precomputes with a copy of the model's adapters, unless a reference is among `given`."""
    adapted = hasattr(model, "peft_config") and hasattr(base.get_output_embeddings(), "base_layer")
    if (
        adapted
        and any(getattr(v, "precompute_ref_log_probs", None) is True for v in given)
        and not any(isinstance(v, nn.Module) for v in given)
    ):
        raise ValueError(
            "precompute_ref_log_probs must be False where a reference adapter is on the head, got "
            "True: TRL would compute it without the head's adapter"
        )


def require_trl() -> None:
    """Raises ImplementationUnavailable if TRL is missing or of another version."""
    if reason := platform.no_module("trl"):
        raise ImplementationUnavailable(reason)
    version = importlib.metadata.version("trl")
    if not version.startswith(f"{TRL}."):
        raise ImplementationUnavailable(
            f"trl must be of version {TRL}, whose fused head is known, got {version}"
        )


def _check(trainer: str, model: Any) -> None:
    choices = _choices(model)
    if choices is None:
        raise ImplementationUnavailable(
            f"trainer must be one whose {type(model).__name__} has TRL's fused head (SFTTrainer, "
            f"DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer), got {trainer}"
        )
    if not choices["logit_scale"] > 0:
        raise ImplementationUnavailable(
            f"the scale of {type(model).__name__}'s logits must be positive, got "
            f"{choices['logit_scale']}"
        )
    if unknown := set(choices["outputs"]) - set(heads.OUTPUTS):
        raise ImplementationUnavailable(
            f"outputs of the fused head must be among {list(heads.OUTPUTS)}, got {sorted(unknown)}"
        )
    head = model.get_output_embeddings()
    heads.resolve(head)
    heads.check_adapters(head)


def _choices(model: Any) -> Mapping[str, Any] | None:
    """TRL's choices for this model's fused head, or None if it has none."""
    ours = getattr(model, OURS, None)
    function = _trl_forward(model) if ours is None else ours.trl_forward
    code = getattr(function, "__code__", None)
    if function is None or code is None or "fused_lm_head" not in code.co_varnames:
        return None
    variables = inspect.getclosurevars(function).nonlocals
    return variables if set(CHOICES) <= variables.keys() else None


def _trl_forward(model: Any) -> Callable | None:
    """The function that TRL gave the model, below accelerate's autocast."""
    bound = model.__dict__.get("_original_forward", model.__dict__.get("forward"))
    return getattr(bound, "__func__", None)


# ---- the forward


def fuse(model: Any, context: Callable = contextlib.nullcontext) -> tuple[str, ...]:
    """Replaces TRL's fused head of a model, once. Returns what it computes of a token.

    context: what the head and the backbone run in.
    """
    choices = _choices(model)
    assert choices is not None
    if OURS not in model.__dict__:
        forward = model.__dict__[OURS] = _forward(model, choices, context)
        model.forward = MethodType(forward, model)
    return tuple(choices["outputs"])


def _forward(model: Any, choices: Mapping[str, Any], context: Callable) -> Callable:
    """A forward with the contract of TRL's. context: what the fused part runs in."""
    theirs, trl_function = model.forward, _trl_forward(model)
    scaling = Scaling(
        choices["temperature"],
        choices["final_logit_softcapping"],
        choices["logit_scale"],
        choices["cast_lm_head_to_fp32"],
    )

    # `generate` and Trainer read the signature.
    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, **kwargs):
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels}
            return theirs(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        with context():
            return _fused(self, choices, scaling, labels, shift_labels, args, kwargs)

    vars(forward)["trl_forward"] = trl_function
    return forward


def _fused(model, choices, scaling: Scaling, labels, shift_labels, args, kwargs) -> Any:
    """TRL's FusedCausalLMOutput."""
    from trl.trainer.utils import FusedCausalLMOutput

    num_tokens = kwargs.pop("num_items_in_batch", None)
    kwargs["use_cache"] = False
    if getattr(choices["text_config"], "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    states = getattr(model, choices["backbone_attr"])(*args, **kwargs)
    x = states.last_hidden_state
    if shift_labels is None:
        x, labels = x[:, :-1], labels[:, 1:]
    else:
        labels = shift_labels
    statistics = token_statistics(
        model.get_output_embeddings(),
        x,
        labels,
        scaling,
        choices["outputs"],
        getattr(model, policies.EXPECTED, None),
    )
    mask = (labels != -100).to(statistics["log_probs"].device)
    loss = -statistics["log_probs"].sum() / (
        mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    )
    auxiliary = None
    if kwargs.get("output_router_logits"):
        config = choices["text_config"]
        auxiliary = _router_loss(states.router_logits, config, kwargs.get("attention_mask"))
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * auxiliary
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=auxiliary, **statistics)


def token_statistics(
    head: nn.Module,
    x: torch.Tensor,
    labels: torch.Tensor,
    scaling: Scaling,
    outputs: Any,
    expected: policies.Expected | None = None,
) -> dict[str, torch.Tensor]:
    """`head.statistics` of tokens x [B, S, H] with labels [B, S], computed for the tokens that have
    a label: [B, S], 0 where the label is -100. Differentiable even if no token has a label.
    """
    mask = (labels != -100).to(x.device)
    cast = contextlib.nullcontext()
    if scaling.fp32:
        x, cast = x.float(), torch.autocast(x.device.type, enabled=False)
    with cast:
        told = None if expected is None else expected.at(mask)
        rows = heads.statistics(head, x[mask], labels.to(x.device)[mask], scaling, outputs, told)
    return {
        name: t.new_zeros(mask.shape).masked_scatter(mask.to(t.device), t)
        for name, t in rows.items()
    }


def _router_loss(router_logits: Any, config: Any, attention_mask: Any) -> torch.Tensor:
    """num_experts: as TRL reads it; also a name of gpt-oss's and Mixtral's num_local_experts in the
    versions of transformers that `accelerate` takes.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss: Any = load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
    )
    return loss
