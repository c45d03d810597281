"""The log of a server: every request before it is acknowledged, every result before it is sent.

An SQLite file on a local disk. The API appends requests and reads results; rank 0 of the workers
takes requests, in the order of each model, and appends results. It is their queue, and what a
server that was killed goes on from: a model is its last checkpoint, and the requests that have run
since.

A transaction is on the disk when it returns (write-ahead log, synchronous FULL). What requests and
results hold is compressed with zstandard.
"""

from __future__ import annotations

import copy
import hashlib
import json
import pathlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import zstandard

from tilewright.server.frames import packed

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
-- used: when a client asked for it last.   next: the number in its sequence of the request that may
-- run.   ran: how many requests have run.   saved: how many of these the checkpoint in `folder` has.
CREATE TABLE IF NOT EXISTS models (
  name TEXT PRIMARY KEY, owner TEXT NOT NULL, about TEXT NOT NULL, state TEXT NOT NULL,
  why TEXT, created REAL NOT NULL, used REAL NOT NULL, next INTEGER NOT NULL DEFAULT 0,
  ran INTEGER NOT NULL DEFAULT 0, saved INTEGER NOT NULL DEFAULT 0, folder TEXT
);
-- waits: 1 until there is a result.   ran: its place among the requests of its model that have run.
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
  model TEXT NOT NULL, seq INTEGER, kind TEXT NOT NULL, digest BLOB NOT NULL, body BLOB,
  arrived REAL NOT NULL, waits INTEGER NOT NULL, ran INTEGER, attempts INTEGER NOT NULL DEFAULT 0,
  UNIQUE (model, seq)
);
CREATE INDEX IF NOT EXISTS waiting ON requests (number) WHERE waits;
CREATE INDEX IF NOT EXISTS history ON requests (model, ran) WHERE ran IS NOT NULL;
-- category: of an error.
CREATE TABLE IF NOT EXISTS results (
  number INTEGER PRIMARY KEY, error TEXT, category TEXT, body BLOB, finished REAL NOT NULL,
  sent REAL
);
CREATE TABLE IF NOT EXISTS paths (
  path TEXT PRIMARY KEY, owner TEXT NOT NULL, about TEXT NOT NULL, created REAL NOT NULL,
  expires REAL
);
"""
VERSION = "2"
AHEAD = 1 << 16  # numbers that a client may be ahead in its sequence
State = Literal["new", "live", "failed", "ended"]
# Kinds of requests for samples: which the workers score; and which the engine for sampling begins.
SAMPLES = SAMPLE, GENERATE = "sample", "generate"
SYNC = "sync/"  # before models that engines are to be sent, among facts: the names of weights
CLIENTS = "clients/"  # before samplers that several clients share: how many have joined
ASLEEP = "asleep"  # the fact that the workers do nothing; "" when they do


class Request(NamedTuple):
    """A request as the workers get it.

    number: in the order of arrival.   seq: its number in the sequence of its model, or None.
    body: as `frames.packed`.   attempts: how often it was begun before.   ran: see `Log.ran`.
    """

    number: int
    id: str
    model: str
    seq: int | None
    kind: str
    body: bytes
    attempts: int
    ran: int | None = None


REQUEST = "r.number, r.id, r.model, r.seq, r.kind, r.body, r.attempts, r.ran"


class Result(NamedTuple):
    """What became of a request: a body as `frames.packed`, or an error and whose it is."""

    body: bytes | None = None
    error: str | None = None
    category: str | None = None
    expired: bool = False


class Model(NamedTuple):
    """A row of models.   about: JSON of what it was created with."""

    name: str
    owner: str
    about: Any
    state: str
    why: str | None
    created: float
    used: float
    next: int
    ran: int
    saved: int
    folder: str | None


class Path(NamedTuple):
    """A row of paths.   about: JSON.   expires: when it is dropped; None: never."""

    path: str
    about: Any
    created: float
    expires: float | None


class Waiting(NamedTuple):
    """A request without a result.   next: the number that the sequence of its model is at."""

    id: str
    kind: str
    model: str
    seq: int | None
    arrived: float
    attempts: int
    next: int | None


class Conflict(ValueError):
    """A number of a sequence that was used with another content."""


def _squeezed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _digest(kind: str, body: bytes) -> bytes:
    """What a request and its repetition have in common."""
    return hashlib.sha256(kind.encode() + b"\0" + body).digest()


def _whole(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _json(about: Any) -> str:
    return json.dumps(about, allow_nan=False)


class Log:
    """The log in a folder, which is made if need be. Threads may share it.

    file: its path.   most_gb: the size from which on `full` is true.
    """

    def __init__(self, folder: pathlib.Path, most_gb: float = float("inf")):
        self.file, self.most = folder / "log.sqlite", most_gb * 1e9
        self._db = self._connected("FULL")
        # What may be lost when the machine fails: a process that is killed loses nothing.
        self._hints = self._connected("NORMAL")
        self._lock = threading.RLock()
        with self._writing() as db:
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute("INSERT OR IGNORE INTO facts VALUES ('version', ?)", (VERSION,))
        if (version := self.fact("version")) != VERSION:
            raise ValueError(f"{self.file}: has version {version}, and this server reads {VERSION}")

    def _connected(self, synchronous: str) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, timeout=60, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {synchronous}")
        return db

    def close(self) -> None:
        for db in (self._db, self._hints):
            db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _read(self, query: str, *given: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, given).fetchall()

    # ---- facts: what the processes of a server tell each other

    def fact(self, name: str) -> str | None:
        rows = self._read("SELECT value FROM facts WHERE name = ?", name)
        return rows[0][0] if rows else None

    def facts(self, prefix: str) -> dict[str, str]:
        """By the rest of their names."""
        rows = self._read(
            "SELECT name, value FROM facts WHERE name >= ? AND name < ?", prefix, f"{prefix}\uffff"
        )
        return {name.removeprefix(prefix): value for name, value in rows}

    def settle(self, name: str, value: str) -> None:
        """Forgets a fact, unless it is another one by now."""
        with self._lock:
            self._hints.execute("DELETE FROM facts WHERE name = ? AND value = ?", (name, value))

    def tell(self, name: str, value: str) -> None:
        with self._lock:
            self._hints.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    # ---- the API's side

    def append(
        self,
        model: str,
        seq: int | None,
        kind: str,
        body: bytes,
        owner: str,
        *,
        creates: Any = None,
        same: bytes | None = None,
    ) -> str:
        """Adds a request, and returns its id. One that is there already, with the same number of
        the same model and the same body, is not added again: its id is returned. So is that of a
        model's end, which has no number.

        creates: what the model is created with, of a request that does. With `named` one that has
            had other requests ends, and another one of its name begins.
        same: the part of the body that a repetition has, too; None: all of it.

        Raises:
            Conflict: The number was used with another body, or the sequence is behind it, or it is
                far ahead.
        """
        digest = _digest(kind, same or body)
        with self._writing() as db:
            replaced = bool(creates and creates.get("named")) and self._has_run(db, model)
            if not replaced and (known := self._known(model, seq, kind, digest)) is not None:
                return known
            if creates is not None:
                self._make_way(db, model)
                now = time.time()
                db.execute(
                    "INSERT INTO models (name, owner, about, state, created, used, next) "
                    "VALUES (?, ?, ?, 'new', ?, ?, ?)",
                    (model, owner, _json(creates), now, now, seq or 0),
                )
            else:
                if seq is not None:
                    self._check_place(db, model, seq)
                db.execute("UPDATE models SET used = ? WHERE name = ?", (time.time(), model))
            return self._added(db, (owner, model, seq, kind, digest, _squeezed(body)), waits=True)

    @staticmethod
    def _check_place(db: sqlite3.Connection, model: str, seq: int) -> None:
        """Raises Conflict for a number that would never be next."""
        row = db.execute("SELECT next FROM models WHERE name = ?", (model,)).fetchone()
        if row is not None and not row[0] <= seq < row[0] + AHEAD:
            raise Conflict(
                f"seq_id is {seq}; the next of {model} is {row[0]}, and accepted are less than "
                f"{row[0] + AHEAD}"
            )

    @staticmethod
    def _has_run(db: sqlite3.Connection, model: str) -> bool:
        """Whether there was more of a model than its creation."""
        query = "SELECT 1 FROM requests WHERE model = ? AND (seq > 0 OR seq IS NULL) LIMIT 1"
        return db.execute(query, (model,)).fetchone() is not None

    @staticmethod
    def _make_way(db: sqlite3.Connection, model: str) -> None:
        """Gives a model that there was under a name another one, with its requests."""
        for (number,) in db.execute("SELECT rowid FROM models WHERE name = ?", (model,)).fetchall():
            before = f"{model}~{number}"
            Log._give_up(db, model, "a model of the same name was created", "user")
            db.execute(
                "UPDATE models SET name = ?, state = 'ended' WHERE name = ?", (before, model)
            )
            db.execute("UPDATE requests SET model = ? WHERE model = ?", (before, model))

    def refuse(self, model: str, seq: int, kind: str, body: bytes, owner: str, error: str) -> None:
        """Adds a request that was refused when it came, and has used up its number.

        Raises:
            Conflict: as `append`.
        """
        digest = _digest(kind, body)
        with self._writing() as db:
            if self._known(model, seq, kind, digest) is not None:
                return
            self._check_place(db, model, seq)
            self._added(db, (owner, model, seq, kind, digest, None), waits=False)
            number = db.execute("SELECT last_insert_rowid()").fetchone()[0]
            db.execute(
                "INSERT INTO results VALUES (?, ?, 'user', NULL, ?, NULL)",
                (number, error, time.time()),
            )
            self._advance(db, model)

    def _known(self, model: str, seq: int | None, kind: str, digest: bytes) -> str | None:
        if kind == "unload_model":  # it has no number, and comes once, whoever asks for it
            query = "SELECT id FROM requests WHERE model = ? AND kind = ?"
            return next((name for (name,) in self._read(query, model, kind)), None)
        rows = self._read("SELECT id, digest FROM requests WHERE model = ? AND seq = ?", model, seq)
        if rows and rows[0][1] != digest:
            raise Conflict(f"seq_id {seq} of {model} was used with another request")
        return rows[0][0] if rows else None

    @staticmethod
    def _added(db: sqlite3.Connection, row: tuple[Any, ...], *, waits: bool) -> str:
        name = secrets.token_hex(16)
        db.execute(
            "INSERT INTO requests (id, owner, model, seq, kind, digest, body, arrived, waits) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (name, *row, time.time(), int(waits)),
        )
        return name

    def owner_of(self, request: str) -> str | None:
        """The key that a request came with; None: there is no such request."""
        rows = self._read("SELECT owner FROM requests WHERE id = ?", request)
        return rows[0][0] if rows else None

    def result(self, request: str) -> Result | None:
        """None while there is none."""
        rows = self._read(
            "SELECT s.body, error, category FROM requests r JOIN results s USING (number) "
            "WHERE id = ?",
            request,
        )
        if not rows:
            return None
        body, error, category = rows[0]
        expired = error is None and body is None
        return Result(None if body is None else _whole(body), error, category, expired)

    def sent(self, request: str) -> None:
        """A result has reached a client: it may be forgotten some time from now."""
        with self._lock:
            self._hints.execute(
                "UPDATE results SET sent = ? WHERE sent IS NULL AND number = "
                "(SELECT number FROM requests WHERE id = ?)",
                (time.time(), request),
            )

    def kind_of(self, request: str) -> tuple[str, str] | None:
        """The kind of a request, and its model."""
        rows = self._read("SELECT kind, model FROM requests WHERE id = ?", request)
        return rows[0] if rows else None

    def blocked(self, request: str) -> str | None:
        """Why a request that waits cannot run yet: a number before it is missing, or the workers
        sleep.
        """
        if self.fact(ASLEEP):
            return "the server sleeps, until POST /wake_up"
        rows = self._read(
            "SELECT m.next, r.seq, EXISTS (SELECT 1 FROM requests o WHERE o.model = r.model AND "
            "o.seq = m.next) FROM requests r JOIN models m ON m.name = r.model WHERE r.id = ? AND "
            "r.seq IS NOT NULL",
            request,
        )
        if rows and rows[0][1] > rows[0][0] and not rows[0][2]:
            return f"seq_id {rows[0][0]} has not come yet"
        return None

    def waiting(self, owner: str | None = None) -> int:
        """The number of requests without a result: all, or those that came with a key."""
        query = "SELECT count(*) FROM requests WHERE waits AND (? IS NULL OR owner = ?)"
        return self._read(query, owner, owner)[0][0]

    def full(self) -> bool:
        """Whether the file has its greatest size."""
        pages, free, size = (
            self._read(f"PRAGMA {name}")[0][0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size >= self.most

    # ---- models and paths

    def model(self, name: str) -> Model | None:
        return next(self._models("WHERE name = ?", name), None)

    def models(self) -> list[Model]:
        """In the order in which they were created."""
        return [*self._models("ORDER BY created, rowid")]

    def _models(self, which: str, *given: Any) -> Iterator[Model]:
        names = ", ".join(Model._fields)
        for name, owner, about, *rest in self._read(f"SELECT {names} FROM models {which}", *given):
            yield Model(name, owner, json.loads(about), *rest)

    def used(self, prefix: str, owner: str) -> None:
        """A client is there: its models whose names begin so are in use."""
        with self._lock:
            self._hints.execute(
                "UPDATE models SET used = ? WHERE owner = ? AND substr(name, 1, ?) = ?",
                (time.time(), owner, len(prefix), prefix),
            )

    def path(self, path: str) -> tuple[str, Any] | None:
        """The owner of a saved path, and what is known of it."""
        rows = self._read("SELECT owner, about FROM paths WHERE path = ?", path)
        return (rows[0][0], json.loads(rows[0][1])) if rows else None

    def claim(self, path: str, owner: str, about: Any) -> None:
        """Adds a path, if it is not there. Raises Conflict where there is another one."""
        with self._writing() as db:
            row = db.execute("SELECT owner, about FROM paths WHERE path = ?", (path,)).fetchone()
            if row is None:
                self._remember(db, path, owner, about)
            elif row[0] != owner or json.loads(row[1]) != about:
                raise Conflict(f"the name {path} is taken; give another")

    def remember(self, path: str, owner: str, about: Any) -> None:
        """Adds a path, or what is known of it now."""
        with self._writing() as db:
            self._remember(db, path, owner, about)

    @staticmethod
    def _remember(db: sqlite3.Connection, path: str, owner: str, about: Any) -> None:
        now, seconds = time.time(), about.get("ttl_seconds")
        db.execute(
            "INSERT OR REPLACE INTO paths VALUES (?, ?, ?, ?, ?)",
            (path, owner, _json(about), now, None if seconds is None else now + seconds),
        )

    def expire(self, path: str, seconds: float | None) -> None:
        """Sets when a path is dropped: so many seconds from now, or never."""
        until = None if seconds is None else time.time() + seconds
        with self._writing() as db:
            db.execute("UPDATE paths SET expires = ? WHERE path = ?", (until, path))

    def expired(self) -> list[str]:
        """Paths whose time is over."""
        rows = self._read("SELECT path FROM paths WHERE expires < ? ORDER BY path", time.time())
        return [path for (path,) in rows]

    def idle_samplers(self, seconds: float) -> list[str]:
        """Samplers that no client has asked in so many seconds."""
        since = time.time() - seconds
        rows = self._read(
            "SELECT path FROM paths WHERE json_extract(about, '$.kind') IN ('sampler', 'session') "
            "AND created < ? AND NOT EXISTS (SELECT 1 FROM requests r WHERE r.model = path AND "
            "(r.waits OR r.arrived >= ?)) ORDER BY path",
            since, since,
        )  # fmt: skip
        return [path for (path,) in rows]

    def sent_of_ended(self) -> list[str]:
        """Weights that engines were sent of models that have ended."""
        rows = self._read(
            "SELECT path FROM paths WHERE json_extract(about, '$.kind') = 'sent' AND NOT EXISTS "
            "(SELECT 1 FROM models m WHERE m.state = 'live' AND "
            "m.name = substr(path, 1, instr(path, '@') - 1)) ORDER BY path"
        )
        return [path for (path,) in rows]

    def inflight(self, model: str, owner: str) -> str | None:
        """The newest sampler that has a model's weights as they go."""
        rows = self._read(
            "SELECT path FROM paths WHERE json_extract(about, '$.inflight') = ? AND owner = ? "
            "ORDER BY created DESC, rowid DESC LIMIT 1",
            model, owner,
        )  # fmt: skip
        return rows[0][0] if rows else None

    def cancel(self, request: str) -> Request | None:
        """Ends a request for samples that waits, and returns it; None: there is no such request."""
        with self._writing() as db:
            row = db.execute(
                f"SELECT {REQUEST} FROM requests r WHERE id = ? AND waits AND kind IN (?, ?)",
                (request, *SAMPLES),
            ).fetchone()
            if row is None:
                return None
            own = (row[0], "the request was canceled", "user", time.time())
            db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, NULL, ?, NULL)", own)
            db.execute("UPDATE requests SET waits = 0 WHERE number = ?", (row[0],))
        return self._request(row)

    def joined(self, sampler: str) -> int:
        """The number of one more client of a sampler, which is there. The first has 0."""
        with self._writing() as db:
            rows = db.execute(
                "INSERT INTO facts VALUES (?, '1') ON CONFLICT (name) DO UPDATE SET "
                "value = CAST(value AS INTEGER) + 1 RETURNING value",
                (CLIENTS + sampler,),
            )
            return int(rows.fetchall()[0][0])

    def drop(self, path: str) -> None:
        """Forgets a path."""
        with self._writing() as db:
            db.execute("DELETE FROM paths WHERE path = ?", (path,))
            db.execute("DELETE FROM facts WHERE name = ?", (CLIENTS + path,))

    def user_of(self, path: str) -> str | None:
        """A sampler that has the weights of a path."""
        rows = self._read(
            "SELECT path FROM paths WHERE json_extract(about, '$.weights') = ? LIMIT 1", path
        )
        return rows[0][0] if rows else None

    def paths(self, owner: str) -> list[Path]:
        """What a key has saved, in that order."""
        rows = self._read(
            "SELECT path, about, created, expires FROM paths WHERE owner = ? "
            "ORDER BY created, path",
            owner,
        )
        return [Path(path, json.loads(about), *times) for path, about, *times in rows]

    @contextmanager
    def apart(self) -> Iterator[Log]:
        """The log as it is at one time, read through a connection of its own, for which neither
        who writes nor who reads this one waits.
        """
        other = copy.copy(self)
        other._lock = threading.RLock()
        # SQLite refuses to write through it.
        where = f"{self.file.absolute().as_uri()}?mode=ro"
        other._db = other._hints = sqlite3.connect(
            where, timeout=60, isolation_level=None, uri=True
        )
        try:
            other._db.execute("BEGIN")
            yield other
        finally:
            other._db.close()

    def pending(self, owner: str) -> list[Waiting]:
        """The requests that came with a key and have no result yet."""
        rows = self._read(
            "SELECT r.id, r.kind, r.model, r.seq, r.arrived, r.attempts, m.next FROM requests r "
            "LEFT JOIN models m ON m.name = r.model WHERE r.waits AND r.owner = ? ORDER BY r.number",
            owner,
        )
        return [Waiting(*row) for row in rows]

    def last(self, model: str, kind: str, most: int) -> list[tuple[int, int, int | None]]:
        """The last requests of a kind that a model has run, the newest first: number, place among
        all that it has run, and bytes of the result, or None where it was dropped.
        """
        return self._read(
            "SELECT r.number, r.ran, length(s.body) FROM requests r JOIN results s USING (number) "
            "WHERE r.model = ? AND r.ran IS NOT NULL AND r.kind = ? AND s.error IS NULL "
            "ORDER BY r.ran DESC LIMIT ?",
            model, kind, most,
        )  # fmt: skip

    def count(self, model: str, kind: str, *, after: int) -> int:
        """How many requests of a kind a model has run, after the first ones, without an error."""
        return self._read(
            "SELECT count(*) FROM requests r JOIN results s USING (number) WHERE r.model = ? AND "
            "r.ran > ? AND r.kind = ? AND s.error IS NULL",
            model, after, kind,
        )[0][0]  # fmt: skip

    def body(self, number: int) -> bytes:
        """The result of a request, which is there."""
        return _whole(self._read("SELECT body FROM results WHERE number = ?", number)[0][0])

    # ---- the workers' side

    def next(self, kinds: Sequence[str] = ()) -> Request | None:
        """The first request to have come of those that may run: of a model that is not failed, with
        the number that its sequence is at, or with none; those of samplers in any order.

        kinds: (): any but what the engine for sampling begins.
        """
        which = f"r.kind != '{GENERATE}'"
        if kinds:
            which = f"r.kind IN ({', '.join(map(repr, kinds))})"
        rows = self._read(
            f"SELECT {REQUEST} FROM requests r "
            f"LEFT JOIN models m ON m.name = r.model WHERE r.waits AND {which} AND "
            "(r.seq IS NULL OR m.name IS NULL OR r.seq = m.next) ORDER BY r.number LIMIT 1"
        )
        return self._request(rows[0]) if rows else None

    def to_generate(self, begun: Container[int] = ()) -> list[Request]:
        """What waits for the engine for sampling, but for these numbers."""
        numbers = self._read(
            f"SELECT number FROM requests WHERE waits AND kind = '{GENERATE}' ORDER BY number"
        )
        query = f"SELECT {REQUEST} FROM requests r WHERE number = ?"
        return [
            self._request(self._read(query, number)[0])
            for (number,) in numbers
            if number not in begun
        ]

    def generated(self, request: Request, body: bytes) -> None:
        """The engine has done its part: the workers score it."""
        with self._writing() as db:
            db.execute(
                "UPDATE requests SET kind = ?, body = ? WHERE number = ? AND waits",
                (SAMPLE, _squeezed(body), request.number),
            )

    @staticmethod
    def _request(row: tuple[Any, ...]) -> Request:
        return Request._make((*row[:5], _whole(row[5]), *row[6:]))

    def begin(self, request: Request) -> None:
        """Counts an attempt, so that a request which ends the workers is not begun forever."""
        with self._lock:
            self._hints.execute(
                "UPDATE requests SET attempts = attempts + 1 WHERE number = ?", (request.number,)
            )

    def finish(
        self,
        request: Request,
        result: Result,
        *,
        ran: bool = True,
        state: State | None = None,
        why: str | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds the result of a request, and lets the next one of its model run.

        ran: whether it was run, and so is again where its model is computed anew.
        state: the state of its model from now on, if it is another.   why: of one that has failed,
            or has ended by itself.
        saved: paths that it has saved, with what is known of them.
        """
        with self._writing() as db:
            body = None if result.body is None else _squeezed(result.body)
            db.execute(
                "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, NULL)",
                (request.number, result.error, result.category, body, time.time()),
            )
            place = None
            if ran:
                db.execute("UPDATE models SET ran = ran + 1 WHERE name = ?", (request.model,))
                rows = db.execute("SELECT ran FROM models WHERE name = ?", (request.model,))
                place = next((row[0] for row in rows), None)
            db.execute(
                "UPDATE requests SET waits = 0, ran = ? WHERE number = ?", (place, request.number)
            )
            if state is not None:
                db.execute(
                    "UPDATE models SET state = ?, why = ? WHERE name = ?",
                    (state, why, request.model),
                )
                if state == "ended":
                    self._give_up(db, request.model, why or "the model was unloaded", "user")
            owner = db.execute("SELECT owner FROM requests WHERE number = ?", (request.number,))
            [(owner,)] = owner.fetchall()
            for path, about in (saved or {}).items():
                self._remember(db, path, owner, about)
            self._advance(db, request.model)

    @staticmethod
    def _advance(db: sqlite3.Connection, model: str) -> None:
        """Moves a sequence behind the numbers that have a result."""
        while db.execute(
            "UPDATE models SET next = next + 1 WHERE name = ? AND EXISTS (SELECT 1 FROM requests r "
            "WHERE r.model = models.name AND r.seq = models.next AND NOT r.waits)",
            (model,),
        ).rowcount:
            pass

    def gaps(self, seconds: float) -> list[tuple[str, int]]:
        """Models whose requests have waited so long for a number that did not come, and it."""
        return self._read(
            "SELECT m.name, m.next FROM models m WHERE m.state = 'live' AND NOT EXISTS (SELECT 1 "
            "FROM requests r WHERE r.model = m.name AND r.seq = m.next) AND (SELECT min(arrived) "
            "FROM requests r WHERE r.model = m.name AND r.waits AND r.seq > m.next) < ?",
            time.time() - seconds,
        )

    def skip(self, model: str, missing: int) -> None:
        """Ends what waits for a number, and goes on behind it: the gradients so far are dropped."""
        with self._writing() as db:
            self._give_up(db, model, f"seq_id {missing} has not come within gap_timeout", "user")
            db.execute(
                "UPDATE models SET next = (SELECT max(seq) + 1 FROM requests WHERE model = ?) "
                "WHERE name = ?",
                (model, model),
            )
            [(owner,)] = db.execute("SELECT owner FROM models WHERE name = ?", (model,)).fetchall()
            self._asked(db, owner, model, "abort_gradient_epoch", None)

    def idle(self, seconds: float) -> list[Model]:
        """Models that no client has asked for in so many seconds, and that have nothing to do."""
        return [
            *self._models(
                "WHERE state = 'live' AND used < ? AND NOT EXISTS "
                "(SELECT 1 FROM requests r WHERE r.model = name AND r.waits)",
                time.time() - seconds,
            )
        ]

    def ask(self, model: Model, kind: str, value: Any) -> None:
        """Adds a request of the server itself, in no sequence."""
        with self._writing() as db:
            self._asked(db, model.owner, model.name, kind, value)

    @classmethod
    def _asked(cls, db: sqlite3.Connection, owner: str, model: str, kind: str, value: Any) -> None:
        row = (owner, model, None, kind, b"", _squeezed(packed(value)))
        cls._added(db, row, waits=True)

    def fail(self, model: str, why: str) -> None:
        """Marks a model whose state is lost. Its requests that wait end with the reason."""
        with self._writing() as db:
            db.execute("UPDATE models SET state = 'failed', why = ? WHERE name = ?", (why, model))
            self._give_up(db, model, why, "server")
            self._advance(db, model)

    @staticmethod
    def _give_up(db: sqlite3.Connection, model: str, why: str, category: str) -> None:
        """Ends the requests of a model that wait."""
        db.execute(
            "INSERT OR IGNORE INTO results SELECT number, ?, ?, NULL, ?, NULL "
            "FROM requests WHERE model = ? AND waits",
            (why, category, time.time(), model),
        )
        db.execute("UPDATE requests SET waits = 0 WHERE model = ?", (model,))

    def checkpointed(self, model: str, ran: int, folder: str) -> None:
        """A checkpoint has what the first `ran` requests of a model have made of it."""
        with self._writing() as db:
            db.execute(
                "UPDATE models SET saved = ?, folder = ? WHERE name = ?", (ran, folder, model)
            )

    def ran(self, model: str, after: int) -> Iterator[tuple[Request, Result]]:
        """The requests of a model that have run, after the first ones, in that order, with their
        results.
        """
        numbers = self._read(
            "SELECT number FROM requests WHERE model = ? AND ran > ? ORDER BY ran", model, after
        )
        for (number,) in numbers:
            [row] = self._read(
                f"SELECT {REQUEST}, s.body, s.error, s.category FROM requests r "
                "JOIN results s USING (number) WHERE number = ?",
                number,
            )
            body = None if row[8] is None else _whole(row[8])
            yield self._request(row[:8]), Result(body, error=row[9], category=row[10])

    # ---- what is kept

    def forget(self, *, after_sent: float, after: float) -> None:
        """Drops results that were sent so many seconds ago, or are so old; and the bodies of
        requests that no checkpoint needs to be computed again from.
        """
        now = time.time()
        with self._writing() as db:
            db.execute(
                "UPDATE results SET body = NULL WHERE body IS NOT NULL AND (sent < ? OR "
                "finished < ?) AND number NOT IN (SELECT number FROM requests r JOIN models m "
                "ON m.name = r.model WHERE r.ran > m.saved AND m.state = 'live')",
                (now - after_sent, now - after),
            )
            db.execute(
                "UPDATE requests SET body = NULL WHERE body IS NOT NULL AND NOT waits AND "
                "NOT EXISTS (SELECT 1 FROM models m WHERE m.name = requests.model AND "
                "m.state = 'live' AND requests.ran > m.saved)"
            )
