"""docs/tutorials: their code is that of the examples, and their commands print what they say; the
Python of README and guide runs. Links are checked by `make docs`.

In a page, a block with a title is a passage of that file. `console` blocks are run, in order, on a
copy of the examples. `bash` blocks, for real models and other machines, are parsed by the programs
that they call. What is marked `template` needs the op of CONTRIBUTING.md: see test_contributing.py.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from importlib import util

import forked
import pytest

from tilewright.core import platform

pytestmark = pytest.mark.packages

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
# A comment before it, the language, what follows that, and the text.
BLOCK = re.compile(r"^(?:<!-- (\w+) -->\n)?```(\S+) ?([^\n]*)\n(.*?)^```$", re.M | re.S)
NEEDS = {
    "benchmark": ("triton",),
    "hugging_face": ("transformers", "accelerate"),
    "own_loss": ("transformers",),
    "qlora": ("transformers", "pydantic"),
    "torchrun": ("transformers", "pydantic", "datasets", "tqdm", "yaml"),
}
# Times, and errors such as 4e-07, differ by machine.
FREE = re.compile(r"\d\.?\d*e-\d\d|\d+\.\d+ s\b")
TOLERANCE = 0.05  # losses after 40 steps in float32, whose sums have another order elsewhere


def blocks(page, *kinds):
    return [m.groups() for m in BLOCK.finditer(page.read_text()) if m[2] in kinds]


def commands(text):
    """(command, lines of its output) of a console block."""
    found = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def matches(said, line):
    """Whether a line of output is the page's, where `...` stands for anything. Numbers with a point
    may differ by TOLERANCE.
    """
    said, line = (FREE.sub("~", text) for text in (said, line))
    pattern = re.escape(line).replace(r"\.\.\.", ".*")
    found = re.fullmatch(re.sub(r"\d+\\\.\d+", r"(\\d+\\.\\d+)", pattern), said)
    want = [float(n) for n in re.findall(r"\d+\.\d+", line)]
    return found is not None and [*map(float, found.groups())] == pytest.approx(want, rel=TOLERANCE)


def missing(output, lines):
    """The first of the page's lines that the output has not, in this order; None if it has all."""
    rest = iter(output.splitlines())
    for line in lines:
        if line != "..." and not any(matches(said, line) for said in rest):
            return line
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_its_code_is_that_of_an_example(page):
    for _, language, title, code in blocks(page, "python", "toml", "yaml"):
        [name] = re.findall(r'title="(.*)"', title) or [None]
        assert name, f"a {language} block of no example"
        source = (ROOT / name).read_text()
        assert code in source or textwrap.dedent(code) in source, (name, code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("tutorials")
    shutil.copytree(ROOT / "examples", where / "examples")
    return where


PROGRAMS = {
    "python": [],
    "tilewright": ["-m", "tilewright"],
    "torchrun": ["-m", "torch.distributed.run"],
    "pip": ["-m", "pip"],
}
# What commands of the pages import of other packages, which takes most of them.
IMPORTS = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.models.llama import modeling_llama
"""


def environment(folder):
    """A user's, without a GPU or a network."""
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join((str(folder / "site"), str(ROOT))),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # pip builds with what is installed, and leaves this environment as it is.
        "PIP_TARGET": str(folder / "site"),
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
    }


@pytest.fixture(scope="module")
def python(folder):
    """Python, which torchrun's ranks run, too."""
    imports = IMPORTS if util.find_spec("transformers") else "import torch"
    with forked.python(imports, folder, environment(folder)) as command:
        yield command


