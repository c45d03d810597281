"""The generated page of results: which rows are shown, the reasons where `auto` is slower, and that
the page is up to date.
"""

import functools
import json
import pathlib
import re
import sys
from dataclasses import replace

import pytest

from bench.page import build as page_of
from bench.page.reasons import NO_REASON
from bench.page.text import COMMAND, number
from tilewright import selection
from tilewright.bench import report, sources, store
from tilewright.core.registry import Goal
from tilewright.ops import OPS
from tilewright.ops.norm.rmsnorm import RMSNORM

pytestmark = pytest.mark.packages

ROOT = pathlib.Path(__file__).parents[2]
NO_GPU = "No number here was measured on a GPU"
ROOF = {"copy_bytes_per_second": 4e12, "flops_per_second": {"bfloat16": 8e14, "float32": 5e13}}


# ---- small raw results


def meta(device="cuda", date="2026-11-20", commit="a", **more):
    name = {"cuda": "NVIDIA H200", "cpu": "Some CPU"}[device]
    return {
        "device_type": device,
        "device": name,
        "versions": {"torch": "2.13.0"},
        "commit": commit and commit * 40,
        "dirty": False,
        "date": f"{date}T10:00:00+00:00",
        "threads": 2,
        "settings": {},
        "argv": ["run", "--until", "17.5", "--out", "/root/x/there"],
        **more,
    }


def figures(ms, spread=0.01, **more):
    return {
        "median_ms": ms,
        "p20_ms": ms * (1 - spread),
        "p80_ms": ms * (1 + spread),
        "samples_ms": [ms],
        "calls_per_sample": 1,
        "host_us": None,
        "gb_per_s": 3000.0,
        "tflop_per_s": 2.0,
        "roofline_percent": 75.0,
        **more,
    }


def row(
    provider,
    ms=None,
    case="qwen3-8b",
    dtype="bfloat16",
    op="rmsnorm",
    spread=0.01,
    peak=None,
    **more,
):
    made = report.row(op, case, dtype, provider, auto=provider == "triton")
    if ms is not None:
        made.update(
            contract="definition" if provider == "eager" else "holds",
            peak_mib=peak,
            forward=figures(ms / 3, spread),
            backward=None,
            forward_backward=figures(ms, spread),
        )
    return {**made, **more}


def write(path, document):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, **document}))
    return path


def put(folder, name, document):
    store.append(folder / store.FILE, name, {"schema": 1, **document})


def jsonl(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"schema": 1, **d}) + "\n" for d in documents))
    return path


def digest(op, device):
    """The digest of today's sources."""
    return sources.digest(OPS[op], device) if op in OPS else "unknown"


def results(root, rows, folder="run", about=None, roof=ROOF):
    about = {"source": None, **(about or meta())}
    groups = {}
    for r in rows:
        groups.setdefault(f"time/{r['op']}.{r['case']}.{r['dtype']}", []).append(r)
    units = []
    for name, group in groups.items():
        source = about["source"] or digest(group[0]["op"], about["device_type"])
        made = {"unit": name, "meta": {**about, "source": source}, "roofline": roof, "rows": group}
        units.append(made)
    whole = {"unit": "suite", "meta": about, "complete": True, "units": {}}
    return jsonl(root / folder / "suite.jsonl", [*units, whole])


def test_optimizer_steps_stand_beside_transformers_by_dtype(tmp_path):
    def step(provider, dtype, ms, **more):
        times = dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), ms)
        given = {"case": "llama", "dtype": dtype, "provider": provider, "mfu": None}
        found = {"status": "ok", "reason": None, "tokens_per_second": 1e6 / ms, "peak_mib": 1000.0}
        return {**given, **found, **times, **more}

    failed = {"provider": "liger", "status": "error", "reason": "exit code 1"}
    rows = [
        step("trainer", "bfloat16", 100.0, mfu=0.5),
        step("transformers", "bfloat16", 250.0, peak_mib=4000.0, loss_difference=2e-3),
        {"case": "llama", "dtype": "bfloat16", **failed},
        step("trainer", "float32", 300.0),
    ]
    write(tmp_path / "a" / "end_to_end.json", {"meta": meta(), "rows": rows})
    page = page_of.build(tmp_path, tmp_path / "page.md").text
    lines = [line for line in page.splitlines() if line.startswith("| llama |")]
    assert len(lines) == 4 and "exit code 1" in lines[2]
    assert "| trainer | 100 [100, 100] | 10000 | 50.0% | 1000 | 2.50 | 0.250 |  |" in lines[0]
    assert "| 2.0e-03 |" in lines[1] and "| float32 | trainer | 300 [300, 300] |" in lines[3]


