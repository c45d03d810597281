"""`python -m bench predict`: the arithmetic, by hand; and the page of what is committed."""

import json
import os
import pathlib
import re
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import predict
from bench.predicted import model, roofs
from bench.predicted import page as pages
from bench.predicted.launches import Launch, Pass, Tensor, _Operators, differences
from bench.stages.goals import Aim
from tilewright.bench import store
from tilewright.core import platform
from tilewright.core.registry import Case, Cost
from tilewright.ops import OPS
from tilewright_lab import pretend
from tilewright_lab.gate import alike
from tilewright_lab.gate.compilers import BUDGETS, key_of

ROOT = pathlib.Path(__file__).parents[2]
# Rates that divide well.
ON = replace(
    roofs.DEVICES["h200"],
    copy=4e12,
    flops={"bfloat16": 800e12, "float8_e4m3fn": 1600e12},
    l2=7e12,
    sms=100,
    clock=2e9,
    ipc=2.5,
    launch=3e-6,
    latency=1e-6,
)


def tensor(*shape, itemsize=2):
    return Tensor(shape, itemsize, False)


# y = f(x) of 1,024 rows of 4,000 elements, a program for each: 16,384,000 bytes.
STREAM = Launch(
    "_forward",
    1024,
    8,
    {"x_ptr": tensor(1024, 4000), "y_ptr": tensor(1024, 4000)},
    facts={"registers": 32, "shared": 0, "uses": [], "per_element": 16.0},
    tile=4096,
)
COST = Cost(2 * 1024 * 4000 * 2)


def of(launch, cost=COST, op="rmsnorm", on=ON):
    return model.predict(op, "forward", Pass((launch,)), cost, on)


def with_facts(launch, **facts):
    return replace(launch, facts={**launch.facts, **facts})


def test_a_streaming_launch_takes_its_bytes_and_a_launch():
    found = of(STREAM)
    assert found.limit == "issue"
    # 1,024 tiles of 4,096 elements, 16 / 32 warp instructions each, at 100 x 2e9 x 2.5 a second.
    assert found.seconds == pytest.approx(1024 * 4096 * 16 / 32 / 5e11 + 3e-6)
    found = of(with_facts(STREAM, per_element=8.0))
    assert found.limit == "bytes" and not found.unknown
    assert found.seconds == pytest.approx(16_384_000 / 4e12 + 3e-6)
    # 8 blocks of 8 warps are the 64 that an SM holds: 1,024 tiles are 2 rounds of 800.
    assert "8 blocks/SM, 2 rounds of tiles = 2.00 us; 100 % of its roof" in found.words


def test_registers_that_cost_blocks_make_latency_the_limit():
    # 255 registers of 256 threads: one block an SM, and 11 rounds of a microsecond.
    found = of(with_facts(STREAM, registers=255, per_element=1.0))
    assert found.limit == "latency" and found.seconds == pytest.approx(11e-6 + 3e-6)


def test_without_a_budget_a_launch_takes_its_bytes():
    unknown = replace(STREAM, facts={}, tile=0)
    # A program alone has an SM's share of the copy.
    found = of(replace(unknown, programs=1))
    assert found.limit == "bytes"
    assert found.seconds == pytest.approx(16_384_000 / (4e12 / 100) + 3e-6)
    assert "residency of _forward (no budget)" in found.unknown
    # Bytes that no argument shows are the largest launch's.
    found = of(unknown, Cost(32_768_000))
    assert found.seconds == pytest.approx(32_768_000 / 4e12 + 3e-6)


def test_stages_of_loops_that_gluon_does_not_pipeline_are_no_difference():
    given = {"constexprs": {}, "signature": {}, "options": {}, "num_warps": 8, "num_stages": 1}
    for gluon, found in ((False, ("num_stages",)), (True, ())):
        kernel = SimpleNamespace(is_gluon=lambda gluon=gluon: gluon)
        spec: Any = SimpleNamespace(kernel=kernel, **given)
        assert differences(spec, {"num_warps": 8}) == found


