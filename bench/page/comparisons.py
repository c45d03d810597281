"""Chooses the row to show for each case, and compares it with the other providers' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.page.raw import Group, Source, newest
from bench.page.text import in_order, number
from tilewright import selection
from tilewright.bench import report, sources, timing
from tilewright.bench.peers import peer_of
from tilewright.bench.providers import BASELINES
from tilewright.core import platform


@dataclass(frozen=True)
class Pair:
    """`auto` and another provider in the same rounds. `which`: the pass, forward + backward if the
    op has a backward, else forward.
    """

    group: Group
    other: dict[str, Any]
    pass_name: str

    @property
    def auto(self) -> dict[str, Any]:
        assert self.group.auto is not None  # or there were no pair
        return self.group.auto

    @property
    def ratio(self) -> float:
        """The other provider's time divided by that of `auto`; above 1, `auto` is ahead."""
        return self.other[self.pass_name]["median_ms"] / self.auto[self.pass_name]["median_ms"]

    @property
    def interval(self) -> tuple[float, float]:
        """p20 and p80 of the rounds' ratios, widened to the ratio of the medians; of rows without
        the same rounds, the ends of their ranges against each other.
        """
        a, b = self.auto[self.pass_name], self.other[self.pass_name]
        ours, theirs = a.get("samples_ms") or (), b.get("samples_ms") or ()
        if ours and len(ours) == len(theirs):
            each = [y / x for x, y in zip(ours, theirs, strict=True)]
            low, high = timing.quantile(each, 0.2), timing.quantile(each, 0.8)
            return min(low, self.ratio), max(high, self.ratio)
        return b["p20_ms"] / a["p80_ms"], b["p80_ms"] / a["p20_ms"]

    @property
    def equal(self) -> bool:
        return holds_one(self.interval)

    @property
    def rounds(self) -> int | None:
        """The number of rounds; None if a row has no samples."""
        return (
            min(len(r[self.pass_name].get("samples_ms") or ()) for r in (self.auto, self.other))
            or None
        )


def holds_one(interval: tuple[float, float]) -> bool:
    return interval[0] <= 1 <= interval[1]


def verdict(p: Pair) -> str:
    """What a comparison says of `auto`."""
    return "equal" if p.equal else "faster" if p.ratio > 1 else "slower"


def spread(pairs: Sequence[Pair]) -> str:
    """The mean ratio with the mean of the intervals; "" for no comparison."""
    if not pairs:
        return ""
    low, high = (timing.geomean(p.interval[i] for p in pairs) for i in (0, 1))
    assert low is not None and high is not None
    text = f"{number(timing.geomean(p.ratio for p in pairs))} [{number(low)}, {number(high)}]"
    return f"equal, {text}" if holds_one((low, high)) else text


# Comparisons that are in no headline, because nobody runs the baseline: (op, provider) -> why.
NOBODY_RUNS = {
    ("aqn_noise", name): "who needs noise without a seed of its own calls torch.randn, not a "
    "generator written in PyTorch"
    for name in ("eager", "compile")
}


def flaws(source: Source, op: str) -> list[str]:
    """Why a result is no evidence about today's code: it is in no headline."""
    reasons, table = [], selection.operations()
    if op not in table or source.meta.get("source") != sources.digest(table[op], source.device[0]):
        reasons.append("code changed since")
    if source.meta.get("dirty") is not False:
        reasons.append("local changes" if source.meta.get("dirty") else "local changes unknown")
    return reasons


def pair(group: Group, provider: str) -> Pair | None:
    """The comparison of two rows; None unless both have a time."""
    auto, other = group.auto, group.rows[provider]
    assert auto is not None, "only groups with `auto` are compared"
    if auto["status"] != "ok" or other["status"] != "ok":
        return None
    for pass_name in ("forward_backward", "forward"):
        if auto[pass_name] and other[pass_name]:
            return Pair(group, other, pass_name)
    return None


def is_tried(row: dict[str, Any] | None) -> bool:
    return row is not None and row["status"] != "unavailable"


