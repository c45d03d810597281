"""Every figure with a unit in README and docs has its source: the raw file that it is read from,
the code that sets it, or the reason why it is no measurement. Not here: pages that a command writes
from raw files (performance), goals (`test_goals.py`), what a page
says of one day's raw files that it names (predicted_measured), and code.
"""

import functools
import json
import pathlib
import re

import pytest

from tilewright.ops import OPS

ROOT = pathlib.Path(__file__).parents[2]
UNITS = "s|ms|µs|seconds|minutes|min|MiB|GiB|MB|GB|GB/s|TFLOP/s|tokens/s|times|x|%"
FIGURE = re.compile(rf"(?<![\w.`/-])\d[\d,]*(?:\.\d+)?\s?(?:{UNITS})(?![\w/])")
OTHERS = (
    "performance*.md", "predicted_measured.md", "goals.md", "truth.md",
)  # fmt: skip
PASSES = ("forward", "backward")
H100, SECOND = "nvidia-h100-2026-11-26", "nvidia-h100-2026-11-26b"
THIRD = "nvidia-h100-2026-11-27"
PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not any(pathlib.Path(name).match(pattern) for pattern in OTHERS)
]


@functools.cache
def contents(folder, file):
    text = (ROOT / "bench/results" / folder / file).read_text()
    lines = file.endswith(".jsonl")
    return [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)


def raw(folder, file, of):
    """of: contents of a raw file -> the number."""
    return of(contents(folder, file))


def row(folder, file, **wanted):
    """The only row of a raw file that has these values."""
    rows = raw(folder, file, lambda d: d["rows"])
    [found] = [r for r in rows if all(r[name] == value for name, value in wanted.items())]
    return found


def timed_row(unit, provider, folder=H100, stage="goals"):
    """A row of a suite."""
    units = {d.get("unit"): d for d in contents(folder, "suite.jsonl")}
    rows = units[f"{stage}/{unit}.bfloat16"]["rows"]
    [found] = [r for r in rows if r["provider"] == provider]
    return found


ACCELERATE = "training-accelerate-amd-epyc-2026-11-23"
DATA = "data-evaluation-amd-epyc-2026-11-27"
DPO = "training-preference-amd-epyc-2026-11-27"


def step(dtype, variant, name):
    return row(ACCELERATE, f"step_{dtype}.json", variant=variant)[name]


def head(variant):
    return row(ACCELERATE, "loss.json", variant=variant, dtype="float32")["peak_mib"]


def of_data(command, of):
    """A number of the last row."""
    return raw(DATA, f"{command}.json", lambda d: of(d["rows"][-1]))


def evaluated(i, of):
    """In percent of bare forward passes."""
    return 100 * raw(DATA, "evaluation_speed.json", lambda d: of(d["rows"][i]))


def least(name):
    return raw("checkpoint-cost-2026-11-25", "cost.json", lambda d: min(d["seconds"][name]))


def size(extra):
    return raw("install-sizes-2026-11-25", "sizes.json", lambda d: d["bytes"][extra]) / 1e9


def determinism(file, of):
    return raw("determinism-amd-epyc-2026-11-23", f"{file}.json", lambda d: d["training"][of])


def minutes(file):
    folder = "training-amd-epyc-2026-11-21"
    return raw(folder, f"{file}.jsonl", lambda rows: sum(r.get("seconds", 0) for r in rows) / 60)


def pair(i):
    """transformers' time over the trainer's, of one process's steps."""
    folder = "training-layouts-amd-epyc-2026-11-23"
    theirs, ours = (
        row(folder, "layouts.json", layout="process", provider=p)["samples_s"][i]
        for p in ("transformers", "trainer")
    )
    return theirs / ours


def timed(*of):
    """Milliseconds on an H100, forward and backward where there is one."""
    found = timed_row(*of)
    return (found.get("forward_backward") or found["forward"])["median_ms"]


