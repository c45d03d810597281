"""One call for a whole model: `accelerate`, its report, and `restore`."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.core import checks
from tilewright.core.platform import newer_than_tested
from tilewright.core.registry import PINS, ImplementationUnavailable
from tilewright.integrations.transformers import causal_lm, layers, linear_attention
from tilewright.integrations.transformers.attention import eager_attention
from tilewright.integrations.transformers.errors import NAME
from tilewright.integrations.transformers.functions import own_function
from tilewright.integrations.transformers.instance import (
    as_before,
    check_restorable,
    is_replaced,
    on_plain_numbers,
    put_back,
    replace_forward,
)
from tilewright.integrations.transformers.tables import OTHERS, register_once, with_other
from tilewright.integrations.transformers.versions import require_transformers
from tilewright.nn.experts import why_not
from tilewright.ops import OPS

PARTS = ("norm", "rope", "mlp", "attention", "linear_attention", "experts", "loss")
# A call through `ops.attention` costs more host time than PyTorch's, which shows where one token is
# generated at a time.
LEFT_ON_CPU = {"attention": "on a CPU generation would be slower, though training may be faster"}
REPORT = "_tilewright_report"  # of the last call, on the model that was given
BEFORE = "_tilewright_before"  # a model's attention and experts implementations before
# Each layer of these would be computed by what the model had before.
ATTENTION_OF_THEIR_OWN = {
    **dict.fromkeys(
        (
            "axk2", "bigbird_pegasus", "deepseek_v32", "deepseek_v4", "doge", "dots3_note_text",
            "glm_moe_dsa", "hy_v4", "qwen4_exp", "qwen4_exp_text",
        ),
        "computes with its attention mask, which is not built",
    ),
    **dict.fromkeys(("inkling_text", "inkling2_text"), "has a position bias"),
    "layoutlm": "makes a mask of its own",
}  # fmt: skip


class Change(NamedTuple):
    """part: one of PARTS.   modules: how many, by class name.   by: what computes them now."""

    part: str
    modules: dict[str, int]
    by: str


class Report(NamedTuple):
    """What `accelerate` did to a model.

    model: its class name.
    changed: the parts that this library computes now.
    left: the parts that it does not, and why, by part.
    notes: a sentence if the installed transformers is newer than those tested.
    """

    model: str
    changed: tuple[Change, ...]
    left: dict[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"accelerate: {self.model}"]
        for part, modules, by in self.changed:
            names = ", ".join(f"{n} {name}" for name, n in modules.items())
            rows.append(f"  changed  {part:<16}  {names}: {by}")
        rows += [f"  left     {part:<16}  {reason}" for part, reason in self.left.items()]
        rows += [f"  note     {note}" for note in self.notes]
        return "\n".join(rows)


def accelerate(
    model: nn.Module,
    *,
    parts: Collection[str] | None = None,
    logits: str = "eval",
    quiet: bool = False,
) -> Report:
    """Computes a transformers model's norms, rotary embedding, MLPs, attention, linear attention,
    experts and loss by this library's ops.

    Changes this instance alone: no class and no module of transformers is patched. Parameters and
    the keys of `state_dict` stay the same; `save_pretrained`, `copy.deepcopy`, pickle, adapters and
    quantized layers work as before (projections are called as before). What a class computes is
    found by evaluating its forward on a few numbers; what no op computes is left, with the reason.
    Norms and MLPs of other libraries' classes are left too if their code may compute something else
    in another dtype, for another length or in another mode: only plain arithmetic is replaced. A
    second call first undoes the first. Numerics are those of the ops: float32 inside, rounded once.

    - norm: every RMSNorm, QK norms and Gemma's 1 + weight included, by `ops.rmsnorm`, and those
      with a gate by `ops.rmsnorm_gated`.
    - rope: `apply_rotary_pos_emb` of each attention layer, by `ops.rope`. The model's own function
      applies tables that require a gradient, as those of a learned embedding.
    - mlp: the gate of SwiGLU and GeGLU MLPs, merged or not, by `ops.silu_mul` and `ops.gelu_mul`.
    - attention, experts: `attn_implementation` and `experts_implementation` "tilewright"; see
      `register`. The model gets a copy of its configuration, which may belong to other models too.
    - linear_attention: the chunked rule and the short convolution of Qwen3-Next and its like, by
      `ops.gated_delta_rule` and `ops.causal_conv1d`. Packed documents (`cu_seq_lens_q` or
      `seq_idx`) do not see each other; transformers' own functions carry the state of one into the
      next. `position_ids` alone separate no documents in these layers, and a model that packs by
      them warns once.
    - loss: where labels are given, `ops.linear_cross_entropy` of hidden states and head, honoring
      num_items_in_batch, ignore_index, shift_labels, logits_to_keep and softcaps. Logits are not
      built, and `output.logits` is None; a tuple (return_dict=False) still contains them. Where all
      labels are ignored the loss is 0, not NaN. A head with adapters, quantized weights or hooks,
      and a model with a loss_function of its own, compute logits and loss as before, decided at
      each call.

    Args:
        model: A transformers model, or a module that contains one (as of PEFT), before FSDP or
            another wrapper derives classes from its modules. Weights may be on the meta device.
        parts: Names in PARTS; None: all, but attention on a CPU, where nothing is gained. Named
            parts are changed wherever an op can compute them.
        logits: "eval": calls with labels return no logits in training mode, but do in evaluation
            mode, for metrics; "never": evaluation mode returns none either, and a tuple has None;
            "always": the loss is left alone.
        quiet: Prints no report. Only rank 0 prints.

    Returns:
        The report, which is also printed.

    Raises:
        ImplementationUnavailable: transformers is missing or too old.
        TypeError: The model is no torch.nn.Module, or parts is a str.
        ValueError: An unknown part or value of logits.

    Example:
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> from tilewright.integrations.transformers import accelerate, restore
        >>> config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=32,
        ...     intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config)
        >>> print(accelerate(model, parts=("norm",), quiet=True))
        accelerate: LlamaForCausalLM
          changed  norm              5 LlamaRMSNorm: rmsnorm[cpp]
          left     rope              not among the parts asked for
          left     mlp               not among the parts asked for
          left     attention         not among the parts asked for
          left     linear_attention  the model has none
          left     experts           the model has none
          left     loss              not among the parts asked for
        >>> restore(model)
    """
    require_transformers()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(parts, str):
        raise TypeError(f"parts must be a collection of names, got {parts!r}; write ({parts!r},)")
    for part in parts or ():
        if part not in PARTS:
            raise ValueError(f"parts must be among {list(PARTS)}, got {part!r}")
    checks.choice("logits", logits, causal_lm.LOGITS)
    restore(model)
    work = _Work(model, parts, logits)
    with on_plain_numbers():
        for part in PARTS:
            try:
                getattr(work, part)()
            except ImplementationUnavailable as error:  # transformers lacks what it stands on
                work.left[part] = str(error)
            except BaseException:
                restore(model)
                raise
    for (
        top
    ) in work.tops:  # its configuration names this library's entries, wherever it is unpickled
        if BEFORE in top.__dict__ and not is_replaced(top):
            replace_forward(top, as_before)
    left = {p: reason for p in PARTS if (reason := work.left.get(p))}
    notes = newer_than_tested("transformers")
    report = Report(type(model).__name__, tuple(work.changed), left, tuple(notes))
    model.__dict__[REPORT] = report
    if not quiet and _is_first_rank():
        print(report)
    return report


def report_of(model: nn.Module) -> Report | None:
    """The report of the `accelerate` call that is in effect for a model.

    Args:
        model: Any module, or one that contains the accelerated model.

    Returns:
        The report; None if the model was not accelerated, or was restored.

    Example:
        >>> import torch
        >>> from tilewright.integrations.transformers import accelerate, report_of
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> report_of(model) is None
        True
        >>> report = accelerate(model, quiet=True)
        >>> report_of(model) is report
        True
    """
    reports = (module.__dict__.get(REPORT) for module in model.modules())
    return next((report for report in reports if report is not None), None)


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`: the model computes the same bits as before.

    Args:
        model: Any module; one that was not accelerated is left as it is.

    Returns:
        None. The model keeps its own copy of its configuration, with the former values.

    Raises:
        RuntimeError: Another tool has derived a class from an accelerated module's, as FSDP does;
            nothing is undone then.

    Example:
        >>> import torch
        >>> from tilewright.integrations.transformers import restore
        >>> restore(torch.nn.Linear(2, 2))
    """
    for module in model.modules():
        check_restorable(module)
    for module in model.modules():
        module.__dict__.pop(REPORT, None)
        before = module.__dict__.pop(BEFORE, None)
        if before is not None:
            for name, value in before.items():
                getattr(module, f"set_{name}_implementation")(value)
                _restore_copies(module, name, value)
        put_back(module)


