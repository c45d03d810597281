"""The memory that preparing data of several sizes takes, and reading a whole epoch of them.

    python -m bench data-memory [--megabytes N ...] [--tokenizer FOLDER] [--files jsonl] --out DIR

Passages of examples/data/shakespeare, in random order, are written to one file, as rows (jsonl) or
as one document (txt), and prepared as the trainer would. Without a tokenizer a token is four bytes.
A further process then reads every batch of an epoch, in the order of training. Sampled are the
process and those that it starts, in MiB, at their peak: `pss` counts a page that processes share
once, and with mapped pages of files, which the system takes back when it needs them; `anonymous`
counts what it cannot take back. `begun` is what had been there before the first row or batch.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import commands
from tilewright.bench.options import at_least

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = {"Pss": "pss", "Pss_Anon": "anonymous"}
BIN, EVERY = 4096, 0.05  # tokens of a bin; seconds between samples


def write_text(path: pathlib.Path, size: int) -> None:
    files = sorted((ROOT / "examples/data/shakespeare/train").iterdir())
    passages = [p for f in files for p in f.read_text().split("\n\n") if p.strip()]
    rng, written = random.Random(0), 0
    with path.open("w") as out:
        while written < size:
            text = "\n\n".join(rng.choices(passages, k=rng.randint(2, 40)))
            row = json.dumps({"text": text}) if path.suffix == ".jsonl" else text
            written += out.write(row + "\n")


# ---- in a process of its own


def _config(path: str, folder: str, tokenizer: str) -> Any:
    from tilewright.trainer.config import Config

    data = {
        "datasets": [{"path": path, "type": "text"}],
        "dataset_prepared_path": f"{folder}/prepared",
        "sample_packing_sequence_len": BIN,
    }
    train = {"output_dir": f"{folder}/out", "data_parallel_mode": "none"}
    model = {"config_path": tokenizer or "-"}
    return Config.model_validate({"model": model, "data": data, "train": train})


class _FourBytes:
    """A tokenizer that takes no time: a token is four bytes."""

    eos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        import numpy as np

        data = text.encode()
        return {"input_ids": np.frombuffer(data[: len(data) // 4 * 4], np.uint32) % 50_000}


def work(phase: str, path: str, folder: str, tokenizer: str) -> None:
    """phase: prepare, or read, what has been prepared. Prints `begun` before either, and at the end
    the number of samples, bins, or tokens.
    """
    datasets: Any = importlib.import_module("datasets")
    from tilewright.trainer.build import load_tokenizer
    from tilewright.trainer.data.batches import Batches, Bins
    from tilewright.trainer.data.prepared import prepare

    datasets.config.HF_DATASETS_CACHE = pathlib.Path(folder, "cache")
    datasets.disable_progress_bars()
    config = _config(path, folder, tokenizer)

    def loaded() -> Any:
        return load_tokenizer(tokenizer) if tokenizer else _FourBytes()

    print("begun", flush=True)
    made = prepare(
        config.data.datasets, config.data, config.model, config.train.seed, loaded, 1 << 20
    )
    if phase == "prepare":
        print(len(made))
        return
    bins = Bins(made, config.data)
    bins.identity()
    batches = Batches(bins, config.data, config.train)
    for _, step in zip(range(batches.steps_per_epoch), batches.steps(), strict=False):
        assert step[0]["input_ids"].shape[1] > 0
    print(batches.tokens)


# ---- watching it


def family(pid: int) -> list[int]:
    """A process and those that it has started."""
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for t in tasks for c in (t / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [pid, *(p for child in children for p in family(child))]


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process and those that it has started."""
    total = dict.fromkeys(NAMES.values(), 0)
    for one in family(pid):
        try:
            lines = pathlib.Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        for name, _, rest in (line.partition(":") for line in lines):
            if name in NAMES:
                total[NAMES[name]] += int(rest.split()[0]) * 1024
    return total


def watched(
    arguments: Sequence[str], sample: Callable[[int], dict[str, int]] = memory
) -> dict[str, Any]:
    """A phase's peaks, its processes, seconds, and the number that it has printed."""
    code = "import sys; from bench.data_memory import work; work(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        if child.stdout is None or child.stdout.readline().strip() != "begun":
            sys.exit(f"error: {arguments[0]} has failed")
        begun, clock = sample(child.pid), time.monotonic()
        peak, processes = dict(begun), 1
        while child.poll() is None:
            now = sample(child.pid)
            peak = {name: max(most, now[name]) for name, most in peak.items()}
            processes = max(processes, len(family(child.pid)))
            time.sleep(EVERY)
        seconds, said = time.monotonic() - clock, child.stdout.read().split()
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        sys.exit(f"error: {arguments[0]} has failed")
    return {
        "begun_mib": {name: round(n / 2**20, 1) for name, n in begun.items()},
        "peak_mib": {name: round(n / 2**20, 1) for name, n in peak.items()},
        "processes": processes,
        "seconds": round(seconds, 1),
        "counted": int(said[-1]),
    }


def main(argv: Sequence[str]) -> int:
    parser = commands.parser("data-memory", __doc__)
    parser.add_argument(
        "--megabytes", type=at_least(1, int), nargs="+", default=[64, 256, 1024], metavar="N"
    )
    parser.add_argument("--tokenizer", default="", metavar="FOLDER")
    parser.add_argument("--files", choices=["jsonl", "txt"], default="jsonl")
    parser.add_argument("--folder", metavar="DIR", help="for the data; default: the system's")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write data_memory.json")
    args = parser.parse_args(argv)
    commands.need(parser)
    meta = commands.metadata(
        "data-memory", argv, {n: getattr(args, n) for n in ("megabytes", "tokenizer", "files")}
    )
    rows = []
    for size in args.megabytes:
        with tempfile.TemporaryDirectory(prefix="tilewright-", dir=args.folder) as folder:
            path = pathlib.Path(folder, f"data.{args.files}")
            write_text(path, size << 20)
            given = (str(path), folder, args.tokenizer)
            row: dict[str, Any] = {"bytes": path.stat().st_size}
            for phase in ("prepare", "read"):
                row[phase] = watched((phase, *given))
            rows.append(row)
        peaks = "; ".join(
            f"{phase} {row[phase]['peak_mib']['anonymous']:.0f} MiB anonymous, "
            f"{row[phase]['begun_mib']['anonymous']:.0f} of them before"
            for phase in ("prepare", "read")
        )
        print(f"{row['bytes'] / 2**20:.0f} MiB of text: {peaks}", flush=True)
    if args.out:
        commands.write(args.out / "data_memory.json", meta, rows)
    return 0
