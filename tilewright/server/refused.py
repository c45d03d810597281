"""What a request is refused with."""

from __future__ import annotations


class Refused(Exception):
    """A request that cannot be carried out.

    status: of HTTP.   used: whether it has used up its number in the sequence of its model.
    category: whose fault it is, "user" or "server".
    """

    def __init__(self, status: int, sentence: str, *, used: bool = True, category: str = "user"):
        super().__init__(sentence)
        self.status, self.used, self.category = status, used, category