def _restore_copies(model: Any, table: str, before: dict[str, str]) -> None:
    """Copies of modules (PEFT's of `modules_to_save`) have copies of the configuration."""
    attribute = f"_{table}_implementation"
    ours = {_chosen(table, other): other for other in before.values()}
    for module in model.modules():
        config = module.__dict__.get("config")
        if (name := getattr(config, attribute, None)) in ours:
            setattr(config, attribute, ours[name])


def _chosen(table: str, other: str) -> str:
    """This library's name in a table of transformers for a model that had another."""
    if table == "experts":
        return NAME
    return with_other(other) if other in OTHERS else other


@contextlib.contextmanager
def accelerated(
    *, parts: Collection[str] | None = None, logits: str = "eval", quiet: bool = False
) -> Iterator[list[Report]]:
    """Accelerates the transformers models that are built inside the block, by whatever code: from
    a constructor, `from_config` or `from_pretrained`.

    For trainers and recipes that build their model themselves, as those of TRL, axolotl and
    LLaMA-Factory. transformers has no hook for that; inside the block `PreTrainedModel.post_init`,
    which every model calls when it is built, calls `accelerate`, in all threads. Leaving the block
    undoes that; models built inside stay accelerated until `restore`.

    Args:
        parts: As in `accelerate`, as are logits and quiet.
        logits: See there.
        quiet: See there.

    Returns:
        A context manager whose value is a list, to which each model adds its report.

    Raises:
        TypeError, ValueError: As `accelerate`.

    Example:
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> from tilewright.integrations.transformers import accelerated
        >>> config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=32,
        ...     intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
        >>> with accelerated(quiet=True) as reports:
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> [report.model for report in reports]
        ['LlamaForCausalLM']
    """
    require_transformers()
    from transformers import PreTrainedModel

    options = {"parts": parts, "logits": logits, "quiet": quiet}
    accelerate(nn.Identity(), parts=parts, logits=logits, quiet=True)  # checks the arguments
    own, reports = PreTrainedModel.post_init, []

    def post_init(self, *args, **kwargs):
        own(self, *args, **kwargs)
        if not _is_part_of_a_model(self, sys._getframe(1)):
            reports.append(accelerate(self, **options))

    PreTrainedModel.post_init = post_init
    try:
        yield reports
    finally:
        PreTrainedModel.post_init = own


