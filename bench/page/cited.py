"""Figures that pages written by hand cite from raw results: `python -m bench report` writes them.

A phrase of a page has "{}" where its figures stand. A figure is of the newest results of an H100;
figures beside each other are of the newest rounds that timed all of them.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.page import raw
from bench.page.raw import Group, Raw
from tilewright.bench import store
from tilewright.bench.units import REORDERED

DEVICE = "NVIDIA H100 80GB HBM3"
FIGURE = r"(\d[\d,]*(?:\.\d+)?)"


def _timed(group: Group, provider: str) -> bool:
    return group.rows.get(provider, {}).get("status") == "ok"


def _own(group: Group) -> str:
    """The name of our kernels for GPUs that these rounds timed, or ""."""
    return next((n for n in ("gluon", "triton") if _timed(group, n)), "")


@dataclass
class Results:
    """What is cited.   folder: of all raw results."""

    raw: Raw
    folder: pathlib.Path

    def rounds(self, op: str, case: str, *providers: str) -> Group:
        """The newest rounds in which all of the providers have a time; by default, our kernels."""
        groups = [
            g
            for g in self.raw.groups
            if (g.source.device[1], g.op, g.case, g.dtype) == (DEVICE, op, case, "bfloat16")
            and (all(_timed(g, p) for p in providers) if providers else bool(_own(g)))
        ]
        return _newest(groups)

    def time(self, op: str, case: str, *providers: str) -> list[str]:
        """Milliseconds, forward and backward where there is one."""
        rows = self.rounds(op, case, *providers).rows
        both = [rows[p]["forward_backward"] or rows[p]["forward"] for p in providers]
        return [_three(figures["median_ms"]) for figures in both]

    def rate(self, op: str, case: str, *passes: str) -> list[str]:
        """TFLOP/s of this library's kernels."""
        group = self.rounds(op, case)
        row = group.rows[_own(group)]
        return [f"{row[name]['tflop_per_s']:.0f}" for name in passes]

    def shares(self, name: str, *ops: str, but: str = "", only: str = "") -> list[str]:
        """The lowest and the highest share of the roof of our kernels, in percent, over the
        newest rounds of each case. but, only: patterns of names of cases.
        """
        cases = {
            (g.op, g.case)
            for g in self.raw.groups
            if g.source.device[1] == DEVICE
            and g.op in ops
            and g.dtype == "bfloat16"
            and _own(g)
            and re.search(only, g.case)
            and not (but and re.search(but, g.case))
        }
        groups = (self.rounds(*of) for of in cases)
        rows = (g.rows[_own(g)] for g in groups)
        percents = [row[name]["roofline_percent"] for row in rows]
        ends = [f"{of(percents):.0f}" for of in (min, max)]
        return ends if len(percents) > 1 else ends[:1]

    def steps(self, *providers: str) -> list[dict[str, Any]]:
        """The newest optimizer steps of all of them, as `auto` chooses their attention."""
        calls: dict[raw.Source, dict[str, raw.Entry]] = {}
        for e in self.raw.of("steps", ("cuda", DEVICE)):
            chosen = (e.source.meta.get("settings") or {}).get("attention")
            if e.data["status"] == "ok" and chosen is None:
                calls.setdefault(e.source, {})[e.data["provider"]] = e
        last = _newest([c[providers[0]] for c in calls.values() if c.keys() >= set(providers)])
        return [calls[last.source][p].data for p in providers]

    def answers(self, question: str) -> dict[str, dict[str, Any]]:
        """The newest times of a question that a suite asked, by pass."""
        timed = []
        for source in (s for f in self.raw.folders for s in f.sources if s.device[1] == DEVICE):
            if question in source.path:
                documents = store.read(self.folder / source.folder)
                [of] = [d for name, _, d in documents if f"{source.folder}/{name}" == source.path]
                timed.append((source.age, of["timed"]))
        return {t["pass"]: t for t in max(timed, key=lambda f: f[0])[1]}


def _newest(items: Iterable[Any]) -> Any:
    return raw.newest(items, lambda _: None)[None]


def _three(value: float) -> str:
    """Three significant digits, trailing zeros too."""
    return f"{value:#.3g}".rstrip(".")


# ---- what the phrases cite


