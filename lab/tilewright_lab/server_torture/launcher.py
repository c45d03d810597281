"""A server's launcher, whose processes are those of this package.

    python -m tilewright_lab.server_torture.launcher [--python COMMAND] --config server.yaml

--python: what starts the processes, in place of this Python.
"""

from __future__ import annotations

import argparse
import sys

from tilewright.server import launcher

MODULES = {
    "api": "tilewright_lab.server_torture.api",
    "worker": "tilewright_lab.server_torture.worker",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable)
    known, rest = parser.parse_known_args(argv)
    sys.executable, launcher.MODULES = known.python, {**launcher.MODULES, **MODULES}
    return launcher.main(rest)


if __name__ == "__main__":
    sys.exit(main())
