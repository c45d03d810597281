"""The base class of the configuration's sections: a frozen pydantic model without unknown keys."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


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


def field(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)
