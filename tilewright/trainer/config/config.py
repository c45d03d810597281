"""The trainer's configuration: every field, what it means, and which values this version refuses.

A field that is accepted does what its description says. What cannot work is refused with one
sentence (`rules.py`), never ignored. Names, types and meanings follow xorl's local training
configuration; DIFFERENCES lists where a default or a meaning departs from it, and why.
The fields are in `fields.py` and `train_fields.py`; `overrides.py` reads files and command lines.

    python -m tilewright.trainer.config check config.yaml --train.lr 2e-5  # the resolved YAML
    python -m tilewright.trainer.config docs docs/trainer/fields.md        # writes the reference
    python -m tilewright.trainer.config --schema                           # JSON schema
    python -m tilewright.trainer.config --explain train.lr                 # one field
"""

from __future__ import annotations

import pathlib
import sys

import yaml
from pydantic import Field, ValidationInfo, model_validator

from tilewright.core import platform
from tilewright.trainer.config import overrides as reading
from tilewright.trainer.config import reference
from tilewright.trainer.config.differences import DIFFERENCES, ELSEWHERE
from tilewright.trainer.config.field_tree import ConfigError, leaves, unknown
from tilewright.trainer.config.fields import Data, Dataset, Lora, Model
from tilewright.trainer.config.refused import ACCEPTED, REFUSED
from tilewright.trainer.config.rules import needs, problems
from tilewright.trainer.config.section import Section
from tilewright.trainer.config.train_fields import Train

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Dataset",
    "Lora",
    "Model",
    "Train",
    "from_command_line",
    "load",
    "resolved",
]


class Config(Section):
    model: Model = Field(Model(), description="What is trained.")
    data: Data = Field(..., description="On what.")
    train: Train = Field(..., description="How.")
    lora: Lora = Field(Lora(), description="Adapters.")

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Config:
        broken = list(problems(self))
        if isinstance(info.context, list):  # `load` reports them together with every other error
            info.context.extend(broken)
        elif broken:
            raise ValueError("\n".join(p.line(self) for p in broken))
        return self


def load(path: str | None, overrides: list[str] | None = None) -> Config:
    """The configuration in a YAML file, with `--section.field value` (or `=value`) overrides.

    Raises ConfigError with every misspelled key, wrong type, refused value and contradiction, one
    line each.
    """
    return reading.build(Config, path, overrides or [], ELSEWHERE)


def resolved(config: Config) -> str:
    """Every field with its value, as YAML. Loading it gives the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def from_command_line(
    argv: list[str] | None = None,
    program: str = "python -m tilewright.trainer.train",
    options: dict[str, str] | None = None,
) -> Config:
    """Parses `config.yaml [--section.field value ...]`. Prints all errors and exits with 2, or
    prints the help and exits. options: further arguments of the program, for the help.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        options = options or {}
        usage = ["config.yaml [--section.field value ...]", *(f"[{name}]" for name in options)]
        print(f"usage: {program} {' '.join(usage)}\n")
        for name, meaning in options.items():
            print(f"{name}\n    {meaning}")
        print(reference.help_text(Config, NOTES))
        sys.exit(0 if argv else 2)
    path = None if argv[0].startswith("--") else argv[0]
    try:
        return load(path, argv[1 if path else 0 :])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


NOTES = {
    path: (" or ".join(ACCEPTED.get(path, ["the default"])), why) for path, why in REFUSED.items()
}

BEGIN, END = "<!-- fields: generated -->", "<!-- end of fields -->"
TITLE = """
A configuration is a YAML file with the sections `model`, `data`, `train` and `lora`. Any field can
be set on the command line too, as `--section.field value` or `--section.field=value`: hyphens and
underscores are equivalent, lists and mappings are JSON. All errors are reported at once, with exit
code 2.

| `python -m tilewright.trainer.config` | |
|---|---|
| `check config.yaml` | prints the resolved configuration, which a run also writes to `train.output_dir` |
| `--explain FIELD` | prints what a field means and needs, and what a change does where a run resumes |
| `--schema` | prints the JSON schema |
| `docs docs/trainer/fields.md` | writes this reference, from `fields.py` and `train_fields.py` |

With the schema in FILE, editors complete and check a configuration whose first line is
`# yaml-language-server: $schema=FILE`.

The column `resume` says what happens if the value is not that of the checkpoint from which a run
resumes: it is refused, refused if the contents that it names differ, or free to change.
"""


def page(text: str) -> str:
    """A page with the current reference between its two marks."""
    before, rest = text.split(BEGIN)
    fields = reference.markdown(Config, TITLE, NOTES, DIFFERENCES)
    return f"{before}{BEGIN}\n{fields}{END}{rest.split(END)[1]}"


# A minimal valid configuration, from which rules state their sentences.
LEAST = {"model": {"config_path": "-"}, "data": {"datasets": [{"path": "dummy"}]}}


def explain(name: str) -> str:
    """`reference.explain` of a field, by its path with or without the section.

    Raises ConfigError for a name that no field has.
    """
    paths = leaves(Config)
    path = next((p for p in paths if name in (p, p.partition(".")[2])), None)
    if path is None:
        raise ConfigError([f"{name}: {unknown(Config, name, ELSEWHERE)}"])
    least = Config.model_validate({**LEAST, "train": {"output_dir": "-"}})
    return reference.explain(Config, path, list(needs(path, least)), DIFFERENCES.get(path))


@platform.command
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command, rest = argv[:1], argv[1:]
    if command == ["docs"] and len(rest) == 1:
        file = pathlib.Path(rest[0])
        file.write_text(page(file.read_text("utf-8")), "utf-8")
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