AHEAD = [row("eager", 9.0), row("compile", 4.0), row("triton", 2.0)]
BEHIND = [row("eager", 9.0), row("compile", 1.0), row("triton", 2.0)]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def build(root):
    return page_of.build(root, root.parent / "docs" / "performance.md", root.parent / "tuned")


def section(text, title):
    """The lines below a heading, up to the next one."""
    return text.split(f"{title}\n", 1)[1].split("\n#", 1)[0]


def line(text, *words):
    """The only line that contains all these words."""
    [found] = [each for each in text.splitlines() if all(w in each for w in words)]
    return found


def run(root, *more):
    given = {"results": root, "out": root.parent / "docs/performance.md"}
    given["tuned"] = root.parent / "tuned"
    return page_of.main([*(f"--{name}={path}" for name, path in given.items()), *more])


# ---- contents


def test_numbers_have_three_digits():
    numbers = 1234.5, 99.96, 1, 0.08761, 0.00012345, 1.5e-9, 0, None, float("inf")
    shown = ["1230", "100", "1.00", "0.0876", "0.000123", "1.5e-09", "0", "", "infinite"]
    assert list(map(number, numbers)) == shown


def test_without_a_gpu_result_it_says_so_and_devices_stand_with_the_newest_first(root):
    page = build(root).text
    assert NO_GPU in page and "There is no result yet." in page
    results(root, AHEAD, about=meta("cpu", "2026-11-21"))
    page = build(root).text
    assert NO_GPU in page and "nothing here is estimated" in page and "bench suite" in page
    results(root, AHEAD, "gpu")
    page = build(root).text
    assert NO_GPU not in page
    assert page.index("## Some CPU (cpu)") < page.index("## NVIDIA H200 (cuda)")


def test_a_gpu_without_a_time_is_not_called_measured(root):
    results(root, [row("eager"), row("triton", status="failed", reason="grad weight: error 1")])
    page = build(root).text
    assert "No time here was measured on a GPU" in page
    assert "grad weight: error 1" in line(page, "`rmsnorm` triton (`auto`), failed")


def test_the_headline_is_a_mean_over_cases_and_then_over_ops(root):
    # rmsnorm: sqrt(4 * 9) = 6; rope: 6
    of_cases = [row("eager", 8, "a"), row("triton", 2, "a")]
    of_cases += [row("eager", 18, "b"), row("triton", 2, "b")]
    times = {"eager": 6, "triton": 1, "liger": 3}
    results(root, [*of_cases, *(row(p, ms, op="rope") for p, ms in times.items())])
    page = build(root)
    main, of_device, *_ = page.texts
    assert of_device.name == "performance_nvidia-h200.md" and of_device.parent == main.parent
    said = line(page.texts[main], "[NVIDIA H200](performance_nvidia-h200.md)")
    assert "| cuda | 3 | 2 | 6.00 |" in said
    headline = section(page.texts[of_device], "## Headline")
    assert "| 6.00 | 6.00 | 6.00 to 6.00 | 2 | 3 | 3 | 0 | 0 |" in line(headline, "| eager |")
    assert "| 3.00 | 3.00 | 3.00 to 3.00 | 1 | 1 |" in line(headline, "| liger |")


def test_old_and_changed_code_is_marked_and_in_no_headline(root):
    results(root, AHEAD, "old", meta(source="0123"))
    changed = [row("eager", 6, op="rope"), row("triton", 1, op="rope")]
    results(root, changed, "dirty", meta(dirty=True))
    results(root, [row("eager", 8, op="silu_mul"), row("triton", 1, op="silu_mul")], "new")
    page = build(root).text
    assert "| 8.00 | 3 |" in line(page, "[NVIDIA H200](")  # of 4 comparisons 3 are left out
    headline = section(page, "## Headline")
    assert "| 8.00 | 8.00 | 8.00 to 8.00 | 1 | 1 | 1 | 0 | 0 |" in line(headline, "| eager |")
    assert line(headline, "| eager |").endswith("| 2 |")  # left out
    assert "| torch.compile |" not in headline
    assert "code changed since" in line(headline, "| `rmsnorm` |", "4.50")
    assert "local changes" in line(headline, "| `rope` |", "6.00")
    assert "changed since" in section(page, "#### `rmsnorm`")


def test_what_nobody_runs_is_in_no_headline_and_says_why(root):
    times = {"compile": 9, "torch-randn": 2, "triton": 1}
    results(root, [row(p, ms, op="aqn_noise") for p, ms in times.items()])
    headline = section(build(root).text, "## Headline")
    assert "| torch.compile |" not in headline
    assert "`aqn_noise` over torch.compile; who needs noise" in headline
    assert "| 2.00 | 2.00 |" in line(headline, "torch-randn", "fused op")


