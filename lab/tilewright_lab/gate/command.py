"""`tilewright gate`: someone's kernels, or with --registry those of the registry."""

from __future__ import annotations

from tilewright.core import platform


@platform.command
def main(arguments: list[str]) -> int:
    """Exit code. 0: passed; 1: a kernel fails; 2: bad input, or nothing compiles here."""
    if "--registry" in arguments:
        from tilewright_lab.gate import compile_gate

        return compile_gate.main([a for a in arguments if a != "--registry"])
    from tilewright_lab.gate import kernel_gate

    return kernel_gate.main(arguments)
