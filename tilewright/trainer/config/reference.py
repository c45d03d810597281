"""The reference of the configuration's fields, from the fields alone: help, a page, a JSON schema,
one field explained.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tilewright.trainer.config.elsewhere import SETTINGS
from tilewright.trainer.config.field_tree import kind, leaves
from tilewright.trainer.config.readers import readers
from tilewright.trainer.config.section import Accepts, RowOf, needs, properties

if TYPE_CHECKING:
    from tilewright.trainer.config import Config

BEGIN, END = "<!-- fields: generated -->", "<!-- end of fields -->"
TITLE = """
A configuration is a YAML file with the sections `model`, `data`, `train` and `lora`. Any field can
be set on the command line too, as `--section.field value` or `--section.field=value`: hyphens and
underscores are equivalent, lists and mappings are JSON. All errors are reported at once, with exit
code 2.

| `python -m tilewright.trainer.config` | |
|---|---|
| `check config.yaml` | prints the resolved configuration, which a run also writes to `train.output_dir` |
| `--explain FIELD` | prints what a field means and needs, what reads it, and what a change does where a run resumes |
| `--schema` | prints the JSON schema |
| `docs docs/trainer/fields.md` | writes this reference, from the fields |

With the schema in FILE, editors complete and check a configuration whose first line is
`# yaml-language-server: $schema=FILE`.

The column `resume` says what happens if the value is not that of the checkpoint from which a run
resumes: it is refused, refused if the contents that it names differ, or free to change. The column
`read by` names the modules of `tilewright.trainer` that read the field.
"""


def _default(field: Any) -> str:
    return "required" if field.default is PydanticUndefined else json.dumps(field.default)


def meaning(field: Any) -> str:
    return " ".join(field.description.split())


def _accepted(field: Any, text: str) -> str:
    """The text with the accepted values, and why, of a field whose type has others."""
    rules = (rule for rule in properties(field).rules if isinstance(rule, Accepts))
    return "".join(
        text.format(" or ".join(rule.values or ["the default"]), rule.why) for rule in rules
    )


def help_text(model: type[BaseModel]) -> str:
    return "\n".join(
        f"--{path} ({kind(field.annotation)}; {_default(field)})\n    {meaning(field)}"
        + _accepted(field, " [only {}: {}]")
        for path, field in leaves(model).items()
    )


def _said(here: dict[str, Any] | str) -> str:
    """Settings as they are written, or the sentence that stands for them."""
    if isinstance(here, str):
        return here
    return ", ".join(f"`{path}: {json.dumps(v).strip(chr(34))}`" for path, v in here.items())


def page(model: type[BaseModel], text: str) -> str:
    """A page with the current reference between its two marks: a table for each section, the
    differences from the documentation that the fields follow, and their names elsewhere.
    """

    def row(*cells: str) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    tables: dict[str, list[str]] = {}
    differences, names = [], []
    for path, field in leaves(model).items():
        section, _, name = path.rpartition(".")
        if section == "data.test_datasets":
            continue  # the fields of data.datasets
        found = properties(field)
        cells = f"`{name}`", _type(field), f"`{_default(field)}`"
        cells += meaning(field) + _accepted(field, " **Only {}:** {}."), found.resume.split(":")[0]
        more = " (each entry of it, and of `data.test_datasets`)" * (section == "data.datasets")
        table = tables.setdefault(f"## {section}{more}", [])
        table.append(row(*cells, ", ".join(readers(model).get(path, ()))))
        differences += [row(f"`{path}`", *found.differs)] if found.differs else []
        names += [(who, name, f"`{path}`") for who, own in found.names.items() for name in own]
    lines = [BEGIN, TITLE.strip()]
    for title, rows in tables.items():
        lines += ["", title, "", "| field | type | default | meaning | resume | read by |"]
        lines += ["|---|---|---|---|---|---|", *rows]
    lines += ["", "## Differences from xorl's documentation", ""]
    lines += ["| field | there | here, and why |", "|---|---|---|", *differences]
    names += [(who, n, _said(here)) for who, own in SETTINGS.items() for n, here in own.items()]
    names.sort(key=lambda cells: (cells[0].lower(), *cells))
    lines += ["", "## Names in other configurations", "", "| in | name | here |", "|---|---|---|"]
    lines += [row(who, f"`{name}`", here) for who, name, here in names] + [END]
    return text.split(BEGIN)[0] + "\n".join(lines) + text.split(END)[1]


def schema(model: type[BaseModel]) -> str:
    """JSON schema, for editors. What fields need of each other is not in it."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    # The lines of a description are those of its source.
    return json.dumps(dialect | model.model_json_schema(), indent=1).replace("\\n", " ")


LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def limits(field: Any) -> str:
    """The range of a number, or the least length of a list; "" without one."""
    found = [
        f"{words} {getattr(limit, name)}"
        for limit in field.metadata
        for name, words in LIMITS.items()
        if hasattr(limit, name)
    ]
    found += [f"{m.min_length} or more long" for m in field.metadata if hasattr(m, "min_length")]
    return ", ".join(found)


def _type(field: Any) -> str:
    if rows := [m for m in field.metadata if isinstance(m, RowOf)]:
        return " | ".join(rows[0].table.names())
    return f"{kind(field.annotation)}{', ' * bool(limits(field))}{limits(field)}"


def explain(config: Config, path: str) -> str:
    """Everything that a field states, and what reads it.

    config: any with an entry in each list, from which rules state their sentences. Raises KeyError
    for an unknown path.
    """
    field = leaves(type(config))[path]
    found = properties(field)
    lines = [
        path,
        f"  type:    {_type(field)}",
        f"  default: {_default(field)}",
        f"  meaning: {meaning(field)}",
        f"  resume:  {found.resume}",
        f"  read by: {', '.join(readers(type(config)).get(path, ['its rules']))}",
        *(f"  rule:    {sentence}" for sentence in needs(path, config)),
        *([f"  in xorl: {found.differs[0]}; here: {found.differs[1]}"] if found.differs else []),
        *(f"  in {who}: {', '.join(names)}" for who, names in found.names.items()),
    ]
    return "\n".join(lines)
