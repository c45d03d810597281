"""What a field of the configuration states, and what reads it from there.

Everything about a field stands on it: its default and meaning, what a change does where a run
resumes, and the rules that its values follow. What others call it is in `dialects`.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from tilewright.trainer.field_tree import get, show, without_index
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
        use_attribute_docstrings=True,
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

    @field_validator("*", mode="before")
    @classmethod
    def _share_as_share(cls, value: Any, info: ValidationInfo) -> Any:
        """Keeps "1.0" of the command line a float: pydantic takes an int if both are accepted."""
        assert info.field_name is not None
        kinds = get_args(cls.model_fields[info.field_name].annotation)
        if isinstance(value, str) and {int, float} <= {*kinds} and re.search("[.eE]", value):
            with contextlib.suppress(ValueError):  # of pydantic, with what is expected
                return float(value)
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


Part = TypeVar("Part", bound=Section)


def part(sections: Iterable[Any], kind: type[Part]) -> Part:
    """The one of a class, which it may have with others."""
    return next(section for section in sections if isinstance(section, kind))


class Resume(enum.StrEnum):
    """What a field does where it differs between a checkpoint and the run that resumes from it: the
    identity of a run (`build.identity`) holds it, and a change is refused; or holds what it names,
    such as a file's samples, and other contents are; or a change is free.
    """

    OTHER_SHAPE = "refused: it is a part of the model's configuration, which must be the same"
    OTHER_WEIGHTS = "refused: it decides which weights and adapters there are, and what they mean"
    OTHER_STATES = "refused: it decides which states the optimizer has, and for what"
    OTHER_ORDER = "refused: the position in the data is one in this order of samples"
    OTHER_BINS = (
        "refused with other contents: the position in the data counts bins, which must be the same"
    )
    OTHER_CONTENTS = (
        "refused with other contents: the run continues with the weights, the model and the "
        "samples it had, unless train.accept_changes names what is another"
    )
    NEXT_STEP = "free: it holds from the next step on"
    ROUNDING = "free: it changes how results are rounded, from the next step on"
    LAYOUT = "free: weights, moments and the position are the same under every layout"
    COST = "free: it changes time and memory"
    EVALUATION = "free: no step depends on an evaluation"
    PLACE = "free: it is where files are, not what they hold"
    OUTPUT = "free: it is what is written, not what is computed"
    THIS_START = "free: it is about one start of the command"


# What is computed does not depend on a field that is one of these.
BESIDE = (Resume.PLACE, Resume.OUTPUT, Resume.THIS_START)


class Place(NamedTuple):
    """Where a field stands in a configuration: its path, with the indices of lists' entries, and
    what its rules are about, which is the configuration, or the entry that it is in.
    """

    path: str
    field: FieldInfo
    config: Any
    within: Any

    @property
    def value(self) -> Any:
        return get(self.config, self.path)

    def paths(self, rule: Rule) -> tuple[str, ...]:
        """The paths of the fields concerned. A name without a section is one beside this field."""
        beside = self.path.rpartition(".")[0]
        return (self.path, *(o if "." in o else f"{beside}.{o}" for o in rule.others))


# ---- rules


class _Rule:
    """What a field's values follow: whether it is `broken`, and what is `wanted`, in words.

    others: the fields that it concerns beside its own. why: the sentence where it is broken, or a
    function that returns it, or None if nothing is wrong: on this machine, say. training: whether
    it is one of training alone.
    """

    others: tuple[str, ...] = ()
    why: str | Callable[[Any], str | None] = ""
    training: bool = False

    def in_training(self) -> Self:
        """Not where documents are scored alone."""
        return self._with(training=True)

    def because(self, why: str) -> Self:
        return self._with(why=why)

    def _with(self, **changes: Any) -> Self:
        made = copy.copy(self)
        vars(made).update(changes)
        return made

    def sentence(self, at: Place) -> str | None:
        return self.why if isinstance(self.why, str) else self.why(at.within)


class Accepts(_Rule):
    """Only these values are accepted; without any, only the default."""

    def __init__(self, *values: Any):
        self.values = values

    def broken(self, at: Place) -> object:
        return at.value not in (self.values or (at.field.default,))

    def wanted(self, at: Place) -> str:
        return f"only {_either(self.values or (at.field.default,))}"


class Only(_Rule):
    """The default, and what `neutral` adds to it, are accepted everywhere; other values only where
    another field has one of these values, one that `table` returns, or not the value `but`.

    Without a reason of its own: something reads the field only there.
    """

    def __init__(
        self,
        other: str,
        *values: Any,
        table: Callable[[], Iterable[Any]] | None = None,
        but: Any = ...,
        neutral: tuple[Any, ...] = (),
    ):
        self.others, self.but, self.neutral = (other,), but, neutral
        self._values = table or (lambda: values)

    @property
    def values(self) -> list[Any]:
        return [*self._values()]

    def holds(self, other: Any) -> bool:
        return other in self.values if self.but is ... else other != self.but

    def broken(self, at: Place) -> object:
        other = get(at.config, at.paths(self)[1])
        return not self.holds(other) and at.value not in (at.field.default, *self.neutral)

    def wanted(self, at: Place) -> str:
        values = f"!= {show(self.but)}"
        if self.but is ...:
            values = f"= {_either(self.values)}" if self.values else "of another package"
        other = without_index(at.paths(self)[1])
        return f"any value but {_either((at.field.default, *self.neutral))} needs {other} {values}"

    def sentence(self, at: Place) -> str | None:
        if self.why:
            return super().sentence(at)
        if self.values == [True]:
            return f"only {self.others[0].rpartition('.')[2]} makes something read this"
        if not self.values:
            return "nothing reads this here"
        return f"only {' and '.join(self.values)} read{'s' * (len(self.values) == 1)} this"


class Refuse(_Rule):
    """Values of this field, which is the one at fault, and others that do not go together. Without
    `when`: any value but the default.
    """

    condition: Callable[[Any], object] | None = None

    def __init__(self, why: str | Callable[[Any], str | None], *others: str):
        self.why, self.others = why, others

    def when(self, condition: Callable[[Any], object]) -> Self:
        return self._with(condition=condition)

    def when_entry(self, condition: Callable[[Any], object]) -> Self:
        return self._with(condition=condition)

    def broken(self, at: Place) -> object:
        return self.condition(at.within) if self.condition else at.value != at.field.default

    def wanted(self, at: Place) -> str:
        others = ", ".join(map(without_index, at.paths(self)[1:]))
        return f"refused with some values of {others}" if others else ""


Rule = Accepts | Only | Refuse


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(show, values))


# ---- fields


class Properties(NamedTuple):
    resume: Resume
    rules: tuple[Rule, ...]
    stored: str | None
    certified: bool
    keyed: bool
    later: bool


def field(
    default: Any,
    resume: Resume,
    *rules: Rule,
    stored: str | None = None,
    certified: bool = True,
    keyed: bool = False,
    later: bool = False,
    **limits: Any,
) -> Any:
    """A field, which means what the string below it says.

    stored: its name in the identity of a run, if it has another one there.
    certified: whether the certificate of a run holds it, unless `resume` says already that nothing
    computed depends on it. False where no step and no number of an evaluation does, and where what
    it names is another fact.
    keyed: whether the name of a prepared set holds it.
    later: whether there are checkpoints or prepared sets from before there was the field: what they
    do not hold is the default.
    limits: for pydantic's Field. An example of a required field stands in where it is missing.
    """
    made = Field(default, **limits)
    certified = certified and resume not in BESIDE
    made.metadata.append(Properties(resume, rules, stored, certified, keyed, later))
    return made


def properties(field: FieldInfo) -> Properties:
    return next(p for p in field.metadata if isinstance(p, Properties))


def places(config: Any, at: str = "", entry: Section | None = None) -> Iterator[Place]:
    """Every field of a configuration, and of its lists' entries, in order."""
    section = entry or (get(config, at[:-1]) if at else config)
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), at + name
        if isinstance(value, Section):
            yield from places(config, f"{path}.")
            continue
        yield Place(path, field, config, entry or config)
        for i, one in enumerate(value if isinstance(value, list) else ()):
            if isinstance(one, Section):
                yield from places(config, f"{path}.{i}.", one)


