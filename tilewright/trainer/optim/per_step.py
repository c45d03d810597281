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

from tilewright.trainer.optim.schedules import by_share
from tilewright.trainer.tables import SCHEDULES


class PerStep(BaseModel):
    """A number that goes from one value to another by a schedule: a pure function of the step.

    A comparison holds if it holds for both values, so that limits of fields are limits of both.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    schedule: str
    """A schedule with an end, such as linear or cosine, and with the default of its shape."""
    first: float = Field(alias="from")
    """The value in the first step."""
    last: float = Field(alias="to")
    """The value in the last of the steps, and after them."""
    steps: int = Field(ge=1, lt=2**63)
    """The number of steps from the one value to the other, both included."""
    start: int = Field(0, ge=0, lt=2**63)
    """The number of steps before them, which have the first value."""

    @model_serializer
    def _as_given(self) -> dict[str, Any]:
        names = {"first": "from", "last": "to"}
        return {names.get(name, name): getattr(self, name) for name in type(self).model_fields}

    def at(self, step: int) -> float:
        """The value in a step, from 0."""
        done = min(1.0, max(0, step - self.start) / max(1, self.steps - 1))
        share = SCHEDULES[self.schedule].share(done)
        return self.first * share + self.last * (1 - share)

    def __ge__(self, other: float) -> bool:
        return min(self.first, self.last) >= other

    def __gt__(self, other: float) -> bool:
        return min(self.first, self.last) > other

    def __le__(self, other: float) -> bool:
        return max(self.first, self.last) <= other

    def __lt__(self, other: float) -> bool:
        return max(self.first, self.last) < other


def _from_mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if any(isinstance(v, bool) for v in value.values()):
        raise ValueError("a boolean does not fit here")
    try:
        made = PerStep.model_validate(value)
    except ValidationError as error:
        raise ValueError(reasons(error)) from None
    if made.schedule not in (usable := by_share()):
        raise ValueError(f"schedule: must be one of {', '.join(usable)}, got {made.schedule}")
    return made


Number = Annotated[float | PerStep, BeforeValidator(_from_mapping)]


def reasons(error: ValidationError) -> str:
    """What is wrong with a mapping, by its keys."""
    said = (e["msg"].removeprefix("Value error, ") for e in error.errors())
    keys = (map(str, e["loc"]) for e in error.errors())
    return "; ".join(": ".join([*at, text]) for at, text in zip(keys, said, strict=True))


def at_step(value: float | PerStep, step: int) -> float:
    return value.at(step) if isinstance(value, PerStep) else value


def largest(value: float | PerStep) -> float:
    return max(value.first, value.last) if isinstance(value, PerStep) else value
