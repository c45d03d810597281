"""What is wrong with a data file: sentences that name a place in it."""

from __future__ import annotations

KINDS = {str: "a string", bool: "a boolean", list: "a list", dict: "an object"}


class Defect(Exception):
    """A place in a file, if it is known ("line 7"), and a reason."""

    def __init__(self, place: str, reason: object):
        super().__init__(": ".join(filter(None, (place, " ".join(str(reason).split())))))


def kind_of(value: object) -> str:
    """What JSON calls a value."""
    return "null" if value is None else KINDS.get(type(value), "a number")


def undecoded(text: str) -> str | None:
    """What is wrong with a text that was decoded with `surrogateescape`; None: nothing."""
    try:
        text.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: {error.reason} at byte {error.start + 1} of a text"
    except UnicodeEncodeError:
        return "a string in it has half of a surrogate pair"
    return None