class Problem(NamedTuple):
    """The fields concerned, the one at fault first, and one sentence."""

    paths: tuple[str, ...]
    message: str

    def line(self, config: Any) -> str:
        return f"{', '.join(f'{p} = {show(get(config, p))}' for p in self.paths)}: {self.message}"


class Broken(list[Problem]):
    """The rules that a configuration breaks.   training: whether it is one to train with."""

    training = True


# A function of sections, or of an entry of a list, that are told by its annotations. With a
# parameter `training` it is given whether the configuration is one to train with.
Check = Callable[..., Problem | None]


def checked(config: Any, checks: Iterable[Check], training: bool) -> Iterator[Problem]:
    """The problems of plain functions."""
    sections = [section for _, section in config]
    for check in checks:
        kinds = get_type_hints(check)
        kinds.pop("return")
        given = {n: training if k is bool else part(sections, k) for n, k in kinds.items()}
        if (problem := check(**given)) is not None:
            yield problem


def concerning(config: Any, checks: Iterable[Check], path: str) -> Iterator[str]:
    """What the plain functions that read a field hold, by their documentation."""
    for check in checks:
        kinds = [kind for kind in get_type_hints(check).values() if isinstance(kind, type)]
        read = {
            f"{at}.{name}"
            for at, section in config
            for kind in kinds
            if issubclass(kind, Section) and isinstance(section, kind)
            for name in kind.model_fields
            if name in check.__code__.co_names
        }
        if path in read and check.__doc__:
            yield " ".join(check.__doc__.split()).rstrip(".")


