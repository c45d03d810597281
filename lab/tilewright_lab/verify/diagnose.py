"""Why a module differs: faults are put into the reference, one at a time, and that with which it
agrees with the model is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch import nn

from tilewright.bench import contract
from tilewright_lab.verify.modules import Replayer, Row, attention_masks, kept_rows, observed
from tilewright_lab.verify.record import Call
from tilewright_lab.verify.reference import IGNORED, AdaptedLinear
from tilewright_lab.verify.result import apart
from tilewright_lab.verify.scenes import Scene
from tilewright_lab.verify.structure import base_of, spoken_bases

EPS = ("variance_epsilon", "eps")
SOME_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)
MOST_SUSPECTS = 8


class Diagnosis:
    """The diagnosis of one failing value of one call."""

    def __init__(self, call: Call, row: Row, scene: Scene, replayer: Replayer):
        self.call, self.row, self.scene, self.replayer = call, row, scene, replayer
        twin = replayer.twin
        module = twin.module(call.path)
        assert module is not None
        self.module: Any = module
        forwards = {
            c.path: m.forward for c in call.children if (m := twin.module(c.path)) is not None
        }
        self.own = observed(call, module.forward, forwards).get(row.what)

    def text(self) -> str:
        """A sentence's end, or ""."""
        if self.own is None:
            return ""
        return next(self._hypotheses(), "")

    def ratio(self) -> str:
        """What is said of a loss of which no cause is found."""
        if self.own is None or self.row.what != "output loss":
            return ""
        truth = self.replayer.replay(self.call).values["output loss"]
        return f"it is {apart(float(self.own.double() / truth), 1.0, 6)[0]} times that of float64"

    def _hypotheses(self) -> Iterator[str]:
        if self.row.what == "output loss":
            yield from self._loss()
        if isinstance(self.module, AdaptedLinear):
            yield from self._adapter()
        if hasattr(self.module, "inv_freq"):
            yield from self._rotary()
        yield from self._masks()
        yield from self._functions()
        yield from self._gate_and_up()
        yield from self._final_softcap()
        yield from self._attributes()
        if "top_k_index" in self.call.arguments[1] or len(self.call.arguments[0]) == 3:
            yield from self._experts()

    def _agrees(self, masks: dict[str, Any] | None = None, call: Call | None = None) -> bool:
        return self._is_near(
            self.replayer.replay(call or self.call, masks).values.get(self.row.what)
        )

    def _is_near(self, value: torch.Tensor | None) -> bool:
        if value is None or self.own is None or value.shape != self.own.shape:
            return False
        own, value = (kept_rows(t, self.scene.kept) for t in (self.own, value))
        error, _ = contract.error(own, value)
        return error <= 4 * self.row.budget and error < self.row.error / 4

    @contextlib.contextmanager
    def _with(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self.module, name)
        setattr(self.module, name, value)
        try:
            yield
        finally:
            setattr(self.module, name, before)

    # ---- single kinds

    def _attributes(self) -> Iterator[str]:
        for name, value in list(vars(self.module).items()):
            if name.startswith("_") or name == "training":
                continue
            spoken = "eps" if name in EPS else name
            others: tuple = (not value,) if isinstance(value, bool) else ()
            if name in EPS and isinstance(value, float):
                others = SOME_EPS
            for other in others:
                if other == value:
                    continue
                with self._with(name, other):
                    if self._agrees():
                        yield f"it agrees with {spoken} {other}; the configuration has {value}"

    def _rotary(self) -> Iterator[str]:
        """The base, from the angles of one position."""
        tables = {n: t for n, t in self.call.output_leaves().items() if t.dim() == 3}
        positions = self.call.arguments[1].get("position_ids")
        if positions is None and len(self.call.arguments[0]) > 1:
            positions = self.call.arguments[0][1]
        right = base_of(self.module.inv_freq)
        if len(tables) != 2 or positions is None or right is None:
            return
        at = (positions == 1).nonzero()
        if not len(at):
            return
        cos, sin = (t[tuple(at[0])].double() for t in tables.values())
        base = base_of(torch.atan2(sin, cos)[: cos.shape[-1] // 2])
        if base is not None and abs(base - right) > 0.05 * right:
            yield spoken_bases(base, right)

    def _adapter(self) -> Iterator[str]:
        module = self.module
        if module.weight.shape[0] == module.weight.shape[1]:
            with self._with("transposed", True):
                if self._agrees():
                    yield "it agrees with the transpose of the adapter's B A"
        with self._with("scales", [0.0] * len(module.scales)):
            if self._agrees():
                yield "it agrees with the layer without its adapter"
            bare = self.replayer.replay(self.call).values.get(self.row.what)
        whole = self.replayer.replay(self.call).values.get(self.row.what)
        if bare is None or whole is None or self.own is None:
            return
        delta = (whole - bare).flatten()
        share = float((self.own.double() - bare).flatten().dot(delta) / delta.dot(delta))
        with self._with("scales", [s * share for s in module.scales]):
            if self._agrees():
                yield f"it agrees with {apart(share, 1.0, 4)[0]} times the adapter's scale"

    def _masks(self) -> Iterator[str]:
        known = self.replayer.masks.get(self.call.key, {})
        given = next(iter(attention_masks(known).items()), None)
        if given is None:
            return
        name, mask = given
        visible = seen(mask)
        for text, other in _variants(visible, self.scene):
            if not torch.equal(other, visible.expand_as(other)):
                least = torch.finfo(mask.dtype).min
                changed = torch.zeros_like(other, dtype=mask.dtype).masked_fill(~other, least)
                if self._agrees({**known, name: changed}):
                    yield text

    def _functions(self) -> Iterator[str]:
        """Functions of transformers' module, as others write them."""
        names = vars(sys.modules[type(self.module).__module__])
        for name, text, function in FUNCTIONS:
            own = names.get(name)
            if own is None:
                continue
            names[name] = functools.partial(function, own)
            try:
                if self._agrees():
                    yield f"it agrees with {text}"
            except (RuntimeError, TypeError):  # the model calls it otherwise
                continue
            finally:
                names[name] = own

    def _gate_and_up(self) -> Iterator[str]:
        """The two halves of a gated MLP: outputs of inner modules, exchanged."""
        children = {c.path.rpartition(".")[2]: c for c in self.call.children}
        for pair in (("gate_proj", "up_proj"), ("w1", "w3"), ("gate_up_proj",) * 2):
            if not all(name in children for name in pair):
                continue
            gate, up = (children[name].output for name in pair)
            if gate is up:
                gate = up = torch.cat(gate.chunk(2, -1)[::-1], -1)
            new = dict(zip((id(children[name]) for name in pair), (up, gate), strict=True))
            inner = [
                dataclasses.replace(c, output=new.get(id(c), c.output)) for c in self.call.children
            ]
            if self._agrees(call=dataclasses.replace(self.call, children=inner)):
                yield "it agrees with gate and up swapped"

    def _final_softcap(self) -> Iterator[str]:
        """Another softcap of the logits, from the largest one."""
        config = getattr(self.module, "config", None)
        cap = getattr(config, "final_logit_softcapping", None)
        own = self.call.output_leaves().get("logits")
        if self.call.path or own is None or (cap is None and self.row.what != "output logits"):
            return
        right = self.replayer.replay(self.call).values["output logits"]
        at = int(right.abs().argmax())
        size, logit = abs(float(own.flatten()[at])), abs(float(right.flatten()[at]))
        if cap is not None:
            logit = cap * math.atanh(min(logit / cap, 1 - 1e-15))
        low, high = size, 1e9  # of a cap whose tanh makes `size` of `logit`
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if middle * math.tanh(logit / middle) < size else (low, middle)
            )
        if cap is None:
            for other in (float(f"{low:.3g}"), low):
                if size < logit and self._is_near(other * (right / other).tanh()):
                    yield f"it agrees with a final softcap of {other}; the configuration has none"
                    return
            return
        text = "it agrees with logits without the final softcap"
        for other in (None, float(f"{low:.3g}"), low):
            vars(config)["final_logit_softcapping"] = other
            try:
                if self._agrees():
                    said = f"it agrees with a final softcap of {other}" if other else text
                    yield f"{said}; the configuration has {cap}"
                    return
            finally:
                vars(config)["final_logit_softcapping"] = cap

    def _experts(self) -> Iterator[str]:
        tables = [p for p in self.module.parameters() if p.dim() >= 2]
        count = min((len(p) for p in tables), default=0)
        index = next(
            (
                t
                for t in (*self.call.arguments[0], *self.call.arguments[1].values())
                if isinstance(t, torch.Tensor) and t.dtype == torch.int64 and t.dim() == 2
            ),
            None,
        )
        if index is None or count < 2 or self.own is None:
            return
        value = self.replayer.replay(self.call).values.get(self.row.what)
        if value is None or value.shape != self.own.shape or len(value) != len(index):
            return
        off = (self.own.double() - value).abs().amax(-1)
        wrong = off > self.row.budget * max(float(value.square().mean().sqrt()), 1e-30)
        cleared = set(index[~wrong].unique().tolist())
        suspects = [e for e in index[wrong].unique().tolist() if e not in cleared and e < count]
        if len(suspects) < 2:
            suspects = index[wrong].unique().tolist()
        for a, b in combinations(suspects[:MOST_SUSPECTS], 2):
            with _swapped(tables, a, b):
                if self._agrees():
                    yield f"it agrees with experts {a} and {b} swapped"
                    return
        if 0 < len(suspects) < count:
            yield f"tokens of experts {suspects} alone differ"

    def _loss(self) -> Iterator[str]:
        batch = self.scene.batch
        labels = batch.get("labels")
        if labels is None or self.own is None:
            return
        truth = self.replayer.replay(self.call).values["output loss"]
        ratio = float(self.own.double() / truth)
        count = int((labels[:, 1:] != IGNORED).sum())
        total = batch.get("num_items_in_batch")
        tokens = labels.numel()
        divisor = count if total is None else int(total)
        said = {
            1 / divisor: f"it is normalized twice, by {divisor} once more",
            divisor: "it is a sum, not normalized",
            divisor / tokens: f"it is normalized by all {tokens} tokens, not by {divisor} targets",
        }
        if total is not None:
            said[divisor / count] = (
                f"it is normalized by the {count} targets here, not by num_items_in_batch {divisor}"
            )
            said[1 / count] = f"it is normalized twice, by the {count} targets and by {divisor}"
        for factor, text in said.items():
            if abs(ratio / factor - 1) < 0.01:
                yield f"{text} ({ratio:.4g} of float64)"
                return
        yield from self._labels(labels, divisor)

    def _labels(self, labels: torch.Tensor, divisor: int) -> Iterator[str]:
        """Labels at other places, in the logits of float64."""
        logits = self.replayer.replay(self.call).values.get("output logits")
        if logits is None or self.own is None:
            return
        S = labels.shape[1]
        shifts = {
            "that are not shifted": (logits, labels),
            "that are not shifted, without the last": (logits[:, :-1], labels[:, :-1]),
            "that are shifted twice": (logits[:, : S - 2], labels[:, 2:]),
        }
        for text, (at, target) in shifts.items():
            losses = nn.functional.cross_entropy(
                at.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            counts = {divisor, int((target != IGNORED).sum())}
            # Roundings of bfloat16 in the logits, which a mean over tokens makes smaller.
            if any(abs(float(self.own.double() * n / losses) - 1) < 2e-3 for n in counts):
                yield f"it agrees with labels {text}"
                return


def _interleaved(own, q, k, cos, sin, *args, **kwargs):
    """Rotates neighboring elements, where `own` rotates those half a head apart."""
    dim = kwargs.get("unsqueeze_dim", 1)
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].unsqueeze(dim) for t in (cos, sin))

    def rotated(x):
        part, rest = x[..., : 2 * half], x[..., 2 * half :]
        even, odd = part[..., ::2], part[..., 1::2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return torch.cat((pairs.flatten(-2), rest), -1)

    return rotated(q), rotated(k)


# A name of transformers' modules, a cause, and function(own, *args, **kwargs).
FUNCTIONS: tuple[tuple[str, str, Callable], ...] = (
    ("apply_rotary_pos_emb", "interleaved rotary embedding", _interleaved),
    (
        "apply_rotary_pos_emb",
        "keys without rotary embedding",
        lambda own, q, k, *args, **kwargs: (own(q, k, *args, **kwargs)[0], k),
    ),
    (
        "repeat_kv",
        "key and value heads that are tiled, where each is repeated",
        lambda own, x, n: x.repeat(1, n, 1, 1),
    ),
)


@contextlib.contextmanager
def _swapped(tables: list[nn.Parameter], a: int, b: int) -> Iterator[None]:
    def swap():
        for p in tables:
            p.data[[a, b]] = p.data[[b, a]].clone()

    swap()
    try:
        yield
    finally:
        swap()


def seen(mask: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S]: which keys a mask shows, of an additive or a boolean one."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def window_of(visible: torch.Tensor) -> int | None:
    """The window of a causal mask, by the first visible key of the last rows; None: none."""
    S = visible.shape[-1]
    first = visible[:, 0].double().argmax(-1)
    reach = int((torch.arange(S, device=first.device) - first).amax()) + 1
    rows = visible[:, 0].any(-1)
    full = bool((visible[:, 0, -1, 0] & rows[:, -1]).any())
    return None if full or reach >= S else reach


def _variants(visible: torch.Tensor, scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
    """Masks with one thing left out."""
    B, S = scene.batch["input_ids"].shape
    at = torch.arange(S, device=visible.device)
    apart = at[:, None] - at[None, :]
    causal = (apart >= 0)[None, None].expand(B, 1, S, S)
    kept = torch.ones_like(causal) if scene.kept is None else scene.kept[:, None, None, :]
    docs = scene.documents
    same = causal if docs is None else (docs[:, None, :, None] == docs[:, None, None, :])
    window = window_of(visible) if docs is None and scene.kept is None else _least(visible)
    within = torch.ones_like(causal) if window is None else (apart < window)[None, None]
    if window is not None:
        yield f"it agrees with attention without the window of {window}", causal & kept & same
        for other in (window - 1, window + 1):
            yield (
                f"it agrees with a window of {other}, where the configuration has {window}",
                causal & kept & same & (apart < other)[None, None],
            )
    if scene.kept is not None:
        yield "it agrees with attention that ignores the padding mask", causal & same & within
    if docs is not None:
        yield "it agrees with documents that see each other", causal & kept & within
    yield "it agrees with attention that is not causal", (kept & same).expand(B, 1, S, S)
    yield "it agrees with attention without any mask", torch.ones_like(causal)


def _least(visible: torch.Tensor) -> int | None:
    """The window of a mask with documents or padding: the most keys that a query sees, if several
    see as many.
    """
    counts = visible[:, 0].sum(-1)
    most = int(counts.max())
    return most if int((counts == most).sum()) > 2 else None


def scaled(row: Row) -> str:
    """What a factor that all elements share says."""
    factor = 1 + row.factor
    if row.rest > 2 * row.budget or abs(row.factor) <= row.factor_budget or factor <= 0:
        return ""
    power = math.log2(factor)
    if abs(power - round(power)) < 1e-3 and round(power):
        return f"it is 2^{round(power)} times the right one"
    if not row.where:  # every number is a multiple of another
        return ""
    part = math.log2(abs(row.factor)) if row.factor else 0.0
    if abs(part - round(part)) < 0.05:
        sign = "+" if row.factor > 0 else "-"
        return f"it is 1 {sign} 2^{round(part)} times the right one"
    return f"it is {apart(factor, 1.0, 6)[0]} times the right one"
