"""What an emulated launch can end with, and where in the source it happened."""

from __future__ import annotations

from typing import Any


class Fault(RuntimeError):
    """A kernel does what a GPU does not allow, or does not define.

    kind: what `--allow` names: "bounds", "alignment", "race", "barrier", "uninitialized",
        "undefined" (masked elements of a load without `other`), "replicas" (threads that hold
        copies of one number differ by its rounding), "limit".
    what: the sentence.
    kernel, line, instruction, program: where; empty as long as nothing above has filled it in.
    """

    def __init__(self, kind: str, what: str):
        super().__init__(what)
        self.kind, self.what = kind, what
        self.kernel, self.line, self.instruction = "", "", ""
        self.program: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "what": self.what,
            "kernel": self.kernel,
            "line": self.line,
            "instruction": self.instruction,
            "program": list(self.program),
        }

    def __str__(self) -> str:
        where = ", ".join(
            part
            for part in (
                self.kernel,
                f"program {self.program}" if self.program else "",
                self.line,
                f"`{self.instruction}`" if self.instruction else "",
            )
            if part
        )
        return f"{self.what} ({where})" if where else self.what


class Unsupported(Exception):
    """The emulator does not have an instruction, or a kind of argument or launch."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what, self.kernel, self.line = what, "", ""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.kernel, self.line) if part)
        return f"the emulator has no {self.what}" + (f" ({where})" if where else "")
