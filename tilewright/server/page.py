"""The page of a server in a browser: an owner's models, losses, queue and checkpoints.

HTML without scripts, which loads nothing. All text is escaped, since clients choose some of it.
"""

from __future__ import annotations

import datetime
import html
import json
import math
import pathlib
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

from tilewright.server.frames import unpacked
from tilewright.server.log import Log, Model, Waiting

REFRESH = 10  # seconds
# The most that is shown: models, pictures, passes of one, requests that wait, checkpoints.
MODELS, PICTURES, PASSES, QUEUED, CHECKPOINTS = 100, 20, 500, 100, 200
METADATA = 200  # characters of a model's
# Bytes of results that one page reads, so that the first one is quick too: what was read is kept,
# and the next page goes on. And losses that are kept.
READ, KEPT = 32e6, 100_000
WIDTH, HEIGHT = 380, 170  # of a picture, and the edges of what is drawn in it
LEFT, RIGHT, TOP, BOTTOM = 50, 372, 10, 142
FEW = 60  # points of a picture up to which each is a dot that tells its loss
STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #596373; --edge: #d8dde5; --back: #fff;
  --tile: #f5f7f9; --line: #1f77b4; --good: #1a7f37; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #9aa5b4; --edge: #333c48;
  --back: #14181e; --tile: #1b2129; --line: #6cb4ee; --good: #4cc46a; --bad: #ff7b72; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back);
  margin: 0 auto; max-width: 1200px; padding: 1em; }
h1 { font-size: 1.4em; margin: 0; } h2 { font-size: 1.1em; margin: 1.8em 0 .4em; }
p { margin: .3em 0; } small, p { color: var(--dim); } small { display: block; }
table { border-collapse: collapse; width: 100%; }
th { color: var(--dim); font-weight: normal; font-size: .87em; }
th, td { border-bottom: 1px solid var(--edge); padding: .35em 1.2em .35em 0; text-align: left;
  vertical-align: top; font-variant-numeric: tabular-nums; }
