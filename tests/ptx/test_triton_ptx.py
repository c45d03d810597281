"""Compiled Triton kernels, emulated from their PTX (compiled.py); and counts of their accesses."""

import json
import sys

import pytest
import torch

from tests.ptx.verdicts import Verdicts

pytest.importorskip("triton")

from tests.ptx import compiled


@pytest.fixture(scope="module")
def verdicts(request):
    """Those of all tests that are to run."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and item.originalname == test_compiled_kernels.__name__
    ]
    found = Verdicts(names)
    yield found
    found.end()


FIXED = compiled.fixed()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.table] * (n not in FIXED)) for n in compiled.runs()],
)
def test_compiled_kernels(name, verdicts):
    assert not verdicts[name], verdicts[name]


ACCESS = """
.visible .entry access(
    .param .u64 from_ptr
)
.reqntid 32
{{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    .shared .align 16 .b8 buffer[8192];
    ld.param.b64 %rd1, [from_ptr];
    mov.b32 %r1, %tid.x;
    mul.lo.s32 %r2, %r1, {stride};
    cvt.s64.s32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.b32 %r3, [%rd3];
    mov.b32 %r4, buffer;
    add.s32 %r5, %r4, %r2;
    st.shared.b32 [%r5], %r3;
    ret;
}}
"""


@pytest.mark.parametrize(
    "stride, sectors, conflicts", [(4, 4, 0), (8, 8, 1), (32, 32, 7), (128, 32, 31), (0, 1, 0)]
)
def test_an_access_is_counted_as_the_sectors_and_passes_that_it_takes(stride, sectors, conflicts):
    from tilewright_lab import emulator

    memory, counts = emulator.Memory(), emulator.Counts()
    emulator.Kernel(ACCESS.format(stride=stride)).run(
        memory, [memory.put(torch.zeros(1024))], (1, 1, 1), counts=counts
    )
    facts = counts.facts()
    assert facts["requested"]["read"] == facts["least"]["read"] == sectors
    assert (facts["conflicts"], facts["wavefronts"]) == (conflicts, conflicts + 1)
    assert facts["issued"] == {
        "control": 1,
        "convert": 1,
        "integer": 5,
        "memory": 2,
        "parameter": 1,
    }


@pytest.mark.skipif(
    not compiled.BUDGETS, reason=f"no counts for Triton {compiled.triton.__version__}"
)
def test_more_than_the_budget_of_counts_is_told(monkeypatch):
    """An uncoalesced load, a bank conflict and a new kernel exceed the budget."""
    budgets = compiled.BUDGETS
    for plant in (
        {"requested": {"read": 1}},
        {"conflicts": 1},
        {"issued": {"integer": 1}},
        {"issued": {"tensor": 1}},
    ):
        found = json.loads(json.dumps(budgets["rmsnorm"]))
        ((what, more),) = plant.items()
        if isinstance(more, dict):
            ((part, n),) = more.items()
            found["_forward"][what][part] = found["_forward"][what].get(part, 0) + n
        else:
            found["_forward"][what] += more
        monkeypatch.setattr(compiled, "count", lambda driver, name, found=found: found)
        with pytest.raises(
            AssertionError, match=r"_forward: more than the budget \(now, budget\): "
        ):
            compiled.counted(None, "rmsnorm")


ANSWERS = """
import json, sys, time
for name in json.load(sys.stdin):
    if name == "dies":
        raise SystemExit("gone")
    if name == "hangs":
        time.sleep(3600)
    print("not a verdict", flush=True)
    print(json.dumps({"name": name, "wrong": "it is" if name == "wrong" else ""}), flush=True)
"""


def test_a_verdict_waits_for_no_work_but_its_own():
    """The first verdicts are available while a later test runs, and a process that ends reports the
    rest.
    """
    verdicts = Verdicts(
        ["right", "wrong", "hangs", "dies", "never", "after"], [sys.executable, "-c", ANSWERS]
    )
    try:
        assert verdicts["right"] == "" and verdicts["wrong"] == "it is"
        for name in ("dies", "after"):
            assert (
                verdicts[name].startswith("no verdict, the process ended with 1")
                and "gone" in verdicts[name]
            )
        assert "hangs" not in verdicts.found and "never" not in verdicts.found
    finally:
        verdicts.end()
    assert verdicts["never"].startswith("no verdict, the process ended with -9")