def problems(config: Any, training: bool = True) -> Iterator[Problem]:
    """Every rule that is broken.   training: with those of training alone."""
    for at in places(config):
        for rule in properties(at.field).rules:
            if (
                (training or not rule.training)
                and rule.broken(at)
                and (sentence := rule.sentence(at))
            ):
                yield Problem(at.paths(rule), sentence)


def needs(path: str, config: Any) -> Iterator[str]:
    """Every rule that concerns a field, at fault or not. config: any with an entry in each list."""
    for at in places(config):
        for rule in properties(at.field).rules:
            own, *others = map(without_index, at.paths(rule))
            if path in (own, *others):
                parts = own * (own != path), rule.wanted(at), rule.why and rule.sentence(at)
                yield ": ".join(filter(None, parts))


def kept(section: Section, resume: Resume, *, unread: bool = True) -> dict[str, Any]:
    """What the identity of a run holds of a section: its fields with this `resume`.

    unread: with those that nothing reads; else what another field decides on comes last.
    """
    always, sometimes = {}, {}
    for name, field in type(section).model_fields.items():
        found = properties(field)
        deciding = [r for r in found.rules if isinstance(r, Only) and not (r.why or unread)]
        if found.resume == resume and all(r.holds(getattr(section, r.others[0])) for r in deciding):
            (sometimes if deciding else always)[found.stored or name] = getattr(section, name)
    return always | sometimes


def certified(config: Any) -> dict[str, Any]:
    """What the certificate of a run holds of its configuration: fields by their paths."""
    made = config.model_dump(mode="json")
    return {
        f"{at}.{name}": made[at][name]
        for at, section in config
        for name, field in type(section).model_fields.items()
        if properties(field).certified
    }


def keyed(section: Section) -> dict[str, Any]:
    """What the name of a prepared set holds of a section, or of an entry of its data sets."""
    found = {}
    for name, field in type(section).model_fields.items():
        own, value = properties(field), getattr(section, name)
        if own.keyed and not (own.later and value == field.default):
            found[name] = value
    return found


def unrecorded(kind: type[Section], resume: Resume) -> dict[str, Any]:
    """What `kept` would have held of a section in a run from before it had its later fields."""
    found = {name: (properties(field), field) for name, field in kind.model_fields.items()}
    return {
        own.stored or name: field.default
        for name, (own, field) in found.items()
        if own.later and own.resume == resume
    }
