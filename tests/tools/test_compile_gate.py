"""The compile gate fails for the faults it detects. Kernels are compiled in a separate process,
since this one may be running Triton's interpreter.
"""

import json
import os
import pathlib
import re
import subprocess
from typing import NamedTuple

import pytest

from tilewright.kernels.spec import KernelSpec
from tilewright_lab.gate import compile_gate, machine_code, ptx_loops
from tilewright_lab.gate import compilers as gate_compilers
from tilewright_lab.gate import verdict as gate_verdict

ROOT = pathlib.Path(__file__).parents[2]
pytest.importorskip("triton")

PLANTED = '''
import contextlib, hashlib, importlib.util, io, json, pathlib, sys

import torch
import triton
import triton.language as tl
from triton import knobs

from tilewright_lab.gate import compile_gate, compilers as gate_compilers, kernel_digest
from tilewright.kernels.spec import KernelSpec
from tilewright.core.registry import Implementation, Op
from tilewright_lab.gate.kernel_gate import recorded


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def hold(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), x / tl.sum(x))


@triton.jit
def strided(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i * n))


@triton.jit
def product(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    x = tl.load(x_ptr + at).to(tl.float16)
    tl.store(y_ptr + at, tl.dot(x, x))


@triton.jit
def loops(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.zeros([BLOCK], tl.float32)
    for j in range(n):
        x += tl.load(x_ptr + j // n * BLOCK + i)
    tl.store(y_ptr + i, x / tl.sum(x))


FACTOR = tl.constexpr(2)


@triton.jit
def scaled(x):
    """The product."""
    return x * FACTOR


@triton.jit
def calls(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)   # of a program
    tl.store(y_ptr + i, scaled(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


@triton.jit
def fused(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x * x + x, mask=i < n)


def spec(kernel, label, block, warps=4, **options):
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    signature = {n: types[n] for n in kernel.arg_names if n in types}
    return KernelSpec(kernel, label, signature, {"BLOCK": block}, warps, **options)


COPY = spec(copy, "copy", 1024, divisible=("n",), elements=1024)
ODD = spec(copy, "odd n", 1024)                # masked by an odd length: no two elements share a load
SPILL = spec(hold, "spill", 8192, warps=1)     # 256 float32 a thread, of which a thread can hold 255
BROKEN = spec(copy, "broken", 1000)            # not a power of two
BUDGETS = gate_compilers.BUDGETS = pathlib.Path(sys.argv[1])
FILE = gate_compilers.COMPILERS[KernelSpec].budget_file()


def gate(*specs, argv=(), budgets=None):
    op = Op("planted", None, None, (Implementation("triton", None, gate=lambda: specs),))
    compile_gate.operations = lambda: {"planted": op}
    if budgets is not None:
        FILE.write_text(json.dumps(budgets))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = compile_gate.main(["--arch", "90", "--jobs", "1", *argv])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def digests(path):
    """The digest of the kernel that calls another, as this file stands and after each change."""
    text, made = pathlib.Path(path).read_text(), {}
    for name, old, new in (("same", "", ""), ("constant", "constexpr(2)", "constexpr(3)"),
                           ("called", "return x * FACTOR", "return FACTOR - x"), ("comment", "# of a program", "#"),
                           ("documentation", "The product.", "A product."), ("below", "FACTOR =", "\\n\\nFACTOR ="),
                           ("own", "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)   #", "tl.arange(0, BLOCK)   #")):
        assert old in text
        file = pathlib.Path(path).with_name(f"{name}.py")
        file.write_text(text.replace(old, new, 1).split("def spec(")[0])
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("changed", file))
        module.__spec__.loader.exec_module(module)
        made[name] = kernel_digest.of_kernel(module.calls)
    return made


found = {"no file": gate(COPY), "update": gate(COPY, argv=["--update"])}
written = json.loads(FILE.read_text())
(key,) = written
found["written"] = written
found["green"] = gate(COPY)
compile_all, compiled = compile_gate.compile_all, {}


def compile_once(specs, tasks, jobs):
    """From here on, a spec that the real one has compiled is not compiled again."""
    new = [(name, arch) for name, arch in tasks if (id(specs[name]), arch) not in compiled]
    for task, result in zip(new, compile_all(specs, new, jobs), strict=True):
        compiled[id(specs[task[0]]), task[1]] = specs[task[0]], result
    return [compiled[id(specs[name]), arch][1] for name, arch in tasks]


compile_gate.compile_all = compile_once
for name, value in [("registers", 4), ("shared", -1), ("load", 256), ("store", 256), ("uses", ["wgmma"]),
                    ("sass_load", 256), ("sass_store", 256), ("wide_loads", 101), ("wide_stores", 101),
                    ("sass_uses", ["tma"]), ("per_element", 0.1)]:
    found[name] = gate(COPY, budgets={key: {**written[key], name: value}})
SIX = [spec(copy, f"copy {warps} {block}", block, warps, divisible=("n",))
       for warps, block in ((4, 512), (4, 1024), (4, 2048), (2, 512), (2, 1024), (2, 2048))]
gate(*SIX, argv=["--update"], budgets={})
six = json.loads(FILE.read_text())
broken = {k: {**b, "registers": 1} for k, b in six.items()}
found["unchanged"] = gate(*SIX, argv=["--json"], budgets=broken)
found["all"] = gate(*SIX, argv=["--all", "--json"], budgets=broken)
found["needs more"] = gate(*SIX[1:], spec(copy, "copy 4 512", 512, divisible=("n",), load=256), argv=["--json"],
                           budgets=six)
found["no budget"] = gate(COPY, budgets={})
found["stale"] = gate(COPY, budgets={**written, "planted/gone sm_90": written[key]})
found["stale, not asked for"] = gate(COPY, budgets={**written, "planted/gone sm_120": written[key]})
found["spill"] = gate(SPILL, argv=["--update"])
found["narrow"] = gate(ODD, argv=["--json"], budgets={})
found["broken"] = gate(BROKEN, argv=["--update"])
found["shared twice"] = gate(COPY, COPY, argv=["--json"], budgets=written)
BLACKWELL = spec(copy, "blackwell", 1024, min_arch=100)
found["not launched"] = gate(BLACKWELL, COPY, argv=["--json"], budgets=written)
AMPERE = spec(copy, "ampere", 1024, max_arch=89)
found["no longer launched"] = gate(AMPERE, COPY, argv=["--json"], budgets=written)
try:
    gate(COPY, spec(copy, "copy", 512))
except ValueError as error:
    found["one label"] = str(error)
WGMMA = {90: ("wgmma",), 100: ("tcgen05",)}
for name, needs in {
    "need wide": (copy, 1024, ("n",), {}), "need no loads": (strided, 1024, (), {"load": 0}),
    "need loads": (strided, 1024, (), {}), "need stores": (copy, 1024, ("n",), {"store": 256}),
    "need no divisions": (loops, 1024, ("n",), {"undivided": True}),
    "need many blocks": (copy, 1024, ("n",), {"per_sm": 17}),
    "need few blocks": (copy, 1024, ("n",), {"per_sm": 16}),
    "need wgmma": (copy, 1024, ("n",), {"uses": WGMMA}), "has wgmma": (product, 64, (), {"uses": WGMMA}),
}.items():
    kernel, block, divisible, options = needs
    planted = spec(kernel, kernel.__name__, block, divisible=divisible, **options)
    found[name] = gate(planted, argv=["--update"])
    FILE.unlink()
    if name == "has wgmma":   # the other architecture, where another instruction is needed
        found["has tcgen05"] = gate(planted, argv=["--arch", "100"])
unchosen, off = (spec(fused, "fused", 1024, options={"enable_fp_fusion": which}) for which in (None, False))
found["fusion not chosen"] = gate(unchosen, budgets={})
found["fusion"], found["fusion of others"] = [], []
for default in (True, False):   # up to Triton 3.9, and from 3.10 on
    knobs.language.default_fp_fusion = default
    with recorded(90) as specs:   # a launch that is not ours
        fused[1,](torch.ones(1024), torch.ones(1024), 1024, BLOCK=1024)
    found["fusion of others"] += [which.options.get("enable_fp_fusion") for which in specs]
    cubins = [gate_compilers.compile_triton(which, 90)[1] for which in (spec(fused, "fused", 1024), off)]
    found["fusion"].append([hashlib.sha256(cubin).hexdigest() for cubin in cubins])
found["digests"] = digests(__file__)
print(json.dumps(found))
'''


