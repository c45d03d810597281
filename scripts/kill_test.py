"""Kills a run at random moments and resumes it, again and again, and compares its end with that of
a run that nothing disturbed.

    python scripts/kill_test.py --kills 50 [--seed 0] [--ranks 2] [--folder DIR]

Two ranks train a tiny model with FSDP2 on gloo and write asynchronous checkpoints, of which three
stay, among them the best by an evaluation after each step. One rank, at random, gets SIGKILL at a
random moment, then the other: in a step, in a copy, while a file is written or a folder renamed.
The next attempt resumes with
`train.load_checkpoint_path: auto`. When the run has ended, its losses, weights, moments and random
states must have the bits of the undisturbed run; with kills left, it starts over in a new folder.

Ranks are forked from this process, which has imported everything: an attempt costs a second.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import datasets  # noqa: F401 - which each rank would import
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from tilewright.trainer import train
from tilewright.trainer.engine import Engine

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def configuration(root: pathlib.Path, name: str, steps: int) -> str:
    """A run of its own folder, on data that all runs share."""
    (root / "model").mkdir(parents=True, exist_ok=True)
    (root / "model/config.json").write_text(json.dumps(SHAPE))
    tree = {
        "model": {"config_path": str(root / "model")},
        "data": {
            "datasets": [{"path": "dummy"}],
            "sample_packing_sequence_len": 32,
            "dataset_prepared_path": str(root / "prepared"),
            "pad_to_multiple_of": 8,
            "val_set_size": 4,
        },
        "train": {
            "output_dir": str(root / name),
            "lr": 1e-2,
            "lr_decay_style": "cosine",
            "max_steps": steps,
            "enable_mixed_precision": False,
            "save_epochs": 0,
            "save_steps": 2,
            "save_async": True,
            "save_total_limit": 3,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "best_metric": "eval_loss",
            "save_best": True,
            "save_hf_weights": False,
            "load_checkpoint_path": "auto",
        },
    }
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def drawing(step: Callable[..., float]) -> Callable[..., float]:
    """An optimizer's step that draws a number, which a run of this model does not: the random
    states of a checkpoint then differ from step to step.
    """

    def stepped(*args: Any, **kwargs: Any) -> float:
        torch.rand(())
        return step(*args, **kwargs)

    return stepped


def start(path: str, ranks: int, log: pathlib.Path, port: int) -> list[int]:
    """Forks the ranks of a run, which meet at the store on `port`; returns their process ids."""
    pids = []
    for rank in range(ranks):
        if child := os.fork():
            pids.append(child)
            continue
        code = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            Engine.optim_step = drawing(Engine.optim_step)
            code = train.main([path])
        except BaseException:  # of a rank whose neighbor was killed
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pids


def attempt(
    path: str, number: int, log: pathlib.Path, at: float | None, draw: random.Random
) -> tuple[bool, bool]:
    """Waits until all ranks of a run have ended; kills them once the clock shows `at`. Returns
    whether any was killed, and whether all ended well.
    """
    # This process's, so that no other takes the port before a rank listens there.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = start(path, number, log, store.port)
    left, killed, good = set(ranks), False, True
    while left:
        if at is not None and not killed and time.monotonic() >= at:
            first, *others = draw.sample(sorted(left), len(left))
            os.kill(first, signal.SIGKILL)
            time.sleep(draw.choice((0, 0, 0.01, 0.05)))
            for other in others:
                os.kill(other, signal.SIGKILL)
            killed = True
        for child in sorted(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.discard(child)
                good = good and os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.002)
    return killed, good


def end_of(folder: pathlib.Path) -> dict[str, object]:
    """All that must be equal: losses and norms of each step, evaluations, which checkpoint is the
    best, and the last one's contents.
    """
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [r for r in rows if "loss" in r]
    values: dict[str, object] = {
        f"step {r['step']}": (r["loss"], r["lr"], r["grad_norm"], r["tokens"]) for r in steps
    }
    values["steps"] = [r["step"] for r in steps]
    values["evaluations"] = [(r["step"], r["eval_loss"]) for r in rows if "eval_loss" in r]
    last = max(folder.glob("checkpoints/global_step_*"), key=lambda p: int(p.name.split("_")[-1]))
    state = json.loads((last / "state.json").read_text())
    best = folder / f"checkpoints/global_step_{state['best']['step']}"
    values["best"] = (best / "state.json").is_file() or f"{best} is gone"
    # Files have times and places in them; what they hold is compared below.
    values["state"] = {k: v for k, v in state.items() if k not in ("written", "files", "checksum")}
    for file in sorted(last.glob("random_*")):
        values[file.name] = {k: v.tolist() for k, v in load_file(file).items()}
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(last / "dcp", folder / "last.pt")
    flat, stack = {}, [("", torch.load(folder / "last.pt", weights_only=True))]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{name}/{k}", v) for k, v in value.items()]
        else:
            flat[name] = value.tolist() if torch.is_tensor(value) else value
    return values | flat


def differences(a: dict[str, object], b: dict[str, object]) -> list[str]:
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="default: a temporary one, removed at the end")
    options = parser.parse_args()
    root = pathlib.Path(options.folder or tempfile.mkdtemp(prefix="kill_test"))
    draw, ranks, log = random.Random(options.seed), options.ranks, root / "log"
    gc.freeze()  # what has been imported: each run collects garbage
    start_of_all = begin = time.monotonic()
    undisturbed = configuration(root, "undisturbed", options.steps)
    _, good = attempt(undisturbed, ranks, log, None, draw)
    if not good:
        print(log.read_text()[-4000:])
        return 1
    whole, wanted = time.monotonic() - begin, end_of(root / "undisturbed")
    kills = resumes = runs = 0
    while kills < options.kills:
        runs += 1
        path = configuration(root, f"run_{runs}", options.steps)
        while True:
            begin = time.monotonic()
            at = begin + draw.uniform(0.2, 0.9) * whole
            at = at if kills < options.kills else None
            killed, good = attempt(path, ranks, log, at, draw)
            kills += killed
            if not killed:
                whole = min(whole, time.monotonic() - begin)  # the first run prepares the data too
                break
            resumes += 1
        end = end_of(root / f"run_{runs}") if good else {}
        if wrong := differences(end, wanted):
            print(f"run {runs}, after {kills} kills: {wrong[:10]} differ")
            print(log.read_text()[-4000:])
            return 1
        if left := [*(root / f"run_{runs}/checkpoints").glob(".*")]:
            print(f"run {runs} has left {left}")
            return 1
        shutil.rmtree(root / f"run_{runs}")
    print(
        f"{kills} kills, {resumes} resumes, {runs} runs of {options.steps} steps: the bits of the "
        f"undisturbed run each time ({time.monotonic() - start_of_all:.0f} s)"
    )
    if options.folder is None:
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