# 65,536 rows of 2,048 times 8 experts' 512 x 2,048.
PRODUCT = Launch(
    "_gemm",
    100,
    8,
    {"x": tensor(2**16, 2048), "w": tensor(8, 512, 2048), "out_ptr": tensor(2**16, 512)},
    {"K": 2048, "BLOCK_M": 128, "BLOCK_N": 128},
    facts={"registers": 128, "shared": 98_328, "uses": ["wgmma"]},
)
FLOPS = 2 * 2**16 * 512 * 2048


def of_product(launch):
    return of(launch, Cost(0, 0, FLOPS), "grouped_gemm")


def test_a_product_is_limited_by_what_its_tile_reads_from_l2():
    found = of_product(PRODUCT)
    # A tile of 128 x 128 has 64 FLOPs for a byte. Two blocks of 128 registers fit an SM.
    assert found.limit == "L2 to SM" and "56 % of its roof" in found.words  # 448 of 800 TFLOP/s
    assert found.seconds == pytest.approx(FLOPS / (64 * 7e12) + 3e-6)


def test_one_block_an_sm_exposes_first_loads_and_stores_unless_warps_are_specialized():
    values = {**PRODUCT.values, "BLOCK_N": 256}
    wide = replace(with_facts(PRODUCT, registers=200, shared=196_640), values=values)
    # 128 x 256 has 85.3 FLOPs for a byte; its 512 x 2 tiles are 11 for an SM.
    loop, exposed = FLOPS / (256 / 3 * 7e12), 11e-6 + 2**16 * 512 * 2 / 4e12
    assert of_product(wide).seconds == pytest.approx(loop + exposed + 3e-6)
    # Four stages of 48 KiB leave no room for a second block, whatever the registers are.
    stages = {**values, "BLOCK_K": 64, "num_stages": 4}
    found = of_product(replace(wide, facts={}, values=stages))
    assert found.seconds == pytest.approx(loop + exposed + 3e-6)
    found = of_product(replace(wide, specialized=True))
    assert found.limit == "L2 to SM" and found.seconds == pytest.approx(loop + 3e-6)


def test_an_fp8_product_has_the_rate_and_roof_of_fp8_and_scales_between_its_steps():
    factors = {n: tensor(4096, 2**15, itemsize=1) for n in ("a_from", "b_from")}
    values, cost = {"BLOCK_M": 128, "BLOCK_N": 128}, Cost(0, 0, 2 * 4096**2 * 2**15)
    launch = Launch("_dweight", 100, 4, {**factors, "out": tensor(1, 4096, 4096)}, values)
    # A tile of 128 x 128 has 128 FLOPs for a byte: 896 of 1,600 TFLOP/s.
    found = of(replace(launch, specialized=True), cost, SCALED_OP)
    assert found.limit == "L2 to SM" and "56 % of its roof" in found.words
    loop = cost.forward_flops / (128 * 7e12)
    assert found.seconds == pytest.approx(loop + 3e-6)
    assert found.dtype == "float8_e4m3fn"
    assert model.floor(cost, "forward", ON, found.dtype) == cost.forward_flops / 1600e12
    # Two multiplications for an element and 128 columns, which warps alone do not hide.
    alone = replace(launch, facts={"registers": 100, "shared": 100_000, "uses": ["wgmma"]})
    scaled = 2 * cost.forward_flops / 256 / 32 / 5e11
    assert of(alone, cost, SCALED_OP).seconds == pytest.approx(loop + scaled + 3e-6)


def test_all_code_of_a_product_is_the_most_that_its_epilogue_takes():
    counted = replace(with_facts(PRODUCT, per_element=8.0), tile=128 * 128)
    found = of_product(counted)
    most = 8 * 2**16 * 512 / 32 / 5e11
    assert f"epilogue at most {1e6 * most:.1f} us" in found.words and not found.unknown
    assert found.seconds == of_product(PRODUCT).seconds
    found = of_product(with_facts(counted, per_element=800.0))
    assert found.unknown == ("the epilogue's arithmetic of _gemm (not apart from its loop's)",)


