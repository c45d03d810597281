"""A process that a launcher starts ends with it, however that ends."""

from __future__ import annotations

import os
import select
import threading

from tilewright.core import platform


def follow() -> None:
    """Ends this process when the launcher that started it, or its parent, has ended."""
    if (number := platform.server_launcher()) is None:
        return
    try:
        launcher = os.pidfd_open(number)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([launcher], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