def check(command, lines, folder, python):
    """Runs a command of a page as a user would."""
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [python, *PROGRAMS[program], *arguments],
        cwd=folder,
        env=environment(folder) | {"PYTHON_EXEC": str(python)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
    line = missing(done.stdout, lines)
    assert line is None, f"{command}\ndoes not print\n{line}\nbut\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_its_commands_print_what_it_says(page, folder, python):
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    if reason := platform.no_extension():  # the pages name the C++ kernels
        pytest.skip(reason)
    for marked, _, _, text in blocks(page, "console"):
        for command, lines in commands(text) if marked is None else ():
            check(command, lines, folder, python)


def test_ops_in_ten_lines(folder):
    """In a Python that has imported nothing."""
    said = ["loss 10.3792, by the definitions 10.3792", "logits that were not built: 125 MiB"]
    check("python examples/ops_in_ten_lines.py", said, folder, sys.executable)


MODEL = '"HuggingFaceTB/SmolLM2-135M"'


def small_model(folder, vocabulary=64):
    """In place of the one on the hub."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=vocabulary, num_attention_heads=2, **shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")


def ran(python, code, folder):
    """The output of code that has the small model."""
    assert MODEL in code
    command = [python, "-c", code.replace(MODEL, "'model'")]
    options = {"env": environment(folder), "cwd": folder, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_of_readme_and_guide_runs(tmp_path, python):
    """In one process."""
    small_model(tmp_path)
    (model, op), guide = (
        [code for *_, code in blocks(ROOT / page, "python")]
        for page in ("README.md", "docs/guide.md")
    )
    said = ran(python, "\n".join([model, op, "print(x.grad.shape)", *guide]), tmp_path)
    assert "rmsnorm[" in said and "linear_cross_entropy[" in said
    assert "torch.Size([512, 576])" in said
    assert "rmsnorm[triton]: " in said, "it is refused on a CPU"


def test_the_script_of_the_trl_page_runs(tmp_path, python):
    """With a small tokenizer, too."""
    pytest.importorskip("trl")
    from trl_rows import VOCAB, tokenizer

    small_model(tmp_path, VOCAB)
    tokenizer().save_pretrained(tmp_path / "model")
    [_, _, title, code], *_ = blocks(ROOT / "docs/trl.md", "python")
    assert title == 'title="examples/trl_sft.py"'
    assert (ROOT / "examples/trl_sft.py").read_text().endswith(f"\n\n{code}")
    said = ran(python, code, tmp_path)
    assert "log_probs, entropy" in said and "'train_loss'" in said


# ---- commands that are not run here


def parsed(program, arguments):
    """Has the trainer or the benchmark's suite parse its arguments; others must exist."""
    if arguments[:2] == ["-m", "tilewright.trainer.train"]:
        from tilewright.trainer.config import load

        config = load(str(ROOT / arguments[2]), arguments[3:])
        # A path of weights alone would leave the shape that the file names.
        if "--model.model_path" in arguments:
            assert config.model.config_path == config.model.model_path
        return config
    if arguments[:1] == ["-m"] and arguments[1] in ("bench", "tilewright.bench"):
        from bench import __main__ as root
        from bench.suite import SUITE
        from tilewright.bench import plan
        from tilewright.bench.timed import RUN
        from tilewright.bench.tune import TUNE

        (module, command), rest = arguments[1:3], arguments[3:]
        for of in (SUITE, RUN, TUNE):
            if of.command == (module, command):
                return plan.parser(of).parse_args(rest)
        assert command in (root.COMMANDS if module == "bench" else ("list", "compare"))
        return None
    script = arguments[0] if program == "python" else program
    assert (ROOT / script).is_file(), script
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_its_other_commands_are_accepted(page):
    for marked, _, _, text in blocks(page, "bash"):
        for line in text.splitlines() if marked is None else ():
            program, *arguments = shlex.split(line, comments=True)
            if program == "make":
                targets = (ROOT / "Makefile").read_text()
                assert all(re.search(rf"^{re.escape(t)}:", targets, re.M) for t in arguments)
                continue
            if program == "torchrun":
                arguments = arguments[arguments.index("-m") :]
            if "tilewright.trainer.train" in arguments:
                pytest.importorskip("pydantic")
            parsed(program, arguments)


@pytest.mark.parametrize(
    "said, line, same",
    [
        ("loss 3.5 in 99.1 s", "loss 3.4302 in 1.7 s", True),
        ("loss 4.5", "loss 3.4302", False),
        ("41 steps in 1.7 s", "40 steps in 1.7 s", False),
        ("difference 2e-06", "difference 4e-07", True),
        ("ops: a=sdpa b=cpp c=cpp", "ops: a=sdpa ... c=cpp", True),
        ("ops: a=sdpa b=cpp c=eager", "ops: a=sdpa ... c=cpp", False),
    ],
)
def test_how_lines_are_compared(said, line, same):
    assert matches(said, line) == same
    assert missing(f"before\n{said}\nafter", ["...", line, "after"]) == (None if same else line)
