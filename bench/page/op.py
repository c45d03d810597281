"""Writes the site's page of an op, from its docstring, the registry and the raw results."""

from __future__ import annotations

import inspect
import pathlib
import sys
import textwrap
from collections.abc import Iterator, Sequence

from bench.page import detail, raw
from bench.page.comparisons import Device
from bench.page.goals import goal_row
from bench.page.text import count, table
from tilewright.bench import contract
from tilewright.core.registry import FLOATS, Implementation, Op, short
from tilewright.ops import cases
from tilewright.selection import operations

# What each implementation is and needs, by its name, or by op and name.
KINDS = {
    "gluon": "Gluon kernels with specialized warps, and Triton's: compute capability 9.0",
    "triton": "Triton kernels: compute capability 8.0 or later, or a CPU under Triton's interpreter",
    "cute": "CuTe DSL kernels: compute capability 9.0 and 10.x, the extra `cute`",
    "cpp": "C++ kernels: CPU tensors",
    "torch": "PyTorch's own function",
    "sdpa": "PyTorch's `scaled_dot_product_attention`",
    "native": "a composition over PyTorch's `grouped_mm`: compute capability 9.0 and 10.x, or a CPU",
    (
        "attention",
        "native",
    ): "cuDNN's attention and `varlen_attn`, both PyTorch's: compute capability 8.0 or later",
    "quack": "QuACK's grouped GEMMs: compute capability 9.0 and 10.x, `pip install quack-kernels`",
    "flash_attention_2": "the package flash-attn",
    "flash_attention_3": "FlashAttention 3: compute capability 9.x, built from its repository",
    "flash_attention_4": "the package flash-attn-4: `pip install --pre flash-attn-4`",
    "eager": "the reference implementation (eager twin): plain PyTorch, any device",
    ("fp8_linear", "triton"): "Triton kernels: compute capability 9.0 or later",
    (
        "low_precision_linear",
        "gluon",
    ): "Gluon kernels with specialized warps: compute capability 9.0; mxfp8 and nvfp4, 10.x",
    (
        "low_precision_linear",
        "triton",
    ): "Triton kernels: compute capability 9.0 or later; mxfp8 and nvfp4 from 10.0 on",
    ("low_precision_linear", "cpp"): "C++ quantizers, and PyTorch's products in float32",
    (
        "low_precision_grouped_gemm",
        "gluon",
    ): "Gluon kernels with specialized warps: compute capability 9.0; mxfp8 and nvfp4, 10.x",
    (
        "low_precision_grouped_gemm",
        "triton",
    ): "Triton kernels: compute capability 9.0 or later; mxfp8 and nvfp4 from 10.0 on",
    ("low_precision_grouped_gemm", "cpp"): "C++ quantizers, and PyTorch's products in float32",
    ("newton_schulz", "cpp"): "C++ kernels: a CPU with AVX-512",
}
FROM_OUTSIDE = "installed from outside"