def run_python(python, *args):
    """The object that Python prints last, run at the root without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'lab'}"
    command = [python, *map(str, args)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def planted(compiling, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    script = folder / "planted.py"  # a file, because Triton reads a kernel's source
    script.write_text(PLANTED)
    return run_python(compiling, script, folder / "budgets")


# What a run that fails says about a budget, about a need, and about any kernel.
RED = {
    "registers": "copy sm_90: registers a thread: ",
    "shared": "copy sm_90: bytes of shared memory: 0, budget -1",
    "load": "copy sm_90: widest global load: 128 bits, budget 256",
    "store": "copy sm_90: widest global store: 128 bits, budget 256",
    "uses": "copy sm_90: no longer uses wgmma",
    "sass_load": "copy sm_90: widest global load in SASS: 128 bits, budget 256",
    "sass_store": "copy sm_90: widest global store in SASS: 128 bits, budget 256",
    "wide_loads": "copy sm_90: loaded by 128 bits or more: 100%, budget 101",
    "wide_stores": "copy sm_90: stored by 128 bits or more: 100%, budget 101",
    "sass_uses": "copy sm_90: no longer uses tma in SASS",
    "per_element": "copy sm_90: instructions an element: ",
    "no budget": "copy sm_90: has no budget",
    "stale": "gone sm_90: has a budget but no kernel",
    "need loads": "strided sm_90: needs a global load of 128 bits, the widest has 32 in PTX and 32",
    "need stores": "copy sm_90: needs a global store of 256 bits, the widest has 128 in PTX and 128",
    "need wgmma": "copy sm_90: needs wgmma, uses none such in PTX and none such in SASS",
    "need no divisions": "loops sm_90: has 1 divisions in loops; accepted: 0",
    "need many blocks": "copy sm_90: counts on 17 blocks per SM, which holds 16 of ",
    "broken": "broken sm_90: does not compile: ",
    "fusion not chosen": "fused sm_90: does not compile: ValueError: the launch does not choose "
    "enable_fp_fusion",
    "spill": "spill sm_90: spills ",
}
GREEN = ("update", "green", "stale, not asked for", "need wide", "need no loads", "has wgmma")


@pytest.mark.parametrize("name", RED)
def test_a_fault_is_red_and_no_update_excuses_it(planted, name):
    assert planted[name]["code"] == 1
    assert f"FAILED planted/{RED[name]}" in planted[name]["out"]
    assert planted[name]["out"].count("FAILED") == 1 + (name == "spill")


@pytest.mark.parametrize("name", [*GREEN, "has tcgen05", "need few blocks", "no file"])
def test_what_has_no_fault_is_green(planted, name):
    assert planted[name]["code"] == 0, planted[name]["out"]
    said = "no budgets for triton" if name == "no file" else "no failures"
    assert said in planted[name]["out"]


def test_a_compilers_reason_and_instructions_of_a_spill_are_told(planted):
    assert "power of 2" in planted["broken"]["out"]
    assert "loads and stores of local memory (LDL, STL); accepted: 0" in planted["spill"]["out"]


def test_update_writes_what_was_compiled(planted):
    (budget,) = planted["written"].values()
    assert len(budget.pop("digest")) == 16
    assert 8 <= budget.pop("registers") <= 64
    # Eight elements per thread: addresses, a load, a mask, a store.
    assert 2 < budget.pop("per_element") < 8
    assert budget.pop("wide_loads") == budget.pop("wide_stores") == 100
    assert budget.pop("uses") == budget.pop("sass_uses") == []
    assert budget.pop("shared") == 0
    assert budget == dict.fromkeys(("load", "store", "sass_load", "sass_store"), 128)


def test_of_what_did_not_change_the_first_of_each_family_is_compiled(planted):
    """Six kernels with unsatisfiable budgets: the op's first fails, with --all each does."""
    found = json.loads(planted["unchanged"]["out"])
    assert [r["name"] for r in found["results"]] == ["planted/copy 4 512"]
    assert len(found["failures"]) == 1
    assert "6 of 6 did not change since their budgets were written: 5 of them" in found["notes"][-1]
    assert len(json.loads(planted["all"]["out"])["failures"]) == 6
    changed = json.loads(planted["needs more"]["out"])  # what a spec needs is of its digest
    assert "planted/copy 4 512" in {r["name"] for r in changed["results"]}
    assert planted["needs more"]["code"] == 1


