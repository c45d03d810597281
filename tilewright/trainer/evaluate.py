"""Scores documents: torchrun -m tilewright.trainer.evaluate config.yaml [--scores FILE] [...]

The configuration is the trainer's. Evaluated are the weights of model.model_path, or of the
checkpoint that train.load_checkpoint_path names, on what a run with it evaluates: each of
data.test_datasets, and the samples of data.datasets that data.val_set_size holds out; without
either, on each of data.datasets.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.core.platform import require

    require("trainer")  # else the imports below end in a traceback

import dataclasses
import functools
import json
import logging
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tilewright.core import platform
from tilewright.core.files import check_writable, write_text
from tilewright.trainer import build, launch
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.checkpoint.fields import Checkpointing
from tilewright.trainer.checkpoint.hf_head import drawn
from tilewright.trainer.checkpoint.run_folder import earlier
from tilewright.trainer.config import Config, Data, Lora, Model, Train, from_command_line
from tilewright.trainer.data.batches import Bins
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.encode import Columns
from tilewright.trainer.data.prepared import split_validation
from tilewright.trainer.data.sources import titles
from tilewright.trainer.data.types.dataset_type import Prompts
from tilewright.trainer.engine import Engine, reproducible
from tilewright.trainer.losses.loss import Loss, loss_of
from tilewright.trainer.losses.preference_fields import kind_of_reference
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.optim.per_step import PerStep
from tilewright.trainer.parallel.fields import Width
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.precision import FULL, Dtypes, resolved
from tilewright.trainer.scoring import Rewarded, Score, batches_of, rewards, scores

PROGRAM = "python -m tilewright.trainer.evaluate"
OPTIONS = {
    "--scores FILE": "Write a line of JSON for each document: dataset, document (its number), id "
    "(the row's, if it has one), tokens (with a label), logprob (their sum, in nats), "
    "mean_logprob, entropy (the mean), accuracy (share of labels that are the most probable token). "
    "Of a reward model: dataset, document, id, reward.",
    "--per-token": "With logprobs, the log-probability of each of these tokens.",
}


@dataclasses.dataclass
class Set:
    """A data set to evaluate on.   most: batches of it, as train.eval_max_batches."""

    name: str
    bins: Bins
    ids: list[str]
    most: float | None = None


@dataclasses.dataclass
class Totals:
    """Sums over documents. Each is exact, whatever their order."""

    documents: int
    tokens: int
    logprob: float
    entropy: float
    hits: int

    @classmethod
    def of(cls, by_document: list[Score]) -> Totals:
        return cls(
            len(by_document),
            sum(s.tokens for s in by_document),
            math.fsum(s.logprob for s in by_document),
            math.fsum(s.entropy for s in by_document),
            sum(s.hits for s in by_document),
        )

    def line(self, name: str) -> str:
        n, loss = self.tokens, -self.logprob / self.tokens
        try:
            perplexity = math.exp(loss)
        except OverflowError:
            perplexity = math.inf
        return (
            f"{name}: documents={self.documents} tokens={n} loss={loss:.6g} "
            f"perplexity={perplexity:.6g} accuracy={self.hits / n:.6g} "
            f"entropy={self.entropy / n:.6g}"
        )


@dataclasses.dataclass
class Rewards:
    """The sum of documents' rewards, exact, whatever their order."""

    documents: int
    reward: float

    @classmethod
    def of(cls, rewarded: list[Rewarded]) -> Rewards:
        return cls(len(rewarded), math.fsum(r.reward for r in rewarded))

    def line(self, name: str) -> str:
        return f"{name}: documents={self.documents} reward={self.reward / self.documents:.6g}"


class Scorer(NamedTuple):
    """What scores documents, and which.

    size: bins of a micro-batch.   sets: which it prepares one by one.   engine: makes one with the
    weights.
    """

    shape: ModelConfig
    loss: Loss
    size: int
    sets: Iterator[Set]
    engine: Callable[[], Engine]


