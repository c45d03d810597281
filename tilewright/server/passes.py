"""Forward and backward passes over the data of a request, on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewright.sampler.asked import reached
from tilewright.server.datums import ROUTES, Data
from tilewright.server.frames import Arrays
from tilewright.server.losses import Documents, make
from tilewright.server.refused import Refused
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data import packing
from tilewright.trainer.data.batches import collate
from tilewright.trainer.data.columns.column import Column
from tilewright.trainer.data.columns.of_tokens import ROUTED_EXPERTS
from tilewright.trainer.engine import Batch, Engine
from tilewright.trainer.models.head import TokenLosses


class Packing(NamedTuple):
    """How documents become micro-batches.

    capacity: tokens of one.   joined: whether one may hold several documents.   multiple: to which
    it is padded.
    """

    capacity: int
    joined: bool
    multiple: int

    def bins(self, lengths: np.ndarray) -> list[np.ndarray]:
        """The documents of each micro-batch, the fullest first."""
        if not self.joined:
            return [np.array([i]) for i in np.argsort(-lengths, kind="stable")]
        return packing.first_fit_decreasing(lengths, self.capacity)


class Spread(NamedTuple):
    """The micro-batches of one request. numbers: of the documents of each, by data-parallel rank;
    all ranks have as many micro-batches. own: this rank's.
    """

    numbers: list[list[np.ndarray]]
    own: list[dict[str, Any]]


def spread(
    engine: Engine, documents: Documents, columns: Mapping[str, Column], how: Packing
) -> Spread:
    mesh = engine.mesh
    lengths = np.array([len(document[0]) for document in documents])
    bins, ranks = how.bins(lengths), mesh.layout.data
    steps = -(-len(bins) // ranks)
    empty = np.empty(0, np.int64)
    numbers = [[*bins[rank::ranks], empty][:steps] for rank in range(ranks)]
    own = [
        collate(
            [[documents[i] for i in one]],
            how.multiple,
            mesh.context,
            columns,
            aligned=True,
        )
        for one in numbers[mesh.batch_rank]
    ]
    return Spread(numbers, own)


def in_order(engine: Engine, given: Spread, values: list[Any]) -> list[np.ndarray] | None:
    """Values of tokens of each document, in the order of the request; None but on the main rank.

    values: of this rank's micro-batches, [1, T, ...].
    """
    by_rank = engine.documents(given.own, values)
    if not engine.mesh.main:
        return None
    by_number: dict[int, np.ndarray] = {}
    for numbers, rank in zip(given.numbers, by_rank, strict=True):
        for bin_numbers, parts in zip(numbers, rank, strict=True):
            by_number |= dict(zip(bin_numbers.tolist(), (t.numpy() for t in parts), strict=True))
    return [by_number[i] for i in range(len(by_number))]


def run(
    engine: Engine,
    data: Data,
    loss: str,
    options: Mapping[str, Any],
    how: Packing,
    *,
    backward: bool,
    routers: bool = True,
    routes: np.ndarray | None = None,
) -> tuple[Any, Arrays]:
    """A pass: its value and arrays as results have them; {} but on the main rank.

    routers: with their statistics.   routes: recorded experts, which are replayed.

    Raises Refused, on every rank, where a loss or a log-probability is not finite: no gradient is
    left then, also of the passes before it.
    """
    made = make(loss, options, data)
    documents = _replaying(made.documents, routes)
    given = spread(engine, documents, {**made.columns, **_column(routes)}, how)
    compute = engine.forward_backward if backward else engine.forward
    sums = compute(given.own, made.loss)
    each = in_order(engine, given, sums.per_token)
    total = sums.values[0]
    problem = None
    value: dict[str, Any] = {}
    arrays: Arrays = {}
    if each is not None:
        values = np.concatenate(each)
        problem = _not_finite(total, values, data)
        if problem is None:
            arrays["logprobs"] = -values
            arrays["elementwise_loss"] = made.each(-values)
            of_documents = np.add.reduceat(
                arrays["elementwise_loss"].reshape(len(values), -1).sum(1, dtype=np.float64),
                data.starts[:-1],
            )
            value = {
                "lengths": data.lengths.tolist(),
                "losses": of_documents.tolist(),
                "metrics": {
                    "loss:sum": total,
                    **_reported(sums.reported(), sums.router() if routers else {}),
                },
            }
    if (problem := engine.mesh.control.broadcast(problem)) is not None:
        engine.zero()
        raise Refused(400, problem)
    return value, arrays


def _column(routes: np.ndarray | None) -> dict[str, Column]:
    if routes is None:
        return {}
    return {ROUTES: dataclasses.replace(ROUTED_EXPERTS, width=routes.shape[1])}


def _replaying(documents: Documents, routes: np.ndarray | None) -> Documents:
    """With the routes of each document's tokens, which are one after the other."""
    if routes is None:
        return documents
    each = np.split(routes, np.cumsum([len(ids) for ids, *_ in documents])[:-1])
    return [
        (ids, labels, {**own, ROUTES: rows})
        for (ids, labels, own), rows in zip(documents, each, strict=True)
    ]


def _reported(losses: Mapping[str, float], routers: Mapping[str, float]) -> dict[str, float]:
    """Metrics by the names of the wire, which say how those of several requests are joined."""
    means = {f"{name}:mean": value for name, value in {**losses, **routers}.items()}
    return {name: value for name, value in means.items() if math.isfinite(value)}


def _not_finite(total: float, values: np.ndarray, data: Data) -> str | None:
    if math.isfinite(total) and np.isfinite(values).all():
        return None
    wrong = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    if not wrong.any():
        return f"the loss is {total}; the gradients since the last step are dropped"
    at = int(wrong.argmax())
    datum = int(np.searchsorted(data.starts, at, "right")) - 1
    return (
        f"datum {datum}, token {at - data.starts[datum]}: its log-probability is {-values[at]}; "
        "the gradients since the last step are dropped"
    )