def test_a_digest_is_of_what_a_kernel_computes(planted):
    digests = planted["digests"]
    differ = {name: digest for name, digest in digests.items() if digest != digests["same"]}
    assert differ.keys() == {"constant", "called", "own"} and len({*differ.values()}) == 3


def test_an_access_that_stays_narrow_is_seen(planted):
    (result,) = json.loads(planted["narrow"]["out"])["results"]
    assert {result["facts"][key] for key in ("load", "store", "sass_load", "sass_store")} == {32}
    assert (result["facts"]["wide_loads"], result["facts"]["wide_stores"]) == (0, 0)
    assert planted["narrow"]["code"] == 1


def test_fusion_is_what_the_launch_chooses_under_any_version(planted):
    (on, off), after = planted["fusion"]
    assert after == [on, off] and on != off, "Triton's default has no effect, the choice has one"
    assert planted["fusion of others"] == [True, False], "which `tilewright gate` leaves to Triton"


def test_a_shared_spec_is_compiled_once_and_an_unlaunched_one_not_at_all(planted):
    for name in ("shared twice", "not launched", "no longer launched"):
        (result,) = json.loads(planted[name]["out"])["results"]
        assert result["name"] == "planted/copy"
    assert "label 'copy'" in planted["one label"]


# ---- the verdict on facts