def pages(results: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(name, Markdown) of each op's page.

    Raises:
        ValueError: A raw result cannot be read; the message names the file.
    """
    raw_results = raw.read(results)
    devices = [
        Device(kind, name, [g for g in raw_results.groups if g.source.device == (kind, name)])
        for kind, name in raw_results.devices()
    ]
    for op in operations().values():
        yield op.name, page(op, raw_results, devices)


def page(op: Op, results: raw.Raw, devices: Sequence[Device]) -> str:
    """The page of one op."""
    public = inspect.unwrap(op.public)
    about = sys.modules[public.__module__].__doc__ or ""  # not cleaned: formulas are indented
    lines = [
        f"# `{op.name}`",
        "",
        about,
        "",
        f"::: {public.__module__}.{public.__name__}",
        "    options:",
        "      show_root_full_path: false",
        '      heading: "Signature"',
        "",
        *arguments(op),
        *implementations(op),
        *definition(op),
        *numerics(op, results, devices),
        *performance(op, devices),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def arguments(op: Op) -> list[str]:
    """What the public function declares, as it is checked."""
    takes = op.takes
    lines = [line.split(maxsplit=1) for line in takes.lines()[: len(takes.arguments)]]
    rows = [[f"`{name}`", f"`{accepted}`"] for name, accepted in lines]
    where = [f"`{c.text}`" for c in takes.conditions]
    return [
        "## Arguments",
        "",
        "As they are checked at each call: dtypes (of another argument, under its name), then the "
        "shape, whose sizes are equal wherever they have one name; `float` is float32, bfloat16, "
        "float16 or float64. Tensors are on one device.",
        "",
        *_plain(["name", "accepts"], rows),
        *([f"Where {', '.join(where)}.", ""] if where else []),
    ]


def implementations(op: Op) -> list[str]:
    rows = [_implementation(op, i) for i in op.implementations]
    return [
        "## Implementations",
        "",
        f"In the order in which `auto` considers them; `tilewright explain {op.name}` prints which "
        "of them run on a machine, and why the others do not. A named one never falls back.",
        "",
        *_plain(["name", "what it is", "`auto` takes it on", "dtypes", "batch-invariant on"], rows),
        *_unsupported(op),
    ]


def _implementation(op: Op, impl: Implementation) -> list[str]:
    return [
        f"`{impl.name}`" + "".join(f", `{a}`" for a in impl.aliases),
        KINDS.get((op.name, impl.name)) or KINDS.get(impl.name, FROM_OUTSIDE),
        ", ".join(d for d in impl.devices if d != "meta") or "never: by name only",
        ", ".join(map(short, impl.dtypes)),
        ", ".join(impl.batch_invariant),
    ]


def _unsupported(op: Op) -> list[str]:
    if not op.requests:
        return []
    rows = []
    for impl in op.implementations:
        if reasons := dict.fromkeys(filter(None, map(impl.refuses, op.requests))):
            rows.append([f"`{impl.name}`", "; ".join(reasons)])
    if not rows:
        return []
    return [
        "Options that an implementation does not support. By name it raises "
        "`ImplementationUnavailable` with this reason, and `auto` takes the next one.",
        "",
        *_plain(["name", "does not support"], rows),
    ]


def definition(op: Op) -> list[str]:
    """The source of the eager twin."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(op.eager))).rstrip()
    except (OSError, TypeError):  # an operator of torch.library
        return []
    return [
        "## Definition",
        "",
        "The reference implementation (eager twin), which every implementation must equal within "
        "the contract:",
        "",
        "```python",
        source,
        "```",
        "",
    ]


def numerics(op: Op, results: raw.Raw, devices: Sequence[Device]) -> list[str]:
    out = [
        "## Numerics",
        "",
        "In every output and every gradient, an implementation's error is at most twice that of "
        f"`eager` in the same dtype plus {_slack(op)} ([the contract](../numerics.md#the-contract)). "
        f"It is checked in {count(_checked(op), 'case')}.",
        "",
    ]
    if op.autocast is not None:
        out += [
            f"Under [`torch.autocast`](../numerics.md#under-torchautocast): {op.autocast}.",
            "",
        ]
    for device in devices:
        entries = [e for e in detail.checked(device, results, "parity") if e.op == op.name]
        if tried := [e for e in entries if e.data["status"] != "unavailable"]:
            out += [
                f"Measured on {device.name} ({device.kind}): the number of cases that hold, and the "
                "worst error as a fraction of its budget, with its tensor and case.",
                "",
                *detail.check_table(tried),
            ]
    return out


def _slack(op: Op) -> str:
    if callable(op.atol):
        return "an absolute slack that depends on the call"
    slack = {d: op.atol.get(d, contract.ATOL[d]) for d in FLOATS}
    return ", ".join(f"{value:.2g} ({short(d)})" for d, value in slack.items())


def _checked(op: Op) -> int:
    return sum(c.tags >= cases.CONTRACT for c in op.cases)


def performance(op: Op, devices: Sequence[Device]) -> list[str]:
    out = ["## Performance", ""]
    measured = [d for d in devices if any(n == op.name for n, _, _ in d.timed)]
    if not any(d.kind == "cuda" for d in measured):
        out += ["Not measured on a GPU yet.", ""]
    for device in measured:
        groups = [g for n, g in device.timed.items() if n[0] == op.name]
        raw_files = dict.fromkeys(
            f"[{g.source.folder}](../../bench/results/{g.source.folder})" for g in groups
        )
        out += [
            f"### {device.title}",
            "",
            "Medians [p20, p80] in ms of what `auto` takes; the last columns are its speedups over "
            "the other providers ([how](../benchmarking.md), "
            f"[reasons where it is slower](../performance_{device.slug}.md#where-auto-is-slower)). Raw: "
            f"{', '.join(raw_files)}.",
            "",
            '<div class="numbers" markdown>',
            "",
            *detail.op_table(device, op.name),
            "</div>",
            "",
        ]
    if op.goals:
        rows = []
        for goal in op.goals:
            on = [d for d in devices if goal.holds_for(d.name, d.capability)] or [None]
            rows += [goal_row(op, goal, d) for d in on]
        out += ["### Goals", "", *table(["op", "device", "goal", "worst", "best", "verdict"], rows)]
    return out


def _plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table without origins and without empty columns."""
    return table(head, [(cells, ()) for cells in rows])