def _step(provider: str) -> Callable[[Results], list[str]]:
    def figures(r: Results) -> list[str]:
        [of] = r.steps(provider)
        numbers = [f"{of['median_ms']:.0f}", f"{float(_three(of['peak_mib'])):,.0f}"]
        if provider == "trainer":
            numbers += [f"{100 * of['mfu']:.0f}", f"{100 * of['mfu_documents']:.1f}"]
        return numbers

    return figures


def _apart(r: Results) -> list[str]:
    """Percent by which losses of the step that all have, and gradient norms, differ in a call."""
    every = r.steps("trainer", "transformers", "accelerate")
    losses = max(of["loss_difference"] for of in every[1:])
    norms = [of["grad_norms"] for of in every]
    wide = max(max(at) / min(at) for at in zip(*norms, strict=True))
    return [f"{100 * losses:.2f}", f"{100 * (wide - 1):.0f}"]


def _norm(r: Results) -> list[str]:
    figures = r.rounds("add_rmsnorm", "qwen3-8b", "liger", "triton").rows["triton"]["forward"]
    moved = figures["gb_per_s"] * 1e9 * figures["median_ms"] / 1e3
    rows = moved / (4 * 4096 * 2)  # two tensors read and two written, in bfloat16
    return [f"{rows:,.0f}", *r.time("add_rmsnorm", "qwen3-8b", "liger", "triton")]


ADAMW_CASE = "qwen3-30b-a3b_6_layers-bf16-states"


def _adamw(r: Results) -> list[str]:
    case, providers = ADAMW_CASE, ("torch-fused", "triton")
    rows = r.rounds("adamw_", case, *providers).rows
    host = [f"{rows[p]['forward']['host_us']:.0f}" for p in providers]
    return [x for pair in zip(r.time("adamw_", case, *providers), host, strict=True) for x in pair]


ROWS_OF_64 = "attention-of-packed-documents-rows-of-64-triton-for-native"
PASSES = ("forward", "backward")


def _documents(r: Results) -> list[str]:
    """Forward, backward: PyTorch's, and ours."""
    of = r.answers(ROWS_OF_64)
    return [_three(of[name][way]["median"] / 1e3) for way in ("now", "other") for name in PASSES]


def _both(*ops: str, **cases: str) -> Callable[[Results], list[str]]:
    """Shares of the roof in forward and backward."""
    return lambda r: [x for name in PASSES for x in r.shares(name, *ops, **cases)]


def _forward(*ops: str, **cases: str) -> Callable[[Results], list[str]]:
    return lambda r: r.shares("forward", *ops, **cases)


def _one_after_another(*parts: Callable[[Results], list[str]]) -> Callable[[Results], list[str]]:
    return lambda r: [x for part in parts for x in part(r)]


def _documents_ratio(r: Results) -> list[str]:
    """Times as fast as PyTorch's, forward and backward added: in rows of 128, and of 64."""
    rows = r.rounds("attention", "qwen3-30b-a3b_32k_packed", "gluon", "native").rows
    theirs, ours = (sum(rows[p][n]["median_ms"] for n in PASSES) for p in ("native", "gluon"))
    of = r.answers(ROWS_OF_64)
    now, other = (sum(of[n][way]["median"] for n in PASSES) for way in ("now", "other"))
    return [f"{theirs / ours:.1f}", f"{now / other:.1f}"]


def _documents_at_once(r: Results) -> list[str]:
    both = r.answers(ROWS_OF_64)["forward_backward"]
    return [_three(both[way]["median"] / 1e3) for way in ("now", "other")]


def _mfu(r: Results) -> list[str]:
    return _step("trainer")(r)[2:]


def _of_compile(r: Results) -> list[str]:
    """Ops in which torch.compile has no time in float32 on AVX2, by the order of a sum alone; and
    the largest error as a multiple of what is allowed.
    """
    times: dict[str, float] = {}
    for group in r.raw.groups:
        row = group.rows.get("compile", {})
        if group.source.device[1] != "AMD EPYC (AVX2)" or row.get("status") != "failed":
            continue
        pairs = re.findall(r"error ([\d.e+-]+) at .*?exceeds ([\d.e+-]+)", row["reason"])
        worst = max(float(error) / float(budget) for error, budget in pairs)
        if worst <= REORDERED:
            times[group.op] = max(worst, times.get(group.op, 0.0))
    return [str(len(times)), f"{max(times.values()):.1f}"]