def result(arch=90, name="op/kernel", **changes):
    green = {"registers": 32, "spill": 0, "local": 0, "shared": 0, "load": 128, "store": 128}
    facts = gate_compilers.Facts(**{**green, "uses": (), **changes})
    return gate_compilers.Result(name, arch, facts)


def spec(**options):
    return KernelSpec(None, "kernel", {}, {}, **options)


class Fixed(NamedTuple):
    WIDTH: int
    MASKED: bool


def test_a_spec_has_the_constants_of_a_named_tuple_by_their_names():
    given = {"FIXED": Fixed(64, False), "BLOCK": 128}
    spec = KernelSpec(None, "kernel", {"x_ptr": "*bf16", "x_strides": ("i32", "i32")}, given)
    assert spec.constants == {"WIDTH": 64, "MASKED": False, "BLOCK": 128}
    other = spec.changed({"MASKED": True, "BLOCK": 64, "x_ptr": None}, label="other")
    assert other.constexprs == {"FIXED": Fixed(64, True), "BLOCK": 64, "x_ptr": None}
    assert other.label == "other" and list(other.signature) == ["x_strides"]
    assert spec.constexprs == given


def test_elements_of_tuples_have_names():
    signature = {"n": "i32", "strides": ("i32", ("i64", "constexpr"))}
    assert gate_compilers.paths(signature) == {
        "n": ((0,), "i32"),
        "strides[0]": ((1, 0), "i32"),
        "strides[1][0]": ((1, 1, 0), "i64"),
        "strides[1][1]": ((1, 1, 1), "constexpr"),
    }


