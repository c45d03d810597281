"""Tries a run's folders before anything is computed: a first checkpoint may be hours away."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

from tilewright.trainer.config.train import Reporting
from tilewright.trainer.parallel.mesh import Mesh


def folders(train: Reporting) -> Iterator[tuple[str, pathlib.Path]]:
    """The folders that a run writes, each with the field that names it."""
    output = pathlib.Path(train.output_dir)
    yield "output_dir", output
    yield "output_dir", output / "checkpoints"
    if train.use_tensorboard:
        named = "output_dir" if train.log_dir is None else "log_dir"
        yield named, pathlib.Path(train.board_dir)
    if train.enable_profiling:
        yield "profile_trace_dir", pathlib.Path(train.profile_trace_dir)


def check(train: Reporting, mesh: Mesh) -> None:
    """Writes a byte in each folder, which is made, on each rank: they may be other machines. Raises
    OSError on all of them.
    """
    with mesh.control.agreeing(OSError):
        for field, folder in folders(train):
            probe = folder / f".writable_{mesh.rank}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    probe.write_bytes(b"x")
                finally:
                    probe.unlink(missing_ok=True)
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise OSError(f"train.{field}: {folder} cannot be written: {reason}") from error
