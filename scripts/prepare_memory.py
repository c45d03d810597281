"""The memory that preparing a data set of text takes, over all processes.

    python scripts/prepare_memory.py .cache/smollm2 [--megabytes 1024] [--files jsonl] [--out X]

The tokenizer `quick` makes a token of every four bytes.

Writes passages of examples/data/shakespeare, in random order, to one file, as rows (jsonl) or as
one document (txt), and prepares it as the trainer would. Samples the process and those that it
starts, and prints the peaks of their resident memory: `pss` counts a page that processes share
once, `rss` in each of them; both count mapped pages of files, which `anonymous` does not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = {"Rss": "rss", "Pss": "pss", "Anonymous": "anonymous"}
CHILD = """
import sys, datasets
import numpy as np
from tilewright.trainer.build import load_tokenizer
from tilewright.trainer.config import Config
from tilewright.trainer.data.prepared import prepare
path, tokenizer, prepared, workers = sys.argv[1:]
datasets.config.HF_DATASETS_CACHE = prepared + "-cache"
config = Config(
    model={"config_path": tokenizer},
    data={
        "datasets": [{"path": path, "type": "text"}],
        "dataset_prepared_path": prepared,
        "sample_packing_sequence_len": 4096,
        "dataset_num_proc": int(workers) or None,
    },
    train={"output_dir": "unused"},
)
class Quick:
    eos_token_id = 0

    def __call__(self, text, add_special_tokens=True):
        data = text.encode()
        return {"input_ids": np.frombuffer(data[: len(data) // 4 * 4], np.uint32) % 50000}

def loaded():
    return Quick() if tokenizer == "quick" else load_tokenizer(tokenizer)

made = prepare(config.data.datasets, config.data, config.model, config.train.seed, loaded, 1 << 20)
print(len(made))
"""


def write(path: pathlib.Path, size: int) -> None:
    files = sorted((ROOT / "examples/data/shakespeare/train").iterdir())
    passages = [p for f in files for p in f.read_text().split("\n\n") if p.strip()]
    rng, written = random.Random(0), 0
    with path.open("w") as out:
        while written < size:
            text = "\n\n".join(rng.choices(passages, k=rng.randint(2, 40)))
            row = json.dumps({"text": text}) if path.suffix == ".jsonl" else text
            written += out.write(row + "\n")


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--files", choices=["jsonl", "txt"], default="jsonl")
    parser.add_argument("--workers", type=int, default=0, help="0: the trainer's default")
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="prepare-memory-"))
    try:
        path = folder / f"data.{given.files}"
        write(path, given.megabytes << 20)
        begun, peak, processes = time.monotonic(), dict.fromkeys(NAMES.values(), 0), 0
        command = [sys.executable, "-c", CHILD, str(path), given.tokenizer, str(folder / "made")]
        child = subprocess.Popen(
            [*command, str(given.workers)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        try:
            while child.poll() is None:
                now = memory(child.pid)
                peak = {name: max(most, now[name]) for name, most in peak.items()}
                processes = max(processes, len(family(child.pid)))
                time.sleep(0.1)
        finally:
            child.kill()
        if child.returncode or child.stdout is None:
            sys.exit("error: preparation has failed")
        packages = ("torch", "datasets", "pyarrow", "tokenizers", "transformers")
        result = {
            "command": f"python scripts/prepare_memory.py {' '.join(sys.argv[1:])}",
            "bytes": path.stat().st_size,
            "samples": int(child.stdout.read().split()[-1]),
            "seconds": round(time.monotonic() - begun, 1),
            "processes": processes,
            "cpus": len(os.sched_getaffinity(0)),
            "peak_mib": {name: most >> 20 for name, most in peak.items()},
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