def test_the_column_of_instructions_an_element_is_there_if_a_kernel_has_them():
    def lines(*counts):
        results = [result(name=f"op/{i}", per_element=n) for i, n in enumerate(counts)]
        return [re.split(" {2,}", s) for s in gate_verdict.table(results, [90]).splitlines()]

    with_it, without = lines(None, 2.5), lines(None, None)
    assert with_it[0][-2:] == ["an element", "uses"] and "an element" not in without[0]
    assert [row[-2] for row in with_it[1:]] == ["-", "2.5"]
    assert {len(row) for row in with_it} == {len(without[0]) + 1}
    assert {len(row) for row in without} == {len(without[0])}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"local": 8}, "8 bytes of stack and local memory"),
        ({"spill": 8}, "spills 8 bytes"),
        ({"local_instructions": 2}, "has 2 loads and stores of local memory"),
        ({"shared": 100 * 1024}, "sm_120 has 101376"),
    ],
)
def test_some_facts_need_no_budget_to_be_wrong(changes, sentence):
    assert not gate_verdict.problems(result(120))
    assert sentence in gate_verdict.problems(result(120, **changes))[0]


def test_only_the_accepted_stack_of_a_kernel_without_spills_passes():
    def problems(arch, **changes):
        return gate_verdict.problems(result(arch, **changes), spec(stack={120: 8}))

    assert problems(120, local=8, local_instructions=6) == []
    assert problems(90, local=8, local_instructions=6)
    assert problems(120, local=16)
    assert problems(120, spill=4, local=8)
    assert problems(120, local_instructions=2)


def test_a_need_is_looked_for_in_ptx_and_in_machine_code():
    def unmet(changes, **needs):
        return gate_verdict.unmet(result(**changes), spec(**needs))

    read = {"sass_load": 128, "sass_store": 128, "sass_uses": ()}
    assert unmet({}) == []  # unread machine code fails nothing
    assert unmet(read) == []
    [said] = unmet(read | {"sass_load": 32})  # ptxas split a load of the PTX
    assert said == "needs a global load of 128 bits, the widest has 128 in PTX and 32 in SASS"
    [said] = unmet(read | {"uses": ("tma",), "sass_uses": ("mma",)}, uses={90: ("tma",)})
    assert said == "needs tma, uses tma in PTX and mma in SASS"
    assert unmet({}, uses={100: ("tcgen05",)}) == []
    assert unmet({"load": 16}, load=0) == []
    assert unmet({"loop_divisions": 0}) == []


@pytest.mark.parametrize(
    "per_sm, warps, arch, changes, held",
    [
        (2, 8, 90, {"registers": 128}, None),
        (2, 8, 90, {"registers": 132}, 1),  # 17 units of 256 a warp
        (3, 4, 90, {"registers": 168, "shared": 75 * 1024}, None),
        (4, 4, 90, {"registers": 168, "shared": 75 * 1024}, 3),
        (2, 8, 120, {"registers": 128, "shared": 49 * 1024}, None),
        (2, 8, 120, {"registers": 128, "shared": 50 * 1024}, 1),
        (4, 16, 100, {}, None),
        (4, 16, 120, {}, 3),  # 1,536 threads
    ],
)
def test_a_launch_that_counts_on_more_blocks_than_an_sm_holds_is_red(
    per_sm, warps, arch, changes, held
):
    said = gate_verdict.unmet(result(arch, **changes), spec(num_warps=warps, per_sm=per_sm))
    assert len(said) == (held is not None)
    if said:
        start = f"counts on {per_sm} blocks per SM, which holds {held} of "
        assert said[0].startswith(start) and said[0].endswith(f" memory and {warps} warps")