def scorer_of(config: Config, mesh: Mesh, *, whole: bool = False) -> Scorer:
    """What a configuration scores. Every rank must call it. Raises as `check_weights`.

    whole: see `sets`.
    """
    m, d, t, p = config.model, config.data, config.train, config.preference
    check_weights(m, t)
    loss = loss_of(t.loss, dict(config), t.loss_args)
    # The head that the loss reads, or that the model's folder has.
    head = hf.shape_of(m).head if loss.head == "language_model" else loss.head
    shape = build.shape_of_run(m, head, mesh)
    referenced = kind_of_reference(config) != "none"
    columns = build.columns_of(t, loss, shape, p.share_prefix, referenced)
    prompts = Prompts(p.max_prompt_len, p.truncation_mode)
    prepared = build.preparing(d, m, prompts, t.seed, shape.vocab_size, mesh)
    return Scorer(
        shape,
        loss,
        t.eval_micro_batch_size or t.micro_batch_size,
        sets(d, t, loss, columns, prepared, whole),
        functools.partial(
            filled_engine, m, config.lora, shape, d, t, mesh, resolved(config.precision, t, t)
        ),
    )


def sets(
    data: Data, train: Train, loss: Loss, columns: Columns, prepared: build.Prepared, whole: bool
) -> Iterator[Set]:
    """What a run evaluates and tests on, or without anything each of data.datasets.

    columns: of a run.   prepared: see `build.preparing`.   whole: every document of
    data.test_datasets, or of data.datasets without them.
    """
    # What scores depend on beside tokens and labels.
    routed = {name: c for name, c in columns.items() if name == "routed_experts"}
    # A folder that was prepared for training has no names of rows.
    named = {} if data.skip_prepare_dataset else {"id": COLUMNS["id"]}

    def made(name: str, dataset: Any, most: float | None) -> Set:
        bins = build.held_bins(name, dataset, data, loss, routed, numbered=True)
        ids = dataset["id"] if "id" in dataset.column_names else [""] * len(dataset)
        return Set(name, bins, ids, None if whole else most)

    held = data.val_set_size is not None and not whole
    entries = data.test_datasets or ([] if held else data.datasets)
    most = train.test_max_batches if train.do_test else train.eval_max_batches
    names = titles(entries)
    for name, entry in zip(names, entries, strict=True):
        yield made(name, prepared([entry], columns=routed | named, shuffle=False), most)
    if held:
        columns = {**columns, **named}
        both = prepared(data.datasets, columns=columns, shuffle=True)
        rows = split_validation(both, data.val_set_size, train.seed, columns)[1]
        name = "held_out#2" if "held_out" in names else "held_out"
        yield made(name, rows, train.eval_max_batches)


def evaluate(
    train: Train, scorer: Scorer, file: pathlib.Path | None = None, *, each_token: bool = False
) -> dict[str, Any]:
    """Scores every document, and returns the sums of each data set: `Totals`, or of a reward model
    `Rewards`. Every rank must call it.

    file: where scores are written, at the end, in the order of the data.
    """
    loss, rewarded = scorer.loss, scorer.shape.head == "reward"
    if loss.tempered and isinstance(train.loss_temperature, PerStep):
        raise ValueError(
            f"train.loss_temperature follows the steps of a run, of which there are none here: give "
            f"the sampler's temperature as a number, got {train.loss_temperature.model_dump()}"
        )
    if each_token and rewarded:
        raise ValueError("--per-token: a reward model has one number for each document")
    with reproducible(train.seed, train.enable_full_determinism):
        chosen, engine = list(scorer.sets), scorer.engine()
        sums, lines = {}, []
        for one in chosen:
            of_set: list[Any] = _scores(engine, one, scorer.size, loss, each_token)
            sums[one.name] = (Rewards if rewarded else Totals).of(of_set)
            if not (rewarded or sum(s.tokens for s in of_set)):
                raise ValueError(
                    f"{one.name}: none of the {len(of_set)} documents in the first batches, of which "
                    f"{one.most} are evaluated, has a label after its first token"
                )
            lines += [_line(one, s) for s in of_set] if file is not None else []
    if engine.mesh.main:
        for name, totals in sums.items():
            print(totals.line(name))
        if file is not None:
            write_text(file, "".join(lines))
            print(f"{file}: {len(lines)} documents")
    return sums


