"""Where a number was measured: the other scripts of this folder write it beside their results."""

from __future__ import annotations

import datetime
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from tilewright.core import platform

ROOT = pathlib.Path(__file__).resolve().parent.parent


def where(**settings: Any) -> dict[str, Any]:
    """The context of a measurement, without which its numbers mean nothing."""

    def git(*arguments):
        if shutil.which("git") is None:
            return None
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "device": platform.device_name("cpu"),
        "versions": platform.describe(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "tilewright", "csrc")),
        "command": " ".join(sys.argv),
        **settings,
    }
