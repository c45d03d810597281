"""Which layouts go together. The table in docs/trainer/layouts.md is made from the code that
refuses:

python tests/trainer/test_combinations.py docs/trainer/layouts.md
"""

import itertools
import pathlib
import sys

import pytest

pytest.importorskip("pydantic")

ROOT = next(p for p in pathlib.Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tilewright.trainer.config import Config, ConfigError  # noqa: E402
from tilewright.trainer.config.checks import CHECKS  # noqa: E402
from tilewright.trainer.parallel.mesh import layout_of  # noqa: E402
from tilewright.trainer.section import problems  # noqa: E402

pytestmark = pytest.mark.packages

# What a layout or an option is, beside FSDP2 and separate projections. A line here is a row and a
# column.
FEATURES = {
    "one process": {"train.data_parallel_mode": "none"},
    "DDP": {"train.data_parallel_mode": "ddp"},
    "FSDP2": {"train.data_parallel_mode": "fsdp2"},
    "HSDP": {"train.data_parallel_mode": "fsdp2", "train.data_parallel_replicate_size": 2},
    "tensor": {"train.tensor_parallel_size": 2},
    "pipeline": {"train.pipeline_parallel_size": 2, "train.gradient_accumulation_steps": 2},
    "experts": {"train.expert_parallel_size": 2},
    "Ulysses": {"train.ulysses_parallel_size": 2},
    "ring": {"train.ringattn_parallel_size": 2},
    "LoRA": {"lora.enable_lora": True},
    "QLoRA": {"lora.enable_lora": True, "lora.enable_qlora": True},
    "AQN": {"lora.enable_lora": True, "lora.enable_qlora": True, "lora.enable_aqn": True},
    "compile": {"train.enable_compile": True},
    "batch-invariant": {"model.batch_invariant": True},
}
BASE = {
    "model.config_path": "folder",
    "model.merge_qkv": False,
    "train.output_dir": "folder",
    "data.datasets": [{"path": "dummy"}],
}
BEGIN, END = "<!-- combinations: generated -->", "<!-- end of combinations -->"


def refusal(one, other):
    """Why two features do not go together, None if they do, or "" if they set the same field."""
    a, b = FEATURES[one], FEATURES[other]
    if any(a[path] != b[path] for path in a.keys() & b.keys()):
        return ""
    tree = {name: {} for name in Config.model_fields}
    for path, value in (BASE | a | b).items():
        section, name = path.split(".")
        tree[section][name] = value
    # Without the rules, which raise at the first.
    parts = {name: Config.model_fields[name].annotation(**tree[name]) for name in tree}
    config = Config.model_construct(**parts)
    for problem in problems(config, CHECKS):
        return problem.message
    t = config.train
    work = t.pipeline_parallel_size * t.tensor_parallel_size * t.context_parallel_size
    try:
        layout_of(t, work if t.data_parallel_mode == "none" else 4 * work)
    except ConfigError as error:
        return str(error)
    return None


def table():
    names = list(FEATURES)
    reasons, lines = [], []
    lines.append("| | " + " | ".join(names) + " |")
    lines.append("|---" * (len(names) + 1) + "|")
    for i, one in enumerate(names):
        cells = []
        for j, other in enumerate(names):
            why = refusal(one, other) if j <= i else ""
            if why:
                if why not in reasons:
                    reasons.append(why)
                cells.append(f"no ({reasons.index(why) + 1})")
            else:
                cells.append("yes" if why is None else "")
        lines.append(f"| **{one}** | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"{i}. {why[0].upper()}{why[1:]}." for i, why in enumerate(reasons, 1)]
    return "\n".join(lines)


def page(text):
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def test_the_table_is_current():
    where = "docs/trainer/layouts.md"
    text = (ROOT / where).read_text()
    assert text == page(text), f"run python tests/trainer/test_combinations.py {where}"


def test_the_table_says_what_the_trainer_does():
    assert refusal("FSDP2", "tensor") is None and refusal("HSDP", "tensor") is None
    assert "fsdp2 takes parameters" in refusal("DDP", "tensor")
    assert refusal("ring", "batch-invariant") is None
    assert refusal("one process", "DDP") == ""
    for one, other in itertools.combinations_with_replacement(FEATURES, 2):
        assert refusal(one, other) == refusal(other, one), (one, other)


if __name__ == "__main__":
    file = pathlib.Path(sys.argv[1])
    file.write_text(page(file.read_text()))
