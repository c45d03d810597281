"""Losses of `python -m bench truth`: data of their steps, and what they are of a plain model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from tilewright.ops.loss import policy, preference
from tilewright.ops.loss.preference import Answers, Pairs

VOCABULARY, PADDING = 64, 0
TOP = 8  # of a teacher's tokens
PAIRS, DOCUMENTS = 12, 24  # of a step
# Tokens of a pair, and of a document: a bin of LONGEST has one pair or two documents, and no more;
# one of BIN two or four.
LEAST, LONGEST, BIN = 22, 32, 64
SHORTEST = 13
# From a log-probability to the one that a column has: ratios far from where a formula clips them,
# and, for the sampler, far from where its weights are clipped.
STEPS = {
    "old_logprob": (-0.6, -0.03, 0.03, 0.6),
    "rollout_logprob": (-0.3, -0.1, 0.1, 0.3),
    "reference_logprob": (-0.5, -0.2, 0.2, 0.5),
    "teacher_logprob": (0.5, 1.0, -1.5, -2.0),
}
Row = dict[str, Any]
Ids = list[int]
# (prompt, answer) -> log-probabilities of all tokens at each place of the answer, float64.
Distributions = Callable[[Ids, Ids], torch.Tensor]


class Step(NamedTuple):
    """A step's rows, and models: the distributions of the policy and of the reference, or the
    reward of a document, differentiable, [] float64.
    """

    rows: Sequence[Row]
    policy: Distributions
    reference: Distributions
    reward: Callable[[Ids], torch.Tensor]


class Kind(NamedTuple):
    """Losses of like data.

    loss: train.loss.   type: the data set's type.   rows: rows of a draw, some by the policy's
    distributions.   expected: (step, losses by name) -> by name the terms whose mean the loss is.
    builds: fields of the loss's section with which a run reads all columns.   reference: whether
    the run has a second model.
    """

    loss: str
    type: str
    rows: Callable[[int, Distributions], list[Row]]
    expected: Callable[[Step, Mapping[str, Loss]], dict[str, torch.Tensor]]
    builds: Mapping[str, Any]
    reference: bool = False

    @property
    def scored(self) -> bool:
        """Whether the model has one number for a document, and no vocabulary."""
        return self.loss == "reward"


@dataclasses.dataclass(frozen=True)
class Loss:
    """kind: a row of KINDS.   fields: of its section."""

    kind: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def section(self) -> Any:
        from tilewright.trainer.losses.distillation_fields import Distillation
        from tilewright.trainer.losses.policy_fields import Policy
        from tilewright.trainer.losses.preference_fields import Preference
        from tilewright.trainer.losses.reward_fields import Reward

        fields, section = dict(self.fields), KINDS[self.kind].loss
        if section == "preference" and preference.FORMULAS[fields["loss"]].kl:
            fields["kl_scope"] = "step"
        if section == "distillation":
            fields["top_k"] = TOP
        sections: dict[str, Any] = {
            "preference": Preference,
            "policy": Policy,
            "reward": Reward,
            "distillation": Distillation,
        }
        return sections[section](**fields)

    def count(self, rows: Sequence[Row]) -> int:
        """What the step's loss is a mean over."""
        by_token = KINDS[self.kind].loss in ("policy", "distillation")
        if by_token and self.fields.get("average") != "documents":
            return sum(t >= 0 for row in rows for t in row["labels"])
        return len(rows)


# ---- data


def _ids(rng: random.Random, count: int) -> Ids:
    return [rng.randrange(PADDING + 1, VOCABULARY) for _ in range(count)]


def _pairs(draw: int, _: Distributions) -> list[Row]:
    """Every third has an answer of one token."""
    rng, rows = random.Random(draw), []
    for i in range(PAIRS):
        prompt, most = (n := rng.randint(5, 6)), LONGEST // 2 - n
        chosen = rng.randint(2, most) if i % 3 else 1
        rejected = rng.randint(max(LEAST - 2 * prompt - chosen, 1), most)
        answers = {"chosen_ids": _ids(rng, chosen), "rejected_ids": _ids(rng, rejected)}
        if i % 3 == 2:
            answers = dict(zip(answers, reversed(answers.values()), strict=True))
        scores = {"chosen_score": 1.0 + rng.random(), "rejected_score": rng.random()}
        rows.append({"prompt_ids": _ids(rng, prompt), **answers, **scores})
    return rows


