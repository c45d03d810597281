"""Files of JSON: a row in a line, several in one, rows of several lines, or one array of all.

Python's own reader gives what the file says: integers of any length, strings that look like dates,
and the nulls of each object.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import Any

from tilewright.trainer.data import rows
from tilewright.trainer.data.defects import Defect, kind_of, undecoded
from tilewright.trainer.data.types.dataset_type import Refused

BOM = codecs.BOM_UTF8
SPACE = re.compile(r"[ \t\n\r]*")
# Between two objects in a line, or in a string of one.
BETWEEN = re.compile(rb"\}\s*\{")
ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair, or of two
# A value above this size is none of several rows without commas, but a line that is damaged.
MOST = 64 << 20
LITERAL = 16  # characters before a cut, at most, at which what is cut seems wrong


class _Several(Exception):
    """A line is not one row."""


class JsonFile(rows.TextFile):
    array = False  # its rows are the items of one array

    def index(self) -> Any:
        with open(self.path, "rb") as file:
            start = file.read(3) == BOM
            file.seek(3 * start)
            while (first := file.read(1)) and first.isspace():
                pass
        self.array = first == b"["
        if self.array:
            self.of_lines = False
            index = self.indexed(self._values())
        else:
            try:
                index = self.indexed(self._lines(check=True))
            except _Several:
                self.of_lines = False
                try:
                    index = self.indexed(self._values())
                except Defect:  # a line is damaged: its row is refused
                    self.of_lines = True
                    index = self.indexed(self._lines(check=False))
        if not index.rows:
            raise Defect("", "there is nothing in it")
        return index

    def _lines(self, check: bool) -> Iterator[tuple[int, int]]:
        """The first byte of each line that is not blank, and the lines before it."""
        start = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                text = line.removeprefix(BOM).strip()
                if text:
                    if check and not _is_one(text):
                        raise _Several
                    yield start, number
                start += len(line)

    def _values(self) -> Iterator[tuple[int, int]]:
        with open(self.path, "rb") as file:
            start = 3 * (file.read(3) == BOM)
            file.seek(start)
            scan = _Scan(file, start, self.array)
            if self.array:
                scan.skip("[")
            for first, _, line in scan.values():
                yield first, line

    def _split(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        if self.of_lines:
            for number, line in enumerate(data.split(b"\n")):
                if text := line.removeprefix(BOM).strip():
                    yield number, text
            return
        for first, stop, line in _Scan(io.BytesIO(data), 0, self.array).values():
            yield line, data[first:stop]

    def _names(self, count: int) -> list[str]:
        read = (self._object(raw)[0] for _, _, raw in self._read(0, count))
        return [*dict.fromkeys(n for row in read if isinstance(row, dict) for n in row)]

    def _object(self, raw: bytes) -> tuple[dict[str, Any] | Refused, list[_Wrong], str]:
        """A row, the places in it that cannot be read, and what is wrong with its bytes."""
        wrong: list[_Wrong] = []
        reason = ""
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            text = raw.decode("utf-8", "surrogateescape")
            reason = f"it is not UTF-8: {error.reason} at byte {error.start + 1}"
        try:
            value = _loaded(text, wrong)
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
                return Refused("it ends within a JSON value"), wrong, reason
            said = f"it is not JSON: {error.msg} at character {error.pos + 1}"
            return Refused(said), wrong, reason
        except RecursionError:
            return Refused("it is nested too deeply"), wrong, reason
        if self.array and isinstance(value, str):
            value = {"text": value}
        if isinstance(value, _Wrong):
            value = Refused(value.why)
        elif not isinstance(value, dict):
            value = Refused(f"it is {kind_of(value)}, and must be an object")
        return value, wrong, reason

    def _row(self, raw: bytes, asking: rows.Asking) -> rows.Row:
        """What is not asked for may hold what cannot be read, but for half a pair."""
        value, wrong, reason = self._object(raw)
        row = value if isinstance(value, Refused) else asking.of(value)
        if isinstance(value, Refused) or isinstance(row, Refused):
            return row
        if wrong and (one := next(_values([*row.values()], _Wrong), None)):
            return Refused(one.why)
        if ESCAPED.search(raw):
            try:
                errors = "surrogateescape" if reason else "strict"
                text = json.dumps(value, ensure_ascii=False, default=lambda one: one.why)
                text.encode("utf-8", errors)
            except UnicodeEncodeError:
                return Refused("a string in it has half of a surrogate pair")
        if reason:
            if any(map(undecoded, [*value, *_keys([*row.values()])])):
                return Refused(reason)
            if said := next(filter(None, map(undecoded, _values([*row.values()], str))), None):
                return Refused(said)
        return row


def _is_one(line: bytes) -> bool:
    """Whether a line without spaces around it may be one object, and is no second one."""
    if not (line.startswith(b"{") and line.endswith(b"}")):
        return False
    if BETWEEN.search(line):
        try:
            json.loads(line.decode("utf-8", "surrogateescape"))
        except json.JSONDecodeError as error:
            return error.msg != "Extra data"
        except (RecursionError, ValueError):
            return True
    return True


class _Wrong:
    """Stands for what cannot be read."""

    def __init__(self, why: str):
        self.why = why


def _loaded(text: str, wrong: list[_Wrong]) -> Any:
    """wrong: is given what cannot be read."""

    def mark(why: str) -> _Wrong:
        wrong.append(_Wrong(why))
        return wrong[-1]

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Wrong:
        members = dict(pairs)
        if len(members) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            return mark(f"{twice} is there twice in one object")
        return members

    def integer(digits: str) -> int | _Wrong:
        try:
            return int(digits)
        except ValueError:
            return mark(f"an integer in it has {len(digits)} digits, which are too many")

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError:
        raise
    except ValueError:  # of such an integer; a function for each is slow
        wrong.clear()
        return json.loads(text, object_pairs_hook=once, parse_int=integer)


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _keys(one)


def _values(value: Any, kind: type) -> Iterator[Any]:
    """Those of a kind, of a list or an object and all that it has."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _values(one, kind)


