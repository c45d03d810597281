"""Reads results whose implementation has another name by now.

Until 2026-11-30, `triton` named on compute capability 9.0 what `gluon` names since: launches of
Triton's kernels and, where a configuration said so, of specialized warps in Gluon. So what was
measured there as `triton`, in 16 bits and by sources whose heuristics had such configurations, is
read as `gluon`'s. Files keep what they say.
"""

from __future__ import annotations

from typing import Any

# By op: from when on the measured sources had them.
SINCE = {
    **dict.fromkeys(
        ("attention", "fp8_linear", "grouped_gemm", "low_precision_linear", "moe_lora", "moe_mlp"),
        "2026-11-26T16:05",
    ),
    "newton_schulz": "2026-11-26T16:53",
}
UNTIL = "2026-11-30"
# Cases that `gluon` refuses, or that `auto` gives to `triton`, by the beginnings of their names.
OTHERS = {
    "attention": ("dropout", "gemma-3-12b_8k", "latent", "softcap"),
    "low_precision_linear": ("mxfp8", "nvfp4"),
}


def named_now(document: dict[str, Any]) -> dict[str, Any]:
    """A document of a suite with today's names of implementations."""
    meta = document["meta"]
    if meta.get("capability") != "9.0" or meta["date"] >= UNTIL:
        return document
    about = {n: document[n] for n in ("op", "case") if n in document}
    kinds = {"rows": "provider", "results": "implementation"}
    changed = {
        kind: [_renamed({**about, **row}, row, name, meta["date"]) for row in document[kind]]
        for kind, name in kinds.items()
        if document.get(kind)
    }
    return {**document, **changed}


def _renamed(about: dict, row: dict[str, Any], name: str, date: str) -> dict[str, Any]:
    op, case = str(about.get("op")), str(about.get("case"))
    is_gluon = (
        row.get(name) == "triton"
        and row.get("dtype") in ("bfloat16", "float16")
        and SINCE.get(op, UNTIL) <= date
        and not case.startswith(OTHERS.get(op, ("\0",)))
    )
    return {**row, name: "gluon"} if is_gluon else row
