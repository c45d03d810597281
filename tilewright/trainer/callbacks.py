"""The rows of the table of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tilewright.trainer.tables import Table


@dataclass(frozen=True)
class Plugin:
    """A row of CALLBACKS.

    make: run, and by keyword the values of `options` -> the callback; or module:name of it, which
        the runs import that have the callback.
    order: callbacks are called in this order, those of equal order by name. Metrics, which report
        `Step.values`, have 50; the comparison with an earlier run has 60.
    wanted: run -> whether the run's configuration asks for it; without one it is there if
        `train.callbacks` names it.
    check: called with `Train` and the mesh for every run, before anything is built: raises, on
        every rank, for what the callback would refuse.
    options: the pydantic model of `train.callback_args` under the row's name, or None where there
        are none.
    """

    make: Callable[..., Any] | str
    order: int = 40
    wanted: Callable[[Any], bool] | None = None
    check: Callable[[Any, Any], None] | None = None
    options: type[BaseModel] | None = None


CALLBACKS = Table("callbacks", "tilewright.trainer.plugins", Plugin)