@dataclass
class Device:
    """The newest measurements of one device, and how `auto` compares.

    auto: the newest row of `auto` for each (op, case, dtype), with its group, whatever its status.
    pairs: `auto` against each provider, in the newest rounds that had both and in which `auto` was
        the same implementation as in its newest row; none if that row has no time.
    """

    kind: str
    name: str
    groups: list[Group]
    auto: dict[tuple[str, str, str], Group] = field(init=False)
    pairs: dict[tuple[str, str, str], dict[str, Pair]] = field(init=False)

    def __post_init__(self):
        self.groups = sorted(self.groups, key=_registry_order)
        tried = [g for g in self.groups if is_tried(g.auto)]
        self.auto = newest(tried, lambda g: (g.op, g.case, g.dtype))
        self.pairs = {name: self._pairs(name, tried) for name in self.timed}

    def _pairs(self, name: tuple[str, str, str], tried: list[Group]) -> dict[str, Pair]:
        row = self.auto[name].auto
        assert row is not None  # as it was tried
        same = [
            g
            for g in tried
            if (g.op, g.case, g.dtype) == name and g.auto and g.auto["provider"] == row["provider"]
        ]
        known = dict.fromkeys(p for g in same for p in g.rows)
        chosen = {
            p: newest(
                [g for g in same if is_tried(g.rows.get(p)) and not g.rows[p]["auto"]], lambda g: 0
            )
            for p in known
        }
        pairs = {p: compared for p, g in chosen.items() if g and (compared := pair(g[0], p))}
        return {p: pairs[p] for p in sorted(pairs, key=provider_order)}

    @property
    def timed(self) -> dict[tuple[str, str, str], Group]:
        return {n: g for n, g in self.auto.items() if g.auto and g.auto["status"] == "ok"}

    @property
    def title(self) -> str:
        return f"{self.name} ({self.kind})"

    @property
    def slug(self) -> str:
        """The name as it is in names of files."""
        return platform.slug(self.name)

    @property
    def capability(self) -> str | None:
        """The compute capability, from its results."""
        return next(
            (g.source.meta["capability"] for g in self.groups if g.source.meta.get("capability")),
            None,
        )

    def best_peer(self, name: tuple[str, str, str]) -> Pair | None:
        """The fastest provider other than eager, compiled eager and tilewright's
        implementations.
        """
        peers = [
            p for provider, p in self.pairs.get(name, {}).items() if _is_peer(name[0], provider)
        ]
        return min(peers, key=lambda p: p.ratio, default=None)

    def best_ways(self, name: tuple[str, str, str]) -> dict[str, Pair]:
        """Each provider's comparison; of a peer with several ways, that with its fastest."""
        best: dict[str, Pair] = {}
        for provider, p in self.pairs.get(name, {}).items():
            peer = peer_of(provider)
            if peer not in best or p.ratio < best[peer].ratio:
                best[peer] = p
        return best

    def dtypes(self) -> list[str]:
        return in_order(dtype for _, _, dtype in self.auto)


def _is_peer(op: str, provider: str) -> bool:
    if provider in ("eager", "compile"):
        return False
    table = selection.operations()
    return provider in BASELINES or op not in table or provider not in table[op].names()


def provider_order(name: str) -> tuple[int, str]:
    return (BASELINES.index(name) if name in BASELINES else len(BASELINES)), name


def _registry_order(group: Group) -> tuple:
    """The registry's order of ops and cases; those that it no longer has come last, by name."""
    ops = selection.operations()
    op = ops.get(group.op)
    cases = [c.name for c in op.cases] if op else []
    return (
        list(ops).index(group.op) if op else len(ops),
        group.op,
        cases.index(group.case) if group.case in cases else len(cases),
        group.case,
    )


def behind(device: Device) -> list[Pair]:
    """Every provider that is faster than `auto`, the largest lead first."""
    slower = [p for pairs in device.pairs.values() for p in pairs.values() if p.ratio < 1]
    return sorted(slower, key=lambda p: (p.ratio, report.key(p.other)))


def recovered(device: Device) -> list[Pair]:
    """Older rounds in which `auto` was behind, for pairs in which it is now ahead: the newest may
    be luck.
    """
    pairs = []
    for group in device.groups:
        for provider, now in device.pairs.get((group.op, group.case, group.dtype), {}).items():
            same = group.auto is not None and group.auto["provider"] == now.auto["provider"]
            then = pair(group, provider) if same and provider in group.rows else None
            if then and now.ratio >= 1 > then.ratio:
                pairs.append(then)
    return pairs


def newest_rows(device: Device) -> dict[tuple[str, str, str, str], Group]:
    """The group of the newest attempted row, for each (op, case, dtype, provider)."""
    chosen: dict[tuple[str, str, str, str], Group] = {}
    for group in device.groups:
        for provider, row in group.rows.items():
            key = (group.op, group.case, group.dtype, provider)
            if is_tried(row) and (key not in chosen or group.source.age > chosen[key].source.age):
                chosen[key] = group
    return chosen