def host(unit, provider):
    """Microseconds of a call on the host."""
    return timed_row(unit, provider, THIRD)["forward"]["host_us"]


def norms_apart():
    """In percent, of the loops of one call."""
    norms = [optimizer_step(p, "grad_norms") for p in ("trainer", "transformers", "accelerate")]
    return 100 * max(max(at) / min(at) - 1 for at in zip(*norms, strict=True))


def of_compile():
    """The largest error of torch.compile on AVX2 that is an order of summation, over its bound."""
    units = contents("amd-epyc-avx2-2026-11-28", "suite.jsonl")
    rows = [r for u in units for r in u.get("rows", ())]
    said = [r["reason"] for r in rows if (r["provider"], r["status"]) == ("compile", "failed")]
    found = re.findall(r"error (\S+) at [^;]*? exceeds (\S+)", "; ".join(said))
    return max(x for a, b in found if (x := float(a) / float(b)) < 8)


def experts_backward():
    return timed_row(MOE, "triton", THIRD)["backward"]["tflop_per_s"]


def attention(provider):
    return timed("attention.qwen3-30b-a3b_8k", provider, THIRD, "time")


def packed(way, of="forward_backward"):
    """Milliseconds of attention over packed documents in rows of 64, as a question timed it."""
    about = "attention of packed documents, rows of 64"
    answers = [t for d in contents(SECOND, "suite.jsonl") for t in d.get("timed", ())]
    [found] = [t for t in answers if t["question"].startswith(about) and t["pass"] == of]
    return found[way]["median"] / 1e3


def documents_of_128():
    """PyTorch's time over Triton's, of packed documents, forward and backward added."""
    ours, theirs = (
        timed_row("attention.qwen3-30b-a3b_32k_packed", name, SECOND)
        for name in ("triton", "native")
    )
    return sum(theirs[of]["median_ms"] for of in PASSES) / sum(
        ours[of]["median_ms"] for of in PASSES
    )


def counted(provider, name):
    """With products in bfloat16, of three digits."""
    of = {"provider": provider, "recomputed": "nothing", "products": "bfloat16"}
    return float(f"{row('preference-counted-2026-11-27', 'counted.json', **of)[name]:.3g}")


def shared(ratio, name):
    """In percent."""
    folder = "shared-prefix-amd-epyc-2026-11-27"
    return 100 * row(folder, "shared_prefix.json", prompt_to_answer=ratio)[name]


def dpo(provider, name):
    """Where layers are recomputed."""
    return row(DPO, "preference.json", provider=provider, recomputed="layers")[name]


def beside_trl(recomputed, name):
    """A ratio where both recompute the same."""
    rows = raw(DPO, "preference.json", lambda d: d["comparisons"])
    return next(r[name] for r in rows if r["trainer"] == r["trl"] == recomputed)


def optimizer_step(provider, name, folder=H100):
    return row(folder, "end_to_end.json", provider=provider)[name]


def peak(provider, folder=H100):
    """MiB, of three digits."""
    return float(f"{optimizer_step(provider, 'peak_mib', folder):.3g}")