def _is_part_of_a_model(model, frame) -> bool:
    """Whether the constructor of another model is building this one."""
    from transformers import PreTrainedModel

    while frame is not None:
        other = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(other, PreTrainedModel) and other is not model:
            return True
        frame = frame.f_back
    return False


def _is_first_rank() -> bool:
    distributed = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    return not joined or distributed.get_rank() == 0


class _Work:
    """One call of `accelerate`. Each method does one part."""

    def __init__(self, model: nn.Module, parts: Collection[str] | None, logits: str):
        self.changed: list[Change] = []
        self.left: dict[str, str] = {}
        self.parts, self.logits = parts, logits
        self.modules = list(model.modules())
        self.tops = _models(model)
        kinds = [(p.device.type, p.dtype) for p in model.parameters() if p.is_floating_point()]
        device, self.dtype = kinds[0] if kinds else ("cpu", torch.float32)
        # Models are often built on a CPU or on meta, and moved later.
        cuda = torch.cuda.is_available() and device in ("cpu", "meta")
        self.device = "cuda" if cuda else "cpu" if device == "meta" else device

    def norm(self) -> None:
        def options(module):
            if layers.is_gated_norm(module):
                arguments = layers.gated_norm_options(module)
                return "rmsnorm_gated", arguments, layers.gated_norm_forward
            return "rmsnorm", layers.norm_options(module), layers.norm_forward

        self._replace("norm", layers.is_norm, options, layers.norm_unknown)

    def rope(self) -> None:
        def options(module):
            return "rope", layers.rope_reason(type(module)) or (), layers.rope_forward

        self._replace("rope", lambda m: layers.rotations_of(type(m)), options)

    def mlp(self) -> None:
        def options(module):
            arguments = layers.mlp_options(module)
            silu = isinstance(arguments, str) or arguments[0] == layers.SILU
            return "silu_mul" if silu else "gelu_mul", arguments, layers.mlp_forward

        self._replace("mlp", layers.is_mlp, options, layers.mlp_unknown)

    def loss(self) -> None:
        if self.logits == "always":
            self.left["loss"] = 'its logits were asked for (logits="always")'
            return

        if any(causal_lm.is_cpt(module) for module in self.modules):
            self.left["loss"] = "PEFT's CPT computes its loss from the logits"
            return

        def options(model):
            arguments = causal_lm.loss_reason(model) or (self.logits,)
            return "linear_cross_entropy", arguments, causal_lm.loss_forward

        tops = set(map(id, self.tops))
        self._replace("loss", lambda m: id(m) in tops, options)

    def _replace(self, part: str, is_one, options, unknown=None) -> None:
        """Replaces the forward of the modules for which `is_one` is true. `options(module)` is one
        op or several, the arguments of the function that makes the forward, or the reason why there
        is none, and that function.

        unknown: (module, *arguments) -> why it may compute something else elsewhere, or None.
        """
        modules = [m for m in self.modules if is_one(m)]
        if not modules:
            self.left[part] = "the model has none"
        if not modules or self._is_left(part):
            return
        changed: dict[str, Counter] = {}
        reasons: Counter = Counter()
        for module in modules:
            name = type(module).__name__
            ops, arguments, make = options(module)
            ops = (ops,) if isinstance(ops, str) else ops
            if isinstance(arguments, str):
                reasons[f"{name} {arguments}"] += 1
            elif "forward" in module.__dict__:
                reasons[f"{name} has a forward of its own instance"] += 1
            elif unknown and (reason := unknown(module, *arguments)):
                reasons[f"{name} {reason}"] += 1
            elif lacking := [op for op in ops if self._by(op) is None]:
                reasons[self._no_fused(" and ".join(lacking))] += 1
            else:
                replace_forward(module, make, *arguments)
                by = " and ".join(filter(None, map(self._by, ops)))
                changed.setdefault(by, Counter())[name] += 1
        self.changed += (Change(part, dict(names), by) for by, names in changed.items())
        if reasons:
            self.left[part] = "; ".join(f"{n} x {reason}" for reason, n in reasons.items())

    def attention(self) -> None:
        attentions = [m for m in self.modules if _attends(m)]
        tops = [m for m in self.tops if _asks_for(m, "attn")]
        if not attentions or not tops:
            self.left["attention"] = "the model has none that can be set"
        elif not self._is_left("attention"):
            for model in tops:
                reason = self._attention_reason(model)
                if reason:
                    self.left["attention"] = reason
                else:
                    names = Counter(type(m).__name__ for m in model.modules() if _attends(m))
                    self._set(model, "attention", "attn", names)

    def _attention_reason(self, model) -> str | None:
        config = model.config
        if config.is_encoder_decoder:
            return "encoder-decoder models have position biases and masks of their own"
        for kind in (config.model_type, config.get_text_config().model_type):
            if reason := ATTENTION_OF_THEIR_OWN.get(kind):
                return f"{kind} {reason}"
        if model.can_generate() and getattr(config, "is_decoder", None) is False:
            causal = {getattr(m, "is_causal", None) for m in self.modules}
            if False in causal and True not in causal:
                return "it generates with attention that is not causal (is_decoder is False)"
        for other in self._implementations(model, "attn").values():
            if other not in OTHERS and not other.startswith(NAME):
                return f"attn_implementation is {other!r}, which is not transformers' own"
            for cls in {type(m) for m in self.modules if _attends(m)}:
                if other == "eager" and not eager_attention(cls):
                    return f"the eager attention of {cls.__name__} is not found"
        return None if self._by("attention") else self._no_fused("attention")

    def linear_attention(self) -> None:
        def options(module):
            names = linear_attention.ops_of(type(module))
            if isinstance(names, str):
                return names, names, None
            fused = tuple(name for name in names if self._by(name))
            return fused or names, (fused,), linear_attention.linear_attention_forward

        self._replace("linear_attention", linear_attention.is_linear_attention, options)
        if self.parts is None or "linear_attention" in self.parts:
            for top in self.tops:
                for layer in linear_attention.first_recurrent_layers(top):
                    if "forward" not in layer.__dict__ and not is_replaced(layer):
                        replace_forward(layer, linear_attention.warning_forward)

    def experts(self) -> None:
        tables = [m for m in self.modules if _is_experts(m)]
        tops = [m for m in self.tops if _asks_for(m, "experts")]
        if not tables or not tops:
            self.left["experts"] = "the model has none"
        elif not self._is_left("experts"):
            reasons = {f"{type(m).__name__} {reason}" for m in tables if (reason := why_not(m))}
            if reasons or self._by("moe_mlp") is None:
                self.left["experts"] = "; ".join(sorted(reasons)) or self._no_fused("moe_mlp")
                return
            for model in tops:
                self._set(model, "experts", "experts", Counter(type(m).__name__ for m in tables))

    def _set(self, model, part: str, table: str, names: Counter) -> None:
        """Sets the model's attention or experts to this library's entry."""
        register_once()
        _own_config(model, self.modules)
        before = self._implementations(model, table)
        model.__dict__.setdefault(BEFORE, {})[table] = before
        by = self._by("attention" if table == "attn" else "moe_mlp") or ""
        others = sorted({other for other in before.values() if other in OTHERS})
        if table == "attn" and others:
            by += f", or {' and '.join(others)} for what it does not compute"
        chosen = {key: _chosen(table, other) for key, other in before.items()}
        getattr(model, f"set_{table}_implementation")(chosen)
        self.changed.append(Change(part, dict(names), by))

    def _implementations(self, model, table: str) -> dict[str, str]:
        """The names in the model's configuration, and in those within it."""
        configs = {"": model.config}
        configs |= {key: getattr(model.config, key, None) for key in model.config.sub_configs}
        names = {k: getattr(c, f"_{table}_implementation", None) for k, c in configs.items()}
        return {key: name for key, name in names.items() if name is not None}

    def _is_left(self, part: str) -> bool:
        """Notes the reason if this part was not asked for."""
        if self.parts is not None and part not in self.parts:
            self.left[part] = "not among the parts asked for"
        elif self.parts is None and self.device == "cpu" and part in LEFT_ON_CPU:
            self.left[part] = f"{LEFT_ON_CPU[part]}; parts=({part!r}, ...) changes it"
        return part in self.left

    def _by(self, op: str) -> str | None:
        """op[implementation] that `auto` takes; None if that is the eager twin."""
        name = PINS.get(op, "auto")
        if name == "auto":
            name = OPS[op].choose(self.device, self.dtype)
            if name == "eager":
                return None
        return f"{op}[{name}]"

    def _no_fused(self, op: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{op} has no fused implementation here ({dtype} on {self.device})"


def _models(model: nn.Module) -> list[Any]:
    """The outermost transformers models in a module."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [top for child in model.children() for top in _models(child)]


def _asks_for(model, table: str) -> bool:
    can_set = getattr(type(model), f"_can_set_{table}_implementation", None)
    return can_set is not None and can_set()


def _attends(module: nn.Module) -> bool:
    """Whether the module asks transformers' table for its attention."""
    own = own_function(type(module).forward)
    return own is not None and "ALL_ATTENTION_FUNCTIONS" in own.__code__.co_names


def _is_experts(module: nn.Module) -> bool:
    return all(name in module._parameters for name in ("gate_up_proj", "down_proj"))


def _own_config(model, modules: list[nn.Module]) -> None:
    """Gives a model a copy of its configuration, which may be shared with others: transformers
    keeps the names of implementations there.
    """
    if BEFORE in model.__dict__:
        return
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    for module in modules:
        config = module.__dict__.get("config")
        if config is not None and id(config) in memo:
            module.config = memo[id(config)]
