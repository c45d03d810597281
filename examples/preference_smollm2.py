"""Preference training (DPO) of SmolLM2-135M on a CPU, and its adapter in transformers.

    make .cache/smollm2/config.json
    python examples/preference_smollm2.py
    # Writes examples/data/preferences anew:
    python examples/preference_smollm2.py --make-data

A pair's prompt is a speaker and two lines of a play. The chosen answer is the next line in
capitals, the rejected one that line as it is. Held out are pairs of The Tempest. The run exits with
1 if their reward accuracy is at most 0.9 at the end, or if the adapter's log-probabilities in
transformers are not the trainer's.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch
from measurement import ROOT
from torch.nn import functional as F

from tilewright.core import platform

WEIGHTS, OUT = ROOT / ".cache/smollm2", ROOT / "outputs/preference_smollm2"
PLAYS, PAIRS = ROOT / "examples/data/shakespeare", ROOT / "examples/data/preferences"
SETS = {"train": ("train", 160), "test": ("heldout", 40)}  # of plays, and the number of pairs
SPEAKER = re.compile(r"[A-Z][A-Za-z. ]+")
LEAST = 30  # characters of an answer
BATCH = 10  # pairs
BOUND = 0.9
CLOSE = 0.01  # nats


# ---- the data


def pairs_of(play: pathlib.Path) -> list[dict[str, str]]:
    """A pair of each speech of a play with three lines, if the third is long enough."""
    pairs = []
    for block in play.read_text().split("\n\n"):
        speaker, *lines = (line.strip() for line in block.strip().splitlines() or [""])
        if len(lines) < 3 or len(lines[2]) < LEAST or not SPEAKER.fullmatch(speaker):
            continue
        if "[" not in block and "]" not in block:  # stage directions
            prompt = "\n".join((speaker, *lines[:2], ""))
            pairs.append({"prompt": prompt, "chosen": lines[2].upper(), "rejected": lines[2]})
    return pairs


def make_data() -> None:
    """Writes so many of the pairs of a folder of plays, at equal distances."""
    for name, (folder, count) in SETS.items():
        pairs = [pair for play in sorted((PLAYS / folder).glob("*.txt")) for pair in pairs_of(play)]
        chosen = [pairs[i * len(pairs) // count] for i in range(count)]
        (PAIRS / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in chosen))
        print(f"{name}.jsonl: {len(chosen)} of {len(pairs)} pairs")


# ---- the model in transformers


class Scores(NamedTuple):
    """Log-probabilities of the answers of pairs, in nats, [pairs]."""

    chosen: torch.Tensor
    rejected: torch.Tensor

    @property
    def accuracy(self) -> float:
        return (self.chosen > self.rejected).double().mean().item()

    @property
    def margin(self) -> float:
        return (self.chosen - self.rejected).mean().item()

    def since(self, before: Scores) -> Scores:
        """Log-ratios: rewards, over beta."""
        return Scores(self.chosen - before.chosen, self.rejected - before.rejected)


@torch.no_grad()
def scores(model: Any, tokenizer: Any, pairs: list[dict[str, str]]) -> Scores:
    """The answers' tokens are those that the trainer has labels for: with the end token."""
    by_name: dict[str, list[torch.Tensor]] = {name: [] for name in Scores._fields}
    for name, sums in by_name.items():
        for first in range(0, len(pairs), BATCH):
            some = pairs[first : first + BATCH]
            prompts = [len(tokenizer(p["prompt"])["input_ids"]) for p in some]
            texts = [p["prompt"] + p[name] + tokenizer.eos_token for p in some]
            batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
            ids, mask = batch["input_ids"], batch["attention_mask"]
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            position = torch.arange(1, ids.shape[1])
            answer = mask[:, 1:].bool() & (position >= torch.tensor(prompts)[:, None])
            sums.append(-loss.double().where(answer, 0.0).sum(1))
    return Scores(*(torch.cat(by_name[name]) for name in Scores._fields))