# ---- log-probabilities of prompts and samples


class Asked(NamedTuple):
    """What a sampling request asks for.

    topk: the most probable tokens at each token of the prompt, so many.   draws: numbers from 0 to
    1, one for each token that is to follow the prompt, if there are no samples.   temperature: 0
    takes the most probable token.   top_k: draws among so many; -1 for all.   top_p: and among
    those that together have this probability.
    """

    topk: int
    draws: list[float]
    temperature: float
    top_k: int
    top_p: float


def scored(engine: Engine, given: Arrays, lengths: list[int], asked: Asked, how: Packing) -> Arrays:
    """A prompt under the engine's weights, and samples that follow it; {} but on the main rank.

    given: tokens [P], the prompt's; sampled, those of all samples, whose lengths are given; targets
    [P - 1, k], further tokens at each place but the first, -1 for none; and what is known already.

    Returns what was known, and prompt_logprobs [P], NaN at the first, which follows nothing; with
    topk also topk_ids and topk_logprobs [P, topk], -1 and NaN there; target_logprobs [P - 1, k], 0
    for none; sampled_logprobs at temperature 1; and with draws these, as `sampled`. Routes that are
    known, of the prompt and each sample in turn, are replayed.
    """
    known = {name: array for name, array in given.items() if name not in ("tokens", "targets")}
    tokens, targets = given["tokens"], given.get("targets")
    cuts = np.cumsum(lengths)[:-1]
    samples = np.split(given["sampled"], cuts) if lengths else [np.empty(0, np.int64)]
    columns, documents = {"last": Column("token", "int64")}, []
    if targets is not None:
        columns["targets"] = Column("token", "int64", fill=-1, width=targets.shape[1])
    for sample in samples:
        whole = np.concatenate((tokens, sample))
        own = {"last": np.zeros(len(whole), np.int64)}
        own["last"][-1] = 1
        if targets is not None:
            after = np.full((len(sample) + 1, targets.shape[1]), -1)
            own["targets"] = np.concatenate((targets, after))
        documents.append((whole, np.append(whole[1:], IGNORE), own))
    routes = given.get(ROUTES)
    columns |= _column(routes)
    spreads = spread(engine, _replaying(documents, routes), columns, how)
    with engine.evaluating():
        outcomes = engine.parts.forward(spreads.own, functools.partial(_scores, asked=asked))
    names = ["logprobs", *(("sampled", "sampled_logprobs") if asked.draws else ())]
    names += ["topk_ids", "topk_logprobs"] if asked.topk else []
    names += [] if targets is None else ["target_logprobs"]
    by_name: dict[str, list[np.ndarray]] = {}
    for i, name in enumerate(names):
        each = in_order(engine, spreads, [o.more[i] if o.more else None for o in outcomes])
        if each is not None:  # as on the main rank alone, while all take part
            by_name[name] = each
    return {**_of_prompt(by_name, len(tokens), bool(lengths)), **known} if by_name else {}


def _of_prompt(by_name: dict[str, list[np.ndarray]], size: int, followed: bool) -> Arrays:
    """by_name: what each document has at each of its tokens.   size: tokens of the prompt.
    followed: whether samples follow it.
    """
    arrays: Arrays = {}
    for name, each in by_name.items():
        first = each[0][: size - 1]
        if name.startswith("sampled"):
            arrays[name] = each[0][-1]
        elif name == "target_logprobs":
            arrays[name] = first
        else:
            fill = -1 if first.dtype.kind == "i" else np.nan
            begin = np.full((1, *first.shape[1:]), fill, first.dtype)
            name = "prompt_logprobs" if name == "logprobs" else name
            arrays[name] = np.concatenate((begin, first))
    if followed:
        own = [one[size - 1 : -1] for one in by_name["logprobs"]]
        arrays["sampled_logprobs"] = np.concatenate(own)
    return arrays


def _scores(per_token: TokenLosses, batch: Batch, *, asked: Asked) -> tuple[torch.Tensor, ...]:
    """As a loss: log-probabilities of labels [1, T]; with draws the drawn tokens and theirs
    [1, T, draws], which are 0 but at the last token; with topk these [1, T, topk]; and those of
    targets [1, T, k].
    """
    values, last = per_token.values(), batch["last"] == 1
    more = [-values]
    if asked.draws:
        logits = per_token.logits_of(last).double()
        ids = values.new_zeros(*values.shape, len(asked.draws), dtype=torch.int64)
        logprobs = values.new_zeros(ids.shape)
        for row in logits:  # at most one: a batch has one prompt, and a rank a part of it
            own = torch.tensor([drawn(row, asked, draw) for draw in asked.draws])
            own = own.to(ids.device)
            ids[last] = own
            logprobs[last] = row.log_softmax(-1)[own].float()
        more += [ids, logprobs]
    more += per_token.most_probable(asked.topk) if asked.topk else ()
    if (targets := batch.get("targets")) is not None:
        own = per_token.listed(targets).logprobs
        more.append(own.where(targets >= 0, 0.0).float())
    return values.sum(), last.sum(), *more


def drawn(logits: torch.Tensor, asked: Asked, draw: float) -> int:
    """The token at a place of the cumulated distribution, the most probable token first."""
    ordered, ids = logits.sort(descending=True, stable=True)
    if not asked.temperature:
        return int(ids[0])
    p = (ordered / asked.temperature).softmax(-1)
    return int(ids[reached(p, asked.top_k, asked.top_p, draw)])