# 64 programs, each of which takes the 256 chunks of a sequence one after another.
DELTA = Launch(
    "_states",
    64,
    4,
    {"k_ptr": tensor(2**14, 32, 128)},
    {"C": 64, "DK": 128, "DV": 128, "BV": 32, "S": 2**14, "GROUP": 2, "STAGES": 3},
    facts={"registers": 128, "shared": 66_000, "uses": ["wgmma", "cp.async"], "per_element": 9.0},
    tile=64 * 32,
)


def test_steps_that_follow_each_other_take_the_latency_of_a_tile_each():
    found = of(DELTA, op="gated_delta_rule")
    # Loads of two of them are in flight.
    assert found.limit == "latency" and found.seconds == pytest.approx(128e-6 + 3e-6)
    # For each chunk 64 x 32 x 128 twice, and 64 x 64 x 32.
    flops = 64 * 256 * 2 * (2 * 64 * 32 * 128 + 64 * 64 * 32)
    us = 1e6 * flops / (800e12 * 64 / 100)
    assert f"{flops / 1e9:.1f} GFLOP = {us:.1f} us" in found.words
    at_most = of(with_facts(DELTA, per_element=900.0), op="gated_delta_rule")
    assert at_most.limit == "latency"
    assert at_most.unknown[0].startswith("issue slots of _states (at most ")


def test_steps_without_products_take_the_latency_too():
    values = {"steps": 9, "runs": 50, "ROWS": 32}
    facts = {"registers": 64, "shared": 0, "uses": []}
    sort = Launch("_place", 50, 4, {"x_ptr": tensor(4096)}, values, facts=facts)
    found = of(sort, Cost(0), "permute")
    # Nine tiles of slots; before them, counts of 32 and of 18 runs.
    assert found.limit == "latency" and found.seconds == pytest.approx(11e-6 + 3e-6)
    more = of(replace(sort, programs=900), Cost(0), "permute")  # 8 blocks on each of 100 SMs
    assert more.seconds == pytest.approx(13e-6 + 3e-6) and "GFLOP" not in more.words


def test_the_code_of_several_branches_is_no_limit():
    of_losses = replace(STREAM, kernel="_backward")
    assert of(of_losses).limit == "issue"
    found = of(of_losses, op="logprob_entropy")
    assert found.limit == "bytes" and "by all of its code" in found.unknown[0]


# The B200's, which divide well; its tensor cores have FP4, and its budgets are of sm_100.
ON_100 = replace(ON, flops={**ON.flops, roofs.E2M1: 3200e12}, arch=100)


def scaled(e2m1, **given):
    """A product in MXFP8 or NVFP4 of 8,192 x 4,096 x 4,096, by all warps."""
    per_byte, per_scale = (2, 16) if e2m1 else (1, 32)
    factors = {
        f"{name}{part}_ptr": tensor(rows, 4096 // each, itemsize=1)
        for name, rows in (("a", 8192), ("b", 4096))
        for part, each in (("", per_byte), ("_scale", per_scale))
    }
    values = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 256 if e2m1 else 128, "E2M1": e2m1}
    facts = {"registers": 162, "shared": 73_736, "uses": ["tcgen05", "block_scale"]}
    tensors = {**factors, "out_ptr": tensor(8192, 4096)}
    return replace(Launch("_scaled", 2048, 4, tensors, values, facts=facts), **given)


SCALED_OP = "low_precision_linear"
OF_SCALED = Cost(0, 0, 2 * 8192 * 4096 * 4096)


def of_scaled(e2m1, cost=OF_SCALED, **given):
    return of(scaled(e2m1, **given), cost, SCALED_OP, ON_100)


