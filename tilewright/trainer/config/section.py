"""The base class of the configuration's sections: a frozen pydantic model without unknown keys."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic_core import core_schema

from tilewright.trainer.tables import Table


class RowOf:
    """Annotates a str: the name of a row of a table."""

    def __init__(self, table: Table):
        self.table = table

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": self.table.names()}

    def _known(self, name: str) -> str:
        self.table[name]
        return name


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python's True is an int: `micro_batch_size: true` would mean 1."""
        assert info.field_name is not None  # it validates a field
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("a boolean does not fit here")
        return value

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        """Python's integers are unbounded; those of arrays and files are not."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("does not fit in 64 bits")
        return value

    def _fill(self, **values: Any) -> None:
        # Only from validators, while the model is being built: afterwards it is frozen.
        for name, value in values.items():
            object.__setattr__(self, name, value)


# What a field does where it differs between a checkpoint and the run that resumes from it: the
# identity of a run (`build.identity`) holds it, and a change is refused; or holds what it names,
# such as a file's samples, and other contents are; or a change is free.
REFUSED, CONTENTS, FREE = "refused: ", "refused with other contents: ", "free: "
OTHER_WEIGHTS = REFUSED + "it decides which weights and adapters there are, and what they mean"
OTHER_STATES = REFUSED + "it decides which states the optimizer has, and for what"
OTHER_ORDER = REFUSED + "the position in the data is one in this order of samples"
OTHER_BINS = CONTENTS + "the position in the data counts bins, which must be the same"
OTHER_CONTENTS = CONTENTS + "the run continues with the weights, the model and the samples it had"
NEXT_STEP = FREE + "it holds from the next step on"
ROUNDING = FREE + "it changes how results are rounded, from the next step on"
LAYOUT = FREE + "weights, moments and the position are the same under every layout"
COST = FREE + "it changes time and memory"
EVALUATION = FREE + "no step depends on an evaluation"
PLACE = FREE + "it is where files are, not what they hold"
OUTPUT = FREE + "it is what is written, not what is computed"
THIS_START = FREE + "it is about one start of the command"


def field(default: Any, description: str, resume: str, **limits: Any) -> Any:
    """resume: what a change does where a run resumes, one of the constants above."""
    extra: dict[str, Any] = {"resume": resume}
    return Field(default, description=description, json_schema_extra=extra, **limits)
