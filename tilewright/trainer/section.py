"""What a field of the configuration states, and what reads it from there.

Everything about a field stands on it: its default and meaning, what a change does where a run
resumes, and which values need what of others. What else values of several fields follow is in plain
functions (`Check`). What others call a field is in `dialects`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

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


# ---- what values need of each other


class Needs(NamedTuple):
    """What any value of a field needs, but the default and those of `neutral`: that another field
    has one of these values, or one that they return, or any value but `but`.

    other: without a section it is beside this field.   why: the sentence where it is not so; ""
    where something reads the field only there.
    """

    other: str
    values: Iterable[Any] | Callable[[], Iterable[Any]] = ()
    why: str = ""
    but: Any = ...
    neutral: tuple[Any, ...] = ()

    @property
    def accepted(self) -> list[Any]:
        return [*(self.values() if callable(self.values) else self.values)]

    def met(self, other: Any) -> bool:
        return other in self.accepted if self.but is ... else other != self.but

    def sentence(self) -> str:
        accepted = self.accepted
        if self.why:
            return self.why
        if accepted == [True]:
            return f"only {self.other.rpartition('.')[2]} makes something read this"
        if not accepted:
            return "nothing reads this here"
        return f"only {' and '.join(accepted)} read{'s' * (len(accepted) == 1)} this"

    def wanted(self, default: Any, other: str) -> str:
        """In words.   other: the path of the other field."""
        values = f"!= {show(self.but)}"
        if self.but is ...:
            values = f"= {_either(self.accepted)}" if self.accepted else "of another package"
        return f"any value but {_either((default, *self.neutral))} needs {other} {values}"


# What a function of a section states of its values: whether they are wrong, the sentence where they
# are, and the fields concerned, the one at fault first. Without a sentence nothing is wrong. A name
# without a section is one of the function's first section.
Stated = tuple[object, str | None, *tuple[str, ...]]

# A function of sections that are told by its annotations, the first of which may be the class of a
# list's entries. With a parameter `training` it is given whether the configuration is one to train
# with. Its documentation stands for a sentence that is not known before something is wrong.
Check = Callable[..., Iterator[Stated]]


class Problem(NamedTuple):
    """The fields concerned, the one at fault first, and one sentence."""

    paths: tuple[str, ...]
    message: str

    def line(self, config: Any) -> str:
        return f"{', '.join(f'{p} = {show(get(config, p))}' for p in self.paths)}: {self.message}"


class Broken(list[Problem]):
    """What is wrong with a configuration.   training: whether it is one to train with."""

    training = True


class Rule(NamedTuple):
    """Something that values follow: the fields concerned, whether it is broken, the sentence where
    it is, and its description.
    """

    paths: tuple[str, ...]
    broken: object
    message: str | None
    description: str


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(show, values))


def sections(config: Any) -> Iterator[tuple[str, Section]]:
    """The sections of a configuration, and the entries of their lists, by their paths."""
    for at, section in config:
        yield at, section
        for name, value in section:
            for i, entry in enumerate(value if isinstance(value, list) else ()):
                if isinstance(entry, Section):
                    yield f"{at}.{name}.{i}", entry


def rules(
    config: Any, checks: Iterable[Check], training: bool = True, *, unbroken: bool = True
) -> Iterator[Rule]:
    """What a configuration's values follow: what fields state, and plain functions.

    unbroken: with the rules that are not broken.
    """
    every = [*sections(config)]
    for at, section in every:
        for name, field in type(section).model_fields.items():
            own, value, path = properties(field), getattr(section, name), f"{at}.{name}"
            if own.refused:
                accepted = own.accepted or (field.default,)
                description = f"only {_either(accepted)}: {own.refused}"
                yield Rule((path,), value not in accepted, own.refused, description)
            for need in own.needs:
                other = _path(at, need.other)
                neutral = value in (field.default, *need.neutral)
                broken = not neutral and not need.met(get(config, other))
                if not (broken or unbroken):
                    continue
                wanted = need.wanted(field.default, without_index(other))
                description = ": ".join(filter(None, (wanted, need.why)))
                yield Rule((path, other), broken, need.sentence(), description)
    for check in checks:
        first, *kinds = _kinds(check)
        given = [training if k is bool else part((s for _, s in config), k) for k in kinds]
        for at, section in every:
            for broken, why, *names in check(section, *given) if isinstance(section, first) else ():
                if not ((broken and why) or unbroken):
                    continue
                paths = tuple(_path(at, name) for name in names)
                others = ", ".join(map(without_index, paths[1:]))
                wanted = others and f"refused with some values of {others}"
                said = why or " ".join((check.__doc__ or "").split()).rstrip(".")
                yield Rule(paths, broken, why, ": ".join(filter(None, (wanted, said))))


@functools.cache
def _kinds(check: Check) -> list[type]:
    return [kind for name, kind in get_type_hints(check).items() if name != "return"]


def _path(section: str, name: str) -> str:
    return name if "." in name else f"{section}.{name}"


def problems(config: Any, checks: Iterable[Check], training: bool = True) -> list[Problem]:
    """What is wrong with a configuration, in the order of its fields.   training: to train with."""
    order = [f"{at}.{name}" for at, section in sections(config) for name, _ in section]
    broken = (
        Problem(rule.paths, rule.message)
        for rule in rules(config, checks, training, unbroken=False)
        if rule.broken and rule.message
    )
    return sorted(broken, key=lambda problem: order.index(problem.paths[0]))


def needs(path: str, config: Any, checks: Iterable[Check]) -> Iterator[str]:
    """Every rule that concerns a field, at fault or not. config: any with an entry in each list."""
    for rule in rules(config, checks):
        own, *others = map(without_index, rule.paths)
        if path in (own, *others):
            yield f"{own}: " * (own != path) + rule.description


# ---- fields


class Properties(NamedTuple):
    resume: Resume
    needs: tuple[Needs, ...]
    refused: str
    accepted: tuple[Any, ...]
    stored: str | None
    certified: bool
    keyed: bool
    later: bool


def field(
    default: Any,
    resume: Resume,
    *needs: Needs,
    refused: str = "",
    accepted: tuple[Any, ...] = (),
    stored: str | None = None,
    certified: bool = True,
    keyed: bool = False,
    later: bool = False,
    **limits: Any,
) -> Any:
    """A field, which means what the string below it says.

    refused: why values that its type has are not accepted: all but `accepted`, or the default.
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
    made.metadata.append(
        Properties(resume, needs, refused, accepted, stored, certified, keyed, later)
    )
    return made


def properties(field: FieldInfo) -> Properties:
    return next(p for p in field.metadata if isinstance(p, Properties))


def kept(section: Section, resume: Resume, *, unread: bool = True) -> dict[str, Any]:
    """What the identity of a run holds of a section: its fields with this `resume`.

    unread: with those that nothing reads; else what another field decides on comes last.
    """
    always, sometimes = {}, {}
    for name, field in type(section).model_fields.items():
        own = properties(field)
        deciding = [need for need in own.needs if not (need.why or unread)]
        if own.resume == resume and all(n.met(getattr(section, n.other)) for n in deciding):
            (sometimes if deciding else always)[own.stored or name] = getattr(section, name)
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
    values = {}
    for name, field in type(section).model_fields.items():
        own, value = properties(field), getattr(section, name)
        if own.keyed and not (own.later and value == field.default):
            values[name] = value
    return values


def unrecorded(kind: type[Section], resume: Resume) -> dict[str, Any]:
    """What `kept` would have held of a section in a run from before it had its later fields."""
    fields = ((name, properties(field), field) for name, field in kind.model_fields.items())
    return {
        own.stored or name: field.default
        for name, own, field in fields
        if own.later and own.resume == resume
    }