MOE, NORM = "moe_mlp.qwen3-30b-a3b_32768", "add_rmsnorm.qwen3-8b"
ADAMW = "adamw_.qwen3-30b-a3b_6_layers-bf16-states"
STEPS = {
    "2.83 s": lambda: step("float32", "before", "median_s"),
    "2.19 s": lambda: step("float32", "after", "median_s"),
    "1.29 times": lambda: step("float32", "after", "times_as_fast"),
    "628 MiB": lambda: step("float32", "before", "peak_mib"),
    "434 MiB": lambda: step("float32", "after", "peak_mib"),
    "724 MiB": lambda: head("after"),
}
OPTIMIZER_STEPS = {
    "53 %": lambda: 100 * optimizer_step("trainer", "mfu", THIRD),
    "44.8 %": lambda: 100 * optimizer_step("trainer", "mfu_documents", THIRD),
    "0.33 %": lambda: 100 * optimizer_step("accelerate", "loss_difference"),
    "70 %": norms_apart,
}
LAST_LAYERS = ("tilewright/trainer/models/low_precision.py", "LAST = 0.15")
LARGE = ("tilewright/trainer/data/prepare.py", "LARGE = 64 << 20")
OF_2026_11_26 = "bench/results/training-preference-amd-epyc-2026-11-26/README.md"
CUSTOM = "a shape or an exponent, no quantity"
# By page: the number itself, (a file, what it says) for what code sets, or the reason why it is
# none of these.
SOURCES = {
    "README.md": {
        **STEPS,
        **OPTIMIZER_STEPS,
        "1854 MiB": lambda: head("before"),
        "80 GB": "the name of the device",
        "321 ms": lambda: optimizer_step("transformers", "median_ms"),
        "161 ms": lambda: optimizer_step("accelerate", "median_ms"),
        "47,700 MiB": lambda: peak("transformers"),
        "32,100 MiB": lambda: peak("accelerate"),
        "142 ms": lambda: optimizer_step("trainer", "median_ms", THIRD),
        "30,000 MiB": lambda: peak("trainer", THIRD),
        "0.686 ms": lambda: packed("now", "backward"),
        "0.485 ms": lambda: packed("other", "backward"),
        "35.8 ms": lambda: timed(MOE, "native", THIRD),
        "14.0 ms": lambda: timed(MOE, "triton", THIRD),
        "503 TFLOP/s": experts_backward,
        "0.453 ms": lambda: timed(NORM, "liger"),
        "0.367 ms": lambda: timed(NORM, "triton"),
        "0.868 ms": lambda: timed(ADAMW, "torch-fused", THIRD),
        "0.656 ms": lambda: timed(ADAMW, "triton", THIRD),
        "373 µs": lambda: host(ADAMW, "torch-fused"),
        "752 µs": lambda: host(ADAMW, "triton"),
        "3.56 ms": lambda: attention("native"),
        "3.13 ms": lambda: attention("flash_attention_4"),
        "3.47 ms": lambda: attention("triton"),
    },
    "docs/integrations.md": {
        **STEPS,
        "1,854 MiB": lambda: head("before"),
        "3.00 s": lambda: step("bfloat16", "before", "median_s"),
        "2.01 s": lambda: step("bfloat16", "after", "median_s"),
        "1.34 times": lambda: step("bfloat16", "after", "times_as_fast"),
        "558 MiB": lambda: step("bfloat16", "before", "peak_mib"),
        "442 MiB": lambda: step("bfloat16", "after", "peak_mib"),
    },
    "docs/integrations_reference.md": {"1.5 MB": "of an export, which the command prints"},
    "docs/tutorials/hugging_face.md": {
        "1.3 times": lambda: step("float32", "after", "times_as_fast")
    },
    "docs/install.md": {
        "0.70 GB": lambda: size("torch"),
        "0.10 GB": lambda: size("transformers"),
        "0.32 GB": lambda: size("trainer"),
        "0.33 GB": lambda: size("trl"),
        "0.07 GB": lambda: size("tensorboard"),
        "1.04 GB": lambda: size("triton"),
        "0.52 GB": lambda: size("cute"),
        "0.26 GB": lambda: size("formats"),
    },
    "docs/trainer/preference.md": {"45 %": lambda: shared("8:1", "saved")},
    "docs/trainer/data.md": {
        "98 %": ("tests/trainer/test_data.py", "0.98"),
        "1 MiB": ("tilewright/trainer/data/types/text.py", "PIECE = 1 << 20"),
        "64 MiB": LARGE,
    },
    "docs/trainer/memory.md": {
        "10 %": ("tests/trainer/test_memory.py", "0.1"),
        "2 GiB": "what a GPU needs beside the plan: an estimate, and named as one",
    },
    "docs/trainer/context_parallel.md": {"2 x": CUSTOM},
    "docs/trainer/failures.md": {"30 seconds": "torchrun's own limit"},
    "docs/trainer/fields.md": {
        "64 MiB": LARGE,
        "2 x": CUSTOM,
        "10%": CUSTOM,
        "15 %": LAST_LAYERS,
        "128 x": "the format's block",
    },
    "docs/trainer/precision.md": {"15 %": LAST_LAYERS},
    "docs/trainer/measured.md": {
        "11.9 s": lambda: dpo("trainer", "median_s"),
        "19.2 s": lambda: dpo("trl", "median_s"),
        "1.62 times": lambda: beside_trl("layers", "times_as_fast"),
        "1.71 times": lambda: beside_trl("nothing", "times_as_fast"),
        "1,680 MiB": lambda: float(f"{dpo('trainer', 'above_mib'):.3g}"),
        "3,460 MiB": lambda: float(f"{dpo('trl', 'above_mib'):.3g}"),
        "1.4 GiB": lambda: (dpo("trainer", "timed_above_mib") - dpo("trainer", "above_mib")) / 1024,
        "0.01 %": "the limit of losses_differ, in words",
        "25.3 GB": lambda: counted("trainer", "gbytes"),
        "64.6 GB": lambda: counted("trl", "gbytes"),
        "3,650 MiB": lambda: counted("trainer", "peak_mib"),
        "6,180 MiB": lambda: counted("trl", "peak_mib"),
        "25.0 %": lambda: shared("1:1", "promised"),
        "22.4 %": lambda: shared("1:1", "saved"),
        "37.5 %": lambda: shared("3:1", "promised"),
        "36.9 %": lambda: shared("3:1", "saved"),
        "44.4 %": lambda: shared("8:1", "promised"),
        "44.8 %": lambda: shared("8:1", "saved"),
        "2 x": CUSTOM,
        "3.6 minutes": (OF_2026_11_26, "It took 3.6 minutes in all"),
        "1,024 MiB": lambda: of_data("data_memory", lambda r: r["bytes"]) / 2**20,
        "531 MiB": lambda: of_data("data_memory", lambda r: r["prepare"]["peak_mib"]["anonymous"]),
        "470 MiB": lambda: of_data("data_memory", lambda r: r["read"]["peak_mib"]["anonymous"]),
        "345 MiB": lambda: of_data("data_memory", lambda r: r["read"]["begun_mib"]["anonymous"]),
        "0.05 %": lambda: 100 * of_data("data_waiting", lambda r: r["share"]),
        "99.4 %": lambda: evaluated(0, lambda r: r["share"]),
        "103.3 %": lambda: evaluated(0, lambda r: r["shares"][-1]),
        "97.9 %": lambda: evaluated(1, lambda r: r["share"]),
        "106.4 %": lambda: evaluated(1, lambda r: r["shares"][-1]),
        "0.37 %": lambda: 100 * of_data("data_waiting", lambda r: r["share_of_a_step"]["most"]),
        "1.22 times": lambda: pair(1),
        "0.96 GB": lambda: (
            raw("checkpoint-cost-2026-11-25", "cost.json", lambda d: d["bytes"]) / 1e9
        ),
        "0.333 s": lambda: least("with checksums, from the page cache"),
        "0.324 s": lambda: least("without, from the page cache"),
        "0.061 s": lambda: least("checksums alone, from the page cache"),
        "2.9 minutes": lambda: minutes("demo"),
    },
    "docs/comparison.md": {
        **OPTIMIZER_STEPS,
        "1.74 ms": lambda: packed("now"),
        "0.661 ms": lambda: packed("other"),
        "5.0 times": of_compile,
    },
    "docs/troubleshooting.md": {"30 seconds": "torchrun's own limit"},
    "docs/trl.md": {
        "64 MiB": ("tilewright/ops/loss/head.py", "on a CPU 64 MiB"),
        "1 GiB": ("tilewright/ops/loss/head.py", "on a GPU 1 GiB"),
    },
    "docs/verify.md": {
        "1 %": ("tests/plants/verify.py", "1.01"),
        "0.1 %": "the limit of what is seen, in words",
    },
    "docs/tested.md": {
        "80 GB": "the name of the device",
        "0.33 %": lambda: 100 * optimizer_step("accelerate", "loss_difference"),
    },
    "CONTRIBUTING.md": {"2 %": ("tilewright/core/cases.py", "DETECTED = 0.02")},
    "docs/benchmarking.md": {
        "256 MiB": ("tilewright/bench/timing.py", "else 2**28)"),
        "2 GiB": ("tilewright/bench/timing.py", "LARGEST_COPY = 2**31"),
        "8 ms": ("tilewright/bench/timing.py", "sample_seconds: float = 0.008"),
        "50 ms": ("tilewright/bench/timing.py", "SLOW_CALL = 0.05"),
        "1 %": ("tilewright/bench/timing.py", "LEAST_GAIN = 1.01"),
        "5 %": ("tilewright/bench/report.py", "threshold: float = 0.05"),
        "8 times": ("tilewright/bench/units.py", "REORDERED = 8.0"),
        "32 MiB": "glibc's own threshold",
        "8 GiB": ("tilewright/bench/piece.py", "MEMORY = 8 * 2**30"),
        "16 GiB": "twice that",
    },
    "docs/guide.md": {
        "1.9 times": documents_of_128,
    },
    "docs/gpu.md": {
        "15 MiB": ("bench/carry.py", "BACK_MIB = 15"),
        "60 s": ("bench/end_to_end_steps.py", "default=60.0"),
        "40 s": "from the script's start to its first result, on one machine",
        "10 s": (f"bench/results/{SECOND}/calls.txt", "from the disk in 9 s"),
        "82 s": (f"bench/results/{SECOND}/calls.txt", "80 of 80 units"),
        "88 s": (f"bench/results/{THIRD}/calls.txt", "1030 of 1030 units of parity"),
        "36 s": (f"bench/results/{THIRD}/calls.txt", "`kernels` in 36 s"),
        "92 MB": "the size of a wheel of nvidia-cutlass-dsl 4.8.1",
        "45 s": (f"bench/results/{SECOND}/calls.txt", "the first after 45 s"),
        "55 s": (f"bench/results/{SECOND}/calls.txt", "took 56 s with attention triton"),
    },
    "docs/numerics.md": {
        "2 %": ("tilewright/core/cases.py", "DETECTED = 0.02"),
        "7 %": "of newton_schulz: see its `atol`",
        "1.06 times": lambda: determinism("with_outputs", "checksums"),
        "1.03 times": lambda: determinism("cost", "algorithms"),
        "17 MB": "528 rows of 4,096 columns in float32, twice",
        "400 MB": "three tensors of 16,384 x 4,096 in bfloat16",
        **dict.fromkeys(("0 times", "448 times", "448 x", "2688 x"), CUSTOM),
    },
}


def figures(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    prose = re.sub(r"^(?: {4}.*\n)+", "", prose, flags=re.M)  # code by its indent
    return {m[0] for m in FIGURE.finditer(re.sub(r"`[^`\n]*`", "``", prose))}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_figure_has_its_source(page):
    known = SOURCES.get(str(page.relative_to(ROOT)), {})
    found = figures(page)
    if page.name == "numerics.md":  # what an op declares, which the contract's test plants
        declared = {
            f"{100 * least:.3g} %"
            for op in OPS.values()
            for results in op.judged.detects.values()
            for least in results.values()
        }
        found -= declared - known.keys()
    assert found == known.keys()
    for figure, source in known.items():
        if callable(source):
            number = re.match(r"[\d,.]+", figure)[0].replace(",", "")
            digits = len(number.partition(".")[2])
            assert f"{source():.{digits}f}" == number, f"{figure}: the raw file has {source()}"
        elif isinstance(source, tuple):
            file, text = source
            assert text in (ROOT / file).read_text(), f"{figure}: {file} does not say {text!r}"