# ---- the run


def draw(rows: list[dict[str, Any]], target: pathlib.Path) -> None:
    """The loss, the reward accuracy and the reward margin by optimizer steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5), dpi=120, layout="tight")
    # Until a step has changed weights all rewards are 0, and no pair is right or wrong.
    rewarded = [r for r in rows if r.get("drift", r.get("eval_drift"))]
    panels = (("loss", rows), ("reward_accuracy", rewarded), ("reward_margin", rows))
    for axes, (key, shown) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, label, style in ((key, "training", "-"), (f"eval_{key}", "held out", "o--")):
            points = [(r["step"], r[name]) for r in shown if name in r]
            axes.plot(*zip(*points, strict=True), style, linewidth=1, label=label)
        axes.set(xlabel="optimizer step", ylabel=key.replace("_", " "))
        axes.grid(alpha=0.3)
    figure.axes[1].set_ylim(0, 1.05)
    figure.axes[0].legend()
    figure.savefig(target)


def compared(adapter: pathlib.Path) -> tuple[Scores, Scores]:
    """Scores of the held-out pairs by transformers: of the model, and with the adapter by peft."""
    import transformers
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    pairs = [json.loads(line) for line in (PAIRS / "test.jsonl").read_text().splitlines()]
    before = scores(model, tokenizer, pairs)
    return before, scores(PeftModel.from_pretrained(model, adapter), tokenizer, pairs)


def main(arguments: list[str]) -> int:
    if not (WEIGHTS / "config.json").is_file():
        return failed(f"{WEIGHTS} has no model; run `make .cache/smollm2/config.json`")
    if missing := platform.no_module("peft"):  # it reads the adapter, after training
        return failed(missing)
    started, folder = time.monotonic(), OUT / "run"
    shutil.rmtree(folder, ignore_errors=True)
    config = "examples/preference_smollm2.yaml"
    command = [sys.executable, "-m", "tilewright.trainer.train", config, *arguments]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        return code
    minutes = (time.monotonic() - started) / 60
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = (r for r in rows if "eval_loss" in r)
    draw(rows, OUT / "preference.png")
    [adapter] = folder.glob("checkpoints/global_step_*/hf")
    before, after = compared(adapter)
    rewards = after.since(before)

    print(f"\ntrained {last['step']} steps in {minutes:.1f} minutes")
    table = [
        ("of the held-out pairs", "before", "after"),
        *(
            (name, first[f"eval_{name}"], last[f"eval_{name}"])
            for name in ("loss", "logprob_chosen", "logprob_rejected", "reward_margin")
        ),
        # Before the first step all rewards are 0.
        ("reward_accuracy", "-", last["eval_reward_accuracy"]),
        ("in transformers, the adapter by peft", "", ""),
        ("reward_accuracy", "-", rewards.accuracy),
        ("log p(chosen) > log p(rejected), share", before.accuracy, after.accuracy),
        ("log p(chosen) - log p(rejected), mean", before.margin, after.margin),
    ]
    for name, *values in table:
        shown = (f"{v:.3f}" if isinstance(v, float) else v for v in values)
        print(f"{name:40}" + "".join(f"{v:>10}" for v in shown))
    print(f"curves   {(OUT / 'preference.png').relative_to(ROOT)}")
    print(f"adapter  {adapter.relative_to(ROOT)}")

    trainers = last["eval_logprob_chosen"] - last["eval_logprob_rejected"]
    if min(last["eval_reward_accuracy"], rewards.accuracy) <= BOUND:
        return failed(f"the reward accuracy must be above {BOUND}")
    if abs(after.margin - trainers) > CLOSE:
        return failed(f"transformers' margin is {after.margin:.4f}, the trainer's {trainers:.4f}")
    return 0


def failed(why: str) -> int:
    print(f"\npreference_smollm2: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--make-data"]:
        make_data()
    else:
        sys.exit(main(sys.argv[1:]))
