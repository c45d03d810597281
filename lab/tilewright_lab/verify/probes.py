"""Probes for leaks and stale caches: one thing is changed, and what must not depend on it is looked
at, in every module in the order in which they end. The first one that moves is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.bench import contract
from tilewright_lab.verify.diagnose import seen, window_of
from tilewright_lab.verify.modules import SLACK, Masks, attention_masks
from tilewright_lab.verify.record import Call, Recorder, leaves
from tilewright_lab.verify.scenes import Scene

STEPS = 3
GROWTH = 16  # of a difference that a module may make of one in its inputs


class Moved(NamedTuple):
    """path: the module.   text: a sentence.   units: by how much more than allowed.
    by: how far.
    """

    path: str
    text: str
    units: float
    by: float


def forward(model: nn.Module, modules: dict[str, nn.Module], batch: dict[str, Any]) -> Recorder:
    recorder = Recorder(modules, gradients=False)
    with torch.no_grad(), recorder.recording():
        model(**batch)
    return recorder


def _rows(value: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """The rows of a tensor [B, S, ...] or [B S, ...]; None for others."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    if value.shape[:2] == rows.shape:
        return value[rows]
    return value[rows.flatten()] if value.shape[0] == rows.numel() else None


def _difference(one: Any, other: Any, pick, pick_other=None) -> tuple[float, bool]:
    """Largest difference of float leaves, and whether integers differ, of the rows that `pick`
    takes.
    """
    worst, integers = 0.0, False
    others = leaves(other)
    for name, a in leaves(one).items():
        a, b = pick(a), (pick_other or pick)(others.get(name))
        if a is None or b is None or a.shape != b.shape or not a.numel():
            continue
        if torch.equal(a, b):
            continue
        if a.is_floating_point():
            worst = max(worst, contract.error(b, a)[0])
        else:
            integers = True
    return worst, integers


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in SLACK


def first_moved(pairs: list[tuple[Call, Call]], pick, pick_other=None, least=8) -> Moved | None:
    """The first module, in the order in which they ended, whose output moved though what it was
    given did not. Modules within which experts were chosen otherwise, by a rounding, are left out.

    least: how many roundings are allowed.
    """
    chosen: set[int] = set()
    outs: dict[int, float] = {}
    for a, b in pairs:
        into, given = _difference(a.arguments, b.arguments, pick, pick_other)
        out, made = _difference(a.output, b.output, pick, pick_other)
        outs[id(a)] = out
        if given or made or id(a) in chosen:
            chosen.add(id(a.parent))
            continue
        if not any(_is_float(pick(t)) for t in leaves(a.arguments).values()):
            # The model itself, given tokens alone: what its modules may make of a rounding adds up.
            into = max((outs.get(id(c), 0.0) for c in a.children), default=0.0)
        floats = [t.dtype for t in a.output_leaves().values() if t.dtype in SLACK]
        floats += [t.dtype for t in leaves(a.arguments).values() if _is_float(t)]
        dtype = max(floats, key=lambda d: torch.finfo(d).eps, default=torch.float32)
        allowed = max(least * SLACK[dtype], GROWTH * into)
        if out > allowed:
            return Moved(a.path, f"by {out:.2g} (allowed {allowed:.1e})", out / allowed, out)
    return None


class Probe(NamedTuple):
    """What is changed, what must stay, in words; the batches, and the rows that must stay."""

    changed: str
    stays: str
    before: dict[str, Any]
    after: dict[str, Any]
    rows: torch.Tensor