# ---- what is read from PTX and machine code


def test_divisions_in_loops_are_read_from_ptx():
    """In nested loops each division counts once; those before, between or after loops, and
    comments, do not count.
    """
    ptx = """
        div.s32 %r1, %r2, %r3;
    $L__BB0_1:
        rem.u32 %r4, %r4, %r1;
    $L__BB0_2:                       // =>This Inner Loop Header
        rcp.approx.ftz.f32 %f1, %f2; // div.s32
        mov.b32 %r7, %div.s32;
        @%p1 bra $L__BB0_4;
        div.full.f32 %f3, %f1, %f2;
    $L__BB0_4:
        @%p2 bra $L__BB0_2;
        bra.uni $L__BB0_1;
        div.rn.f32 %f4, %f5, %f6;
        bra $L__BB0_9;
    $L__BB0_9:
        ret;"""
    assert ptx_loops.divisions(ptx) == 3
    assert ptx_loops.divisions(ptx.split("$L__BB0_2")[0]) == 0


# A line of PTX: the bits that it loads from global memory, families of instructions.
PTX = {
    "@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];": (128, ""),
    "ld.global.L1::evict_last.v2.b64 { %rd4, %rd5 }, [%rd1];": (128, ""),
    "ld.global.nc.b16 %rs1, [%rd1];": (16, ""),
    "ld.volatile.global.f32 %f1, [%rd1];": (32, ""),
    "ld.global.v8.b32 {%r1}, [%rd1];": (256, ""),
    "ld.shared.v4.b32 {%r1}, [%r2];": (0, ""),
    "ld.param.b64 %rd1, [p];": (0, ""),
    "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;": (128, "cp.async"),
    "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1];": (
        128,
        "tma",
    ),
    "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 1024;": (0, "tma"),
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {%r1}], [%r2];": (
        0,
        "tma",
    ),
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}, %rd1, %rd2, %p1;": (0, "wgmma"),
    "@%p4 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p5;": (0, "tcgen05"),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r4};": (0, "mma"),
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [ %r1 ], %rd1, %rd2;": (
        0,
        "block_scale tcgen05",
    ),
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3;": (
        0,
        "block_scale mma",
    ),
    "cp.async.bulk.commit_group; wgmma.commit_group.sync.aligned; tcgen05.alloc.x;": (0, ""),
    "barrier.cluster.arrive.aligned;": (0, "cluster"),
    "cvt.rn.satfinite.e2m1x2.f32 low, %f2, %f1;": (0, "e2m1"),
    "cvt.rn.f16x2.e2m1x2 both, low;": (0, "e2m1"),
    "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f2, %f1;": (0, "e4m3"),
    "cvt.rn.f16x2.e4m3x2 %r1, %rs1;": (0, "e4m3"),
    "cvt.rn.satfinite.e5m2x2.f32 %rs1, %f2, %f1; cvt.rn.f16x2.f32 %r1, %f2, %f1;": (0, ""),
}


@pytest.mark.parametrize("ptx", PTX)
def test_widths_and_families_of_instructions_are_read_from_ptx(ptx):
    load, uses = PTX[ptx]
    found = machine_code.ptx_facts(ptx)
    assert (found["load"], sorted(found["uses"])) == (load, uses.split())