def _with_margins(draw: int, of: Distributions) -> list[Row]:
    return [{**row, "margin": i % 3 / 2} for i, row in enumerate(_pairs(draw, of))]


def _documents(draw: int) -> list[tuple[Ids, Ids]]:
    """Prompts and answers; every third answer has one token."""
    rng, documents = random.Random(draw), []
    for i in range(DOCUMENTS):
        count = rng.randint(SHORTEST, BIN // 4)
        answer = rng.randint(2, 8) if i % 3 else 1
        documents.append((_ids(rng, count - answer), _ids(rng, answer)))
    return documents


def _answers(draw: int, _: Distributions) -> list[Row]:
    return [
        {"prompt_ids": prompt, "completion_ids": answer, "label": i % 5 < 3}
        for i, (prompt, answer) in enumerate(_documents(draw))
    ]


def _sampled(draw: int, of: Distributions) -> list[Row]:
    rng, rows = random.Random(draw), []
    for prompt, answer in _documents(draw):
        own, before = _picked(of, prompt, answer).tolist(), [0.0] * len(prompt)
        columns = {"advantage": before + [rng.gauss(0, 1) for _ in own]}
        for name, steps in STEPS.items():
            columns[name] = before + [min(x + rng.choice(steps), 0.0) for x in own]
        ids, labels = prompt + answer, [-100] * len(prompt) + answer
        rows.append({"input_ids": ids, "labels": labels, **columns})
    return rows


def _taught(draw: int, of: Distributions) -> list[Row]:
    """Rows with log-probabilities of a teacher near the policy."""
    generator, rows = torch.Generator().manual_seed(draw), []
    for prompt, answer in _documents(draw):
        own = of(prompt, answer)
        noise = torch.randn(own.shape, generator=generator, dtype=own.dtype)
        top = (own + noise / 2).log_softmax(-1).topk(TOP)
        unread = [[*range(TOP)]] * len(prompt)
        none = [[-10.0] * TOP] * len(prompt)
        rows.append(
            {
                "input_ids": prompt + answer,
                "labels": [-100] * len(prompt) + answer,
                "teacher_ids": unread + top.indices.tolist(),
                "teacher_logprobs": none + top.values.tolist(),
            }
        )
    return rows


# ---- losses


def _picked(of: Distributions, prompt: Ids, answer: Ids) -> torch.Tensor:
    """The log-probabilities of an answer's tokens."""
    return of(prompt, answer).gather(1, torch.tensor(answer)[:, None])[:, 0]


def _sums(of: Distributions, rows: Sequence[Row], name: str) -> torch.Tensor:
    return torch.stack([_picked(of, row["prompt_ids"], row[name]).sum() for row in rows])


def _lengths(rows: Sequence[Row], name: str) -> torch.Tensor:
    return torch.tensor([len(row[name]) for row in rows]).double()


def _of_pairs(step: Step, losses: Mapping[str, Loss]) -> dict[str, torch.Tensor]:
    names, rows = ("chosen_ids", "rejected_ids"), step.rows
    own, theirs = ([_sums(of, rows, n) for n in names] for of in (step.policy, step.reference))
    counts = [_lengths(rows, n) for n in names]
    gap = torch.tensor([r["chosen_score"] - r["rejected_score"] for r in rows]).double()
    terms = {}
    for name, loss in losses.items():
        fields = dict(loss.fields)
        formula, sft = preference.FORMULAS[fields.pop("loss")], fields.pop("sft_ratio", 0.0)
        against = theirs if formula.reference else [t.detach() for t in own]
        ratios = [(a - b).detach().mean().clamp_min(0) for a, b in zip(own, against, strict=True)]
        pairs = Pairs(*own, *against, *counts)
        pairs = pairs._replace(gap=gap, kl_chosen=ratios[0], kl_rejected=ratios[1])
        values = formula(**fields)(pairs)
        terms[name] = values - sft * own[0] / counts[0].mean()
    return terms


def _of_answers(step: Step, losses: Mapping[str, Loss]) -> dict[str, torch.Tensor]:
    """Mismatched: a prompt with the answer of the document before, round the step."""
    rows = step.rows
    own, theirs = (_sums(of, rows, "completion_ids") for of in (step.policy, step.reference))
    mismatched = [
        {**row, "completion_ids": rows[i - 1]["completion_ids"]} for i, row in enumerate(rows)
    ]
    with torch.no_grad():
        both = [_sums(of, mismatched, "completion_ids") for of in (step.policy, step.reference)]
    desirable = torch.tensor([row["label"] for row in rows])
    kl = (both[0] - both[1]).mean().clamp_min(0)
    answers = Answers(own, theirs, _lengths(rows, "completion_ids"), desirable, kl)
    terms = {}
    for name, loss in losses.items():
        fields = dict(loss.fields)
        formula = preference.FORMULAS[fields.pop("loss")]
        terms[name] = formula(**fields)(answers)
    return terms


class _Documents:
    """Documents of tokens in order, as `ops.loss.documents.Documents`."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = list(lengths)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([t.sum() for t in values.split(self.lengths)])

    def each(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(torch.tensor(self.lengths))


def _parts(row: Row) -> tuple[Ids, Ids]:
    """The prompt and the answer of a row with labels."""
    count = sum(t >= 0 for t in row["labels"])
    return row["input_ids"][:-count], row["labels"][-count:]


def _of_tokens(step: Step, losses: Mapping[str, Loss]) -> dict[str, torch.Tensor]:
    both = [*map(_parts, step.rows)]
    own = torch.cat([_picked(step.policy, *parts) for parts in both])
    answers = [answer for _, answer in both]

    def column(name: str) -> torch.Tensor:
        parts = (row[name][-len(a) :] for row, a in zip(step.rows, answers, strict=True))
        # As the trainer stores it.
        return torch.tensor([*itertools.chain(*parts)], dtype=torch.float32).double()

    documents = _Documents([len(a) for a in answers])
    given = {"ref_logprob": "reference_logprob"} | {
        n: n for n in ("advantage", "old_logprob", "rollout_logprob", "teacher_logprob")
    }
    terms = {}
    for name, loss in losses.items():
        fields = dict(loss.fields)
        average = fields.pop("average", "tokens")
        formula = policy.FORMULAS[fields.pop("loss")](**fields)
        reads = formula.needed
        columns: dict[str, Any] = {n: column(c) for n, c in given.items() if n in reads}
        if "documents" in reads:
            columns["documents"] = documents
        values = policy.losses(formula, policy.Tokens(own, torch.ones_like(own), **columns))
        if average == "documents":
            lengths = torch.tensor(documents.lengths).double()
            values = values * documents.each(lengths.mean() / lengths)
        terms[name] = values
    return terms


def _with_rest(listed: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return torch.cat((listed, rest[:, None]), 1)


def _of_teachers(step: Step, losses: Mapping[str, Loss]) -> dict[str, torch.Tensor]:
    both = [*map(_parts, step.rows)]
    own = torch.cat([step.policy(*parts) for parts in both])
    picked = torch.cat([_picked(step.policy, *parts) for parts in both])
    rows = [*zip(step.rows, both, strict=True)]
    ids = torch.tensor([k for row, (p, _) in rows for k in row["teacher_ids"][len(p) :]])
    listed = [k for row, (p, _) in rows for k in row["teacher_logprobs"][len(p) :]]
    t = torch.tensor(listed, dtype=torch.float32).double()  # as the trainer stores it
    s = own.gather(1, ids)
    others = own.scatter(1, ids, -torch.inf).logsumexp(1)
    whole = [_with_rest(t, torch.log1p(-t.exp().sum(1))), _with_rest(s, others)]
    terms = {}
    for name, loss in losses.items():
        fields, share = loss.fields, loss.fields.get("cross_entropy_share", 0.0)
        a, b = whole
        if fields.get("outside") == "renormalize":
            a, b = t.log_softmax(1), s.log_softmax(1)
        if fields["divergence"] == "forward":
            apart = (a.exp() * (a - b)).sum(1)
        elif fields["divergence"] == "reverse":
            apart = (b.exp() * (b - a)).sum(1)
        else:
            m = ((a.exp() + b.exp()) / 2).log()
            apart = ((a.exp() * (a - m)).sum(1) + (b.exp() * (b - m)).sum(1)) / 2
        terms[name] = (1 - share) * apart - share * picked
    return terms


def _of_rewards(step: Step, losses: Mapping[str, Loss]) -> dict[str, torch.Tensor]:
    chosen, rejected = (
        torch.stack([step.reward(row["prompt_ids"] + row[n]) for row in step.rows])
        for n in ("chosen_ids", "rejected_ids")
    )
    margin = torch.tensor([row["margin"] for row in step.rows]).double()
    values = -logsigmoid(chosen - rejected - margin)
    centered = (chosen + rejected).square()
    return {
        name: values + loss.fields.get("center_rewards_coefficient", 0.0) * centered
        for name, loss in losses.items()
    }


_policy = functools.partial(Kind, "policy", "tokenized", _sampled, _of_tokens)
KINDS = {
    "pairs": Kind(
        "preference",
        "preference_tokenized",
        _pairs,
        _of_pairs,
        {"loss": "sigmoid", "offset_alpha": 1.0},
        True,
    ),
    "answers": Kind(
        "preference",
        "unpaired_preference_tokenized",
        _answers,
        _of_answers,
        {"loss": "kto", "kl_scope": "step"},
        True,
    ),
    "rewards": Kind("reward", "preference_tokenized", _with_margins, _of_rewards, {}),
    "sampled": _policy({"loss": "policy_loss", "use_tis": True}),
    "with a reference": _policy({"loss": "dr_grpo", "beta": 0.1}),
    "with a teacher": _policy({"loss": "opd"}),
    "taught": Kind("distillation", "tokenized", _taught, _of_teachers, {"top_k": TOP}),
}
DISTILLED: dict[str, dict[str, Any]] = {
    "distillation forward": {"divergence": "forward"},
    "distillation reverse": {"divergence": "reverse"},
    "distillation jsd": {"divergence": "jsd"},
    "distillation renormalized": {"divergence": "forward", "outside": "renormalize"},
    "distillation with labels": {"divergence": "reverse", "cross_entropy_share": 0.3},
}
POLICIES: dict[str, Loss] = {}
for _name, _row in policy.FORMULAS.items():
    _kind = "with a teacher" if "teacher_logprob" in _row.needs else "sampled"
    POLICIES[_name] = Loss(_kind, {"loss": _name})
LOSSES = {
    **{
        name: Loss("pairs" if formula.paired else "answers", {"loss": name})
        for name, formula in preference.FORMULAS.items()
    },
    "sigmoid smoothed": Loss("pairs", {"loss": "sigmoid", "label_smoothing": 0.1}),
    "sigmoid offset": Loss("pairs", {"loss": "sigmoid", "offset_alpha": 1.0}),
    "orpo with SFT": Loss("pairs", {"loss": "orpo", "sft_ratio": 1.0}),
    "kto weighed": Loss(
        "answers",
        {"loss": "kto", "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.5},
    ),
    "reward": Loss("rewards"),
    "reward centered": Loss("rewards", {"center_rewards_coefficient": 0.01}),
    **POLICIES,
    "dr_grpo with KL": Loss("with a reference", {"loss": "dr_grpo", "beta": 0.1}),
    "policy_loss corrected": Loss(
        "sampled", {"loss": "policy_loss", "use_tis": True, "dual_clip": 1.5, "icepop_beta": 1.3}
    ),
    "ppo by documents": Loss("sampled", {"loss": "ppo", "average": "documents"}),
    **{name: Loss("taught", fields) for name, fields in DISTILLED.items()},
}
