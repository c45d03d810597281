"""`tilewright check-layout`: right steps are equal to one process, faults are named with the first
parameter, the factor and the likely cause, and what cannot be checked leaves no process behind.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import tempfile
import textwrap
import types
from multiprocessing import forkserver

import layout_steps
import pytest
import torch
from helpers import until  # and what the process that ranks are forked from imports
from plants import layout as plants
from plants.layout import STEPS

from tilewright_lab.check_layout import command as tool
from tilewright_lab.check_layout import compare
from tilewright_lab.check_layout.command import Refused
from tilewright_lab.check_layout.findings import find
from tilewright_lab.check_layout.notes import notes, notes_of_one
from tilewright_lab.check_layout.ranks import Ranks, Target, load_function

ROOT = pathlib.Path(__file__).parents[2]


def command(*arguments):
    """Exit code, standard output, standard error."""
    forkserver.ensure_running()
    return plants.command(*arguments)


@pytest.fixture(scope="module")
def found():
    """Every layout of layout_steps.py, by name and number of processes."""
    code, out, err = command(f"{STEPS}:every", "--json")
    assert code == 1 and not err, err
    said, single = json.loads(out), {"gradients": 9, "dtype": "float64", "notes": []}
    single |= {"tokens": sum(layout_steps.LENGTHS), "tolerance": 1e-9}
    assert not said["equal"]
    assert {k: v for k, v in said["single"].items() if k not in ("loss", "norm")} == single
    return {(r["layout"], r["world_size"]): r for r in said["layouts"]}


@pytest.mark.parametrize("layout, size", plants.RIGHT)
def test_a_right_step_is_equal(found, layout, size):
    plants.check(layout, size, found[layout, size])
    # In bfloat16 nothing is equal by bits: the dtype decides what is, be it that of one rank.
    rounded = dict.fromkeys(("fsdp2-bfloat16", "hand-mixed"), ("bfloat16", 5e-2))
    assert (1e-4 < found[layout, size]["worst"] < 5e-2) == (layout in rounded)
    said = found[layout, size]["dtype"], found[layout, size]["tolerance"]
    narrow = rounded | {"ddp-float32": ("float32", 1e-4)}
    assert said == narrow.get(layout, ("float64", 1e-9))


@pytest.mark.parametrize("layout, size", plants.PLANTS)
def test_a_fault_is_found_as_its_row_says(found, layout, size):
    plants.check(layout, size, found[layout, size])
    assert found.keys() == {*plants.PLANTS, *plants.RIGHT}, "every layout has a row"


def test_numbers_of_tokens_that_hide_faults_are_noted(found):
    noted = {key: r["notes"] for key, r in found.items() if r["notes"]}
    [equal], [same] = noted.pop(("hand-equal", 2)), noted.pop(("ddp-same", 2))
    assert "does not show" in equal
    assert same.startswith("the ranks have 2 times the tokens of one process")
    assert "same work" in same
    assert noted.pop(("pipeline", 2)) == [
        f"no {what} is compared: the ranks have none" for what in ("norm", "optimizer step")
    ]
    for (layout, size), [note] in noted.items():
        if layout.startswith("expert"):
            assert note == "no norm is compared: the ranks have none"
        else:
            assert layout.startswith("tensor") and f"{size} times the tokens" in note, layout
            assert "right where ranks share a batch" in note


def test_a_narrower_dtype_is_on_its_line():
    one = compare.Alone(1.0, 8, None, None, torch.float64, ["w"], {"w": 1.0}, True, [], False, [])
    result = tool.Result("half", 2, [], [], 0.0, "bfloat16", 5e-2)
    lines = tool.as_text(one, [result]).splitlines()
    assert lines[1] == "half on 2: equal; computed in bfloat16, equal within 5e-02"


def test_unusual_parameters_are_compared_and_what_is_not_is_noted(tmp_path):
    forkserver.ensure_running()
    with Ranks(1, Target(f"{STEPS}:unusual"), str(tmp_path), 60.0) as ranks:
        layouts = ranks.load()
        [one] = ranks.run("single")
        names = ("same", "thawed", "imaginary", "half", "float8", "dropout")
        numbers = {
            "half": torch.float64,  # weights alone
            "rounded": torch.bfloat16,
            "rounded_norm": torch.float16,
            "rounded_report": torch.bfloat16,
        }
        compared = {name: ranks.run(name) for name in {*names, *numbers}}
    # Members of an enumeration could not be loaded here, but that this file is on the path.
    [[layout, sizes]] = layouts.items()
    assert [(type(v), v) for v in (layout, *sizes)] == [(str, "named"), (int, 2)]
    assert {type(name) for name in compared["same"][0].weights} == {str}
    idle, buffers = notes_of_one(one)
    assert idle == "idle requires a gradient and has none in one process"
    assert buffers == "buffers are not compared, and the step changes calls"

    found = {name: find(one, of_it) for name, of_it in compared.items()}
    assert not any(found[name] for name in ("same", "half", "float8")), found
    assert compared["same"][0].dtype == torch.float64
    assert compared["half"][0].dtype == torch.bfloat16
    assert compared["float8"][0].dtype == torch.float8_e5m2
    assert {name: compared[name][0].number for name in numbers} == numbers
    assert not find(one, compared["rounded"]) and compared["rounded_norm"][0].dtype == torch.float64
    [note] = notes(one, compared["half"], False)
    assert note.startswith("the step of 1 of ") and "such as down.weight, is below" in note
    thawed, step = found["thawed"]
    assert thawed.text == "down.bias has one on every rank, and none in one process"
    assert thawed.hint == "it is frozen in one process, or not in its graph"
    assert step.hint.startswith("follows from")
    assert found["imaginary"][0].name == "phase" and found["imaginary"][0].differing == 1
    [note] = notes(one, compared["dropout"], True)
    assert "random numbers" in note and not notes(one, compared["dropout"], False)


# ---- the page

PAGE = "".join(p.read_text() for p in sorted((ROOT / "docs").glob("check_layout*.md")))


def test_code_on_the_page_is_that_of_the_examples():
    blocks = re.findall(r'```python title="(.*?)"\n(.*?)```', PAGE, re.S)
    assert len(blocks) == 3
    for name, code in blocks:
        source, code = (re.sub("\n+", "\n", t) for t in ((ROOT / name).read_text(), code))
        assert code in source or textwrap.indent(code, "    ") in source, name


NEEDS = {
    "fsdp2": (),
    "trainer": ("transformers", "accelerate"),
    "layouts": ("transformers", "pydantic", "datasets", "yaml"),
}


@pytest.mark.parametrize("example", NEEDS)
def test_examples_print_what_the_page_says(example, monkeypatch):
    for package in NEEDS[example]:
        pytest.importorskip(package)
    monkeypatch.chdir(ROOT)
    [said] = re.findall(rf"\$ tilewright check-layout (\S*_{example}.*?)```", PAGE, re.S)
    function, _, lines = said.partition("\n")
    code, out, err = command(function)
    assert code == ("DIFFERS" in lines) and not err, err
    rounded = [re.sub(r"\d+\.\d+|\d+%", "~", text) for text in (out, lines)]
    assert rounded[0] == rounded[1], out


# ---- what cannot be checked

BAD = {
    "dict": "the function returned a value of type dict; it must be a tilewright_lab.check_layout.Step",
    "text": "loss() returned a value of type str; it must be a tensor of one element",
    "rows": "loss() returned a tensor of shape [3]; it must be a tensor of one element",
    "nan": "loss() returned nan; it must be finite",
    "tokens": "Step.tokens is 1.5; it must be an integer of 0 or more",
    "no_step": "Step.optimizer is a value of type int, which has no step()",
    "norm": "clip() returned None; it must be a number",
    "shape": "'embed.weight' has shape [48, 8] here and [24, 8] in one process: say in Step.parts "
    "which part it is",
    "name": "'haed.weight' is no parameter of the one process (did you mean 'head.weight'?): give "
    "its name there in Step.names",
    "parts": "no rank has 64 of the 256 elements of 'experts.weight': see Step.parts",
    "absent": "no rank has the parameter 'norm.weight' of the one process",
}


@contextlib.contextmanager
def refused(function, number, folder, timeout=600.0):
    """Ranks that have imported the function. The timeout is for what hangs unasked."""
    forkserver.ensure_running()
    with Ranks(number, Target(f"{STEPS}:{function}"), str(folder), timeout) as ranks:
        ranks.load()
        yield ranks


def test_what_a_step_may_not_be(tmp_path):
    with refused("bad", 1, tmp_path) as ranks:
        ranks.run("single")
        said = {}
        for layout in BAD:
            with pytest.raises(Refused) as error:
                ranks.run(layout)
            said[layout] = str(error.value)
    assert said == {layout: f"{layout} in one process: {s}" for layout, s in BAD.items()}


@pytest.mark.parametrize(
    "function, layout, sentence",
    [
        (
            "Model",
            "single",
            "one process: TypeError: Model.__init__() takes from 1 to 2 positional arguments but 4",
        ),
        ("raises", "x", "x on 2 processes, rank 1: ZeroDivisionError: "),
        ("dies", "x", "x on 2 processes, rank 1: the process ended in the function with exit code"),
    ],
)
def test_the_first_rank_that_raises_or_dies_is_named(function, layout, sentence, tmp_path):
    number = 1 if layout == "single" else 2
    with refused(function, number, tmp_path) as ranks, pytest.raises(Refused) as error:
        ranks.run(layout)
    said = str(error.value)
    assert said.startswith(sentence)
    if function == "raises":
        assert said.endswith("in <lambda>: `step.loss = lambda: 1 // 0  # named`")
    if function == "dies":  # rank 0 may have been heard first
        lost = "RuntimeError: [tcp/pair.cc:537] Read error: Connection reset by peer"
        assert ranks._cause("x", 0, lost) == said


def alive(pid):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it has ended, perhaps while its status was read
        return False


def test_a_collective_that_a_rank_does_not_join(tmp_path, monkeypatch):
    """The limit on silence is short only once nothing more can be said."""
    hear = Ranks._hear

    def shortened(self, layout, rank, answers):
        hear(self, layout, rank, answers)
        if self._at == ["synchronize()", "gathering the gradients"]:
            self.timeout = 6.0  # rank 0 is a line from its all-reduce, which never ends

    monkeypatch.setattr(Ranks, "_hear", shortened)
    with refused("hangs", 2, tmp_path) as ranks:
        with pytest.raises(Refused) as error:
            ranks.run(str(tmp_path / "pids"))
        pids = [int(n) for n in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 4 and all(map(alive, pids))
    said = str(error.value).partition(" on 2 processes ")[2]
    first, second = said.removeprefix("hangs: nothing for 6 s; ").split("; ")
    assert first.startswith("rank 0 is in synchronize() at layout_steps.py:")
    assert first.endswith(" in synchronize: `dist.all_reduce(grad)`")
    assert second == "rank 1 waits for the others, gathering the gradients"
    until(lambda: not any(map(alive, pids)))


def _checks(folder, name):
    with refused(name, 2, folder) as ranks:
        ranks.run(f"{folder}/pids")


@pytest.mark.parametrize("name", ["hangs", "orphaned"])
def test_ranks_end_with_their_parent(name, tmp_path):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_checks, args=(tmp_path, name))
    process.start()
    file = tmp_path / "pids"

    def started():
        assert process.is_alive()
        pids = file.read_text().split() if file.exists() else []
        return len(pids) == 4 and pids

    pids = until(started)
    process.kill()
    process.join()
    until(lambda: not any(map(alive, pids)))


def test_a_termination_leaves_no_file(tmp_path, monkeypatch):
    forkserver.ensure_running()  # whose own files stay
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(list(tmp_path.iterdir())))
    try:
        with pytest.raises(SystemExit) as error:
            command(f"{STEPS}:terminates", "--timeout", "600")
        os.kill(os.getpid(), signal.SIGTERM)  # handled as before the command
    finally:
        signal.signal(signal.SIGTERM, before)
    assert error.value.code == 128 + signal.SIGTERM and received == [[]]


def test_ranks_end_if_their_start_is_interrupted(tmp_path, monkeypatch):
    forkserver.ensure_running()
    process = multiprocessing.get_context("forkserver").Process
    start, started = process.start, []

    def once(self):
        if started:
            raise SystemExit
        start(self)
        started.append(self)

    monkeypatch.setattr(process, "start", once)
    with pytest.raises(SystemExit):
        Ranks(2, Target(f"{STEPS}:every"), str(tmp_path), 60.0)
    left = started[0].is_alive()
    started[0].kill()  # the tests' process would wait for it at its end
    assert not left


def test_a_death_is_where_the_rank_last_said_it_was():
    """Also if another rank, which lost its connection, was heard first."""
    ours, theirs = multiprocessing.Pipe()
    for where in ("the start", "the function"):
        theirs.send(("at", where))
    theirs.close()
    ranks = object.__new__(Ranks)
    ranks.number, ranks._pipes, ranks._at = 2, [None, ours], ["the function", "the import"]
    ranks._processes = [None, types.SimpleNamespace(join=lambda wait: None, exitcode=7)]
    said = ranks._death("x", 1)
    assert said == "x on 2 processes, rank 1: the process ended in the function with exit code 7"


def test_a_function_that_is_not_there():
    code, out, err = command(f"{STEPS}:evry")
    assert (code, out) == (2, "")
    start = f"check-layout: {STEPS} has no 'evry'; did you mean 'every'? (it has collected, "
    assert err.startswith(start) and err.endswith(", unusual, every)\n")
    assert ", data, tensor, " in err and ", Model" not in err and "fully_shard" not in err
    with pytest.raises(Refused, match=r"has no 'nothing' \(it has no function of its own\)$"):
        load_function("torch.version:nothing")


@pytest.fixture
def imports(monkeypatch):
    """Paths and modules are as before."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "layout_steps", layout_steps)
    monkeypatch.setitem(sys.modules, "broken_steps", None)