# nvdisasm output: a copy; and its output for single lines of PTX of each family.
COPY = """
        /*00e0*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*00f0*/              @!P1 LDG.E.64 R8, desc[UR6][R2.64+0x10] ;
        /*0100*/                   LDS.128 R12, [R49] ;
        /*0110*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0120*/              @P0 STG.E.128 desc[UR6][R2.64], R4 ;
        /*0130*/                   EXIT ;
"""
SASS = {
    "LDG.E.U16 R4, desc[UR14][R2.64+0x2]": ("sass_load", 16),
    "LDG.E R4, desc[UR14][R2.64]": ("sass_load", 32),
    "LDG.E.LTC128B.64 R6, desc[UR12][R6.64+0x10]": ("sass_load", 64),
    "LDG.E.ENL2.256 R20, R16, desc[UR12][R16.64+0x400]": ("sass_load", 256),
    "STG.E.ENL2.256 desc[UR12][R2.64+0x800], R16, R20": ("sass_store", 256),
    "LDGSTS.E.BYPASS.128 [R13], desc[UR18][R2.64], P0": ("sass_load", 128),
    "UBLKCP.S.G [UR4], [UR6], UR10": ("sass_load", 128),
    "UBLKCP.S.S [UR4], [UR6], UR10": ("sass_load", 0),
    "UTMASTG.2D [UR4], [UR10]": ("sass_store", 128),
    "STG.E.U8 desc[UR12][R4.64], R19": ("sass_store", 8),
    "LDL.64 R2, [R1+0x8]": ("local_instructions", 1),
    "@!P0 STL [R1], R2": ("local_instructions", 1),
    "EXIT": ("instructions", 1),
    "NOP": ("instructions", 0),
    "LDGSTS.E [R13], desc[UR18][R2.64]": ("sass_uses", ("cp.async",)),
    "HGMMA.64x64x16.F32 R24, gdesc[UR4], !UPT": ("sass_uses", ("wgmma",)),
    "@!UP0 UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4], idesc[UR7]": ("sass_uses", ("tcgen05",)),
    "HMMA.16816.F32 R4, R8, R12, R4": ("sass_uses", ("mma",)),
    "UTMALDG.2D.MULTICAST [UR4], [UR10], UR9": ("sass_uses", ("tma",)),
    "UCGABAR_ARV": ("sass_uses", ("cluster",)),
    "STAS.128 [R10.64], R4": ("sass_uses", ("cluster",)),
    "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R4, R5, R0, RZ": ("sass_uses", ("e2m1",)),
    "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R5, R0, RZ": ("sass_uses", ("e4m3",)),
    "F2FP.F16.E4M3.UNPACK_B R6, R6": ("sass_uses", ("e4m3",)),
    "F2FP.F16.E2M1.UNPACK_B R6, R6.B1": ("sass_uses", ("e2m1",)),
    "F2FP.BF16.F32.PACK_AB R4, R5, R0": ("sass_uses", ()),
}


def test_widths_and_their_shares_are_read_from_sass():
    found = machine_code.sass_facts(COPY)
    assert (found["sass_load"], found["sass_store"]) == (128, 128)
    assert (found["wide_loads"], found["wide_stores"]) == (66, 100)
    assert (found["local_instructions"], found["sass_uses"], found["instructions"]) == (0, (), 6)


@pytest.mark.parametrize("instruction", SASS)
def test_an_instruction_is_read_from_sass(instruction):
    fact, value = SASS[instruction]
    for text in (
        f"        /*1c3a0*/              {instruction} ;",
        f"        /*02e0*/  {instruction} ;   /* 0x02 */",
    ):
        assert machine_code.sass_facts(text)[fact] == value


def test_what_is_no_cubin_is_not_disassembled():
    with pytest.raises((ValueError, RuntimeError), match=r"not a cubin|cannot disassemble"):
        machine_code.disassemble([b"PK"], 90)
    with pytest.raises(RuntimeError, match=r"does not know SM1|no nvdisasm"):
        machine_code.disassemble([], 1)


def test_spills_and_stack_are_read_from_what_ptxas_says():
    log = (
        "ptxas info    : Function properties for kernel\n"
        "    88 bytes stack frame, 120 bytes spill stores, 160 bytes spill loads\n"
        "ptxas info    : Used 128 registers, 88 bytes cumulative stack size, 16 bytes lmem\n"
    )
    assert gate_compilers.resources(log) == (128, 160, 104)
    with pytest.raises(RuntimeError, match="no register count"):
        gate_compilers.resources("nothing of the kind")