@pytest.mark.parametrize("e2m1", [False, True])
def test_a_scaled_product_reads_codes_and_scales_from_l2(e2m1):
    # 128 + 128 rows, of 1 + 1 / 32 or 1 / 2 + 1 / 16 bytes an element: 124 and 228 FLOPs a byte.
    per_byte = 2 * 128 * 128 / (256 * (0.5625 if e2m1 else 1.03125))
    found = of_scaled(e2m1)
    assert found.limit == "L2 to SM" and f"{per_byte:.0f} FLOP/B" in found.words
    assert found.seconds == pytest.approx(OF_SCALED.forward_flops / (per_byte * 7e12) + 3e-6)
    # The tensor cores' rate is that of the codes, and so is the roof.
    assert found.dtype == (roofs.E2M1 if e2m1 else roofs.E4M3)
    share = per_byte * 7e12 / (3200e12 if e2m1 else 1600e12)
    assert f"{100 * share:.0f} % of its roof" in found.words
    assert any("copies of scales to tensor memory" in what for what in found.unknown)
    # 128 columns of a sum, and 2 x 4 or 2 x 16 of scales, are allocated as 256 of 512.
    assert "2 blocks/SM, of 256 columns of tensor memory each," in found.words


def test_tensor_memory_holds_two_sums_with_their_scales():
    # Shared memory would hold six; a sum of 256 columns fits once, so that nothing hides its tiles.
    small = {"registers": 64, "shared": 36_000, "uses": ["tcgen05"]}
    assert "2 blocks/SM" in of_scaled(False, facts=small).words
    values = {**scaled(False).values, "BLOCK_N": 256}
    wide = of_scaled(False, facts=small, values=values)
    assert "1 block/SM, of 512 columns of tensor memory each, exposes 1024 tiles'" in wide.words


def test_a_scaled_product_of_specialized_warps_hides_its_loads_but_not_the_one_sum_of_256_columns():
    tensors = {"out": tensor(8192, 4096), "out_ptr": tensor(8192, 4096)}
    given = {"tensors": tensors, "specialized": True}
    narrow = {**given, "values": {"BLOCK_N": 128, "PER": 4}}
    wait = "the wait for a sum"
    assert not any(wait in what for what in of_scaled(False, **narrow).unknown)
    wide = of_scaled(True, values={"BLOCK_N": 256, "PER": 1}, **given)
    assert any(wait in what for what in wide.unknown)
    per_byte = 2 * 128 * 256 / (384 * 0.5625)
    assert wide.seconds == pytest.approx(OF_SCALED.forward_flops / (per_byte * 7e12) + 3e-6)
    # The result is written once, though a pointer beside the descriptor names it too.
    once = of_scaled(False, replace(OF_SCALED, forward_flops=1), **narrow)
    assert once.seconds == pytest.approx(8192 * 4096 * 2 / 4e12 + 3e-6)


def test_operators_of_pytorch_are_launches_and_copies_of_their_tensors():
    alone = of(STREAM)
    operators = (("index", 40_000_000), ("where", 40_000_000), ("add", 8))
    found = model.predict("rmsnorm", "forward", Pass((STREAM,), 0, operators), COST, ON)
    assert found.seconds - alone.seconds == pytest.approx(80_000_008 / 4e12 + 3 * 3e-6)
    assert found.limit == "bytes" and "4 launches = 12.0 us" in found.words
    told = "3 operators of PyTorch, a launch each: 80.0 MB (index 40.0 MB, where 40.0 MB) / 4.00"
    assert told in found.words


def test_an_operator_that_computes_is_counted_and_a_view_is_not():
    t = torch.zeros(8, 4)
    with _Operators() as operators:
        made = t.view(4, 8).T[1:].unsqueeze(0)
        torch.empty(1000)
        t + 1
        t.add_(1)
        made @ torch.ones(4, 2)
    names = [name for name, _ in operators.others]
    assert names == ["add", "add_", "ones"] and operators.flops == 2 * 7 * 4 * 2
    # Read and written; in place, one tensor.
    assert [bytes_ for _, bytes_ in operators.others] == [256, 128, 32]


