"""The benchmark itself: statistics, the contract gate before timing, files, comparison,
commands.
"""

import functools
import importlib.util
import json
import math
import pathlib
import re
import time
from types import SimpleNamespace

import pytest
import torch

from bench import overhead
from tilewright.bench import plan, providers, report, run, store, timing, units
from tilewright.bench.__main__ import main
from tilewright.bench.peers import PEERS
from tilewright.bench.timed import RUN
from tilewright.core.registry import Case, Cost, Implementation, Op
from tilewright.ops.norm.rmsnorm import RMSNORM, rmsnorm_eager

ROOF = timing.Roofline(1e10, {"float32": 1e11})
QUICK = run.Settings(rounds=2, sample_seconds=0.0)


COST = Cost(1000, 2000, 3000, 4000)
RAGGED = next(c for c in RMSNORM.cases if c.name == "ragged")


def _case(name="tiny", cost=COST):
    return Case(name, RAGGED.make, lambda itemsize: cost, frozenset({"cpu"}))


def _op(*implementations, cases=None):
    op = Op("rmsnorm", None, rmsnorm_eager, implementations, cases or (_case(),))

    def public(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", implementation="auto"):
        return op.pick(implementation, x)(x, weight, bias, eps, offset, cast)

    op.public = public
    return op


def _fake(name, fn):
    return Implementation(name, lambda: fn, devices=("cpu",))


def wrong(x, *rest):
    return rmsnorm_eager(x, *rest) * 1.02


def raises(x, *rest):
    raise RuntimeError("no such instruction\nand a long dump")


# ---- statistics


def test_quantiles_and_means():
    for samples, q, expected in (
        ([3, 1, 2], 0.5, 2),
        ([1, 2], 0.2, 1.2),
        (range(11), 0.8, 8),
        ([7], 0.8, 7),
    ):
        assert timing.quantile(samples, q) == pytest.approx(expected)
    with pytest.raises(ValueError, match="empty"):
        timing.quantile([], 0.5)
    with pytest.raises(ValueError, match=r"q must be in \[0, 1\], got 1.5"):
        timing.quantile([1], 1.5)
    assert timing.geomean([1, 4]) == pytest.approx(2) and timing.geomean([]) is None
    t = timing.Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (t.p20, t.median, t.p80) == (pytest.approx(1.8), 3, pytest.approx(4.2))
    assert t.samples == (5.0, 1.0, 2.0, 4.0, 3.0)


@pytest.fixture
def pass_time(monkeypatch):
    """A fake clock that only this function advances: a loaded machine changes no test."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_cpu_sample_lasts_as_long_as_asked(pass_time):
    clock = timing.CpuClock(sample_seconds=0.0095)
    calls = clock.prepare(lambda: pass_time(0.001))
    assert calls == 10
    assert clock.sample(lambda: pass_time(0.001), calls) == pytest.approx(0.001)
    assert clock.prepare(lambda: pass_time(1.0)) == 1
    assert clock.prepare(int) == timing.CALLS_AT_MOST  # faster than the timer resolves


class Recorder:
    """A clock that records which task was sampled, and returns times of its own."""

    def __init__(self):
        self.seen = []

    def prepare(self, fn):
        fn()
        return 1

    def sample(self, fn, calls):
        self.seen.append(fn())
        return float(len(self.seen))

    def host_seconds(self, fn):
        return None


def test_rounds_are_interleaved_in_an_order_drawn_anew():
    clock, tasks = Recorder(), {n: (lambda n=n: n) for n in "abcd"}
    timings, errors = timing.interleave(tasks, clock, rounds=6, seed=1)
    order = ["".join(clock.seen[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(r) == list("abcd") for r in order) and len(set(order)) > 1
    assert {len(t.samples) for t in timings.values()} == {6} and not errors
    again = Recorder()
    timing.interleave(tasks, again, rounds=6, seed=1)
    assert again.seen == clock.seen


def test_one_failure_loses_only_itself():
    count = iter(range(100))

    def third_time_unlucky():
        if next(count) == 2:
            raise RuntimeError("out of luck\nmore")

    tasks = {"good": int, "bad": third_time_unlucky}
    timings, errors = timing.interleave(tasks, Recorder(), rounds=4)
    assert errors == {"bad": "RuntimeError: out of luck"}
    assert list(timings) == ["good"] and len(timings["good"].samples) == 4


@pytest.mark.parametrize(
    "rounds, max_seconds, taken",
    [
        (50, 0.0, 3),
        (50, 10.0, 10),
        (50, 5.0, 7),  # twice the time, for seven rounds
        (50, 2.0, 4),
        (2, 0.0, 2),
    ],
)
def test_limits_of_time(rounds, max_seconds, taken, pass_time):
    limits = {"rounds": rounds, "max_seconds": max_seconds}
    timings, _ = timing.interleave({"a": lambda: pass_time(1.0)}, Recorder(), **limits)
    assert len(timings["a"].samples) == taken


def test_no_rounds_is_an_error():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        timing.interleave({"a": int}, Recorder(), rounds=0)


def test_roofline_takes_the_tighter_bound_and_adds_the_passes():
    roof = timing.Roofline(100.0, {"float32": 10.0})
    assert roof.seconds(1000, 10, "float32") == 10.0  # by traffic
    assert roof.seconds(100, 100, "float32") == 10.0  # by arithmetic
    assert roof.seconds(100, 100, "float16") == 1.0  # no peak measured
    assert roof.seconds(0, 0, "float32") is None
    assert list(roof.floors(Cost(1000, 100, 10, 100), "float32").values()) == [10.0, 10.0, 20.0]
    small = {"copy_bytes": 2**16, "matmul": 8, "samples": 2}
    measured = timing.measure_roofline("cpu", [torch.float32], **small)
    assert measured.copy_bytes_per_second > 0 and measured.flops_per_second["float32"] > 0
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        timing.clock("tpu")


def test_a_slow_peak_is_three_samples(monkeypatch):
    """As of bfloat16 products on a processor without instructions for them: 2 s each."""
    now, taken = [0.0], []

    def sample(fn, calls):
        taken.append(calls)
        now[0] += calls
        return 1.0

    kinds = iter([0.1, 4.0])  # seconds of a sample: the copy's, then the product's
    clock = SimpleNamespace(prepare=lambda fn: next(kinds), sample=sample)
    monkeypatch.setattr(timing, "clock", lambda device, seconds: clock)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timing.measure_roofline("cpu", [torch.bfloat16], copy_bytes=2**16, matmul=8)
    assert taken == [0.1] * 12 + [4.0] * 3


# ---- the gate


def _measure(op, only, settings=QUICK, dtype=torch.float32):
    rows = run.measure(op, op.cases[0], "cpu", dtype, ROOF, timing.CpuClock(0.0), settings, only)
    return {r["provider"]: r for r in rows}


def test_a_wrong_answer_is_never_timed():
    op = _op(_fake("wrong", wrong), _fake("right", rmsnorm_eager), _fake("raises", raises))
    rows = _measure(op, ["eager", "wrong", "right", "raises"])
    assert rows["wrong"]["status"] == "failed" and "out 0: error" in rows["wrong"]["reason"]
    assert rows["wrong"]["forward"] is None and rows["wrong"]["forward_backward"] is None
    shown = report.line(rows["wrong"])
    assert re.match(r"\*wrong +FAILED: out 0", shown) and " ms" not in shown
    assert rows["raises"]["status"] == "error"
    assert rows["raises"]["reason"] == "RuntimeError: no such instruction"
    for name, held in (("right", "holds"), ("eager", "definition")):
        assert rows[name]["contract"] == held
        for which in report.PASSES:
            f = rows[name][which]
            assert 0 < f["p20_ms"] <= f["median_ms"] <= f["p80_ms"] and len(f["samples_ms"]) == 2
    f, b = (rows["right"][which] for which in ("forward_backward", "backward"))
    assert f["gb_per_s"] == pytest.approx(3000 / f["median_ms"] * 1e3 / 1e9)
    assert b["gb_per_s"] == pytest.approx(2000 / b["median_ms"] * 1e3 / 1e9)
    assert f["tflop_per_s"] == pytest.approx(7000 / f["median_ms"] * 1e3 / 1e12)
    assert f["large_roofline_percent"] == pytest.approx(100 * 3000 / 1e10 / (f["median_ms"] / 1e3))
    theirs, ours = (rows[name]["forward"]["median_ms"] for name in ("eager", "right"))
    assert rows["right"]["speedup"]["eager"]["forward"] == pytest.approx(theirs / ours)


def test_one_case_says_its_first_numbers_as_soon_as_they_hold():
    """Before any round, and never a number that does not hold."""
    said = []
    op = _op(_fake("wrong", wrong), _fake("right", rmsnorm_eager))

    class Clock(timing.CpuClock):
        def prepare(self, fn):
            said.append("rounds begin")
            return super().prepare(fn)

    only = ["eager", "wrong", "right"]
    run.measure(op, op.cases[0], "cpu", torch.float32, ROOF, Clock(0.0), QUICK, only, said.append)
    before = said[: said.index("rounds begin")]
    assert re.match(r"\w+ \w+ float32: computes the truth in float64, then checks ", before[0])
    assert all(name in before[0] for name in only)
    assert sorted(line.split(":")[0].strip() for line in before[1:]) == ["eager", "right"]
    assert all(re.search(r"pass takes [\d.e-]+ ms, .*, about \d+ s left", s) for s in before[1:])


def test_a_backward_is_timed_without_its_forward(pass_time):
    calls = []

    def step(name, seconds):
        calls.append(name)
        pass_time(seconds)

    task = timing.After(lambda: step("before", 7.0), lambda: step("timed", 0.5))
    clock = timing.CpuClock(2.0)
    assert clock.prepare(task) == 4 and clock.sample(task, 4) == 0.5
    assert calls == ["before", "timed"] * (len(calls) // 2)


def test_slack_is_for_baselines_only_and_is_shown():
    slightly = lambda x, *rest: rmsnorm_eager(x, *rest) * (1 + 1e-6)  # noqa: E731
    op = _op(_fake("mine", slightly), _fake("torch", slightly))
    only = ["eager", "mine", "torch"]
    assert [r["status"] for r in _measure(op, only).values()] == ["ok", "failed", "failed"]
    rows = _measure(op, only, run.Settings(rounds=1, sample_seconds=0.0, baseline_slack=100.0))
    assert rows["mine"]["status"] == "failed" and rows["mine"]["forward"] is None
    assert rows["torch"]["status"] == "ok" and report.beyond(rows["torch"])
    assert "beyond the contract" in report.line(rows["torch"])


@pytest.mark.parametrize("off, timed", [(1e-6, True), (1e-4, False)])
def test_compiled_code_that_sums_in_another_order_is_timed_and_marked(off, timed, monkeypatch):
    """In float32; what computes another thing has no time, and no implementation of ours."""

    def slightly(x, *rest):
        return rmsnorm_eager(x, *rest) * (1 + off)

    op = _op(_fake("mine", slightly))
    as_compiled = lambda op: lambda **kw: op.public(**kw, implementation="mine")  # noqa: E731
    monkeypatch.setattr(providers, "compiled", as_compiled)
    monkeypatch.setattr(units.store, "documents", lambda out: {"roofline": {"roofline": {}}})
    monkeypatch.setattr(units.timing, "Roofline", lambda **roof: ROOF)
    only = ["eager", "mine", "compile"]
    single, half = (
        units.time_unit(op, op.cases[0], "cpu", dtype, QUICK, None, only)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert single.options["settings"]["baseline_slack"] > 1
    assert half.options["settings"]["baseline_slack"] == 1
    rows = {r["provider"]: r for r in single.make()["rows"]}
    found = rows["compile"]
    assert found["contract"].startswith("out 0: error") and rows["mine"]["status"] == "failed"
    assert (found["forward"] is not None) == report.beyond(found) == timed


def test_the_forward_records_no_graph_and_the_backward_accumulates_no_gradients():
    grads = []

    def call(x):
        grads.append((torch.is_grad_enabled(), x.requires_grad, x.grad is None))
        return 2 * x

    x = torch.ones(3, requires_grad=True)
    made = run.passes(providers.Provider("p", call), {"x": x})
    for _ in range(2):
        made["forward_backward"]()
    assert grads[1:] == [(True, True, True)] * 2 and x.grad is None
    made["forward"]()
    assert grads[-1] == (False, False, True)
    assert list(run.passes(providers.Provider("p", call), {"x": torch.ones(3)})) == ["forward"]


# ---- files


def test_metadata_say_what_was_measured_with():
    meta = run.metadata("cpu", QUICK, ["run"])
    assert meta["versions"]["torch"] == torch.__version__ and meta["settings"]["seed"] == run.SEED
    assert meta["argv"] == ["run"] and meta["threads"] == torch.get_num_threads()


def test_run_holds_baselines_to_the_contract_unless_asked():
    args = plan.parser(RUN).parse_args(["--op", "rmsnorm", "--rounds", "2"])
    assert args.stage == ["roofline", "time"] and args.op == ["rmsnorm"] and args.rounds == 2
    assert args.baseline_slack == 1 and args.dtype == ["bfloat16", "float32"]
    assert args.minutes == 1440 and args.sample_ms == 8


def test_units_are_one_line_each_and_the_last_of_a_name_counts(tmp_path):
    documents = {"time/b": {"rows": [1.5, "x"]}, "time/a": {"rows": []}, "roofline": {"r": 1e-30}}
    for name, document in documents.items():
        store.append(tmp_path / store.FILE, name, document)
    documents["time/a"] = {"rows": ["newer"]}
    store.append(tmp_path / store.FILE, "time/a", documents["time/a"])
    assert store.documents(tmp_path) == documents
    store.write(tmp_path, documents | {store.SUMMARY: {"complete": True}})
    lines = [json.loads(line) for line in (tmp_path / store.FILE).read_text().splitlines()]
    assert [line["unit"] for line in lines] == ["suite", "roofline", "time/a", "time/b"]
    found = {name: document for name, _, document in store.read(tmp_path)}
    assert found == {**documents, "suite": {"complete": True}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.append(tmp_path / store.FILE, "time/c", {"rows": [float("nan")]})
    assert "time/c" not in store.documents(tmp_path)


def test_a_row_is_a_line(tmp_path):
    path = tmp_path / "a.json"
    document = {"meta": {"b": [1, 2]}, "rows": [{"x": 1}, {"x": [2, 3]}], "l": {"m": [{"k": 1}]}}
    store.write_json(path, document)
    assert json.loads(path.read_text()) == document
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert lines[1:5] == ['"meta": {"b": [1, 2]},', '"rows": [', '{"x": 1},', '{"x": [2, 3]}']
    assert '{"k": 1}' in lines


def test_the_old_file_stays_if_writing_fails(tmp_path):
    path = tmp_path / "results.json"
    store.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        store.write_json(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda rows: rows[0].pop("status"), r"row 0 has no \['status'\]"),
        (lambda rows: rows[0].update(status="fine"), "row 0: status must be one of"),
        (lambda rows: rows[1].update(status="failed"), "row 1 has a time although"),
    ],
)
def test_schema_errors_name_the_fault(spoil, message):
    rows = _timed()[1]
    report.check(rows)
    spoil(rows)
    with pytest.raises(ValueError, match=message):
        report.check(rows)


# ---- two runs


def _row(op, case, provider, ms, *, spread=0.01, auto=False):
    r = report.row(op, case, "float32", provider, auto=auto)
    if ms is None:
        r.update(status="failed", reason="it broke")
        return r
    for which in report.PASSES:
        samples = [ms / 1e3 * (1 + spread * k) for k in (-1, 0, 1)]
        r[which] = report.figures(timing.Timing.of(samples), 0, 0, None)
    return {**r, "contract": "holds"}


def _timed(ours=1.0, spread=0.01, baseline=2.0):
    mine = _row("a", "1", "cpp", ours, spread=spread, auto=True)
    meta = {"device": "d", "commit": None, "dirty": None, "date": "2026-01-01T00:00:00+00:00"}
    return meta, [_row("a", "1", "eager", baseline), mine]


def _write(folder, run):
    meta, rows = run
    store.write(folder, {store.SUMMARY: {"meta": meta}, "time/a.1.float32": {"rows": rows}})
    return folder


@pytest.mark.parametrize(
    "after, code, text",
    [
        (_timed(), 0, "not significant"),
        (_timed(ours=1.2), 1, "REGRESSION"),
        (_timed(ours=1.2, spread=0.5), 0, "not significant"),
        (_timed(ours=1.04), 0, "ratio 1.040"),
        (_timed(ours=0.5), 0, "faster"),
        (_timed(baseline=4.0), 0, "baseline slower"),
        (_timed(ours=None), 1, "ok before, failed after: it broke"),
    ],
)
def test_compare_exits_with_1_on_a_regression_only(after, code, text, tmp_path, capsys):
    a, b = _write(tmp_path / "a", _timed()), _write(tmp_path / "b", after)
    assert main(["compare", str(a), str(b / store.FILE)]) == code
    assert text in capsys.readouterr().out


def test_compare_takes_the_threshold_and_refuses_what_is_no_result(tmp_path, capsys):
    a = _write(tmp_path / "a", _timed())
    b = _write(tmp_path / "b", _timed(ours=1.2))
    assert main(["compare", str(a), str(b), "--threshold", "0.5"]) == 0
    assert main(["compare", str(a), str(tmp_path / "c")]) == 2
    assert "c: holds no finished suite" in capsys.readouterr().err
    (b / store.FILE).write_text("{")
    assert main(["compare", str(a), str(b)]) == 2
    assert str(b / store.FILE) in capsys.readouterr().err
    meta, rows = _timed()
    text, regressions = report.compare((meta, rows), (meta, rows[:1]))
    assert "a 1 float32 cpp: only before" in text and not regressions


# ---- commands


def test_list_shows_the_registry_and_its_reasons(capsys):
    assert main(["list", "--device", "cpu", "--dtype", "float32,float16", "--op", "rmsnorm"]) == 0
    out = capsys.readouterr().out
    assert "rmsnorm: cases timed on cpu: qwen3-8b" in out
    for name in ("eager", "compile", *PEERS, *RMSNORM.names()):
        assert f"\n  {name:<8} " in out
    assert PEERS["liger"].why_not("rmsnorm", "cpu") in out
    if RMSNORM.implementation("cpp").why_not("cpu") is None:
        assert "float32: usable; float16: takes float32, bfloat16, not float16" in out


@pytest.mark.parametrize(
    "argv, message",
    [
        ("run --op rmsnrm", "--op: unknown 'rmsnrm'; did you mean 'rmsnorm'? have ['rmsnorm'"),
        ("run --provider tensorrt", "argument --provider: unknown 'tensorrt'; "),
        ("run --case palm", "argument --case: unknown 'palm'; have ["),
        ("run --dtype float8", "--dtype: unknown 'float8'; did you mean 'float32'? have ["),
        ("run --rounds 0", "must be an integer of at least 1, got '0'"),
        ("run --op rope --case ragged --device cpu", "nothing to do: no op of"),
        ("tune --device cpu --only rope.nothing.float32", "--only: unknown 'rope.nothing.float32'"),
        ("tune --device cpu --op rmsnorm", "no op of --op has a launch to search on cpu"),
        ("compare a b --threshold -1", "must be a number of at least 0, got '-1'"),
    ],
)
def test_bad_arguments_are_named_with_what_is_accepted(argv, message, capsys):
    minutes = ["--minutes", "1"] if argv.startswith("tune") else []
    with pytest.raises(SystemExit) as caught:
        main([*argv.split(), *minutes])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_overhead_counts_down_the_layers_of_calls_with_and_without_a_graph(monkeypatch):
    levels, given = overhead.levels, []

    def watched(op, name, kwargs):
        given.append(kwargs["x"].requires_grad)
        return levels(op, name, kwargs)

    monkeypatch.setattr(overhead, "levels", watched)
    rows = overhead.overhead([RMSNORM], "cpu", torch.float32, rounds=2, sample_seconds=0.0)
    assert [r["grad"] for r in rows] == given == [False, True]
    for r in rows:
        assert not r["errors"]
        fused = r["implementation"] == "cpp"
        timed = {k for k, v in r["us"].items() if v}
        assert timed == {"public", "resolved", "pick", *(["operator"] if fused else [])}
        assert (r["overhead_us"] is not None) == fused
    assert "public - operator" in overhead.table(rows)


def test_overhead_repeats_the_first_launch_of_a_triton_kernel(monkeypatch):
    if reason := RMSNORM.implementation("triton").why_not("cpu"):
        pytest.skip(reason)
    from tilewright.kernels.norm import rmsnorm_triton

    made = RMSNORM.cases[0].make("cpu", torch.float32, 0).items()
    kwargs = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in made}
    levels = overhead.levels(RMSNORM, "triton", kwargs)
    assert set(levels) == set(overhead.LEVELS)
    assert "launch" not in overhead.levels(RMSNORM, "cpp", kwargs)
    seen, kernels = [], type(rmsnorm_triton._forward)
    monkeypatch.setattr(kernels, "run", lambda kernel, *a, **k: seen.append(kernel.fn.__name__))
    levels["launch"]()
    assert not seen, "the launch itself, and not what is looked up now"
    levels["operator"]()
    assert seen == ["_forward"]


def test_overhead_calls_the_operator_with_what_the_op_passes():
    if reason := RMSNORM.implementation("cpp").why_not("cpu"):
        pytest.skip(reason)
    kwargs = RMSNORM.cases[0].make("cpu", torch.float32, 0)
    made = overhead.levels(RMSNORM, "cpp", kwargs)
    expected = RMSNORM.public(**kwargs, implementation="cpp")
    assert torch.equal(made["public"](), expected) and torch.equal(made["resolved"](), expected)
    assert torch.equal(made["operator"]()[0], expected) and made["operator"]()[0].requires_grad
    assert made["pick"]() is RMSNORM.pick("cpp", kwargs["x"])


def test_the_roof_is_a_copy_of_as_many_bytes(monkeypatch):
    """Beside the large copy: a short copy includes its start and end, as do the calls compared with
    it.
    """
    roof = timing.Roofline(1e9, {"float32": 1e12})
    cost = Cost(1000, 3000, 0, 0)
    assert roof.floors(cost, "float32")["forward_backward"] == pytest.approx(4e-6)
    found = roof.floors(cost, "float32", {1000: 5e-6})
    assert found == {"forward": 5e-6, "backward": 3e-6, "forward_backward": pytest.approx(8e-6)}
    assert timing.copy_of(0, "cpu") is None
    assert timing.copy_of(timing.LARGEST_COPY + 1, "cpu") is None
    copied = timing.copy_of(999, "cpu")()
    assert copied.nbytes == 500 and bool((copied == 1).all())
    seen = []

    def interleave(tasks, clock, **kw):
        seen.extend(tasks)
        times = {(n, w): 4e-6 if n != run.COPY else w * 1e-9 / 2 for n, w in tasks}
        return {k: timing.Timing.of([t]) for k, t in times.items()}, {}

    monkeypatch.setattr(timing, "interleave", interleave)
    op = _op(_fake("right", rmsnorm_eager), cases=(_case("one", Cost(4000, 8000)),))
    row = _measure(op, ["right"])["right"]
    assert {w for n, w in seen if n == run.COPY} == {4000, 8000}
    assert row["forward"]["roofline_percent"] == pytest.approx(50)
    large = 100 * 4000 / ROOF.copy_bytes_per_second / 4e-6
    assert row["forward"]["large_roofline_percent"] == pytest.approx(large)


def test_the_flush_leaves_no_dirty_lines():
    """All of it is read, and none written."""
    clock = object.__new__(timing.CudaClock)
    clock._buffer, clock._sum = torch.ones(64), torch.empty(())
    before = clock._buffer._version
    clock.flush()
    assert clock._buffer._version == before and float(clock._sum) == 64


@pytest.mark.parametrize("seconds, calls, made", [(0.0, timing.CUDA_CALLS, 6), (0.15, 1, 3)])
def test_a_slow_call_on_a_gpu_is_sampled_once_and_prepared_in_few(
    monkeypatch, pass_time, seconds, calls, made
):
    """Calls of a second would take minutes of the device at thirty repetitions each."""
    clock = object.__new__(timing.CudaClock)
    clock._flushes, clock._host, clock._flush_seconds = {}, {}, 1e-3
    queued, count = [], []

    def synchronize():
        pass_time(seconds if queued else 0.0)
        queued.clear()

    def call():
        queued.append(1)
        count.append(1)
        pass_time(0.0004)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert clock.prepare(call) == calls
    assert len(count) == made
    assert clock.host_seconds(call) == pytest.approx(0.0004), "without the wait for the device"
    assert clock._flushes[id(call)] == 2


# ---- under pytest-benchmark


def test_a_baseline_beyond_the_contract_is_skipped_and_an_implementation_fails(monkeypatch):
    pytest.importorskip("pytest_benchmark")
    path = pathlib.Path(__file__).parents[1] / "benchmark" / "test_speed.py"
    spec = importlib.util.spec_from_file_location("test_speed", path)
    speed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speed)
    op = _op(_fake("wrong", wrong))
    call = functools.partial(op.public, implementation="wrong")
    found = [providers.Provider(name, call) for name in ("compile", "wrong")]
    monkeypatch.setattr(speed, "providers", lambda op, device, dtype: found)
    with pytest.raises(pytest.skip.Exception, match="breaks the contract: out 0: error"):
        speed.test_speed(op, op.cases[0], torch.float32, "compile", None)
    with pytest.raises(AssertionError, match="out 0: error"):
        speed.test_speed(op, op.cases[0], torch.float32, "wrong", None)