def test_the_fastest_of_a_peers_ways_counts_and_is_named(root):
    ways = [row("transformers", 30), row("transformers-grouped", 3), row("triton", 2)]
    results(root, ways)
    said = line(section(build(root).text, "## Headline"), "| transformers |")
    assert "| 1.50 | 1.50 |" in said and "transformers-grouped" in said


def rounds(provider, times):
    samples = {"forward_backward": {**figures(sorted(times)[len(times) // 2]), "samples_ms": times}}
    return row(provider, 1.0, **samples)


def test_a_ratio_whose_interval_holds_one_is_equal(root):
    ours, theirs = [2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 1.0, 2.0, 3.0, 2.0, 3.0]
    results(root, [rounds("compile", theirs), rounds("triton", ours)])
    headline = section(build(root).text, "## Headline")
    # The rounds' ratios: 0.5, 2, 0.5, 2, 1.5, 2, 1.5.
    assert "| equal, 1.00 [0.700, 2.00] |" in line(headline, "| `rmsnorm` |")
    assert "| 1 | 1 | 0 | 1 | 0 |" in line(headline, "| torch.compile |")
    assert "| 7 |" in line(headline, "| `rmsnorm` |")


def test_a_row_has_times_rate_roof_and_ratios(root):
    # Not a peer: another implementation of this library. A peer: any unknown provider.
    results(root, [*AHEAD, row("liger", 3.5), row("cpp", 2.5), row("newcomer", 3.0)])
    said = section(build(root).text, "#### `rmsnorm`")
    times = "0.667 [0.660, 0.673]", "2.00 [1.98, 2.02]", "3000 GB/s", "75.0"
    ratios = "4.50", "| 2.00 [2.00, 2.00] |", "1.50 [1.50, 1.50] (newcomer)"
    for text in (*times, *ratios, "Measured at aaaaaaaaaa, 2026-11-20."):
        assert text in said
    assert "backward |" in said and "| backward |" not in said  # entirely empty columns are omitted


# ---- choice of the row


def test_the_newest_wins_and_the_older_is_listed(root):
    results(root, AHEAD, "z-older", meta(date="2026-11-19", commit="b"))
    results(root, [*AHEAD[:2], row("triton", 3.0)], "a-newer")
    page = build(root).text
    assert "3.00 [2.97, 3.03]" in page and "2.00 [1.98, 2.02]" not in page
    raw = section(page, "## Raw files")
    assert "bbbbbbbbbb" in line(raw, "z-older") and "aaaaaaaaaa" in line(raw, "a-newer")
    assert "`python -m tilewright.bench run --out .../there`" in raw and "/root" not in page


def test_a_newest_row_that_failed_hides_the_older_time(root):
    results(root, AHEAD, "older", meta(date="2026-11-19"))
    failed = row("triton", status="failed", reason="out 0: error 1")
    results(root, [row("eager", 9.0), failed], "newer")
    page = build(root).text
    assert "#### `rmsnorm`" not in page and "## Headline" not in page and "out 0: error 1" in page


def test_a_ratio_is_never_of_two_runs(root):
    """The newest run has no peer: the ratio is the older run's own, not the newest time against the
    older one.
    """
    older = meta(date="2026-11-19", commit="b")
    results(root, [row("triton", 2.0), row("liger", 6.0)], "older", older)
    results(root, [row("triton", 1.0), row("eager", 5.0)], "newer")
    page = build(root).text
    said = line(section(page, "#### `rmsnorm`"), "qwen3-8b")
    assert "3.00 [3.00, 3.00] (liger)" in said and "5.00" in said
    assert "bbbbbbbbbb, 2026-11-19" in line(section(page, "## Headline"), "| liger |")


def test_an_older_ratio_of_another_implementation_is_not_of_auto(root):
    older = [row("triton", 2.0), row("cute", 1.0), row("liger", 1.5)]
    results(root, older, "older", meta(date="2026-11-19"))
    results(root, [row("triton", 2.0, auto=False), row("cute", 1.0, auto=True)], "newer")
    page = build(root).text
    assert "In none of the 1 comparisons" in page and "liger" not in section(page, "## Headline")


def test_an_older_result_that_says_otherwise_is_shown(root):
    results(root, BEHIND, "older", meta(date="2026-11-19"))
    results(root, AHEAD, "newer")
    page = build(root).text
    said = line(section(page, "### Older results in which `auto` was slower"), "compile")
    assert "0.500" in said and "2.00" in said
    assert "In 1 comparison `auto` was slower in an older result" in page


# ---- where it is slower

REASON = '[[reason]]\nop = "rms*"\nagainst = "compile"\nreason = "The registers spill."\n'


def test_a_slower_case_is_listed_with_its_reason_or_without(root):
    results(root, BEHIND)
    page = build(root)
    said = line(section(page.text, "## Where `auto` is slower"), "`rmsnorm`")
    assert "| compile | 0.500 [0.500, 0.500] |" in said and NO_REASON in said
    [case] = page.unexplained
    assert "rmsnorm qwen3-8b bfloat16 compile" in case
    (root / "reasons.toml").write_text(REASON)
    page = build(root)
    assert "The registers spill." in line(page.text, "| compile | 0.500 [") and not page.unexplained


def test_a_reason_holds_only_for_what_its_patterns_fit(root):
    results(root, BEHIND)
    others = {"op": "rope", "case": "llama*", "dtype": "float32", "against": "liger"}
    for field, value in (others | {"device": "*EPYC*"}).items():
        text = f'[[reason]]\n{field} = "{value}"\nreason = "Because."\n'
        (root / "reasons.toml").write_text(text)
        assert build(root).unexplained, field


def test_a_slower_case_that_is_equal_needs_no_reason_and_one_that_overlaps_does(root):
    """The rounds decide: ranges of two rows overlap wherever the machine's speed changes."""
    ours = [2.0, 4.0, 2.0, 4.0, 2.0, 4.0, 2.0]
    near, faster = [1.9, 4.4, 1.9, 4.4, 1.9, 3.6, 1.9], [x * 0.9 for x in ours]
    for theirs, equal in ((near, True), (faster, False)):
        results(root, [rounds("compile", theirs), rounds("triton", ours)])
        page = build(root)
        said = line(section(page.text, "## Where `auto` is slower"), "| compile |")
        assert ("Within spread: p20 to p80 are " in said) == equal
        assert ("no reason known yet" in said) != equal and bool(page.unexplained) != equal


def test_without_a_backward_forward_is_compared(root):
    only = [row("compile", 1.0, forward_backward=None), row("triton", 2.0, forward_backward=None)]
    results(root, only)
    slower = section(build(root).text, "## Where `auto` is slower")
    assert "| 0.500 [0.500, 0.500] | forward |" in slower


def test_a_baseline_beyond_the_contract_is_marked(root):
    results(root, [row("compile", 1.0, contract="grad weight: error 3"), row("triton", 2.0)])
    page = build(root)
    said = line(page.text, "| compile | 0.500 [")
    assert "breaks the numerics contract" in said and page.unexplained
    assert "0 of 1" in line(section(page.text, "### Numerics of the timed inputs"), "| compile |")


def test_broken_reasons_name_the_file(root):
    for text in (
        "[[reason]]\nop = 3\nreason = 'x'",
        "[[reason]]\nops = 'x'\nreason = 'x'",
        "[[reason]]\nop = 'x'",
        "reason = ",
        "[[reasons]]\nreason = 'x'",
    ):
        (root / "reasons.toml").write_text(text)
        with pytest.raises(ValueError, match=r"reasons\.toml: "):
            build(root)


# ---- goals, what is missing, tuned constants


def with_goal(monkeypatch, goal):
    """Gives a goal to rmsnorm, and none to any other op."""
    for op in OPS.values():
        monkeypatch.setattr(op, "goals", (goal,) if op is RMSNORM else ())


H200 = functools.partial(Goal, "H200")


@pytest.mark.parametrize(
    "goal, words",
    [
        (
            H200("forward_backward", "roofline_percent", at_least=70),
            ["75.0 (qwen3-8b bfloat16)", "| met |"],
        ),
        (
            H200("forward_backward", "roofline_percent", at_least=80),
            ["at least 80.0 % of roof", "not met in 1"],
        ),
        (H200("forward", "median_ms", at_most=0.7), ["0.667", "| met |"]),
        (H200("forward", "median_ms", at_most=0.6), ["at most 0.600 ms", "not met in 1 of 1"]),
        (H200("forward", "peak_mib", at_most=100), ["64.0", "| met |"]),
        (Goal("B200", "forward", "median_ms", at_most=0.6), ["| B200 |", "not measured"]),
        (H200("backward", "median_ms", at_most=0.6), ["not measured"]),
        (H200("forward", "median_ms", at_most=1, dtypes=("float32",)), ["not measured"]),
        (
            H200("forward", "median_ms", at_most=1, cases=("qwen3-8b", "b")),
            ["| met; not measured: b bfloat16 |"],
        ),
    ],
)
def test_goals(root, monkeypatch, goal, words):
    case = next(c for c in RMSNORM.cases if c.name == "qwen3-8b")
    monkeypatch.setattr(RMSNORM, "cases", (case,))
    with_goal(monkeypatch, goal)
    results(root, [row("triton", 2.0, peak=64.0)])
    goals = section(build(root).text, "## Goals")
    said = line(goals, "`rmsnorm`")
    assert all(w in said for w in words), said
    assert ("Measured at" in goals) == ("| not measured |" not in said)


CLASS = ("sm_90", "sm_100")


@pytest.mark.parametrize(
    "name, capability, share, said",
    [
        ("NVIDIA H100", "9.0", 4.0, "met"),
        ("NVIDIA B200", "10.0", 4.0, "met"),
        ("NVIDIA B200", "10.0", 5.0, "not met in 1"),
        ("NVIDIA RTX", "12.0", 4.0, "not measured"),
        ("Some CPU", None, 4.0, "not measured"),
    ],
)
def test_a_goal_of_a_class_is_judged_by_what_its_device_has_measured(
    root, monkeypatch, name, capability, share, said
):
    of_all = Goal(CLASS, "forward", "matmul_percent", at_least=share, cases=("qwen3-8b",))
    with_goal(monkeypatch, replace(of_all, dtypes=("bfloat16",)))
    about = {**meta("cuda" if capability else "cpu"), "device": name, "capability": capability}
    roof = {**ROOF, "flops_per_second": {"bfloat16": 50e12}}  # and the rows say 2 TFLOP/s: 4 %
    results(root, [row("triton", 2.0)], about=about, roof=roof)
    found = line(section(build(root).text, "## Goals"), "`rmsnorm`")
    of = "sm_90 or sm_100" if said == "not measured" else name
    assert f"| {said}" in found and of in found, found
    assert "% of the measured matrix product" in found


def test_a_class_of_devices_has_no_absolute_speed():
    with pytest.raises(ValueError, match="metric must not be 'median_ms' for a class of devices"):
        Goal(CLASS, "forward", "median_ms", at_most=1.0)


def test_the_worst_and_the_best_case_of_a_goal(root, monkeypatch):
    with_goal(monkeypatch, H200("forward", "median_ms", at_most=1.5, cases=("a", "b")))
    results(root, [row("triton", 3.0, "a"), row("triton", 6.0, "b")])
    said = line(section(build(root).text, "## Goals"), "`rmsnorm`")
    assert "| 2.00 (b bfloat16) | 1.00 (a bfloat16) | not met in 1 of 2 cases |" in said


def test_ops_and_implementations_without_a_time_are_named(root):
    results(root, AHEAD)
    page = build(root).text
    said = section(page, "## Not measured here")
    assert "llama" in line(said, "`rmsnorm`") or "gemma" in line(said, "`rmsnorm`")
    assert "qwen3-8b," not in line(said, "`rmsnorm`")
    for name in selection.operations().keys() - {"rmsnorm"}:
        kind = line(said, f"`{name}`").split(":")[0]
        assert kind in ("- In no case", "- Without a case that is timed on cuda"), name
    said = line(page, "Implementations that were not timed", "then only if it is faster")
    by_name = dict(re.findall(r"(\w+) \(([^)]*)\)", said))
    assert "`rmsnorm`" not in by_name["triton"] and "`rope`" in by_name["triton"]
    assert "`rmsnorm`" in by_name["cute"] and "`rmsnorm`" in by_name["cpp"]


def test_tuned_tables_are_summed_up(root):
    about = {n: meta(commit="c")[n] for n in ("date", "commit", "dirty", "versions")}
    entry = {"key": {"N": 1}, "config": {"w": 4}, "heuristic": {"w": 8}, **about}
    entry |= {"median_us": 10.0, "heuristic_us": 20.0}
    same = {**entry, "config": {"w": 8}, "median_us": 20.0}
    table = {"device": "NVIDIA H200", "device_type": "cuda"}
    table["launches"] = {"forward": [entry, same, same]}
    write(root.parent / "tuned/h200/rmsnorm.json", table)
    said = section(build(root).text, "## Tuned launch configurations")
    assert "| NVIDIA H200 | `rmsnorm` | forward | 3 | 1 | 1.26 | 1.00 | 2.00 |" in said
    assert "cccccccccc" in said


# ---- suites


LEVELS = ("public", "resolved", "operator", "pick")


def overhead(us, implementation="triton", **more):
    found = {"op": "rmsnorm", "implementation": implementation, "case": "ragged"}
    return {**found, "dtype": "bfloat16", "grad": True, "errors": {}, "us": us, **more}


def suite(root, name="suite"):
    folder, about = root / name, meta(commit=None, source="0123456789abcdef", dirty=None)
    unit = {"status": "done", "seconds": 1.0, "reason": None}
    left = {**unit, "status": "not reached"}
    units = {"parity/rmsnorm.ragged": unit, "time/rope.a.bfloat16": left}
    given = {**about, "argv": ["suite", "--minutes", "9"]}
    whole = {"unit": "suite", "kind": "suite", "meta": given, "complete": False, "units": units}
    jsonl(folder / "suite.jsonl", [whole])
    clocks = {"sm_mhz": 1980.0, "power_w": None}
    put(folder, "roofline", {"meta": {**about, "clocks": clocks}, "roofline": ROOF})
    about = {**about, "load_average": [1.5, 0, 0], "load_average_at_end": [3.5, 0, 0]}

    def result(implementation, status="holds", reason=None):
        found = {"implementation": implementation, "dtype": "bfloat16"}
        return {**found, "status": status, "reason": reason}

    def judged(kind, case, results):
        found = {"meta": about, "op": "rmsnorm", "case": case, "results": results}
        put(folder, f"{kind}/rmsnorm.{case}", found)

    for case, error in (("ragged", 0.002), ("zero-rows", 0.003)):
        right = {"name": "out 0", "error": error, "eager": 0.001, "budget": 0.004}
        wrong = {**right, "error": None}
        unavailable = {**result("cpp", "unavailable", "takes CPU tensors"), "tensors": []}
        results = [
            {**result("triton"), "tensors": [right]},
            {**result("cute", "broken", "out 0: error 1"), "tensors": [wrong]},
            unavailable,
        ]
        judged("parity", case, results)
    judged("graph", "ragged", [result("triton"), result("cute", "error", "no capture")])
    put(folder, TIMED, {"meta": about, "roofline": ROOF, "rows": AHEAD})
    died = {"roofline": None, "rows": [], "error": "its process died: SIGSEGV"}
    put(folder, "time/rope.a.bfloat16", {"meta": about, **died})
    us = {level: {"median": 1.5, "p20": 1.0, "p80": 2.0} for level in LEVELS}
    put(folder, "overhead/rmsnorm", {"meta": about, "rows": [overhead(us, overhead_us=0.25)]})
    return folder


def test_a_suite_is_read_whole(root):
    suite(root)
    page = build(root).text
    assert "sources 0123456789, 2026-11-20" in page
    parity = section(page, "### Numerics")
    assert "2 of 2; 0.750 (out 0, zero-rows)" in line(parity, "| triton |")
    assert "0 of 2; infinite" in line(parity, "| cute |")
    assert "`rmsnorm` ragged cute bfloat16, broken: out 0: error 1" in parity
    assert "- takes CPU tensors: `rmsnorm` cpp" in parity
    graph = section(page, "### CUDA graphs")
    assert "1 of 1" in line(graph, "| triton |") and "error: no capture" in graph
    assert "| yes | 1.50 | 1.50 | 1.50 | 1.50 | 0.250 |" in section(page, "### Host time of a call")
    said = line(page, "| [suite]")
    assert said.endswith("| unknown | 3.50 |") and "| `python -m bench suite --minutes 9` |" in said
    assert "4000 | 50.0 | 800 | 1980 MHz SM" in section(page, "## Measured roofline")
    assert "no: 1 of 2 units not reached" in section(page, "## Raw files")
    assert "time/rope.a.bfloat16" in line(page, "SIGSEGV")
    assert "#### `rmsnorm`" in page and "code changed since" in section(page, "#### `rmsnorm`")


def test_a_suite_that_was_ended_before_its_summary_counts(root):
    folder = suite(root)
    units = store.documents(folder)
    del units["suite"]
    store.write(folder, units)
    page = build(root).text
    assert "#### `rmsnorm`" in page
    said = line(page, "| [suite]")
    assert "| suite |" in said and "| no | unknown |" in said


def test_overhead_and_training_folders_are_listed(root):
    us = {**dict.fromkeys(LEVELS), "public": {"median": 7.0}}
    made = overhead(us, "cpp", op="rope", errors={"pick": "no"}, overhead_us=None)
    put(root / "overhead-x", "overhead/rope", {"meta": meta("cpu"), "rows": [made]})
    (root / "training-x").mkdir()
    (root / "training-x" / "README.md").write_text("runs")
    (root / "notes").mkdir()
    page = build(root).text
    assert "7.00" in line(section(page, "### Host time of a call"), "| cpp |")
    assert "`rope` pick: no" in page
    assert "[README.md](../results/training-x/README.md)" in section(page, "## Training runs")
    assert "not read" in line(page, "| [notes]")


# ---- broken files


def _broken(folder, name, change):
    """Changes a unit's document."""
    documents = store.documents(folder)
    change(documents[name])
    store.write(folder, documents)


TIMED = "time/rmsnorm.qwen3-8b.bfloat16"
PARITY = "parity/rmsnorm.ragged"


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("suite", lambda d: d.pop("units"), "has no 'units'"),
        ("suite", lambda d: d.update(schema=2), "schema must be 1, got 2"),
        ("roofline", lambda d: d["roofline"].pop("flops_per_second"), "no 'flops_per_second'"),
        (PARITY, lambda d: d["results"][0].update(status="fine"), "status must be one of"),
        (PARITY, lambda d: d["results"][0]["tensors"][0].pop("budget"), "has no 'budget'"),
        ("graph/rmsnorm.ragged", lambda d: d["meta"].pop("date"), "meta has no 'date'"),
        (TIMED, lambda d: d["meta"].update(date="yesterday"), "yesterday"),
        (TIMED, lambda d: d["rows"][0].pop("provider"), "row 0 has no"),
        (TIMED, lambda d: d["rows"][0]["forward"].pop("p20_ms"), "has no 'p20_ms'"),
        (TIMED, lambda d: d["rows"][0]["forward"].update(median_ms=0), "must be positive"),
        ("overhead/rmsnorm", lambda d: d.update(rows=[3]), "not subscriptable"),
    ],
)
def test_a_broken_file_is_one_clear_error_that_names_it(root, capsys, name, change, said):
    folder = suite(root)
    _broken(folder, name, change)
    assert run(root) == 2
    [message] = capsys.readouterr().err.strip().splitlines()
    assert message.count(f"{folder / store.FILE}: {name}: ") == 1 and said in message
    assert not (root.parent / "docs").exists()


def test_what_is_no_json_and_what_is_not_there_are_named(root, capsys):
    path = results(root, AHEAD)
    path.write_text(path.read_text()[:-9])
    assert run(root) == 2 and str(path) in capsys.readouterr().err
    path.write_text('{"schema": 1, "meta": NaN}')
    assert run(root) == 2 and "NaN is no number" in capsys.readouterr().err
    assert run(root / "nowhere") == 2 and "nowhere: no such folder" in capsys.readouterr().err


# ---- the command


def test_check_fails_where_the_page_or_a_picture_is_not_what_it_would_be(root, capsys):
    pytest.importorskip("matplotlib")
    path = results(root, AHEAD)
    out, pictures = root.parent / "docs/performance.md", root.parent / "docs/img/performance"
    assert run(root, "--check") == 1 and "is not there" in capsys.readouterr().out
    assert not out.exists()
    assert run(root) == 0 and run(root, "--check") == 0
    kinds = ("headline", "ratios", "roofline")
    assert sorted(p.name for p in pictures.iterdir()) == [f"nvidia-h200-{k}.png" for k in kinds]

    text = out.read_text()
    out.write_text(text.replace("4.50", "5.50"))
    capsys.readouterr()
    assert run(root, "--check") == 1 and "differs" in capsys.readouterr().out
    out.write_text(text)

    (pictures / "nvidia-h200-ratios.png").unlink()
    assert run(root, "--check") == 1 and run(root) == 0 and run(root, "--check") == 0

    # New results and an updated page: the pictures are now outdated.
    first = next(iter(store.documents(path.parent)))
    _broken(path.parent, first, lambda d: d["rows"][2]["forward_backward"].update(median_ms=1.0))
    for file, text in build(root).texts.items():
        file.write_text(text)
    assert run(root, "--check") == 1 and "shows other numbers" in capsys.readouterr().out
    # One that is no longer shown is removed, and others are left.
    (pictures / "mine.png").write_bytes(b"")
    path.unlink()
    assert run(root) == 0 and [p.name for p in pictures.iterdir()] == ["mine.png"]


def test_check_fails_for_a_case_without_a_reason(root, capsys):
    pytest.importorskip("matplotlib")
    results(root, BEHIND)
    assert run(root) == 0
    assert NO_REASON in capsys.readouterr().out
    assert run(root, "--check") == 1
    (root / "reasons.toml").write_text(REASON)
    assert run(root) == 0 and run(root, "--check") == 0


def test_without_matplotlib_the_text_is_the_same_and_it_says_what_is_missing(
    root, monkeypatch, capsys
):
    results(root, AHEAD)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(root) == 0
    said = "pictures are not drawn: the package 'matplotlib' is not installed (pip install "
    assert f"{said}'tilewright[bench]')" in capsys.readouterr().err
    out = root.parent / "docs/performance.md"
    assert out.read_text() == build(root).texts[out] and not (out.parent / "img").exists()


def test_pictures_hold_what_they_say(root):
    """No clipped text, no row without a mark, every peer by its name."""
    pytest.importorskip("matplotlib")
    for i in range(8):
        times = {"triton": 2.0, "compile": 3.0, "liger": 2.5 + i % 2, "quack": 3.0}
        rows = [row(p, ms, f"case-{i}") for p, ms in times.items()]
        results(root, rows, f"run-{i}", meta(date=f"2026-11-{10 + i}", commit="abcdef01"[i]))
    alone = [row("eager", 9.0, "alone"), row("triton", 2.0, "alone")]
    alone += [row("eager", 18.0, "a", op="rope"), row("triton", 2.0, "a", op="rope")]
    results(root, alone, "eager-only")
    shown = {p.kind: p for p in build(root).pictures}
    ratios = shown["ratios"].data
    [panel] = ratios["panels"]
    assert {y for y, *_ in panel["points"]} == set(range(len(ratios["rows"]))) == set(range(8))
    assert {other for _, other, *_ in panel["points"]} == {"compile", "liger", "quack"}
    assert "cases of rmsnorm, rope." in shown["ratios"].caption
    headline = shown["headline"].data
    assert headline["rows"] == [["rope", ""], ["rmsnorm", ""]], "the largest gain first"
    assert headline["panels"][0]["points"] == [
        [0, "eager", pytest.approx(9), True],
        [1, "compile", pytest.approx(1.5), True],
        [1, "eager", 4.5, True],
    ]
    over = "auto over torch.compile"
    peers = [f"over the best peer: {peer}" for peer in ("liger", "quack")]
    legends = {"ratios": [over, *peers], "headline": [over, "auto over eager PyTorch"]}
    legends["roofline"] = ["rmsnorm", "rope"]
    assert set(shown) == set(legends)
    for kind, picture in shown.items():
        figure = picture.figure()
        figure.draw_without_rendering()
        names = [t.get_text() for legend in figure.legends for t in legend.get_texts()]
        assert names == legends[kind]
        dates = f"measured 2026-11-10 to 2026-11-{17 if kind == 'ratios' else 20}"
        assert dates in figure.get_suptitle()
        for artist in (*figure.texts, *figure.legends):
            box = artist.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.width, (kind, box)


def test_points_of_changed_code_are_hollow(root):
    pytest.importorskip("matplotlib")
    for name, source, op in (("old", {"source": "0123"}, "rmsnorm"), ("new", {}, "rope")):
        rows = [row("compile", 3.0, op=op), row("triton", 2.0, op=op)]
        results(root, rows, name, meta(**source))
    shown = build(root).pictures
    assert {p.kind for p in shown} == {"headline", "ratios", "roofline"}
    for picture in shown:
        [panel] = picture.data["panels"]
        assert sorted(p[-1] for p in panel["points"]) == [False, True]
        assert "Hollow: measured on code that has changed" in picture.caption
        [axes] = picture.figure().axes
        drawn = [c for c in axes.collections if len(c.get_offsets())]
        assert sorted(len(c.get_facecolor()) for c in drawn) == [0, 1], "one hollow, one filled"


def test_the_same_inputs_make_the_same_bytes(root, monkeypatch):
    single = [row("eager", 9.0, dtype="float32"), row("triton", 3.0, dtype="float32")]
    timed = {"meta": meta(), "roofline": ROOF, "rows": single}
    put(suite(root), "time/rmsnorm.qwen3-8b.float32", timed)
    results(root, BEHIND, "run", meta("cpu"))
    results(root, AHEAD, "same-date", meta("cpu"))
    made = []
    for reverse in (False, True):  # the order of files on disk is arbitrary
        with monkeypatch.context() as patched:
            for name in ("glob", "iterdir", "rglob"):
                real = getattr(pathlib.Path, name)
                patched.setattr(
                    pathlib.Path, name, lambda *a, real=real, r=reverse: sorted(real(*a), reverse=r)
                )
            page = build(root)
        made.append((page.text, [p.digest for p in page.pictures]))
    assert made[0] == made[1]


def test_the_committed_page_is_what_the_committed_results_make(monkeypatch):
    monkeypatch.chdir(ROOT)  # the links of the page are relative
    out, tuned = pathlib.Path("docs/performance.md"), pathlib.Path("tilewright/kernels/tuned")
    page = page_of.build(pathlib.Path("bench/results"), out, tuned)
    for path, text in page.texts.items():
        assert path.read_text() == text, f"run `{COMMAND}`"
        assert len(text.splitlines()) < 250, path  # a few screens
    assert {p.name for p in out.parent.glob("performance*.md")} == {p.name for p in page.texts}
    assert not page.unexplained


def test_columns_have_a_fixed_order(root):
    """Whatever dtype was measured first."""
    rows = [row(p, 2.0, dtype=d) for d in ("bfloat16", "float32") for p in ("eager", "triton")]
    results(root, rows)
    assert "| op | eager, float32 | eager, bfloat16 |" in build(root).text
