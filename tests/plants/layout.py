"""Faults planted in steps (tests/lib/layout_steps.py) for `tilewright check-layout`: each has what
is found first, and words of the cause that is named. And the layouts that are right.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewright.__main__ import main

STEPS = str(pathlib.Path(__file__).parents[1] / "lib/layout_steps.py")
ANY = math.inf


class Plant(NamedTuple):
    """The first finding: its kind, first parameter, ranks, factor (None: no multiple; ANY) and
    number of parameters that differ.   cause: words of the hint. Others follow from it.
    """

    kind: str
    name: str | None
    ranks: tuple[int, ...]
    factor: float | None
    differing: int
    cause: str

    def check(self, result: dict[str, Any]) -> None:
        """Raises AssertionError unless a layout's result, of `--json`, is as the row says."""
        assert not result["equal"], result
        first, *others = result["findings"]
        found = first["kind"], first["name"], tuple(first["ranks"]), first["differing"]
        assert found == (self.kind, self.name, self.ranks, self.differing), result
        assert self.cause in first["hint"], first
        if self.factor is None:
            assert first["rest"] > 0.1, first
        elif self.factor is not ANY:
            assert abs(first["factor"] - self.factor) <= 1e-9 and not first["rest"], first
        for other in others:  # no second cause
            assert "follows from" in other["hint"], other


HEAD, ALL, FOUR = "head.weight", (0, 1), (0, 1, 2, 3)
PLANTS = {
    # the sum over ranks
    ("hand-none", 2): Plant("gradient", HEAD, ALL, None, 9, "the sum over the ranks is one proces"),
    ("ddp-around", 2): Plant("gradient", HEAD, ALL, None, 9, "the mean over the ranks is one proc"),
    ("hand-norms_alone", 2): Plant(
        "gradient", "norm.weight", ALL, None, 2, "different gradients: an all-reduce is missing"
    ),
    ("hand-again", 2): Plant(
        "gradient", HEAD, ALL, 2, 9, "gradients are reduced twice: the ranks'"
    ),
    ("ddp-again", 2): Plant("gradient", HEAD, ALL, 2, 9, "right before synchronize(), which"),
    ("hand-one_again", 2): Plant(
        "gradient", HEAD, ALL, 2, 1, "only 1 of 9 gradients: they are summed over 2 ranks"
    ),
    ("hand-bfloat16", 2): Plant("gradient", HEAD, ALL, ANY, 9, "reduced, or cast, in bfloat16"),
    ("hand-scaled", 2): Plant("gradient", HEAD, (1,), 3, 9, "ranks have different gradients"),
    ("expert-doubled", 2): Plant(
        "gradient", "experts.weight", ALL, 2, 1, "only 1 of 9 gradients: they are "
    ),
    ("expert-doubled", 4): Plant(
        "gradient", "experts.weight", FOUR, 4, 1, "only 1 of 9 gradients: they are "
    ),
    # what the loss is divided by
    ("hand-local", 2): Plant("gradient", HEAD, ALL, None, 9, "each rank's own tokens (16, 8)"),
    ("ddp-local", 2): Plant("gradient", HEAD, ALL, None, 9, "each rank's own tokens (16, 8)"),
    ("ddp-local", 4): Plant("gradient", HEAD, FOUR, None, 9, "each rank's own tokens (9, 3, 7, 5)"),
    ("fsdp2-local", 2): Plant("gradient", HEAD, ALL, None, 9, "each rank's own tokens (16, 8)"),
    ("hand-mean", 2): Plant(
        "gradient", HEAD, ALL, 2, 9, "summed over 2 ranks where the loss needs"
    ),
    ("hand-twice", 2): Plant("gradient", HEAD, ALL, 0.5, 9, "averaged over 2 ranks where"),
    # data and weights
    ("hand-fewer", 2): Plant("tokens", None, (), ANY, 0, "do not have the data of one process"),
    ("hand-overlap", 2): Plant("tokens", None, (), ANY, 0, "do not have the data of one process"),
    ("hand-same_slice", 2): Plant("tokens", None, (), ANY, 0, "do not have the data of one proc"),
    ("hand-shifted", 2): Plant("loss", None, ALL, ANY, 0, "targets that are shifted otherwise"),
    ("other_weights", 2): Plant("weights", HEAD, (1,), None, 7, "starts with other weights"),
    # norm, clipping, the optimizer, the report
    ("hand-stale", 2): Plant("gradient", HEAD, ALL, None, 9, "gradients are not set to zero"),
    ("hand-clipped", 2): Plant("gradient", HEAD, ALL, ANY, 9, "a clip by its own norm does"),
    ("hand-counted", 2): Plant(
        "norm", None, ALL, math.sqrt(2), 0, "every gradient is counted by 2 ranks: sqrt(2)"
    ),
    ("tensor-counted", 2): Plant(
        "norm", None, ALL, ANY, 0, "every rank holds whole are counted by 2"
    ),
    ("tensor-own_norm", 2): Plant("norm", None, ALL, ANY, 0, "squares are not summed over ranks"),
    ("hand-left_out", 2): Plant("step", HEAD, ALL, 0, 1, "the optimizer does not have it"),
    ("hand-own_rate", 2): Plant("step", HEAD, (1,), 2, 9, "the clipping or the optimizer is not"),
    ("hand-own_report", 2): Plant(
        "reported loss", None, ALL, ANY, 0, "it is not reduced over the ranks"
    ),
}
RIGHT = [
    *(("hand", 2), ("hand", 4), ("ddp", 2), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 4)),
    *(("ddp-float32", 2), ("fsdp2-bfloat16", 2), ("tensor_dtensor", 2), ("pipeline", 2)),
    *(("tensor", 2), ("tensor", 4), ("expert", 2), ("expert", 4)),
    *(("ddp-compiled", 2), ("ddp-same", 2), ("hand-mixed", 2), ("hand-equal", 2)),
]
NAMES = {f"{layout} on {size}": (layout, size) for layout, size in (*PLANTS, *RIGHT)}


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check-layout", *arguments])
    return code, out.getvalue(), err.getvalue()


def check(layout: str, size: int, result: dict[str, Any]) -> None:
    if (layout, size) in PLANTS:
        PLANTS[layout, size].check(result)
    else:
        assert result["equal"], result["findings"]


def results(names: list[str]) -> Iterator[tuple[str, str]]:
    """What is found of these, in one launch of each layout."""
    chosen = {NAMES[name]: name for name in names}
    options = [f"--layout={layout}" for layout in dict.fromkeys(layout for layout, _ in chosen)]
    _, out, err = command(f"{STEPS}:every", "--json", *options)
    assert not err, err
    for result in json.loads(out)["layouts"]:
        layout, size = result["layout"], result["world_size"]
        if (layout, size) in chosen:
            try:
                check(layout, size, result)
                said = "as said"
            except AssertionError as error:
                said = str(error)
            yield chosen[layout, size], said
