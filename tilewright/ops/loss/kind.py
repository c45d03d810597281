"""A kind of loss on a language model's head, from a function of the statistics of its rows alone:
`kind_op` adds the public function, which takes what `linear_logprob` takes.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.core import checks
from tilewright.core.registry import Case, Judged, Op, instead_of
from tilewright.core.takes import takes
from tilewright.kernels.loss.operators import Stats, Wanted
from tilewright.ops.loss import head_cases
from tilewright.ops.loss.head import HEAD, JUDGED, RANKS, SIZES, HeadRows, head_op
from tilewright.ops.loss.logprob import ARGMAX, SHARED, linear_logprob, scaling_of

# What every kind takes beside its options: what linear_logprob takes beside its own.
COMMON = [
    p
    for p in inspect.signature(linear_logprob, eval_str=True).parameters.values()
    if p.name not in ARGMAX
]
PER_TOKEN = "[*T]"  # a declared shape: that of the targets
DOC = """{about}

Statistics are computed in float32, without all logits. Differentiable once in x, weight, bias,
lora_A and lora_B; backward recomputes the logits: 8 T H V flops. Autocast as in
`linear_cross_entropy`.

Args:
    x, weight, target, bias, ignore_index: as in `linear_cross_entropy`.
{options}    lora_A, lora_B, lora_scale, temperature, softcap, group: as in `linear_logprob`.
    fp32_logits, chunk_size: as in `linear_cross_entropy`.
    implementation: "auto", or one of triton, cpp, eager.

Returns:
    [...] fp32 (fp64 for fp64), 0 where target is ignore_index; a tuple of these for a kind with
    several results.

Raises:
    TypeError, ValueError, IndexError, ImplementationUnavailable: as `linear_cross_entropy`.

Example:
    >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    >>> loss = {name}(x, weight, torch.tensor([0, 3]))
"""


def kind_op(
    name: str,
    kind: Callable,
    cases: tuple[Case, ...],
    *,
    wanted: Wanted = Wanted(),  # noqa: B008 (a constant)
    judged: Judged = JUDGED,
    atol: Callable | Mapping[torch.dtype, float] = head_cases.atol,
    **declared: Any,
) -> Op:
    """The op of a kind of loss, and its public function of this name, which `Op.public` is.

    Ignored rows get 0, and rows whose target is out of range NaN, whatever the kind returns there;
    results that are not floating point stay as they are.

    Args:
        name: the op's and the function's name. They belong to the kind's module.
        kind: (Stats, its options) -> a tensor [T], or a tuple of several, in plain PyTorch,
            differentiable in the statistics. Its options have annotations and defaults. Its
            docstring says what it computes, then has a line for each option, `name: ...`.
        cases: the contract's cases; `head_cases.case` makes one.
        wanted: statistics beside log_sum and picked.
        judged, atol: as in `Op`.
        declared: a declaration for each option of the kind, in the language of `core.takes`
            (but it names no constants). A tensor that is declared [*T] reaches the kind as [T].

    Returns:
        The op.

    Raises:
        TypeError: An option has no declaration, annotation or default, or a name that is taken; or
            what is declared is no option.

    Example:
        >>> def squared(stats, scale: float = 1.0):
        ...     return scale * (stats.picked - stats.log_sum) ** 2
        >>> op = kind_op("linear_squared", squared, (), scale="number")
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> loss = op.public(x, weight, torch.tensor([0, -100]), scale=0.5)
        >>> f"{loss[0]:.4f} {loss[1]:.4f}"  # (log 4)^2 / 2
        '0.9609 0.0000'
    """
    options = _options(name, kind, declared)

    def rows(stats: Stats, valid: torch.Tensor, own: dict[str, Any]) -> tuple:
        outputs = kind(stats, **own)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(_masked(name, t, valid) for t in outputs)

    def public(
        x, weight, target, *, lora_A, lora_B, lora_scale, temperature, softcap, implementation, **of
    ):
        own = {p.name: of.pop(p.name) for p in options}
        for n, value in own.items():
            if PER_TOKEN in declared[n] and isinstance(value, torch.Tensor):
                own[n] = value.reshape(-1)
        scaling = scaling_of(temperature, softcap)
        head = HeadRows.of(x, weight, target, adapter=(lora_A, lora_B, lora_scale), **of)
        outputs = op.pick(implementation, x)(head, scaling, wanted, own)
        return outputs[0] if len(outputs) == 1 else outputs

    parameters = [*COMMON[:3], *options, *COMMON[3:]]
    public.__signature__ = inspect.Signature(parameters)
    public.__annotations__ = {p.name: p.annotation for p in parameters}
    public.__name__ = public.__qualname__ = name
    public.__module__ = kind.__module__
    public.__doc__ = _documented(name, kind, options)
    taking = takes(*SIZES, *RANKS, **HEAD, **declared, **SHARED)(public)
    # Within "products" autocast is off, as implementations need it.
    cast = checks.autocast("products", "x", "weight", "bias", "lora_A", "lora_B")(taking)
    op = head_op(name, cast, rows, cases, judged, atol=atol)  # which `public` picks from
    return op


def _options(name: str, kind: Callable, declared: Mapping[str, Any]) -> list[inspect.Parameter]:
    """The kind's own, as keywords of the public function."""
    _, *own = inspect.signature(kind, eval_str=True).parameters.values()
    names, of = [p.name for p in own], f"of {kind.__name__}()"
    taken = {p.name for p in COMMON} | set(inspect.signature(kind_op).parameters)
    for n in declared:
        if n not in names:
            raise TypeError(f"{name}: {n} is declared, but is no option {of}{instead_of(n, names)}")
    for p in own:
        if p.name in taken:
            raise TypeError(
                f"{name}: option {p.name} {of} has the name of an argument of all kinds, or of "
                "kind_op()"
            )
        if p.name not in declared:
            raise TypeError(
                f'{name}: option {p.name} {of} must be declared, such as {p.name}="number"'
            )
        if p.annotation is p.empty or p.default is p.empty:
            raise TypeError(f"{name}: option {p.name} {of} must have an annotation and a default")
    return [p.replace(kind=p.KEYWORD_ONLY) for p in own]


def _masked(name: str, t: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Rows of a result, by what `targets.presence` says of their targets."""
    # Multiplied by `valid`, a sum over rows would be the loss of each.
    checks.shape(f"a result of {name}'s kind", t, tuple(valid.shape), "a number for each row")
    return torch.where(valid == 0, 0.0, t * valid) if t.is_floating_point() else t


def _documented(name: str, kind: Callable, options: list[inspect.Parameter]) -> str:
    """The kind's docstring, with its options among the arguments of all kinds."""
    about, own = inspect.cleandoc(kind.__doc__ or ""), ""
    names = "|".join(p.name for p in options)
    if options and (matched := re.search(rf"^({names})\b[\w, ]*:", about, re.MULTILINE)):
        about, own = about[: matched.start()], about[matched.start() :]
    own = textwrap.indent(own.strip() + "\n", "    ") if own else ""
    return DOC.format(name=name, about=about.strip(), options=own)