NAMES = {
    "train_step": "'train_step' must be module:function or path/file.py:function",
    "no/where.py:f": "no/where.py: no such file",
    "no_such_module.steps:f": "there is no module 'no_such_module'",
    f"{STEPS}:VOCAB": f"{STEPS}:VOCAB is of type int; it must be a function",
}


@pytest.mark.parametrize("name", NAMES)
def test_other_names_of_functions(name, imports):
    with pytest.raises(Refused) as error:
        load_function(name)
    assert str(error.value) == NAMES[name]


def test_a_file_that_cannot_be_imported(tmp_path, imports):
    path = tmp_path / "broken_steps.py"
    path.write_text("import torch\n\nx = 1 / 0\n")
    with pytest.raises(Refused, match="cannot be imported: ZeroDivisionError: division by zero at"):
        load_function(f"{path}:f")


def test_layouts_are_names_and_numbers_of_processes():
    plan = tool.plan
    assert plan(None) == {2: ["default"], 4: ["default"]}
    assert plan(["a", "b"], ["b"], [4]) == {4: ["b"]}
    assert plan({"a": 2, "b": (1, 2)}) == {2: ["a", "b"], 1: ["b"]}
    numbers = (0, "2", (), True, [2, "b"])
    for given in ([1], {}, "ab", {2: 2}, *({"a": number} for number in numbers)):
        with pytest.raises(Refused, match="must be names, or numbers of processes"):
            plan(given)
    for given, options, sentence in (
        ({"single": 2}, (), "the layout 'single' is that of one process"),
        (["fsdp2"], (["fsdp"],), "no layout 'fsdp'; did you mean 'fsdp2'?"),
        (["fsdp2"], ([], [3]), "no layout is left on 3 processes"),
    ):
        with pytest.raises(Refused, match=sentence.replace("?", r"\?")):
            plan(given, *options)