def test_the_interpreter_is_refused_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compile_gate.main([]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


COLLECTED = """
import json, pathlib, sys
from tilewright_lab.gate import compilers as gate
from tilewright_lab.gate.verdict import budgeted, judge
from tilewright.kernels import tuning
from tilewright.ops import OPS
from tilewright.selection import operations

specs = gate.collect(operations().values(), without=("cute",))
found = {"budgets": gate.COMPILERS[gate.KernelSpec].budget_file().name,
         "modules": sorted({s.kernel.fn.__module__ for s in specs.values()}),
         "keys": [f"{n} sm_{a}" for n, s in specs.items() for a in gate.ARCHS
                  if s.min_arch <= a <= s.max_arch and budgeted(n)],
         "space": list(gate.collect([OPS["rope"]], space=True)),
         "tables": []}
for tables in sys.argv[1:]:
    tuning.TABLES = pathlib.Path(tables)
    specs = gate.collect([OPS["rmsnorm"]], without=("cute",))
    specs = {n: s for n, s in specs.items() if not budgeted(n)}
    results = gate.compile_all(specs, gate.launched(specs, gate.ARCHS), 2)
    found["tables"].append([sorted(r.key for r in results), judge(results, specs, {}, ())])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def collected(compiling, tmp_path_factory):
    """What the gate compiles: of all ops, of candidates, and of two tables."""
    folder = tmp_path_factory.mktemp("tables")
    launches = {
        "fits": {"BLOCK_D": 128, "BLOCK_T": 8, "num_warps": 8},
        "spills": {"BLOCK_D": 128, "BLOCK_T": 64, "num_warps": 1},  # 256 per thread
    }
    for name, config in launches.items():
        path = folder / name / "some-gpu/rmsnorm.json"
        path.parent.mkdir(parents=True)
        entry = {"key": {"D": 128, "itemsize": 4, "add": False}, "config": config}
        table = {"schema": 1, "device": "some gpu", "launches": {"forward": [entry]}}
        path.write_text(json.dumps(table))
    return run_python(compiling, "-c", COLLECTED, *(folder / name for name in launches))


def test_every_triton_module_is_in_the_gate_and_every_kernel_has_a_budget(collected):
    name, modules, keys = (collected[n] for n in ("budgets", "modules", "keys"))
    written = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for end in ("triton", "gluon")
        for p in (ROOT / "tilewright/kernels").rglob(f"*_{end}.py")
        if p.stem not in ("gated_triton", "logits_triton", "math_triton", "tiles_triton")
    }  # device functions, not kernels
    assert set(modules) == written, "no op's gate= compiles these modules"
    path = gate_compilers.BUDGETS / name
    if not path.exists():
        pytest.skip(f"no budgets for {path.stem}")
    budgets = json.loads(path.read_text())
    archs = tuple({key.split()[-1] for key in budgets})  # all architectures, for the pinned Triton
    differ = set(budgets) ^ {key for key in keys if key.endswith(archs)}
    assert not differ, f"run `python -m tilewright gate --registry --update`: {sorted(differ)}"


def test_every_entry_of_every_table_is_compiled_for_every_architecture(collected):
    (keys, failures), (_, spilled) = collected["tables"]
    assert failures == []
    assert sorted(k.rpartition(" ")[2] for k in keys) == ["sm_100", "sm_120", "sm_90"]
    entry = "some-gpu: D=128 itemsize=4 add=False; BLOCK_D=128 BLOCK_T=8 num_warps=8"
    assert all(entry in k for k in keys)
    assert any("spills" in f for f in spilled)


def test_candidates_of_searches_are_collected_for_the_gate(collected):
    names = collected["space"]
    assert len(names) > 4 and all(n.startswith("rope/rotate") and "; BLOCK_H=" in n for n in names)
