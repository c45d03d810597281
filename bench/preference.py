"""Steps of DPO on a CPU: the trainer's and TRL's, each in a process of its own, in turns.

    python -m bench preference --out DIR [--layers N] [--tokens N] [--steps N] [--rounds N]
    python -m bench preference --out DIR --count [--layers N] [--tokens N]

Both begin from the same random weights, of SmolLM2-135M's shape, and take the same pairs in the
same order, one a step: a prompt of a quarter of the tokens, and two answers. Weights, products and
AdamW's states are float32, and the reference is a second model. Texts are numbers of tokens, which
a tokenizer of words reads. Each recomputes no activations, or those of whole layers (the default of
both); the trainer also those of the MLPs alone.

A step's time is that from the end of one to the end of the next; the first of each process is left
out. Beside the clock's seconds are the processor's, of all threads, which other programs' load
changes less. Memory is of two steps of another process: its high-water mark, and `above` what that
is above what was resident before the first one, with the weights of both models. Its C library
returns what is freed (MALLOC), of which a timed one keeps up to a third of its peak in fragments
(`timed_above`) and so takes less time. The losses must agree, which shows that both compute the
same. The file is written after each process, with what there is by then.

With --count nothing is computed: counted.json has what a step launches on a GPU, and the peak of
its tensors (`bench/predicted/step.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench import commands
from bench.end_to_end_steps import largest_difference
from bench.host_memory import level_mib, status_mib
from bench.llama import SEED, Shape, of_transformers
from tilewright.bench import store, timing
from tilewright.bench.options import at_least
from tilewright.core import platform

# Who takes the steps, and what it recomputes in backward.
PROVIDERS = (
    ("trainer", "nothing"),
    ("trainer", "mlp"),
    ("trl", "nothing"),
    ("trainer", "layers"),
    ("trl", "layers"),
)
COMPARED = ((0, 2), (1, 2), (3, 4))  # the trainer's and TRL's
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # larger blocks are returned when they are freed
END = "<end>"
LR, BETA = 1e-5, 0.1
AGREEMENT = 1e-4  # relative, of losses in float32


@dataclasses.dataclass(frozen=True)
class Job:
    """tokens: of a prompt with an answer."""

    folder: str
    layers: int
    tokens: int
    steps: int

    def path(self, *parts: str) -> pathlib.Path:
        return pathlib.Path(self.folder, *parts)

    @property
    def shape(self) -> Shape:
        return Shape(tokens=self.tokens, layers=self.layers)


def write_inputs(job: Job) -> int:
    """Writes a model with its tokenizer, and the pairs. Returns the bytes of the weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, vocabulary = of_transformers(job.shape), job.shape.vocabulary
    model.save_pretrained(job.path("model"))
    words = {str(i): i for i in range(vocabulary - 1)} | {END: vocabulary - 1}
    made = Tokenizer(models.WordLevel(words, unk_token=END))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(job.path("model"))
    rng = random.Random(SEED)

    def text(count: int) -> str:
        return " ".join(str(int(vocabulary ** rng.random()) - 1) for _ in range(count))

    prompt, answer = job.tokens // 4, job.tokens - job.tokens // 4 - 1  # and the end
    with job.path("pairs.jsonl").open("w") as file:
        for _ in range(job.steps):
            row = {"prompt": text(prompt) + " ", "chosen": text(answer), "rejected": text(answer)}
            file.write(json.dumps(row) + "\n")
    return sum(p.numel() * p.element_size() for p in model.parameters())


