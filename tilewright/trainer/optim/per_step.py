"""A number of the section train that may change from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
)

from tilewright.trainer.optim.row import SCHEDULES, Position, Schedule
from tilewright.trainer.options import reasons


class PerStep(BaseModel):
    """A number that goes from one value to another by a schedule: a pure function of the step.

    A comparison holds if it holds for both values, so that limits of fields are limits of both.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    schedule: str
    """A row of SCHEDULES that changes anything."""
    first: float = Field(alias="from")
    """The value in the first step."""
    last: float = Field(alias="to")
    """The value in the last of the steps, and after them. With a `floor`, the least value."""
    steps: int | None = Field(None, ge=1, lt=2**63)
    """The number of steps from the one value to the other, both included, of one that ends."""
    start: int = Field(0, ge=0, lt=2**63)
    """The number of steps before them, which have the first value: the schedule's warmup."""
    constant_steps: int = Field(0, ge=0, lt=2**63)
    cycles: float | None = Field(None, gt=0)
    power: float = Field(1.0, gt=0)
    step_size: int | None = Field(None, ge=1, lt=2**63)
    gamma: float | None = Field(None, gt=0, le=1)

    @model_serializer
    def _as_given(self) -> dict[str, Any]:
        names = {"first": "from", "last": "to"}
        given = {"start", *self.model_fields_set}
        fields = (name for name in type(self).model_fields if name in given)
        return {names.get(name, name): getattr(self, name) for name in fields}

    def at(self, step: int) -> float:
        """The value in a step, from 0."""
        row, step = SCHEDULES[self.schedule], max(step, self.start)
        at = Position(step, self.start, self.start + (self.steps or 1))
        fields = {name: getattr(self, _short(name)) for name in row.fields}
        share = row.share(at if row.by_step else at.done(), **fields)
        if row.floor:
            return max(self.first * share, self.last)
        return self.first * share + self.last * (1 - share)

    def problem(self) -> str | None:
        """What does not fit to its schedule, or None."""
        known = self.schedule in SCHEDULES.names()
        if not known or not _fits(SCHEDULES[self.schedule]):
            usable = ", ".join(name for name, row in SCHEDULES.items() if _fits(row))
            return f"schedule: must be one of {usable}, got {self.schedule}"
        row, given = SCHEDULES[self.schedule], self.model_fields_set
        needs = [*map(_short, row.needs), *(["steps"] if row.ends else [])]
        if absent := [name for name in needs if name not in given]:
            return f"{absent[0]}: {self.schedule} needs it"
        takes = {*SHARED, *map(_short, row.fields), *needs}
        if more := sorted(given - takes):
            return f"{more[0]}: {self.schedule} does not read it"
        if row.floor and self.last > self.first:
            return f"to: {self.schedule} falls, so it must be at most from, got {self.last}"
        if row.ends and self.constant_steps and self.constant_steps >= (self.steps or 0):
            return f"constant_steps: leaves no decay of {self.steps} steps"
        if self.schedule == "cosine_with_restarts" and (self.cycles or 1) % 1:
            return f"cycles: hard restarts need a whole number of them, got {self.cycles}"
        return None

    def __ge__(self, other: float) -> bool:
        return min(self.first, self.last) >= other

    def __gt__(self, other: float) -> bool:
        return min(self.first, self.last) > other

    def __le__(self, other: float) -> bool:
        return max(self.first, self.last) <= other

    def __lt__(self, other: float) -> bool:
        return max(self.first, self.last) < other


SHARED = ("schedule", "first", "last", "start")  # keys of every schedule


def _short(name: str) -> str:
    """The key of a field of the section train, whose schedule is one of rates."""
    return name.removeprefix("lr_")


def _fits(row: Schedule) -> bool:
    """Whether a schedule changes anything, and reads nothing but what a mapping has."""
    return (
        row.decays
        and row.options is None
        and all(_short(name) in PerStep.model_fields for name in row.fields)
    )


def _from_mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if any(isinstance(v, bool) for v in value.values()):
        raise ValueError("a boolean does not fit here")
    try:
        made = PerStep.model_validate(value)
    except ValidationError as error:
        raise ValueError(reasons(error)) from None
    if said := made.problem():
        raise ValueError(said)
    return made


Number = Annotated[float | PerStep, BeforeValidator(_from_mapping)]


def at_step(value: float | PerStep, step: int) -> float:
    return value.at(step) if isinstance(value, PerStep) else value