th, time { white-space: nowrap; }
td[data-name=model], td[data-name=base], td[data-name=path], small { overflow-wrap: anywhere; }
.live, .ready { color: var(--good); } .failed { color: var(--bad); } .ended { color: var(--dim); }
main { display: grid; gap: 1em; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
figure { margin: 0; padding: .7em; background: var(--tile); border-radius: 6px; min-width: 0; }
figcaption { overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; font-size: 12px; fill: var(--dim); }
path { stroke: var(--edge); } circle { fill: var(--line); }
polyline { fill: none; stroke: var(--line); stroke-width: 1.5; stroke-linejoin: round; }
@media (max-width: 640px) {
  thead { display: none; } tr { display: block; padding: .5em 0; }
  tr { border-bottom: 1px solid var(--edge); }
  td { display: grid; grid-template-columns: 7.5em 1fr; border: 0; padding: .1em 0; }
  td::before { content: attr(data-name); color: var(--dim); font-size: .87em; } }
"""


class _Html(str):
    """Text that is HTML already."""


def _escaped(text: object) -> _Html:
    return text if isinstance(text, _Html) else _Html(html.escape(str(text)))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> _Html:
    """empty: what is said in place of a table without rows."""
    body = [
        "".join(
            f'<td data-name="{_escaped(name)}"><div>{_escaped(cell)}</div></td>'
            for name, cell in zip(head, row, strict=True)
        )
        for row in rows
    ]
    if not body:
        return _Html(f"<p>{_escaped(empty)}</p>")
    titles = "".join(f"<th>{_escaped(name)}</th>" for name in head)
    lines = "\n".join(f"<tr>{cells}</tr>" for cells in body)
    return _Html(f"<table><thead><tr>{titles}</tr></thead><tbody>\n{lines}\n</tbody></table>")


def _with_note(text: object, note: object) -> _Html:
    return _Html(f"{_escaped(text)}<small>{_escaped(note)}</small>") if note else _escaped(text)


def _state(state: str, why: str | None = None) -> _Html:
    """state: of a model, or of the workers, with what follows a colon as the reason."""
    state, _, told = state.partition(": ")
    return _with_note(_Html(f'<b class="{_escaped(state)}">{_escaped(state)}</b>'), why or told)


def _when(seconds: float) -> _Html:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return _Html(f"<time>{moment:%Y-%m-%d %H:%M:%S}</time>")


def _lasting(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _bytes(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def _rest(count: int, shown: int) -> _Html:
    """A sentence on what is left out, if anything is."""
    return _Html(f"<p>{count - shown} more not shown.</p>" if count > shown else "")


# ---- losses


def _loss(body: bytes) -> float:
    """The loss of a pass by the tokens that add to it: the log may no longer have their weights."""
    value, arrays = unpacked(body)
    each = arrays["elementwise_loss"]
    tokens = int(each.reshape(len(each), -1).any(1).sum())
    return value["metrics"]["loss:sum"] / max(tokens, 1)


class _Seen:
    """What pages of a log have read of requests that have run, which does not change.

    losses: by number.   steps: by model, of its first requests, so many: optimizer steps.
    """

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.steps: dict[tuple[str, float], tuple[int, int]] = {}

    def steps_of(self, log: Log, model: Model) -> int:
        key = model.name, model.created
        ran, steps = self.steps.get(key, (0, 0))
        if model.ran > ran:
            steps += log.count(model.name, "optim_step", after=ran)
            self.steps[key] = model.ran, steps
        return steps

    def passes_of(self, log: Log, model: Model, most: float) -> tuple[list[tuple[int, float]], int]:
        """(place among the model's requests, loss) of the last passes, and how many there are,
        some of which may be dropped, or not read yet.

        most: bytes that are read.
        """
        last, points = log.last(model.name, "forward_backward", PASSES), []
        for number, place, size in last:
            loss = self.losses.get(number)
            if loss is None and size is not None and most > 0:
                most -= size
                loss = self.losses[number] = _loss(log.body(number))
            if loss is not None:
                points.append((place, loss))
        return points[::-1], len(last)


# By log; the API has one.
_SEEN: weakref.WeakKeyDictionary[Log, _Seen] = weakref.WeakKeyDictionary()


def _ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers, the first below `low` and the last above `high`."""
    # What differs by less than a thousandth is drawn as level.
    span = max(high - low, max(abs(low), abs(high)) / 1e3) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= span / 4)
    first = math.floor(low / step)
    return [i * step for i in range(first, max(math.ceil(high / step), first + 1) + 1)]


def _picture(points: list[tuple[int, float]]) -> _Html:
    """Losses over places, as an SVG element."""
    places, losses = zip(*points, strict=True)
    ticks = _ticks(min(losses), max(losses))
    width = max(places[-1] - places[0], 1)

    def x(place: int) -> float:
        return LEFT + 6 + (RIGHT - LEFT - 12) * (place - places[0]) / width

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - ticks[0]) / (ticks[-1] - ticks[0])

    grid = "".join(f"M{LEFT} {y(tick):.1f}H{RIGHT}" for tick in ticks)
    labels = [
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        for tick in ticks
    ]
    ends = {places[0]: "start"} | ({places[-1]: "end"} if len(points) > 1 else {})
    labels += [
        f'<text x="{LEFT if at == "start" else RIGHT}" y="{BOTTOM + 17}" text-anchor="{at}">'
        f"{place}</text>"
        for place, at in ends.items()
    ]
    middle = (LEFT + RIGHT) // 2
    labels.append(f'<text x="{middle}" y="{BOTTOM + 17}" text-anchor="middle">requests run</text>')
    line = " ".join(f"{x(place):.1f},{y(loss):.1f}" for place, loss in points)
    dots = [
        f'<circle cx="{x(place):.1f}" cy="{y(loss):.1f}" r="2.5">'
        f"<title>request {place}: {loss:.5g}</title></circle>"
        for place, loss in points[: FEW if len(points) <= FEW else 0]
    ]
    drawn = "".join([f'<path d="{grid}"/><polyline points="{line}"/>', *dots, *labels])
    return _Html(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="losses of passes">{drawn}</svg>'
    )


def _figure(model: Model, points: list[tuple[int, float]], count: int) -> _Html:
    told = f"{count} pass{'es' * (count != 1)}"
    told = told if len(points) == count else f"{len(points)} of {told}"
    if not points:
        told = f"{told}: results are no longer kept" if count else "no pass yet"
        return _Html(f"<figure><figcaption>{_with_note(model.name, told)}</figcaption></figure>")
    note = f"loss per token, now {points[-1][1]:.4g}; {told}"
    caption = f"<figcaption>{_with_note(model.name, note)}</figcaption>"
    return _Html(f"<figure>{caption}{_picture(points)}</figure>")


