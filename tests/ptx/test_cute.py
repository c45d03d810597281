"""The CuTe DSL kernels. Without a GPU, they are compiled for sm_90 and sm_100, and their PTX is
emulated on the CPU (tools/emulator), where it must satisfy the numerics contract, stay inside
tensors and write every element once.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import tempfile
from types import SimpleNamespace

import pytest
import torch

from tilewright.bench import contract
from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.kernels.spec import CuteSpec
from tilewright.selection import operations
from tilewright_lab.emulator import Kernel, Memory
from tilewright_lab.gate import compile_gate
from tilewright_lab.gate import compilers as gate_compilers
from tilewright_lab.gate import verdict as gate_verdict

pytest.importorskip("triton")

if reason := platform.no_cutlass():
    pytest.skip(reason, allow_module_level=True)

from tilewright.kernels import cute as tw
from tilewright.kernels.loss import softmax_stats_cute
from tilewright.kernels.loss.operators import Scaling, Softmax, StatsGradients, Wanted
from tilewright.kernels.norm import rmsnorm_cute
from tilewright.kernels.norm.operators import Norm
from tilewright.ops.loss import softmax_stats

rmsnorm, cross_entropy = (
    importlib.import_module(f"tilewright.ops.{n}") for n in ("norm.rmsnorm", "loss.cross_entropy")
)

OPS = ("rmsnorm", "add_rmsnorm", "cross_entropy")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LLAMA = Norm(1e-6, 0.0, True)


@functools.cache
def compiled(function, types, arch):
    with tempfile.TemporaryDirectory() as folder:
        kernel = tw.compiled(function, types, arch, f"--keep-ptx --keep-cubin --dump-dir {folder}")
        return Kernel(kernel.__ptx__), kernel.__ptx__


class Emulator:
    """Stands in for `kernels.cute.launch`. calls: (host function, arguments, memory) per launch."""

    def __init__(self, arch):
        self.arch, self.calls = arch, []

    def __call__(self, function, *arguments):
        types = tw.argument_types(function, arguments)
        kernel, _ = compiled(function, types, self.arch)
        cluster = next(a.cluster for a in arguments if hasattr(a, "cluster"))
        memory = Memory()
        *arguments, blocks, groups = arguments
        values = [
            memory.put(a, tw.address(a) % 16) if isinstance(a, torch.Tensor) else a
            for a, kind in zip(arguments, types, strict=False)
            if isinstance(kind, str)
        ]
        kernel.run(memory, values, (blocks, groups, 1), cluster)
        memory.take_back()
        self.calls.append((function, arguments, memory))


@pytest.fixture(params=[90, 100], ids=["sm_90", "sm_100"])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(tw, "launch", emulator)
    loaded = {
        "rmsnorm": rmsnorm._cute().rmsnorm,
        "add_rmsnorm": rmsnorm._cute().add_rmsnorm,
        "cross_entropy": cross_entropy.fused("cute"),
    }
    for op, fn in loaded.items():
        for dtype in (F32, BF16, F16):
            monkeypatch.setitem(
                operations()[op]._table, ("cute", torch.device("cpu"), dtype, None), fn
            )
    return emulator


CASES = [(op, case) for op in OPS for case in operations()[op].cases if "contract" in case.tags]


# All in bf16 for sm_90; for sm_100, and in the other dtypes, a subset that covers every path.
MORE = (
    "ragged",
    "gemma",
    "qk_norm",
    "fp32_weight",
    "wide",
    "bias_none_cast",
    "all_ignored",
    "everything_wide",
)
RUNS = {
    f"sm_{arch}-{op}-{case.name}": (arch, op, case)
    for arch in (90, 100)
    for op, case in CASES
    if arch == 90 or case.name in MORE
}
# Columns, stride and offset of logits. The architectures differ in instructions, which narrow rows
# have too.
ROWS = {
    f"sm_{arch}-{V}": (arch, V, stride, offset)
    for arch in (90, 100)
    for V, stride, offset in (
        (50257, 50257, 0),
        (33000, 33001, 0),
        (20011, 20480, 3),
        (16, 24, 1),
    )
    if arch == 90 or V < 2**15
}


# What `make test` runs of these. All are in the table of `python -m tests.ptx`.
FIXED = ("-ragged", "-qk_norm", "wide")


@pytest.mark.parametrize(
    "emulator, op, case",
    [
        pytest.param(*run, id=name, marks=[pytest.mark.table] * (not name.endswith(FIXED)))
        for name, run in RUNS.items()
    ],
    indirect=["emulator"],
)
def test_the_contract_holds(op, case, emulator):
    for dtype in (BF16,) if emulator.arch == 90 else (F32, F16):
        with contract.poisoned():
            assert contract.check(operations()[op], "cute", case, "cpu", dtype) == [], dtype
    for _, _, memory in emulator.calls:  # every element is written exactly once
        for t, _ in memory.tensors:
            written = memory.times(t, "written")
            assert written.max() == written.min() <= 1, (t.shape, written)


# ---- beyond the public functions' cases


def test_wide_rows_in_clusters(emulator):
    """Both kernels for a row shared by 2 to 8 blocks, several rows per cluster, and a row that does
    not fill them.
    """
    for D, dtype, bias in ((16512, BF16, False), (24576, F32, True), (65536, BF16, True)):
        g = torch.Generator().manual_seed(0)
        x, w, b = (
            torch.randn(n, D, generator=g).squeeze(0).to(dtype).requires_grad_() for n in (3, 1, 1)
        )
        case = {"x": x, "weight": w, **({"bias": b} if bias else {})}
        assert contract.compare(operations()["rmsnorm"], "cute", case, dtype) == []
    clusters = {
        a.cluster for _, arguments, _ in emulator.calls for a in arguments if hasattr(a, "cluster")
    }
    assert clusters == {2, 4, 8}


@pytest.mark.parametrize(
    "emulator, V, stride, offset", ROWS.values(), indirect=["emulator"], ids=ROWS
)
def test_any_row_of_logits(V, stride, offset, emulator):
    """Odd widths, strides, and a first element off 16 bytes; rows of -inf, +inf and NaN; ignored
    targets.
    """
    for dtype in (F32, BF16) if emulator.arch == 90 and V < 2**15 else (BF16,):
        g = torch.Generator().manual_seed(0)
        memory = torch.randn(8 * stride + offset, generator=g).to(dtype) * 3
        x = torch.as_strided(memory, (8, V), (stride, 1), offset)
        inf = float("inf")
        x[1], x[2, V // 2], x[3, 5], x[4, : V // 2] = -inf, inf, float("nan"), -inf
        target = torch.tensor([0, 1, 2, 3, V - 1, -100, V, 7])
        options = Scaling(), Wanted(True, True, True)
        found = softmax_stats_cute.forward(x, target, None, *options)
        truth = softmax_stats.stats_eager(x.double(), target, None, *options)
        inside = (target >= 0) & (target < V)
        for name, a, t in zip(truth._fields, found, truth, strict=True):
            # A row with a NaN may report any number as its peak.
            rows = {
                "log_sum": range(8),
                "peak": [0, 1, 2, 4, 5, 6, 7],
                "picked": [0, 1, 2, 4, 5, 6, 7],
            }.get(name, [0, 4, 5, 6, 7])
            # error accepts NaN where truth is NaN, and equal infinities
            for i in rows:
                assert contract.error(a[i : i + 1], t[i : i + 1])[0] < 2e-5, (name, i, a[i], t[i])
        assert (found[5] >= 0).all() and (found[5] < V).all()  # an index, also with a NaN
        g_lse, g_target = torch.randn(8, generator=g), torch.randn(8, generator=g)
        g_lse[[1, 2, 3, 5]] = 0  # rows 1 to 3 have a target, row 5 has none
        g_target[[1, 2, 3]] = 0
        before, peak, log_sum = x.clone(), *found[:2]
        of_loss = Softmax(peak, log_sum), StatsGradients(g_lse, g_target)
        args = x, target, None, Scaling(), *of_loss, None
        expected = (
            torch.exp(x.double() - (peak.double() + log_sum.double())[:, None])
            * g_lse.double()[:, None]
        )
        expected[inside.nonzero()[:, 0], target[inside]] += g_target.double()[inside]
        expected[[1, 2, 3, 5]] = 0
        out = softmax_stats_cute.backward(*args)
        assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(before))
        read = emulator.calls[-1][2].times(x, "read")
        assert not read[[1, 2, 3, 5]].any()  # rows without gradients are not read
        softmax_stats_cute.backward_(*args)
        for result in (out, x):
            assert contract.error(result, expected)[0] < 8 * torch.finfo(dtype).eps


def test_the_emulator_sees_a_missing_barrier(monkeypatch):
    """Otherwise the tests above would pass without any."""
    monkeypatch.setattr(tw, "launch", Emulator(90))
    real = Kernel.__init__

    def without(barrier):
        def build(self, text):
            real(self, text)
            last = [
                i for i, (_, _, op, _) in enumerate(self.code) if ".".join(op).startswith(barrier)
            ][-1]
            self.code[last] = (None, False, ["mov", "u32"], ["%r0", "0"])

        return build

    for D, barrier in (
        (2048, "bar.sync"),
        (32768, "barrier.cluster.wait"),
        (32768, "barrier.cluster.arrive"),
    ):
        compiled.cache_clear()
        monkeypatch.setattr(Kernel, "__init__", without(barrier))
        with pytest.raises(
            RuntimeError, match=r"without a barrier|may not have begun|deadlock|barrier\.cluster"
        ):
            rmsnorm_cute.forward(torch.ones(2, D), None, torch.ones(D), None, LLAMA)
    compiled.cache_clear()


def test_every_column_is_dealt_out_once():
    for D in (
        1,
        5,
        128,
        129,
        1000,
        1024,
        5120,
        7168,
        8192,
        8200,
        16384,
        16392,
        32768,
        53248,
        65535,
        65536,
    ):
        for width in (8, 4, 1):
            vec = next(v for v in (width, 2, 1) if D % v == 0)
            for backward in (False, True):
                p = rmsnorm_cute.plan(D, 1, vec, backward)
                assert p.cluster <= tw.CLUSTER_LIMIT and p.block <= 512 and p.block % 32 == 0, p
                found = [
                    p.column(rank, thread, k)
                    for k in range(p.chunks)
                    for rank in range(p.cluster)
                    for thread in range(p.threads)
                ]
                assert sorted(c for c in found if c < D) == list(range(0, D, vec)), p
                for k in range(p.chunks):
                    last = p.column(p.cluster - 1, p.threads - 1, k) + vec
                    assert not p.whole(k) or last <= D, p


# ---- compilation and selection


@pytest.mark.parametrize(
    "op, label, clusters",
    [
        ("rmsnorm", "cute forward bf16 weight=bf16 D=4096", False),
        ("rmsnorm", "cute backward bf16 weight=bf16 D=65536", True),
        ("cross_entropy", "cute forward bf16 V=128256", True),
        ("cross_entropy", "cute backward bf16", False),
    ],
)
def test_compiles_without_a_gpu(op, label, clusters):
    specs = gate_compilers.collect([operations()[op]], without=("gluon", "triton"))
    chosen = {f"{op}/{label}": specs[f"{op}/{label}"]}
    results = gate_compilers.compile_all(chosen, gate_compilers.launched(chosen, (90, 100, 120)), 1)
    assert [r.arch for r in results] == [90, 100]
    assert gate_verdict.judge(results, chosen, None, ()) == []
    for r in results:
        assert r.facts.local == 0 and r.facts.load == 128, r
        assert ("cluster" in r.facts.uses) == clusters
        assert 0 < r.facts.registers <= 255


def test_auto_never_chooses_it():
    for op in OPS:
        impl = operations()[op].implementation("cute")
        assert impl.devices == ()
        assert operations()[op].choose("cuda", BF16) != "cute"


def test_refuses_tensors_of_a_cpu():
    reason = r"rmsnorm\[cute\]: the CuTe DSL kernels take CUDA tensors, not cpu"
    with pytest.raises(ImplementationUnavailable, match=reason):
        operations()["rmsnorm"].public(torch.ones(2, 8), torch.ones(8), implementation="cute")


def test_says_why_it_cannot_run(monkeypatch):
    monkeypatch.setattr(platform.torch.cuda, "is_available", lambda: False)
    assert platform.no_cute("cuda") == "no CUDA device"
    monkeypatch.setattr(platform, "no_cuda", lambda capability=0: None)
    for capability, reason in (
        ((9, 0), None),
        ((10, 0), None),
        ((10, 3), None),
        ((12, 0), "needs compute capability 9.0 or 10.x, this device has 12.0"),
        ((8, 9), "needs compute capability 9.0 or 10.x, this device has 8.9"),
    ):
        monkeypatch.setattr(platform.torch.cuda, "get_device_capability", lambda c=capability: c)
        assert platform.no_cute("cuda") == reason
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)
    assert platform.no_cute("cuda") == (
        "the package 'nvidia-cutlass-dsl' is not installed (pip install 'tilewright[cute]')"
    )


def test_the_gate_without_the_compiler(monkeypatch, capsys):
    """Its kernels are skipped, with the reason, unless it is required."""
    cute = gate_compilers.COMPILERS[CuteSpec]
    monkeypatch.setitem(
        gate_compilers.COMPILERS, CuteSpec, dataclasses.replace(cute, missing=lambda: "not here")
    )
    assert compile_gate.main(["--require", "cute"]) == 2
    assert "not here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compile_gate.main(["--require", "nvcc"])
    specs = gate_compilers.collect(operations().values(), without=("cute",))
    assert specs and not any(isinstance(s, CuteSpec) for s in specs.values())


def test_arguments_reach_a_compiled_function(monkeypatch):
    """A launch up to the driver: the arguments are those that the compiled function takes."""
    seen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    real = tw.compiled
    monkeypatch.setattr(
        tw,
        "compiled",
        lambda *key: lambda *given: seen.append(real(*key).generate_execution_args(*given)),
    )
    monkeypatch.setattr(tw, "_compiled", {})
    x, w = torch.ones(3, 1024), torch.ones(1024)
    rmsnorm_cute.forward(x, None, w, None, LLAMA)
    softmax_stats_cute.forward(x, torch.zeros(3, dtype=torch.int64), None, Scaling(), Wanted())
    assert len(seen) == 2


def test_rows_off_16_bytes(emulator):
    """An unaligned view: narrower accesses, as wide as all addresses allow."""
    for dtype, offset in ((F32, 1), (BF16, 4)):
        x, w = (torch.randn(n + offset).to(dtype)[offset:] for n in (3 * 1024, 1024))
        x = x.view(3, 1024)
        y = rmsnorm_cute.forward(x, None, w, None, LLAMA).y
        expected = operations()["rmsnorm"].eager(x.double(), w.double())
        assert contract.error(y, expected)[0] < 4 * torch.finfo(dtype).eps
        vec = next(a.vec for a in emulator.calls[-1][1] if hasattr(a, "vec"))
        assert vec == {F32: 1, BF16: 4}[dtype]


def test_every_kernel_has_a_budget():
    cute = gate_compilers.COMPILERS[CuteSpec]
    if not cute.budget_file().exists():
        pytest.skip(f"no budgets for {cute.budget_file().stem}")
    specs = gate_compilers.collect(operations().values(), without=("gluon", "triton"))
    assert {s.function.__module__ for s in specs.values()} == {
        rmsnorm_cute.__name__,
        softmax_stats_cute.__name__,
    }
    keys = {f"{name} sm_{arch}" for name in specs for arch in cute.archs}
    assert keys == set(json.loads(cute.budget_file().read_text()))