def probes(scenes: list[Scene], vocab: int, reach: int | None) -> Iterator[Probe]:
    """reach: how far back a token of the last layer sees, if every layer has a window."""
    for scene in scenes:
        batch = scene.without_labels()
        ids = batch["input_ids"]
        other = (ids + 1 + vocab // 3) % vocab
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        real = torch.ones_like(ids, dtype=torch.bool) if scene.kept is None else scene.kept

        def changing(where, batch=batch, ids=ids, other=other):
            return {**batch, "input_ids": torch.where(where, other, ids)}

        if scene.documents is None and scene.kept is None:
            last = at == ids.shape[1] - 1
            yield Probe("the last token", "the tokens before it", batch, changing(last), ~last)
            half = at >= ids.shape[1] // 2
            yield Probe("the second half", "the first half", batch, changing(half), ~half)
            if reach is not None and reach < ids.shape[1]:
                far = at >= reach
                text = f"tokens {reach} and later, beyond all windows"
                yield Probe("the first token", text, batch, changing(at == 0), far)
        if scene.kept is not None and not bool(scene.kept.all()):
            yield Probe("the padding", "the other tokens", batch, changing(~real), real)
        if scene.documents is not None:
            first = scene.documents == 0
            yield Probe(
                "the first document", "the documents after it", batch, changing(first),
                ~first & real,
            )  # fmt: skip


def draws(model: nn.Module, modules: dict[str, nn.Module], batch: dict[str, Any]) -> Moved | None:
    """The first module that computes another output when the same input is given again."""
    one, other = (forward(model, modules, batch).ended for _ in range(2))
    moved = first_moved(
        list(zip(one, other, strict=False)), lambda t: t if isinstance(t, torch.Tensor) else None
    )
    return (
        None
        if moved is None
        else moved._replace(
            text=f"two runs of the same input differ {moved.text}, so it draws random numbers"
        )
    )


def leak(model: nn.Module, modules: dict[str, nn.Module], probe: Probe) -> Moved | None:
    one, other = (forward(model, modules, b).ended for b in (probe.before, probe.after))
    if [c.key for c in one] != [c.key for c in other]:
        keys = {c.key: c for c in other}
        pairs = [(c, keys[c.key]) for c in one if c.key in keys]
    else:
        pairs = list(zip(one, other, strict=True))
    return first_moved(pairs, lambda t: _rows(t, probe.rows))


# ---- the masks of single modules


def mask_leaks(recorder: Recorder, masks: Masks, scene: Scene) -> Iterator[Moved]:
    """Calls each module that was given a mask again, with one token's hidden state changed, and
    looks at the tokens to which the reference's mask hides it.
    """
    for call in recorder.calls:
        mask = next(iter(attention_masks(masks.get(call.key, {})).values()), None)
        inner = (c for c in call.children if c.path.startswith(call.path))
        if mask is None or any(attention_masks(masks.get(c.key, {})) for c in inner):
            continue  # only the innermost modules
        moved = _probe_mask(recorder.modules[call.path], call, seen(mask), scene)
        if moved is not None:
            yield moved


@torch.no_grad()
def _probe_mask(module: nn.Module, call: Call, visible: torch.Tensor, scene: Scene) -> Moved | None:
    args, kwargs = call.arguments
    shape = scene.batch["input_ids"].shape
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != shape:
        return None
    S = shape[1]
    visible = visible.expand(shape[0], *visible.shape[1:])[:, 0]
    real = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    real = real if scene.kept is None else scene.kept
    for j in (0, S // 2, S - 1):
        changed = hidden.clone()
        changed[:, j] = hidden[:, j].flip(-1) * 1.5 + hidden[:, j].std()
        rows = ~visible[:, :, j] & real
        if not bool(rows.any()):
            continue
        outputs = []
        for value in (hidden.clone(), changed):
            if "hidden_states" in kwargs:
                outputs.append(module(*args, **{**kwargs, "hidden_states": value}))
            else:
                outputs.append(module(value, *args[1:], **kwargs))
        one, other = outputs
        move, _ = _difference(one, other, lambda t, rows=rows: _rows(t, rows))
        allowed = 4 * SLACK.get(hidden.dtype, SLACK[torch.float32])
        if move > allowed:
            text = f"token {j} moves tokens from which its mask hides it, {_why(visible, j, scene)}"
            text = f"{text}by {move:.2g} (allowed {allowed:.1e})"
            return Moved(call.path, text, move / allowed, move)
    return None


def _why(visible: torch.Tensor, j: int, scene: Scene) -> str:
    if scene.kept is not None and not bool(scene.kept[:, j].all()):
        return "as padding, "
    window = window_of(visible.unsqueeze(1)) if scene.documents is None else None
    if j == 0 and window is not None and scene.kept is None:
        return f"beyond the window of {window}, "
    if scene.documents is not None:
        return "in other documents, "
    return ""


# ---- caches


def _by_token(value: Any, B: int, S: int) -> torch.Tensor | None:
    """A tensor [B, S, ...] or [B S, ...] as the former; None for others."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    if value.dim() > 2 and value.shape[:2] == (B, S):
        return value
    return value.unflatten(0, (B, S)) if value.shape[0] == B * S else None


class Step(NamedTuple):
    """A part of a row, computed with a cache: until which token; calls of the full forward beside
    those with the cache; and what takes the part's rows of both.
    """

    end: int
    pairs: list[tuple[Call, Call]]
    whole: Callable[[Any], torch.Tensor | None]
    part: Callable[[Any], torch.Tensor | None]


def _decoding(model: nn.Module, modules: dict[str, nn.Module], scene: Scene) -> Iterator[Step]:
    """Most tokens at once, and the last ones one by one, with a cache."""
    ids = scene.batch["input_ids"]
    S = ids.shape[1]
    extra = {"attention_mask": torch.ones_like(ids)}
    full = forward(model, modules, {"input_ids": ids, **extra, "use_cache": False}).ended
    by_key = {c.key: c for c in full}
    kept: dict[str, Any] = {}
    at = 0
    for end in (S - STEPS, *range(S - STEPS + 1, S + 1)):
        batch = {
            "input_ids": ids[:, at:end], "use_cache": True, **kept,
            "attention_mask": extra["attention_mask"][:, :end],
        }  # fmt: skip
        recorder = Recorder(modules, gradients=False)
        with torch.no_grad(), recorder.recording():
            output = model(**batch)
        # Its name since transformers 5.24, and before.
        name = "cache" if hasattr(output, "cache") else "past_key_values"
        kept = {name: getattr(output, name, None)}
        if kept[name] is None:
            return

        def whole(t, part=slice(at, end)):
            t = _by_token(t, *ids.shape)
            return None if t is None else t[:, part]

        def step(t, n=end - at):
            return _by_token(t, len(ids), n)

        pairs = [(by_key[c.key], c) for c in recorder.ended if c.key in by_key]
        yield Step(end, pairs, whole, step)
        at = end


def stale_cache(model: nn.Module, modules: dict[str, nn.Module], scene: Scene) -> Moved | None:
    """Decodes the last tokens one by one with a cache, and compares with the full forward."""
    for step in _decoding(model, modules, scene):
        moved = first_moved(step.pairs, step.whole, step.part, least=32)
        if moved is not None:
            text = f"token {step.end - 1} computed from the cache differs from the full forward "
            return moved._replace(text=text + moved.text)
    return None


def cache_drift(model: nn.Module, modules: dict[str, nn.Module], scene: Scene) -> float:
    """How far roundings move a module's output between the full forward and decoding, until they
    decide over an expert.
    """
    worst = 0.0
    for step in _decoding(model, modules, scene):
        for a, b in step.pairs:
            out, made = _difference(a.output, b.output, step.whole, step.part)
            if made:
                return worst
            worst = max(worst, out)
    return worst