def count(job: Job) -> Iterator[dict[str, Any]]:
    """What each launches, and needs in memory, with products in either dtype."""
    # Kernels are not launched, but tensors of a CPU are to take their path.
    start = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "bench.predicted.step"]
    for (provider, recomputed), half in itertools.product(PROVIDERS, (False, True)):
        config = job.path(f"counted-{recomputed}.yaml")
        store.write_json(config, configuration(job, str(job.path("out")), recomputed))
        shape = {"layers": job.layers, "tokens": job.tokens}
        asked = {"provider": provider, "recomputed": recomputed, "half": half, "shape": shape}
        text = json.dumps(asked | {"path": str(config)})
        done = subprocess.run([*start, text], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{provider}: {done.stderr[-2000:]}")
        yield json.loads(done.stdout.splitlines()[-1])


def configuration(job: Job, out: str, recomputed: str) -> dict[str, Any]:
    model = str(job.path("model"))
    return {
        "model": {"model_path": model, "tokenizer_path": model},
        "data": {
            "datasets": [{"path": str(job.path("pairs.jsonl")), "type": "preference"}],
            "dataset_prepared_path": str(job.path("prepared")),
            "sample_packing_sequence_len": 2 * job.tokens,
            "shuffle_before_merging_datasets": False,
            "shuffle_merged_datasets": False,
        },
        "train": {
            "output_dir": out,
            "data_parallel_mode": "none",
            "loss": "preference",
            "max_steps": job.steps,
            "lr": LR,
            "lr_decay_style": "constant",
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": recomputed != "nothing",
            "recompute_modules": ["mlp"] if recomputed == "mlp" else None,
            "save_strategy": "no",
            "save_hf_weights": False,
            "log_format": "structured",
        },
        "preference": {"loss": "sigmoid", "beta": BETA},
    }


def now() -> tuple[float, float]:
    """The clock's and the processor's seconds."""
    return time.perf_counter(), time.process_time()


def memory(resident: float) -> dict[str, float]:
    """The memory of a step.   resident: `level_mib` before the first step."""
    peak = status_mib("VmHWM")
    return {"peak_mib": peak, "above_mib": peak - resident}


def train(config: str) -> int:
    """The trainer, whose lines also have the processor's seconds of a step, and memory."""
    from tilewright.trainer import train as trainer
    from tilewright.trainer.callbacks import CALLBACKS, Plugin
    from tilewright.trainer.plugins.callback import Callback, Step

    class Processor(Callback):
        last, resident = 0.0, 0.0

        def before_step(self, step: Step) -> None:
            if not self.resident:
                self.resident = level_mib()

        def after_step(self, step: Step) -> None:
            before, self.last = self.last, time.process_time()
            step.values |= {"cpu_seconds": self.last - before, **memory(self.resident)}

    CALLBACKS.add("processor", Plugin(Processor, wanted=lambda run: True))
    return trainer.main([config])


def train_trl(job: Job, out: str, recomputed: str) -> None:
    """Writes a line for each step, with the trainer's names."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            job.path("model"), dtype=torch.float32, attn_implementation="sdpa"
        )

    rows = [json.loads(line) for line in job.path("pairs.jsonl").read_text().splitlines()]
    began: list[tuple[float, float]] = []
    taken: list[dict[str, float]] = []
    resident = 0.0

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            (clock, processor), after = began[-1], now()
            began.append(after)
            spans = {"seconds": after[0] - clock, "cpu_seconds": after[1] - processor}
            taken.append(spans | memory(resident))

    args = DPOConfig(
        output_dir=out,
        per_device_train_batch_size=1,
        max_steps=job.steps,
        max_length=job.tokens,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=BETA,
        bf16=False,
        gradient_checkpointing=recomputed == "layers",
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        train_sampling_strategy="sequential",
    )
    models = load(), load()
    trainer = DPOTrainer(
        *models,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job.path("model")),
        callbacks=[Clock()],
    )
    for weight in itertools.chain(*(model.parameters() for model in models)):
        weight.sum()  # a file's pages are resident once they are read
    resident = level_mib()
    began.append(now())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    with pathlib.Path(out, "metrics.jsonl").open("w") as file:
        for i, (loss, step) in enumerate(zip(losses, taken, strict=True), 1):
            file.write(json.dumps({"step": i, "loss": loss, **step}) + "\n")


def run_once(
    job: Job, provider: str, recomputed: str, number: int | str, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The lines of one process's steps. Raises RuntimeError with the end of what it printed."""
    from tilewright.trainer.plugins.records import rows

    out = str(job.path(f"{provider}-{recomputed}-{number}"))
    if provider == "trl":
        asked = {"job": dataclasses.asdict(job), "out": out, "recomputed": recomputed}
    else:
        asked = {"config": f"{out}.yaml"}
        # JSON is YAML.
        store.write_json(pathlib.Path(asked["config"]), configuration(job, out, recomputed))
    more = ["env", *(f"{name}={value}" for name, value in environment.items())]
    command = [*more, sys.executable, "-m", "bench.preference", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    steps = [row for row in rows(pathlib.Path(out, "metrics.jsonl")) if "loss" in row]
    if done.returncode or len(steps) != job.steps:
        raise RuntimeError(f"{provider}: {(done.stderr or done.stdout)[-2000:]}")
    return steps


def figures(
    provider: str,
    recomputed: str,
    held: list[dict[str, Any]],
    timed: list[list[dict[str, Any]]],
) -> dict[str, Any]:
    """held, timed: the lines of the steps of memory, and of each timed process."""
    later = [row for steps in timed for row in steps[1:]]
    t = timing.Timing.of([row["seconds"] for row in later])
    return {
        "provider": provider,
        "recomputed": recomputed,
        "median_s": t.median,
        "p20_s": t.p20,
        "p80_s": t.p80,
        "samples_s": [row["seconds"] for row in later],
        "median_cpu_s": statistics.median(row["cpu_seconds"] for row in later),
        "peak_mib": held[-1]["peak_mib"],
        "above_mib": held[-1]["above_mib"],
        "timed_above_mib": max(steps[-1]["above_mib"] for steps in timed),
        "losses": [row["loss"] for row in timed[0]],
    }


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['provider']:<8} {row['recomputed']:<8} {row['median_s']:.2f} s [{row['p20_s']:.2f}, "
        f"{row['p80_s']:.2f}], processor {row['median_cpu_s']:.2f}  peak {row['peak_mib']:.0f} MiB, "
        f"above the weights {row['above_mib']:.0f}  loss {row['losses'][0]:.5f} -> "
        f"{row['losses'][-1]:.5f}"
    )


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    return {
        "trainer": ours["recomputed"],
        "trl": theirs["recomputed"],
        "times_as_fast": theirs["median_s"] / ours["median_s"],
        "times_as_fast_by_processor": theirs["median_cpu_s"] / ours["median_cpu_s"],
        "of_its_memory": ours["peak_mib"] / theirs["peak_mib"],
        "of_its_memory_above_the_weights": ours["above_mib"] / theirs["above_mib"],
        "losses_differ": largest_difference(ours["losses"], theirs["losses"]),
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 1: the losses differ."""
    parser = commands.parser("preference", __doc__)
    for name, default in (("layers", 30), ("tokens", 1024), ("steps", 4), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=at_least(1, int), default=default, metavar="N")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write preference.json")
    parser.add_argument("--count", action="store_true", help="count a step on a GPU, and take none")
    args = parser.parse_args(argv)
    if args.count and args.out is None:
        parser.error("--count writes counted.json, and needs --out DIR")
    commands.need(parser, (*platform.EXTRAS["trainer"], "trl"))
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    meta = commands.metadata("preference", argv, settings)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        job = Job(folder, args.layers, args.tokens, args.steps)
        weights = write_inputs(job)
        if args.count:
            rows = list(count(job))
            commands.write(args.out / "counted.json", meta, rows, weights_bytes=weights)
            return 0
        brief = dataclasses.replace(job, steps=min(job.steps, 2))
        held = [run_once(brief, *provider, "memory", MALLOC) for provider in PROVIDERS]
        timed: list[list] = [[] for _ in PROVIDERS]
        for number in range(args.rounds):
            for i, provider in enumerate(PROVIDERS):
                timed[i].append(run_once(job, *provider, number, {}))
                rows = {
                    i: figures(*PROVIDERS[i], held[i], steps)
                    for i, steps in enumerate(timed)
                    if steps
                }
                print(shown(rows[i]), flush=True)
                both = [(a, b) for a, b in COMPARED if rows.keys() >= {a, b}]
                comparisons = [compared(rows[a], rows[b]) for a, b in both]
                if args.out:
                    more = {"weights_bytes": weights, "comparisons": comparisons}
                    commands.write(args.out / "preference.json", meta, [*rows.values()], **more)
    for ratios in comparisons:
        values = (v if isinstance(v, str) else f"{v:.3g}" for v in ratios.values())
        print("  ".join(f"{k} {v}" for k, v in zip(ratios, values, strict=True)))
    return int(any(c["losses_differ"] > AGREEMENT for c in comparisons))


if __name__ == "__main__":
    _asked = json.loads(sys.argv[1])
    if "config" in _asked:
        sys.exit(train(**_asked))
    train_trl(Job(**_asked.pop("job")), **_asked)
