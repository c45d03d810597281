"""The trainer's configuration: every field, what it means, and which values this version refuses.

A field that is accepted does what its description says. What cannot work is refused with one
sentence, never ignored. Names, types and meanings follow xorl's local training configuration; where
a default or a meaning departs from it, `dialects/xorl.toml` says so, and why. Everything else about
a field stands on it (`section.field`), beside what reads it: in `fields.py` of `models`, `optim`,
`losses`, `parallel`, `checkpoint` and `data`, and, where the readers are above, in `train.py`. What
values of several fields follow is in plain functions there, and in `checks.py` where no reader of
one knows the other; `checks.CHECKS` lists them. `overrides.py` reads files and command lines.

    python -m tilewright.trainer.config check config.yaml --train.lr 2e-5  # the resolved YAML
    python -m tilewright.trainer.config docs docs/trainer/fields.md        # writes the reference
    python -m tilewright.trainer.config references LISTS FILE              # of others' names
    python -m tilewright.trainer.config --schema                           # JSON schema
    python -m tilewright.trainer.config --explain train.lr                 # one field
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import yaml
from pydantic import Field, ValidationInfo, model_validator

from tilewright.core import platform
from tilewright.trainer.config import overrides as reading
from tilewright.trainer.config import reference
from tilewright.trainer.config.checks import CHECKS
from tilewright.trainer.config.train import Train
from tilewright.trainer.data.fields import Data
from tilewright.trainer.field_tree import ConfigError, leaves
from tilewright.trainer.losses.distillation_fields import Distillation
from tilewright.trainer.losses.policy_fields import Policy
from tilewright.trainer.losses.preference_fields import Preference
from tilewright.trainer.losses.reward_fields import Reward
from tilewright.trainer.models.fields import Model
from tilewright.trainer.models.lora_fields import Lora
from tilewright.trainer.parallel.precision import Precision
from tilewright.trainer.section import Section, problems


class Config(Section):
    model: Model = Field(Model(), description="What is trained.")
    data: Data = Field(..., description="On what.")
    train: Train = Field(..., description="How.")
    lora: Lora = Field(Lora(), description="Adapters.")
    precision: Precision = Field(Precision(), description="Dtypes.")
    preference: Preference = Field(Preference(), description="Preferences.")
    policy: Policy = Field(Policy(), description="Policies.")
    distillation: Distillation = Field(Distillation(), description="A teacher's distributions.")
    reward: Reward = Field(Reward(), description="Reward models.")

    @model_validator(mode="before")
    @classmethod
    def _of_fp32(cls, given: Any) -> Any:
        """precision.type: fp32 is train.enable_mixed_precision: false, which need not be said."""
        match given:
            case {"precision": {"type": "fp32"}, "train": dict(train)}:
                return {**given, "train": {"enable_mixed_precision": False, **train}}
        return given

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Config:
        training = getattr(info.context, "training", True)
        broken = problems(self, CHECKS, training)
        if isinstance(info.context, list):  # `load` reports them together with every other error
            info.context.extend(broken)
        elif broken:
            raise ValueError("\n".join(p.line(self) for p in broken))
        return self


def load(path: str | None, overrides: list[str] | None = None, *, training: bool = True) -> Config:
    """The configuration in a YAML file, with `--section.field value` (or `=value`) overrides.

    training: whether it is trained with; False: weights that are there score documents.

    Raises ConfigError with every misspelled key, wrong type, refused value and contradiction, one
    line each.
    """
    return reading.build(Config, path, overrides or [], training=training)


def resolved(section: Section) -> str:
    """Every field with its value, as YAML. Loading a configuration's gives the same one."""
    return yaml.safe_dump(section.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def from_command_line(
    argv: list[str] | None = None,
    program: str = "python -m tilewright.trainer.train",
    options: dict[str, str] | None = None,
    *,
    training: bool = True,
) -> Config:
    """Parses `config.yaml [--section.field value ...]`. Prints all errors and exits with 2, or
    prints the help and exits. options: further arguments of the program, for the help.
    training: as in `load`.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        options = options or {}
        usage = ["config.yaml [--section.field value ...]", *(f"[{name}]" for name in options)]
        print(f"usage: {program} {' '.join(usage)}\n")
        for name, meaning in options.items():
            print(f"{name}\n    {meaning}")
        print(reference.help_text(Config))
        sys.exit(0 if argv else 2)
    path = None if argv[0].startswith("--") else argv[0]
    try:
        return load(path, argv[1 if path else 0 :], training=training)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def explain(name: str) -> str:
    """`reference.explain` of a field, by its path with or without the section.

    Raises ConfigError for a name that no field has.
    """
    path = next((p for p in leaves(Config) if name in (p, p.partition(".")[2])), None)
    if path is None:
        raise ConfigError([f"{name}: {reading.unknown(Config, name)}"])
    entries = [{"path": "dummy"}]
    least = {
        "model": {"config_path": "-"},
        "data": {"datasets": entries, "test_datasets": entries},
        "train": {"output_dir": "-"},
    }
    return reference.explain(Config.model_validate(least, context=[]), path)


@platform.command
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command, rest = argv[:1], argv[1:]
    if command == ["docs"] and len(rest) == 1:
        file = pathlib.Path(rest[0])
        file.write_text(reference.page(Config, file.read_text("utf-8")), "utf-8")
    elif command == ["references"] and len(rest) == 2:
        lists = {p.stem: p.read_text("utf-8") for p in sorted(pathlib.Path(rest[0]).glob("*.txt"))}
        pathlib.Path(rest[1]).write_text(reference.others(Config, lists), "utf-8")
    elif command == ["check"]:
        config = from_command_line(rest, "python -m tilewright.trainer.config check")
        print(resolved(config), end="")
    elif argv == ["--schema"]:
        print(reference.schema(Config))
    elif command == ["--explain"] and rest:
        try:
            print("\n".join(map(explain, rest)))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0
