"""Judges compiled kernels by the rules, their needs, and their budgets."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tilewright.kernels.device import SMS, resident
from tilewright_lab.gate.compilers import SHARED_LIMIT, Facts, Result

BUDGETED = (
    "registers",
    "shared",
    "load",
    "store",
    "uses",
    "sass_load",
    "sass_store",
    "wide_loads",
    "wide_stores",
    "sass_uses",
    "per_element",
)


def budgeted(name: str) -> bool:
    """Whether a kernel has budgets. Searched configurations change with every search and are judged
    by the rules alone.
    """
    return "[" not in name


def problems(result: Result, spec: Any = None) -> list[str]:
    """Faults of a kernel regardless of its budget. spec: may accept bytes of stack."""
    f = result.facts
    if f is None:
        return [f"does not compile: {result.error}"]
    faults = []
    stack = getattr(spec, "stack", {}).get(result.arch, 0)
    accepted = not f.spill and f.local <= stack
    if not accepted:
        faults.append(
            f"spills {f.spill} bytes a thread, has {f.local} bytes of stack and local memory; "
            "accepted: 0"
        )
    if f.local_instructions and not (accepted and f.local):
        faults.append(
            f"has {f.local_instructions} loads and stores of local memory (LDL, STL); accepted: 0"
        )
    if f.serialized and not getattr(spec, "serial", False):
        faults.append("ptxas serializes its wgmma: something reads their sums while they run")
    limit = SHARED_LIMIT[result.arch]
    if f.shared > limit:
        faults.append(f"needs {f.shared} bytes of shared memory, sm_{result.arch} has {limit}")
    return faults


def unmet(result: Result, spec: Any) -> list[str]:
    """The spec's needs that the kernel does not meet, regardless of its budget."""
    f = result.facts
    if f is None:
        return []
    faults = []
    if f.loop_divisions:
        faults.append(f"has {f.loop_divisions} divisions in loops; accepted: 0")
    for kind in ("load", "store"):
        need, have = (
            getattr(spec, kind),
            {"PTX": getattr(f, kind), "SASS": getattr(f, f"sass_{kind}")},
        )
        if any(bits is not None and bits < need for bits in have.values()):
            faults.append(
                f"needs a global {kind} of {need} bits, the widest has "
                + " and ".join(
                    f"{bits} in {where}" for where, bits in have.items() if bits is not None
                )
            )
    claim, warps = getattr(spec, "per_sm", 1), getattr(spec, "num_warps", 1)
    held = resident(f.registers, f.shared, warps, SMS[result.arch])
    if held < claim:
        faults.append(
            f"counts on {claim} blocks per SM, which holds {held} of {f.registers} registers a "
            f"thread, {f.shared} bytes of shared memory and {warps} warps"
        )
    for name in spec.uses.get(result.arch, ()):
        have = {"PTX": f.uses, "SASS": f.sass_uses}
        if any(uses is not None and name not in uses for uses in have.values()):
            faults.append(
                f"needs {name}, uses "
                + " and ".join(
                    f"{'+'.join(uses) or 'none such'} in {where}"
                    for where, uses in have.items()
                    if uses is not None
                )
            )
    return faults


def over_budget(result: Result, budget: dict[str, Any] | None) -> list[str]:
    """Facts that are worse than the budget."""
    f = result.facts
    if f is None:
        return []
    if budget is None:
        return ["has no budget; --update writes one"]
    faults = [
        f"{description}: {getattr(f, key)}, budget {budget[key]}"
        for key, description in (
            ("registers", "registers a thread"),
            ("shared", "bytes of shared memory"),
        )
        if getattr(f, key) > budget[key]
    ]
    if _known(f, budget, "per_element") and f.per_element > budget["per_element"]:
        faults.append(f"instructions an element: {f.per_element}, budget {budget['per_element']}")
    least = (
        ("load", "widest global load", " bits"),
        ("store", "widest global store", " bits"),
        ("sass_load", "widest global load in SASS", " bits"),
        ("sass_store", "widest global store in SASS", " bits"),
        ("wide_loads", "loaded by 128 bits or more", "%"),
        ("wide_stores", "stored by 128 bits or more", "%"),
    )
    faults += [
        f"{description}: {getattr(f, key)}{unit}, budget {budget[key]}"
        for key, description, unit in least
        if _known(f, budget, key) and getattr(f, key) < budget[key]
    ]
    return faults + [
        f"no longer uses {name}{where}"
        for key, where in (("uses", ""), ("sass_uses", " in SASS"))
        if _known(f, budget, key)
        for name in budget[key]
        if name not in getattr(f, key)
    ]


def _known(facts: Facts, budget: dict[str, Any], key: str) -> bool:
    """False if machine code could not be read here, or where the budget was written."""
    return getattr(facts, key) is not None and key in budget


def judge(
    results: Sequence[Result],
    specs: dict[str, Any],
    budgets: dict[str, Any] | None,
    stale: Iterable[str],
) -> list[str]:
    """One sentence per failure.

    budgets: None if this compiler has none; then nothing is compared.
    stale: keys of budgets whose kernels no longer exist.
    """
    failures = [
        f"{r.key}: {p}"
        for r in results
        for p in [
            *problems(r, specs[r.name]),
            *unmet(r, specs[r.name]),
            *(
                []
                if budgets is None or not budgeted(r.name)
                else over_budget(r, budgets.get(r.key))
            ),
        ]
    ]
    return failures + [f"{key}: has a budget but no kernel; --update removes it" for key in stale]


def write_budgets(path: pathlib.Path, budgets: dict[str, Any]) -> None:
    lines = [f"  {json.dumps(key)}: {json.dumps(budgets[key])}" for key in sorted(budgets)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # one line per kernel, for readable diffs


def table(results: Sequence[Result], archs: Sequence[int]) -> str:
    """One line per kernel: a number per architecture, or one number if they agree. "an element" is
    there if a kernel has it.
    """
    by_name: dict[str, list[Result]] = {}
    for r in results:
        by_name.setdefault(r.name, []).append(r)
    heads = "for " + ", ".join(f"sm_{a}" for a in archs)
    width = max(map(len, [heads, *by_name]))
    counted = any(r.facts and r.facts.per_element is not None for r in results)
    row = f"{{:<{width}}}  {{:<12}}{{:<13}}{{:<20}}{{:<17}}{{:<13}}{{:<22}}"
    row += f"{'{:<18}' if counted else '{:.0}'}{{}}"
    lines = [
        row.format(
            heads,
            "registers",
            "spill+local",
            "shared",
            "load/store bits",
            "in SASS",
            "wide bytes, %",
            "an element",
            "uses",
        )
    ]
    for name, kernel_results in by_name.items():

        def column(show, kernel_results=kernel_results):
            values = [show(r.facts) if r.facts else "-" for r in kernel_results]
            return values[0] if len(set(values)) == 1 else " ".join(values)

        lines.append(
            row.format(
                name,
                column(lambda f: str(f.registers)),
                column(lambda f: str(f.spill + f.local)),
                column(lambda f: str(f.shared)),
                column(lambda f: f"{f.load}/{f.store}"),
                column(lambda f: "-" if f.sass_load is None else f"{f.sass_load}/{f.sass_store}"),
                column(lambda f: "-" if f.sass_load is None else f"{f.wide_loads}/{f.wide_stores}"),
                column(lambda f: "-" if f.per_element is None else str(f.per_element)),
                column(lambda f: "+".join(f.uses) or "-"),
            )
        )
    return "\n".join(lines)
