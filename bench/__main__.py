"""python -m bench: measurements of a checkout, and the pages that report them.

`python -m tilewright.bench` times, compares and tunes wherever the package is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from tilewright import lab
from tilewright.core import platform

# name -> (module with main(argv), help). Imported on demand.
COMMANDS = {
    "suite": ("bench.suite", "check and time every op within a time budget; resumable"),
    "search": ("bench.search", "search the launch configurations behind goals that were missed"),
    "gpu-cache": (
        "bench.gpu_cache",
        "fill Triton's cache with the kernels that a GPU launches first, without a GPU",
    ),
    "gate-variants": (
        "bench.gate_variants",
        "compile the alternative of every open question about a launch configuration",
    ),
    "margins": (
        "bench.margins",
        "write bench/margins.json, or print it of some ops: errors as shares of what is allowed",
    ),
    "rehearse": (
        "bench.rehearse",
        "run the first call on a GPU on a simulated one, and estimate its clock",
    ),
    "profile": (
        "bench.profile",
        "list the kernels of each pass of a timed case, with their times, on a CUDA device",
    ),
    "predict": (
        "bench.predict",
        "write bench/predicted/predicted.json: times of the goals' cases by arithmetic on counts, without a GPU",
    ),
    "end-to-end": (
        "bench.end_to_end",
        "time training steps of the trainer and of transformers' model, on a CPU or a GPU",
    ),
    "preference": (
        "bench.preference",
        "time steps of DPO by the trainer and by TRL, on a CPU",
    ),
    "truth": (
        "bench.truth",
        "write docs/trainer/truth.md: losses and gradients of each layout beside those in float64",
    ),
    "shared-prefix": (
        "bench.shared_prefix",
        "time passes of DPO with and without shared prompts, on a CPU",
    ),
    "layouts": (
        "bench.layouts",
        "train with each layout of the trainer, and of transformers' Trainer, on a CPU",
    ),
    "memory": (
        "bench.memory",
        "compare the trainer's plan of memory with the allocator's count, for pipelines on a CPU",
    ),
    "data-memory": (
        "bench.data_memory",
        "measure the memory of preparing data of several sizes, and of reading them",
    ),
    "data-waiting": (
        "bench.data_waiting",
        "measure how long steps of the demo wait for their batches, on two ranks of a CPU",
    ),
    "evaluation-speed": (
        "bench.evaluation_speed",
        "time evaluations of the demo's model and bare forward passes, on a CPU",
    ),
    "server": (
        "bench.server",
        "measure a training server beside its engine in process, on a CPU",
    ),
    "rollout": (
        "bench.rollout",
        "time samples beside transformers' generate, and how soon new weights are sampled",
    ),
    "optim": (
        "bench.optim",
        "time steps of AdamW beside torch's and torchao's, in float32 and bfloat16",
    ),
    "ops": ("bench.page.ops", "write the table of docs/ops.md from the ops' docstrings"),
    "report": ("bench.page.build", "write docs/performance.md from committed raw results"),
}
BUDGETED = ("suite", "search")  # their minutes count from the start of the process


@platform.command
def main(argv: list[str] | None = None, start_time: float | None = None) -> int:
    """start_time: when the process started, for commands with a time budget (default: now)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        try:
            with lab.needed(f"python -m bench {argv[0]}: a part of it"):
                command = importlib.import_module(COMMANDS[argv[0]][0]).main
        except lab.LabMissing as error:
            print(error, file=sys.stderr)
            return 2
        more = (start_time,) if argv[0] in BUDGETED else ()
        return command(argv[1:], *more) or 0
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    for name, (_, about) in COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    parser.parse_args(argv)
    parser.print_help()
    return 2


if __name__ == "__main__":
    from tilewright.bench.runner import started

    sys.exit(main(start_time=started()))