class _Scan:
    """Finds values that follow each other, in an array with commas between them. It holds the text
    of one value, and of what was read with it, as Latin-1: each character is a byte.
    """

    def __init__(self, file: Any, start: int, array: bool):
        self.file, self.array = file, array
        # The text that has been read, the byte of the file at which it begins, and where in it is
        # read next.
        self.text, self.start, self.at = "", start, 0
        self.counted = self.line = 0  # up to where in it line ends are counted, and how many

    def _more(self) -> bool:
        self._count(self.at)
        chunk = self.file.read(max(rows.PIECE, len(self.text) - self.at))
        self.text, self.start = self.text[self.at :] + chunk.decode("latin-1"), self.start + self.at
        self.at = self.counted = 0
        return bool(chunk)

    def _count(self, to: int) -> int:
        """The lines of the file before a place in the text."""
        self.line, self.counted = self.line + self.text.count("\n", self.counted, to), to
        return self.line

    def _next(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            if spaces := SPACE.match(self.text, self.at):
                self.at = spaces.end()
            if self.at < len(self.text) or not self._more():
                return self.text[self.at : self.at + 1]

    def skip(self, character: str) -> None:
        if self._next() != character:
            raise self._wrong(f"Expecting '{character}'", self.at)
        self.at += 1

    def _wrong(self, reason: str, at: int) -> Defect:
        of_line = self.text[self.text.rfind("\n", 0, at) + 1 : at].encode("latin-1")
        character = len(of_line.decode("utf-8", "surrogateescape")) + 1
        line = self._count(at) + 1
        return Defect(f"line {line}", f"it is not JSON: {reason} at character {character}")

    def values(self) -> Iterator[tuple[int, int, int]]:
        """The first and the last byte of each, and the lines before it."""
        first = True
        while (character := self._next()) and not (self.array and character == "]"):
            if self.array and not first and character == ",":
                self.at += 1
                self._next()
            elif self.array and not first:
                raise self._wrong("Expecting ',' delimiter", self.at)
            if self.at < len(self.text) or not self.array:
                stop = self._value()
                if not self.array and self.text[self.at] != "{":
                    raise self._wrong("Expecting '{'", self.at)
                start, line, self.at = self.at, self._count(self.at), stop
                yield self.start + start, self.start + stop, line
            first = False
        if character:
            self.at += 1
            if self._next():
                raise self._wrong("Extra data", self.at)

    def _value(self) -> int:
        """Where the value ends that begins here."""
        while True:
            try:
                _, stop = DECODER.raw_decode(self.text, self.at)
            except RecursionError as error:
                raise self._wrong("it is nested too deeply", self.at) from error
            except json.JSONDecodeError as error:
                size, after = len(self.text) - self.at, error.pos - self.at
                cut = error.msg.startswith("Unterminated") or after >= size - LITERAL
                if not (cut and (self.array or size < MOST) and self._more()):
                    raise self._wrong(error.msg, self.at + after) from error
            else:
                if stop < len(self.text):
                    return stop
                size = stop - self.at
                if not self._more():
                    return self.at + size


DECODER = json.JSONDecoder()