def check_weights(model: Model, train: Checkpointing) -> None:
    """Raises ValueError for a configuration whose weights would be drawn."""
    if model.model_path is None and train.load_checkpoint_path is None:
        raise ValueError(
            "model.model_path = null, train.load_checkpoint_path = null: give one of them; there "
            "are no weights to evaluate"
        )


def filled_engine(
    model: Model,
    lora: Lora,
    shape: ModelConfig,
    data: Width,
    train: Train,
    mesh: Mesh,
    dtypes: Dtypes = FULL,
) -> Engine:
    """An engine with the model folder's weights or a checkpoint's. Raises as `check_weights`."""
    check_weights(model, train)
    path = train.load_checkpoint_path
    if path is None and model.model_path is not None:
        missing, _ = drawn(hf.local_folder(model.model_path, model.revision), shape)
        if missing:
            raise ValueError(
                f"model.model_path = {model.model_path}: a language model, which has no "
                f"{missing[0]} to give rewards; train one with train.loss = reward"
            )
    ops = build.choose_ops(model, shape, mesh, build.compute_dtype(train))
    parts = build.build_model(model, lora, shape, data, train, mesh, ops, dtypes)
    engine = build.engine_around(parts, train, mesh, lora.lora_plus_scale)
    if path is not None:
        folders = earlier(train.output_dir, path)
        if not folders:
            raise ValueError(f"train.load_checkpoint_path = {path}: there is no checkpoint")
        wanted = {"model": build.model_identity(model, lora, shape)}
        if lora.enable_lora and not train.allow_other_base:
            wanted["base"] = {"weights": parts.origin}  # adapters are of these weights
        names = build.names_of_ops(ops, engine, train)
        engine.load(folders, wanted, names, train.verify_checkpoint, states=False)
    return engine


def _scores(
    engine: Engine, one: Set, size: int, loss: Loss, each_token: bool
) -> list[Score] | list[Rewarded]:
    """In the order of the data."""
    batches = batches_of(one.bins, size, engine.mesh, one.most)
    if engine.model.config.head == "reward":
        return sorted(r for some in rewards(engine, batches) for r in some)
    each = scores(engine, batches, each_token=each_token, loss=loss)
    return sorted(s for some in each for s in some)


def _line(one: Set, s: Score | Rewarded) -> str:
    row: dict[str, Any] = {
        "dataset": one.name,
        "document": s.document,
        "id": one.ids[s.document] or str(s.document),
    }
    if isinstance(s, Rewarded):
        return json.dumps({**row, "reward": s.reward}) + "\n"
    n = s.tokens
    row |= {
        "tokens": n,
        "logprob": s.logprob,
        "mean_logprob": s.logprob / n if n else None,
        "entropy": s.entropy / n if n else None,
        "accuracy": s.hits / n if n else None,
    }
    if s.logprobs is not None:
        row["logprobs"] = s.logprobs
    return json.dumps(row) + "\n"


def asked(argv: list[str]) -> tuple[pathlib.Path | None, bool, list[str]]:
    """The file of `--scores`, whether `--per-token` is given, and the other arguments. Exits with 2
    if they are not whole.
    """
    rest = [a for a in argv if a != "--per-token"]
    each, file = len(rest) < len(argv), None
    if "--scores" in rest:
        at = rest.index("--scores")
        if at + 1 == len(rest) or rest[at + 1].startswith("--"):
            print("--scores needs a FILE", file=sys.stderr)
            sys.exit(2)
        file = pathlib.Path(rest[at + 1])
        del rest[at : at + 2]
    if each and file is None:
        print("--per-token needs --scores FILE", file=sys.stderr)
        sys.exit(2)
    return file, each, rest


@platform.command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code, as `launch.run` has it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    file, each, argv = asked(sys.argv[1:] if argv is None else argv)
    config = from_command_line(argv, PROGRAM, OPTIONS, training=False)

    def first(rank: int, size: int, device: torch.device) -> None:
        if file is not None and rank == 0:
            check_writable(file, "--scores")

    def work(mesh: Mesh) -> None:
        evaluate(config.train, scorer_of(config, mesh), file, each_token=each)

    return launch.run(config.train, work, first=first)


if __name__ == "__main__":
    launch.end(main)
