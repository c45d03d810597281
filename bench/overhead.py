"""Measures dispatch overhead: the same tiny call at several depths, in microseconds.

public: the op's function, with its argument checks.
launch: Triton's own launch of the first kernel, `kernel[grid](...)`, for Triton's implementations.
kept: the same launch through the cache of `kernels.launch`, as launchers do it; the lower bound of
    any such call.
resolved: the callable from `Op.resolve`, with the arguments that the public function passes on.
operator: the first registered torch operator that it calls, alone.
pick: `Op.pick` alone, the look-up between public and resolved.

`not_launched` measures Triton's implementations without a GPU: all host work except the driver's
call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from tilewright.bench import timing
from tilewright.core import platform
from tilewright.core.registry import Op, short
from tilewright.core.torch_names import TorchDispatchMode
from tilewright.selection import operations
from tilewright_lab import pretend

# Microseconds of a call above Triton's launch of its first kernel, on a GPU's machine: without and
# with a graph recorded.
GOALS = {False: 8.0, True: 15.0}
LEVELS = ("public", "resolved", "operator", "launch", "kept", "pick")


class _FirstOperator(TorchDispatchMode):
    """Records the first call of an operator of tilewright, with its arguments."""

    first_call: tuple | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.first_call is None and func.namespace == "tilewright":
            self.first_call = func, args, kwargs or {}
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def not_launched(arch: int = 90) -> Iterator[None]:
    """Inside, Triton's implementations accept CPU tensors. Kernels are compiled for compute
    capability `arch` (90: 9.0), and each call binds and specializes its arguments as for a GPU, but
    launches nothing: results are uninitialized memory.
    """
    from triton.runtime import driver

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", pretend.NoDriver(arch)))
        stack.enter_context(mock.patch.object(platform, "interpreting", lambda: True))
        for op in operations().values():  # choices made inside must not remain outside
            stack.enter_context(op.fresh_choices())
        yield


@contextlib.contextmanager
def _first_launch() -> Iterator[dict[str, Callable[[], object]]]:
    """Collects the first launch of a Triton kernel inside the block, as callables that repeat it
    through Triton and through the launch cache.
    """
    callables: dict[str, Callable[[], object]] = {}
    if platform.no_module("triton"):
        yield callables
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from tilewright.kernels import launch as launch_cache

    launch_cache.clear_launch_cache()  # so that Triton launches
    with contextlib.ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            run = kind.run

            def spy(kernel, *args, run=run, **options):
                if not callables:
                    constants = {
                        name: value
                        for name, value in options.items()
                        if name not in ("grid", "warmup")
                    }
                    callables["launch"] = lambda: run(kernel, *args, **options)
                    callables["kept"] = lambda: launch_cache.launch(
                        kernel, options["grid"], *args, **constants
                    )
                return run(kernel, *args, **options)

            stack.enter_context(mock.patch.object(kind, "run", spy))
        yield callables


def levels(op: Op, name: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """A callable for each depth; "operator" is absent if the implementation calls no operator of
    tilewright.

    The arguments at each depth are those of one recorded public call.
    """
    passed: list[tuple] = []
    recorder = _FirstOperator()
    pick = op.pick

    def recording_pick(name, *pick_args):
        resolved = pick(name, *pick_args)

        def record(*args, **options):
            passed.append((resolved, pick_args, args, options))
            # Not around the public call, which checks its arguments by operators too.
            with recorder:
                return resolved(*args, **options)

        return record

    with mock.patch.object(op, "pick", recording_pick), _first_launch() as launches:
        op.public(**kwargs, implementation=name)
    resolved, pick_args, args, options = passed[0]
    callables = {
        "public": lambda: op.public(**kwargs, implementation=name),
        "resolved": lambda: resolved(*args, **options),
        "pick": lambda: op.pick(name, *pick_args),
    }
    if recorder.first_call is not None:
        operator, inner, inner_options = recorder.first_call
        callables["operator"] = lambda: operator(*inner, **inner_options)
    return {**callables, **launches}


def overhead(
    ops: Iterable[Op],
    device: str,
    dtype: torch.dtype,
    *,
    rounds: int = 30,
    sample_seconds: float = 0.004,
    implementation: str | None = None,
) -> list[dict[str, Any]]:
    """A row for each op, with and without recording an autograd graph: interleaved medians and
    minima in microseconds.

    implementation: measured for ops that have it; default: what `auto` resolves to.

    The input is the op's first contract case, so tiny that the kernel itself takes next to nothing.
    This is host time on both device types: on CUDA the calls are queued without synchronization.
    """
    rows = []
    timer = timing.CpuClock(sample_seconds)
    for op in ops:
        case = next((c for c in op.cases if "contract" in c.tags), None)
        if case is None or (implementation is not None and implementation not in op.names()):
            continue
        name = implementation or op.choose(device, dtype)
        inputs = case.make(device, dtype, 0)
        for grad in (False, True):
            kwargs = {
                k: v.detach().requires_grad_(grad and v.requires_grad)
                if isinstance(v, torch.Tensor)
                else v
                for k, v in inputs.items()
            }
            timings, errors = timing.interleave(levels(op, name, kwargs), timer, rounds=rounds)
            row = {
                "op": op.name,
                "implementation": name,
                "case": case.name,
                "dtype": short(dtype),
                "grad": grad,
                "errors": errors,
                "us": {},
            }
            for level in LEVELS:
                t = timings.get(level)
                row["us"][level] = t and {
                    "median": t.median * 1e6,
                    "p20": t.p20 * 1e6,
                    "p80": t.p80 * 1e6,
                    "least": min(t.samples) * 1e6,
                }
            public, operator, launch = (row["us"][n] for n in ("public", "operator", "launch"))
            row["overhead_us"] = (
                public["median"] - operator["median"] if public and operator else None
            )
            row["over_launch_us"] = (
                public["median"] - launch["median"] if public and launch else None
            )
            # Minima are the most robust to other processes on the CPU.
            row["least_over_launch_us"] = (
                public["least"] - launch["least"] if public and launch else None
            )
            rows.append(row)
    return rows


def goal_text(row: dict[str, Any]) -> str:
    """A row's goal, and whether it is met; "-" where there is no launch to compare with."""
    if row["over_launch_us"] is None:
        return "-"
    most = GOALS[row["grad"]]
    return f"{most:g} us: {'met' if row['over_launch_us'] <= most else 'missed'}"


def table(rows: Iterable[dict[str, Any]]) -> str:
    out = [
        f"{'op':<22} {'implementation':<14} {'grad':<5} "
        + " ".join(f"{level + ' us':>12}" for level in LEVELS)
        + f" {'public - operator':>18} {'public - launch':>16} {'of least times':>15} {'goal':>14}"
    ]
    for r in rows:
        cells = [
            f"{r['us'][level]['median']:12.2f}" if r["us"][level] else f"{'-':>12}"
            for level in LEVELS
        ]
        over = [
            f"{'-' if r[n] is None else f'{r[n]:.2f} us':>{width}}"
            for n, width in (
                ("overhead_us", 18),
                ("over_launch_us", 16),
                ("least_over_launch_us", 15),
            )
        ]
        out.append(
            f"{r['op']:<22} {r['implementation']:<14} {'yes' if r['grad'] else 'no':<5} "
            + " ".join((*cells, *over, f"{goal_text(r):>14}"))
        )
        out += [f"  {level}: {reason}" for level, reason in r["errors"].items()]
    return "\n".join(out)