EXPERTS = "moe_mlp", "qwen3-30b-a3b_32768"
HEADS = "attention", "qwen3-30b-a3b_8k"
TURNED = "-transpose$"  # cases that write the transpose too
UP = "grouped_gemm", "qwen3-30b-a3b_up_32768"

CITED: dict[str, dict[str, Callable[[Results], list[str]]]] = {
    "README.md": {
        "sdpa with a mask, not compiled: {} ms, {} MiB": _step("transformers"),
        "`accelerate(model)`: {} ms, {} MiB": _step("accelerate"),
        "newer code: {} ms, {} MiB, MFU {} %, of the documents trained {} %": _step("trainer"),
        "PyTorch's `F.grouped_mm`: {} ms | {} ms": lambda r: r.time(*EXPERTS, "native", "gluon"),
        "ms: {} and {} TFLOP/s": lambda r: r.rate(*EXPERTS, *PASSES),
        "{} rows of 4,096 | Liger-Kernel: {} ms | {} ms |": _norm,
        "PyTorch, fused: {} ms, {} µs on the host | {} ms, {} µs |": _adamw,
        "cuDNN: {} ms; FlashAttention 4, taken if installed: {} ms | {} ms, same": lambda r: r.time(
            *HEADS, "native", "flash_attention_4", "gluon"
        ),
        "PyTorch, varlen: {} and {} ms | {} and {} ms |": _documents,
        "Losses of the step agree within {} %, norms of gradients differ by up to {} %": _apart,
    },
    "docs/goals.md": {
        "it reached {} % by this count and {} % by the documents that were trained": _mfu
    },
    "docs/comparison.md": {
        "{} % with attention counted as of one document, {} % as of the documents trained": _mfu,
        "agree within {} %, norms of gradients differ by up to {} %": _apart,
        "in one pass it is {} ms beside {} ms": _documents_at_once,
        "In {} ops `torch.compile` had no time in float32 on AVX2, since gradients of weights are off "
        "by up to {} times what": _of_compile,
    },
    "docs/guide.md": {
        "it was {} times (rows of 128) and {} times (rows of 64) as fast": _documents_ratio
    },
    "docs/predicted_measured.md": {
        "649, by specialized warps {} TFLOP/s": lambda r: r.rate(*UP, "forward"),
        "597, 450, later {}, {} TFLOP/s": lambda r: r.rate(*EXPERTS, *PASSES),
        "450, by specialized warps {} TFLOP/s": lambda r: r.rate(*HEADS, "forward"),
        "rewritten {} TFLOP/s, with": lambda r: r.rate(*HEADS, "backward"),
        "with the forward {} ms | additions": lambda r: r.time(*HEADS, "gluon"),
        "| 45.1 ms | {} ms, cuDNN {} ms |": lambda r: r.time(
            "attention", "qwen3-30b-a3b_32k", "gluon", "native"
        ),
        "| 86 to 93 % | 81 to 100 % | {} to {} % |": _forward("rmsnorm", "silu_mul", "gelu_mul"),
        "| {} to {} %; 79 to 85 %, after a change {} to {} % |": _both("qk_norm_rope"),
        "| 69 to 85 %, after a change {} to {} % |": _forward("permute"),
        "| 79 %, 5.8 %; after a change {} %, {} % |": _both("causal_conv1d"),
        "after a change {} %, {} %; {} % | all were": _one_after_another(
            _forward("quantize_block_fp8", only=TURNED),
            _forward("quantize_mxfp8", only=TURNED),
            _forward("silu_mul_quantize", only=TURNED),
        ),
    },
}


def pages(results: pathlib.Path, root: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Each page that is there with its figures as the raw results have them.

    root: the checkout; what is carried to a GPU's machine has some of its pages. Raises
    ValueError, naming it, for a phrase that is not once in its page.
    """
    known = Results(raw.read(results), results)
    for name, phrases in CITED.items():
        if not (root / name).is_file():
            continue
        text = (root / name).read_text()
        for phrase, figures in phrases.items():
            text = with_figures(text, phrase, figures(known), name)
        yield root / name, text


def with_figures(text: str, phrase: str, figures: list[str], name: str) -> str:
    """The text of a page with other figures in a phrase."""
    pattern = FIGURE.join(map(re.escape, phrase.split("{}")))
    if len(re.findall(pattern, text)) != 1:
        raise ValueError(f"{name}: must say {phrase!r} once, with figures for {{}}")
    return re.sub(pattern, lambda _: phrase.format(*figures), text)