def test_operators_that_copy_are_counted_with_what_they_read_and_write():
    t, index = torch.zeros(800, 64), torch.zeros(900, dtype=torch.int64)
    with _Operators() as operators:
        torch.where((index >= 0)[:, None], t[index], 0)
    bytes_ = dict(operators.others)
    assert bytes_["index"] == 4 * 64 * (800 + 900) + 8 * 900
    # The bytes of the copies, and of the condition, whose shape is [900, 1].
    assert bytes_["where"] >= 4 * 64 * 2 * 900 + 900


def test_what_hopper_refuses_has_rows_with_each_launch_that_changes_a_pass(monkeypatch):
    op = fake_op(fake_case("common", 10**6), fake_case("newer", 10**6), requests=(1,))
    devices = []

    def passes(found, op, name, case, dtype, launch, config):
        if case.name == "newer" and devices[-1] == 90:
            return {}, "needs compute capability 10.0"
        apart = {"forward": Pass((replace(STREAM, source="a"),)), "backward": Pass((STREAM,))}
        if launch:
            apart["backward"] = Pass((replace(STREAM, source="b"),))
        return {**apart, "forward_backward": apart["forward"].followed_by(apart["backward"])}, None

    def simulated(device, arch=90):
        devices.append(arch)
        return nullcontext([])

    ways = [(pages.HEURISTIC, "", "", {}), ("other warps", "", "rmsnorm/backward", {})]
    monkeypatch.setattr(predict, "_passes", passes)
    monkeypatch.setattr(predict, "_alternatives", lambda *_: iter(ways))
    monkeypatch.setattr(predict.launches, "simulated", simulated)
    seen: set[str] = set()
    found = list(predict.newer([op], ON_100, seen))
    assert {r.case for r in found} == {"newer"}
    assert [(r.which, r.launch) for r in found] == [
        ("forward", pages.HEURISTIC),
        ("backward", pages.HEURISTIC),
        ("backward", "other warps"),
    ]
    assert devices == [90, 100] and seen == {"a", "b", ""}
    head = pages.table(found)[0]
    assert "| launch |" in head and "goal" not in head
    # An op that refuses nothing has no row.
    op.requests = ()
    assert not list(predict.newer([op], ON_100, seen))


def fake_case(name, bytes_):
    return Case(name, lambda *_: {}, lambda itemsize: Cost(bytes_), frozenset({"cuda"}))


def fake_op(*cases, **more) -> Any:
    given = {"name": "rmsnorm", "cases": list(cases), "choose": lambda *_: "triton"}
    return SimpleNamespace(**given, **more)


def test_kernels_without_a_goal_are_those_of_the_largest_case_and_what_no_row_launches(monkeypatch):
    launched = {"small": "a", "large": "a", "other": "b", "again": "b"}
    op = fake_op(*(fake_case(n, 10**6 * (1 + (n == "large"))) for n in launched), goals=())

    def passes(found, op, name, case, *_):
        if case.name == "refused":
            return {}, "values on the host"
        return {"forward": Pass((replace(STREAM, source=launched[case.name]),))}, None

    has_goals: list[str] = []
    monkeypatch.setattr(predict, "_passes", passes)
    monkeypatch.setattr(predict, "goals_on", lambda op, device: iter(has_goals))
    monkeypatch.setattr(predict.launches, "simulated", lambda device, arch: nullcontext([]))
    seen: set[str] = set()
    assert [r.case for r in predict.others([op], ON, seen)] == ["large", "other"]
    assert seen == {"a", "b"} and not list(predict.rows([op], ON, seen))
    # An op that has goals has rows of kernels alone. A row says why an op has no line.
    has_goals.append("a goal")
    assert [r.case for r in predict.others([op], ON, {"a"})] == ["other"]
    has_goals.clear()
    op.cases = [fake_case("refused", 1)]
    (row,) = predict.others([op], ON, seen)
    assert (row.op, row.seconds, row.words) == ("rmsnorm", None, "values on the host")


