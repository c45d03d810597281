"""The stages under NVIDIA's tools, by what these print."""

import sys

import pytest
import torch

from bench.stages import tools
from tilewright.bench.runner import failures
from tilewright.ops import OPS

HEAD = "========= COMPUTE-SANITIZER\n"
TAIL = "========= ERROR SUMMARY: 0 errors\n"
READ = "========= Invalid __global__ read of size 2 bytes\n=========     at _forward+0x40\n"


def run_as(monkeypatch, output, code=0, program="/bin/tool"):
    monkeypatch.setattr(tools.shutil, "which", lambda name: program)
    commands = []

    def run(command):
        commands.append(command)
        if output is None:
            return "tilewright launches rmsnorm\n", "did not end within 55 s"
        return output, f"exit code {code}" if code else None

    monkeypatch.setattr(tools, "_output", run)
    return commands


def launches():
    """Two processes of memcheck, one of racecheck."""
    (unit,) = tools.sanitize_units([OPS["rmsnorm"], OPS["rope"], OPS["adamw_"]])
    assert unit.options["processes"] == [
        ("memcheck", ["rmsnorm", "adamw_"]),
        ("memcheck", ["rope"]),
        ("racecheck", ["rmsnorm", "rope", "adamw_"]),
    ]
    return unit


def begins(name):
    return f"{tools.BEGIN}{name}\n"


@pytest.mark.parametrize(
    "output, code, found",
    [
        (HEAD + begins("rmsnorm") + begins("adamw_") + TAIL, 0, ["holds", "holds"]),
        (HEAD + begins("rmsnorm") + READ + begins("adamw_") + TAIL, 77, ["broken", "holds"]),
        (
            HEAD + begins("rmsnorm") + READ + f"{tools.RAISED}an error\n" + TAIL,
            77,
            ["broken", "unavailable"],
        ),
        (begins("rmsnorm") + f"{tools.RAISED}no memory\n", 0, ["error", "unavailable"]),
        (begins("rmsnorm") + begins("adamw_"), 139, ["holds", "error"]),
        ("no module named tilewright", 1, ["error", "error"]),
        ("========= Error: Device not supported", 1, ["unavailable", "unavailable"]),
        (None, 0, ["error", "unavailable"]),  # it did not end
    ],
)
def test_what_a_sanitizer_finds_is_told_of_the_op_that_it_is_about(
    output, code, found, monkeypatch
):
    commands = run_as(monkeypatch, output, code)
    document = launches().make()
    results = document["results"][:2]
    assert [(r["op"], r["status"]) for r in results] == list(
        zip(["rmsnorm", "adamw_"], found, strict=True)
    )
    assert {r["implementation"] for r in results} == {"memcheck"}
    broken = any(status in ("broken", "error") for status in found)
    assert bool(failures({"results": results})) == broken
    if "broken" in found:
        assert "Invalid __global__ read" in results[0]["reason"]
    assert len(commands) == 3
    command = next(c for c in commands if "'rmsnorm', 'adamw_'" in c[-1])
    assert command[:5] == ["/bin/tool", "--tool", "memcheck", "--report-api-errors", "no"]
    assert sys.executable in command


def test_without_the_tools_nothing_is_broken(monkeypatch):
    run_as(monkeypatch, "", program=None)
    for unit in (launches(), *tools.counter_units([(OPS["rmsnorm"], timed_case())])):
        document = unit.make()
        assert {r["status"] for r in document["results"]} == {"unavailable"}
        assert not failures(document)


def timed_case():
    return next(c for c in OPS["rmsnorm"].cases if c.name == "qwen3-8b" and "cuda" in c.tags)


COUNTERS = """==PROF== Connected to process 1
tilewright launches rmsnorm
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","_backward","GPU Speed Of Light Throughput","Memory Throughput","%","91.2"
"0","1","_backward","Occupancy","Achieved Occupancy","%","49.7"
==PROF== Disconnected
"""


def test_hardware_counters_are_kept(monkeypatch):
    (command,) = [run_as(monkeypatch, COUNTERS)]
    (unit,) = tools.counter_units([(OPS["rmsnorm"], timed_case())])
    document = unit.make()
    assert [(c["kernel"], c["metric"], c["value"]) for c in document["counters"]] == [
        ("_backward", "Memory Throughput", "91.2"),
        ("_backward", "Achieved Occupancy", "49.7"),
    ]
    assert "none" in command[0] and "regex:^(_backward)$" in command[0]
    assert command[0][-1].endswith("launch(['rmsnorm'], ['qwen3-8b'], ['forward_backward'])")
    run_as(monkeypatch, "==ERROR== ERR_NVGPUCTRPERM", 1)
    (result,) = unit.make()["results"]
    assert result["status"] == "unavailable" and "NVGPUCTRPERM" in result["reason"]


def test_what_the_tools_run_exists():
    assert len(set(tools.LAUNCHED)) == 10 and set(tools.LAUNCHED) <= set(OPS)
    for op, case, kernel, _ in tools.COUNTED:
        cases = [c for c in OPS[op].cases if c.name == case]
        assert any("cuda" in c.tags for c in cases) and "contract" not in cases[0].tags
        kernels = {s.kernel.__name__ for s in tools.kernels(OPS[op])}
        assert kernel in kernels, (kernel, kernels)
    bulk = {n for n in tools.LAUNCHED if tools.copies_in_bulk(OPS[n])}
    assert bulk == {"moe_mlp", "grouped_gemm", "attention"}, (
        "racecheck does not know their barriers"
    )


def test_a_process_under_a_tool_says_which_op_begins(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(op, name, kwargs):
        assert name == "triton", "`auto` may be another library's kernel"
        if op.name == "rope":
            raise RuntimeError("an illegal address\nat 0")

    monkeypatch.setattr(tools.contract, "run", run)
    for name in ("rmsnorm", "rope", "route"):
        monkeypatch.setattr(OPS[name], "cases", OPS[name].cases)
        case = tools.smallest(OPS[name])
        monkeypatch.setattr(
            tools, "smallest", lambda op, case=case: type(case)(op.name, lambda *_: {}, case.cost)
        )
    tools.launch(["rmsnorm", "rope", "route"])
    assert capsys.readouterr().out.splitlines() == [
        f"{tools.BEGIN}rmsnorm",
        f"{tools.BEGIN}rope",
        f"{tools.RAISED}RuntimeError: an illegal address",
    ]