# ---- the rest


def _models(models: Sequence[Model], seen: _Seen, log: Log) -> _Html:
    rows = []
    for model in models[:MODELS]:
        metadata = model.about.get("user_metadata")
        note = json.dumps(metadata, ensure_ascii=False) if metadata else ""
        if len(note) > METADATA:
            note = f"{note[:METADATA]} …"
        name, state = _with_note(model.name, note), _state(model.state, model.why)
        steps, created = seen.steps_of(log, model), _when(model.created)
        rank = model.about["rank"] or "all weights"
        rows.append([name, state, rank, steps, model.ran, created])
    head = ("model", "state", "rank", "steps", "requests run", "created (UTC)")
    return _table(head, rows, "There is no model yet.")


def _blocked(waiting: Waiting, log: Log, workers: str) -> str:
    """What a request waits for."""
    if why := log.blocked(waiting.id):
        return why
    if waiting.seq is not None and waiting.next is not None and waiting.seq > waiting.next:
        return f"seq_id {waiting.next} runs first"
    if workers != "ready":
        return f"the workers: {workers}"
    return "runs now" if waiting.attempts else "its turn"


def _queue(waiting: Sequence[Waiting], log: Log, workers: str) -> _Html:
    now = time.time()
    rows = [
        [
            one.kind,
            one.model,
            "" if one.seq is None else one.seq,
            _with_note(_when(one.arrived), f"{_lasting(now - one.arrived)} ago"),
            _blocked(one, log, workers),
        ]
        for one in waiting[:QUEUED]
    ]
    head = ("request", "model", "seq_id", "since (UTC)", "waits for")
    return _table(head, rows, "No request waits.")


def _size(file: pathlib.Path) -> int:
    """Bytes of the log's files: what was not moved to the first one yet lies beside it."""
    files = (file, file.with_name(f"{file.name}-wal"))
    return sum(one.stat().st_size for one in files if one.is_file())


def page(requests: Log, owner: str, *, base: str, about: Mapping[str, object]) -> str:
    """The page of what came with one key, HTML. It changes nothing, and nothing waits for it.

    base: the name of the weights below all models.   about: further facts of the server, by name.
    """
    seen = _SEEN.setdefault(requests, _Seen())
    if len(seen.losses) > KEPT:
        seen.losses.clear()
    with requests.apart() as log:
        models = [model for model in log.models() if model.owner == owner]
        # The newest first, and what has ended last.
        models.sort(key=lambda model: (model.state == "ended", -model.created))
        drawn = [model for model in models if model.state == "live"][:PICTURES]
        figures = [
            _figure(model, *seen.passes_of(log, model, READ / len(drawn))) for model in drawn
        ]
        workers, waiting = log.fact("workers") or "starting", log.pending(owner)
        saved = [one for one in log.paths(owner) if "size" in one.about][::-1]
        facts = {"workers": _state(workers), "base": base, "log": _bytes(_size(log.file)), **about}
        checkpoints = [
            [
                one.path,
                one.about["kind"],
                _bytes(one.about["size"]),
                _when(one.created),
                "" if one.expires is None else _when(one.expires),
            ]
            for one in saved[:CHECKPOINTS]
        ]
        head = ("path", "kind", "size", "saved (UTC)", "until")
        sections = [
            _table([*facts], [[*facts.values()]], ""),
            "<h2>Models</h2>",
            _models(models, seen, log),
            _rest(len(models), MODELS),
            "<h2>Losses</h2><main>" if figures else "<main>",
            *figures,
            "</main><h2>Queue</h2>",
            _queue(waiting, log, workers),
            _rest(len(waiting), QUEUED),
            "<h2>Checkpoints</h2>",
            _table(head, checkpoints, "Nothing is saved yet."),
            _rest(len(saved), CHECKPOINTS),
        ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="refresh" content="{REFRESH}">',
            f"<title>Tilewright</title><style>{STYLE}</style></head><body>",
            "<h1>Tilewright</h1>",
            f"<p>As of {_when(time.time())} UTC, and again every {REFRESH} seconds.</p>",
            *sections,
            "</body></html>\n",
        ]
    )