def test_a_forward_that_computes_gradients_is_shown_with_its_backward():
    apart = {"forward": Pass((STREAM,)), "backward": Pass((PRODUCT,))}
    both = Pass((STREAM, PRODUCT))
    assert predict._whiches({**apart, "forward_backward": both}) == ("forward", "backward")
    both = Pass((STREAM, STREAM, PRODUCT))
    assert predict._whiches({**apart, "forward_backward": both}) == ("forward", "forward_backward")
    assert predict._whiches({"forward": apart["forward"]}) == ("forward",)


@pytest.fixture(scope="module")
def page():
    return pages.page(pages.read())


def test_every_op_with_a_triton_kernel_has_a_line_on_each_device_and_its_arithmetic(page):
    arithmetic = page[page.index("## Arithmetic") :]
    for op in OPS.values():
        if "triton" not in op.names():
            continue
        for device in (d for d in roofs.DEVICES.values() if d.arch == 90):
            part = page[page.index(f"## {device.device}\n") :].split("\n## ")[0]
            of_op = [x for x in part.splitlines() if x.startswith(f"| `{op.name}` |")]
            assert any(re.search(r" (ms|us) \| [\d.]+ \|", x) for x in of_op), (op.name, device)
        assert f"\n- `{op.name}` " in arithmetic, op.name


def family(name):
    """The family of a scaled product's budget, without its result's type and its tile's width."""
    op, recipe = re.findall(r"\w+", name)[:2]
    return op, recipe, *(word in name for word in (" rows", " weights", " specialized"))


def test_every_scaled_product_has_a_row_on_the_b200(page):
    (version,) = re.findall(r"Budgets of Triton ([\d.]+) for", page)
    held = json.loads((BUDGETS / f"triton-{version}.json").read_text()).items()
    newest = {name: facts["uses"] for name, facts in held if name.endswith(" sm_100")}
    families = {family(name) for name, uses in newest.items() if "block_scale" in uses}
    assert len(families) == 2 * 2 + 2 * 2 * 2
    table = page[page.index("## B200\n") :].split("\n## ")[0]
    arithmetic = page[page.index("Of the B200:\n") :]
    shown = re.findall(r"_scaled\w* \(budget of ([^),]*)", arithmetic)
    assert families <= set(map(family, shown))
    for op, recipe, *_ in families:
        for which in ("forward", "forward + backward"):
            row = rf"\| `{op}` \| {recipe} [^|]* \| {re.escape(which)} \| heuristic \|"
            assert re.search(rf"{row}.* ms \| [\d.]+ \|", table), (op, recipe, which)
    assert "No timed case launches" not in arithmetic
    # A device that is not simulated anew would have the launches of Hopper's conversions.
    assert not re.search(r"_scaled\w* \([^)]*HARDWARE", arithmetic)


def test_of_grouped_products_no_pass_has_operators_of_pytorch(page):
    """One launch places the rows, and two find the scale of a tensor in NVFP4."""
    lines = re.findall(r"^- `low_precision_grouped_gemm` .*", page, re.MULTILINE)
    assert {line.split()[2] for line in lines} == {"block_fp8", "mxfp8", "nvfp4"}
    for line in lines:
        both, nvfp4 = "forward + backward" in line, line.split()[2] == "nvfp4"
        assert line.count(" _place (") == 1 + both, line
        assert "operators of PyTorch" not in line
        (launched,) = re.findall(r"(\d+) launches = ", line)
        assert int(launched) == {(0, 0): 4, (1, 0): 9, (0, 1): 8, (1, 1): 23}[both, nvfp4], line