@pytest.mark.parametrize("seconds", ["0", "inf", "nan", "1e+09"])
def test_a_limit_on_silence_is_a_number_of_seconds(seconds):
    sentence = f"the timeout must be above 0 s and at most 86400 s, got {seconds}"
    assert command("x:f", "--timeout", seconds) == (2, "", f"check-layout: {sentence}\n")


# ---- numbers


def test_a_deviation_is_a_factor_and_what_remains():
    torch.manual_seed(0)
    want, other = torch.randn(2, 50, dtype=torch.float64)
    other -= (other @ want) / (want @ want) * want
    for factor, part in ((1.0, 0.0), (-3.0, 0.0), (2.0, 0.5), (1.0, 1e-6)):
        d = compare.deviation(factor * want + part * other, want, 1e-9, 0.0)
        assert d.factor == pytest.approx(factor) and d.multiple == (part == 0)
        assert d.holds == (factor == 1 and part == 0)
        own = (factor * want + part * other).norm()
        assert d.rest == pytest.approx(float(part * other.norm() / own), abs=1e-12)
    assert not compare.deviation(want * torch.nan, want, 1.0, 1.0).holds
    noise = compare.deviation(1e-18 * other, torch.zeros(50), 1e-9, 1e-16)
    assert noise.holds and noise.multiple


def test_a_budget_holds_no_tenth_more_or_in_8_bits_no_double():
    want = torch.randn(100, dtype=torch.float64)
    for dtype, relative in compare.TOLERANCE.items():
        more = 1.1 if dtype.itemsize > 1 else 2.0
        assert not compare.deviation(more * want, want, relative, 0.0).holds
