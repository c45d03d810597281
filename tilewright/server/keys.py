"""Keys of a server: what each key has made is its own."""

from __future__ import annotations

import hashlib
import hmac
import pathlib
import re

LINE = re.compile(r"([A-Za-z0-9_.-]+):\s*([0-9a-f]{64})")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """The keys that a server knows, by their digests.

    names: what each is called in answers.
    """

    def __init__(self, names: dict[str, str]):
        self.names = names

    @classmethod
    def of(cls, key: str) -> Keys:
        """One key, without a name."""
        return cls({digest(key): "owner"})

    @classmethod
    def read(cls, file: pathlib.Path) -> Keys:
        """A file with one key, or a line for each of several: its name, and the SHA-256 of the key.

        Raises ValueError.
        """
        try:
            lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise ValueError(f"server.api_token_file = {file}: cannot be read: {error}") from error
        if not lines:
            raise ValueError(f"server.api_token_file = {file}: there is no key in it")
        matches = [LINE.fullmatch(line) for line in lines]
        if len(lines) == 1 and matches[0] is None:
            return cls.of(lines[0])
        if None in matches:
            raise ValueError(
                f"server.api_token_file = {file}: line {matches.index(None) + 1} must be `NAME: "
                "SHA-256 of the key`, as the others"
            )
        return cls({match[2]: match[1] for match in matches if match is not None})

    def owner(self, key: str) -> str | None:
        """What the log calls who has a key; None of one that is not known."""
        given = digest(key)
        # All are compared: how long it takes tells nothing of them.
        known = [hmac.compare_digest(given, one) for one in self.names]
        return given[:16] if any(known) else None

    def name(self, owner: str) -> str:
        """What answers call an owner."""
        return next((name for one, name in self.names.items() if one[:16] == owner), owner)