def test_what_the_gate_compiles_and_counts_for_predictions_is_in_its_budgets():
    for path in BUDGETS.glob("triton-*.json"):
        held = json.loads(path.read_text())
        for name, (end, _) in alike.CHANGED.items():
            assert key_of(f"{name} {end}", 90) in held, path
        for name in alike.TILES:
            assert held[key_of(name, 90)].get("per_element"), (name, path)
        for op, launch in alike.KEYS:
            assert any(k.startswith(f"{op}/{launch} ") and " D=2048 sm_90" in k for k in held), path


def test_products_that_are_not_derived_are_refused():
    with pytest.raises(ValueError, match="products of _gemm are not derived"):
        of(PRODUCT, op="gated_delta_rule")
    with pytest.raises(ValueError, match="no kernel of this library"):
        model.predict("attention", "forward", Pass(()), COST, ON)


def test_measured_rates_take_the_place_of_the_defaults(tmp_path):
    path = tmp_path / "roofline.json"
    measured = {"copy_bytes_per_second": 4.1e12, "flops_per_second": {"bfloat16": 7e14}}
    path.write_text(json.dumps({"roofline": measured}))
    on = roofs.read(ON, path)
    assert (on.copy, on.flops["bfloat16"], on.l2) == (4.1e12, 7e14, ON.l2)
    assert on.measured == ("copy", "bfloat16")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"roofs must be a folder .* got .*KeyError"):
        roofs.read(ON, path)


def test_every_rate_has_its_source_and_each_device_the_sms_of_its_compute_capability():
    rates = {"device", "arch", "measured"} ^ set(roofs.Roofs.__dataclass_fields__)
    assert set(roofs.SOURCES) == rates
    # Each dtype of a product, but for float16, whose rate is bfloat16's.
    flops = {dtype for device in roofs.DEVICES.values() for dtype in device.flops}
    assert flops - {"float16"} == set(roofs.SOURCES["flops"])
    for device in roofs.DEVICES.values():
        assert device.sms == pretend.DEVICES[device.arch][0]


# ---- a simulated device


@pytest.fixture(scope="module")
def command(compiling):
    path = os.pathsep.join((str(ROOT), str(ROOT / "lab")))
    variables = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}

    def run(*arguments):
        command = [compiling, "-m", "bench", "predict", *arguments]
        return subprocess.run(command, env=variables, cwd=ROOT, text=True, capture_output=True)

    return run


def test_what_is_committed_is_what_the_counts_make(command, page):
    version = platform.describe().get("triton", "").split("+")[0]
    if f"Budgets of Triton {version} for" not in page:
        pytest.skip(f"what is committed is of another Triton than {version}")
    done = command("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_hopper_has_too_is_not_predicted_on_the_b200(command):
    done = command("--device", "b200", "--op", "rmsnorm")
    assert done.returncode == 2 and "Hopper has all cases of these ops too" in done.stdout


def test_measured_times_stand_beside_predicted_ones(command, tmp_path):
    measured = {"copy_bytes_per_second": 2e12, "flops_per_second": {"bfloat16": 7e14}}
    store.append(tmp_path / store.FILE, "roofline", {"roofline": measured})
    case = next(c for c in OPS["silu_mul"].cases if c.name == "deepseek-v3")
    row = {"provider": "triton", "auto": True, "forward": {"median_ms": 0.123}}
    document = {"op": "silu_mul", "case": "deepseek-v3", "dtype": "bfloat16", "rows": [row]}
    name = Aim(OPS["silu_mul"], case, torch.bfloat16).name
    store.append(tmp_path / store.FILE, name, document)
    done = command("--device", "h200", "--op", "silu_mul", "--roofs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stdout.splitlines() if "deepseek-v3 | forward | " in x)
    # Two inputs and a result of 16,384 x 2,048: 201 MB at 2 TB/s, and a launch.
    assert "| 0.104 ms |" in line and line.endswith("| 0.123 ms |")
