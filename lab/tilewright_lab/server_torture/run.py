"""A schedule on a server that is killed at its places, beside one that is not disturbed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tilewright_lab.server_torture.client import Answer, Client, Server, Stuck, write_server
from tilewright_lab.server_torture.points import Kill, Place, arm, mark_of
from tilewright_lab.server_torture.schedule import Call, Wave, waves

MODULE = "tilewright_lab.server_torture.launcher"
EVERY = 3  # optimizer steps between checkpoints: some kills are between two, some after one
TWO = {"nproc_per_node": 2, "data_parallel_mode": "fsdp2"}
SESSION = b"SESSION"  # in place of the session's name, which the server draws
# Whole tables of what the log holds, without ids and times; and sizes, since DCP's files have paths
# and checkpoints a date.
QUERIES = {
    "request": "SELECT model, seq, kind, error, waits FROM requests LEFT JOIN results USING (number) "
    "ORDER BY requests.number",
    "model": "SELECT name, state, why, next, ran FROM models ORDER BY created",
    "path": "SELECT path, json_remove(about, '$.size') FROM paths WHERE path NOT LIKE 'session/%' "
    "ORDER BY created, path",
}


class Setting(NamedTuple):
    """What servers are started with.

    seed: of the schedule.   ranks: of the workers.   python: what starts processes; None: Python.
    """

    folder: pathlib.Path
    model: pathlib.Path
    seed: Sequence[int]
    ranks: int = 1
    python: str | None = None


class Said(NamedTuple):
    """An answer to a call of the wave of a number."""

    number: int
    call: Call
    content: bytes


@dataclasses.dataclass
class Record:
    """What a server has done.

    answers: in the order of the schedule.   lists: of checkpoints.   log: rows of its tables.
    files: digests of adapters, by path.   seconds: from each kill to the next result, by number.
    stuck: the number of a kill after which nothing came, and what is known of that.
    """

    answers: list[Said] = dataclasses.field(default_factory=list)
    lists: list[bytes] = dataclasses.field(default_factory=list)
    log: dict[str, list[bytes]] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    stuck: tuple[int, str] | None = None


def planned(place: Place) -> list[Place]:
    """The kills that lead to one: what is computed again was computed, and killed, before."""
    if place.point != "replayed":
        return [place]
    return [Place(place.process, "committed", place.kind), place]


def play(
    name: str, setting: Setting, every: Sequence[Place], kills: Mapping[int, Sequence[Place]]
) -> Record:
    """Runs the schedule around `every` place on a server of its own, below the setting's folder.

    kills: number of a place -> those that are to happen there; {}: none.
    """
    changes = {"checkpoint_every": EVERY, **(TWO if setting.ranks == 2 else {})}
    file = write_server(setting.folder / name, setting.model, changes)
    python = setting.python
    options = [] if python is None else ["--python", python]
    record, session, number = Record(), "", -1
    try:
        with Server(file, MODULE, options, python) as server, server.client() as client:
            session = client.post("create_session", {"tags": []}).value["session_id"]
            for wave in waves(every, setting.seed, session, str(setting.model)):
                number = wave.number
                _play(client, server.root, wave, kills.get(number, ()), record)
            record.lists = [_list(client, said) for said in record.answers[:2]]
            times = client.times
    except Stuck as stuck:
        record.stuck = number, str(stuck)
        return record
    plain = session.encode()
    record.answers = [s._replace(content=s.content.replace(plain, SESSION)) for s in record.answers]
    record.lists = [content.replace(plain, SESSION) for content in record.lists]
    _read(record, server.root, plain)
    _time(record, server.root, kills, times)
    return record


def _play(
    client: Client, root: pathlib.Path, wave: Wave, kills: Sequence[Place], record: Record
) -> None:
    """Sends a wave. Raises Stuck, also where its kill is not reached."""
    armed = kills if wave.model is not None else ()
    if wave.model is not None and kills:
        arm(root, [Kill(wave.number, place, wave.model) for place in kills])
    futures = [client.post(call.path, call.body) for call in wave.calls]
    for call, future in zip(wave.calls, futures, strict=True):
        answer = client.result(future, protobuf=call.protobuf)
        content = f"{answer.status} ".encode() + _content(answer)
        record.answers.append(Said(wave.number, call, content))
    for place in armed:
        client.until(
            mark_of(root, wave.number, place.point).exists, f"{place.name} was not reached"
        )


def _content(answer: Answer) -> bytes:
    """Without ids of requests, which are drawn."""
    if answer.protobuf:
        return answer.body
    value = answer.value
    if isinstance(value, dict):
        value.pop("request_id", None)
    return json.dumps(value, sort_keys=True).encode()


def _list(client: Client, said: Said) -> bytes:
    """The checkpoints of a model, without times and sizes."""
    path = f"/api/v1/training_runs/{said.call.model}/checkpoints"
    rows = client.call("GET", path).value["checkpoints"]
    for row in rows:
        del row["time"], row["size_bytes"]
    return json.dumps(rows).encode()


# ---- what a server has left


def _read(record: Record, root: pathlib.Path, session: bytes) -> None:
    db = sqlite3.connect(root / "log.sqlite")
    for what, query in QUERIES.items():
        rows = [json.dumps(row).encode() for row in db.execute(query)]
        record.log[what] = [row.replace(session, SESSION) for row in rows]
    db.close()
    for path in sorted(root.glob("models/*/sampler_weights/*/adapter/*.safetensors")):
        name = str(path.relative_to(root)).replace(session.decode(), SESSION.decode())
        record.files[name] = hashlib.sha256(path.read_bytes()).hexdigest()


def _time(
    record: Record,
    root: pathlib.Path,
    kills: Mapping[int, Sequence[Place]],
    answered: Sequence[float],
) -> None:
    """Seconds from each kill to the next result: of the API, that a client has got; of the workers,
    that is in the log.
    """
    db = sqlite3.connect(root / "log.sqlite")
    finished = [at for (at,) in db.execute("SELECT finished FROM results")]
    db.close()
    for number, each in kills.items():
        place = each[-1]
        at = float(mark_of(root, number, place.point).read_text())
        times = answered if place.process == "api" else finished
        record.seconds[number] = min(t for t in times if t > at) - at


# ---- the verdict


def differences(want: Record, got: Record) -> Iterator[tuple[int, str]]:
    """What a server has done that one which was not disturbed has not, with the number of the kill
    at or after which it was.
    """
    for a, b in zip(want.answers, got.answers, strict=False):
        if a.content != b.content:
            yield b.number, f"the result of {b.call.name} is {_short(b, a)}"
    if got.stuck is not None:
        yield got.stuck
        return
    last = got.answers[-1].number
    if got.lists != want.lists:
        yield last, f"the lists of checkpoints are {got.lists!r}, not {want.lists!r}"
    for what in QUERIES:
        a, b = want.log[what], got.log[what]
        at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if len({*pair}) > 1), None)
        if at is None and len(a) == len(b):
            continue
        at = min(len(a), len(b)) if at is None else at
        number = got.answers[min(at, len(got.answers) - 1)].number if what == "request" else last
        yield number, f"{what} {at} of the log is {b[at : at + 1]}, not {a[at : at + 1]}"
    if waits := [row for row in got.log["request"] if json.loads(row)[-1]]:
        yield last, f"{waits[0].decode()} waits"
    if got.files != want.files:
        odd = sorted({*got.files.items()} ^ {*want.files.items()})[0][0]
        yield last, f"{odd} has other bits, or is not there"


def _short(got: Said, want: Said) -> str:
    a, b = want.content, got.content
    if got.call.protobuf:
        return f"{len(b)} bytes of protobuf that are not the {len(a)} that they were"
    at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if len({*pair}) > 1), 0)
    begin = max(0, at - 80)
    return f"... {b[begin : at + 120].decode()} ..., not ... {a[begin : at + 120].decode()} ..."


def verdict(want: Record, got: Record, count: int) -> dict[int, list[str]]:
    """What is wrong, by the number of a kill: that of the first difference, since what follows from
    it differs too.   count: of the kills.
    """
    wrong: dict[int, list[str]] = {}
    for number, sentence in differences(want, got):
        # What is only seen at the end may be of any of them: the last stands for it.
        wrong.setdefault(min(max(number, 0), count - 1), []).append(sentence)
    first = min(wrong, default=None)
    return {} if first is None else {first: wrong[first]}


def batch(setting: Setting, every: Sequence[Place]) -> tuple[Record, dict[int, list[str]]]:
    """Kills at each of these places of one server, and what is wrong by their numbers."""
    want = play("reference", setting, every, {})
    if want.stuck is not None:
        raise Stuck(f"without a kill: {want.stuck[1]}")
    got = play("killed", setting, every, {i: planned(p) for i, p in enumerate(every)})
    return got, verdict(want, got, len(every))
