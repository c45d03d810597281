"""Runs on preferences, and a plain loop that they are compared with."""

import collections
import itertools
import random
import types
from typing import Any

import pytest
import torch
import transformers
from small import SHAPE, by_hand, write_run
from small import trained as trained  # of preferences too

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked
from tilewright.trainer.losses.preference.row import PREFERENCES
from tilewright.trainer.models.head import OfSequence

VOCAB = 64


class Given(OfSequence):
    """Log-probabilities that a model would give."""

    def __init__(self, logprobs):
        super().__init__(())
        self.logprobs = logprobs

    def values(self):
        return -self.logprobs[None]


def trls_trainer(**fields):
    """What TRL's losses read of their trainer, on one processor."""
    device = torch.device("cpu")
    accelerator = types.SimpleNamespace(
        device=device, gather=lambda t: t, gather_for_metrics=lambda t: t
    )
    return types.SimpleNamespace(
        model=types.SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **fields,
    )


class Words:
    """A tokenizer of words, with offsets and a chat template."""

    is_fast, chat_template, eos_token_id = True, "there", 1
    all_special_ids, added_tokens_decoder = (1,), {}

    def __call__(self, text, **_):
        ids, offsets, at = [], [], 0
        for word in text.split(" "):
            ids.append(2 + sum(map(ord, word)) % (VOCAB - 2))
            offsets.append((at, at + len(word)))
            at += len(word) + 1
        return {"input_ids": ids, "offset_mapping": offsets}

    def get_chat_template(self, tools=None):
        return "no generation blocks"

    def apply_chat_template(self, messages, add_generation_prompt=False, **_):
        text = "".join(f"<{m['role']}> {m['content']} " for m in messages)
        return text + ("<assistant> " if add_generation_prompt else "")


def samples(row, most=64, kind="preference", **features):
    listed = isinstance(row.get("chosen"), list)
    features = {"chosen": types.SimpleNamespace(dtype="list" if listed else "string"), **features}
    made: Any = DATASETS[kind].samples(Asked("data", kind, most, Words(), features))(row)
    return [*made]


def answers(found):
    return [[t for t in labels if t != IGNORE] for _, labels, _ in found]


def rows(count, seed):
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    return [
        {"prompt_ids": ids(2, 9), "chosen_ids": ids(1, 8), "rejected_ids": ids(1, 8)}
        for _ in range(count)
    ]


SMALL = SHAPE | {"vocab_size": VOCAB}
STEPS = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, path of a configuration): eight bins a step, each of one or more pairs."""
    folder = tmp_path_factory.mktemp("preference")
    for name, seed in (("model", 0), ("other", 1)):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**SMALL)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    path = write_run(
        folder,
        "preference",
        ("pairs.jsonl", "preference_tokenized"),
        rows(120, 1),
        train={"gradient_accumulation_steps": 8, "max_steps": STEPS},
    )
    return folder, path


def plain(settings, reference="model", beta=0.1, after=lambda *_: None):
    """The losses, margins and accuracies of a loop over two of transformers' models, a pair at a
    time.

    after: called with (policy, reference model, steps done) after each step.
    """
    load_model = transformers.LlamaForCausalLM.from_pretrained
    policy, other = (load_model(settings[0] / name) for name in ("model", reference))

    def logprob(model, ids, labels):
        logits = model(ids[None]).logits[0].log_softmax(-1)
        kept = labels != IGNORE
        return logits[kept].gather(1, labels[kept][:, None]).sum()

    def terms(batches):
        margins = []
        for batch in batches:
            ends = batch["cu_seqlens"].tolist()
            spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
            for chosen, rejected, role in zip(spans, spans[1:], batch["role"], strict=False):
                if role != 0:
                    continue
                answers = [
                    (batch["input_ids"][0, s], batch["labels"][0, s]) for s in (chosen, rejected)
                ]
                c, r = (logprob(policy, *a) for a in answers)
                with torch.no_grad():
                    C, R = (logprob(other, *a) for a in answers)
                margins.append(beta * ((c - r) - (C - R)))
        margins = torch.stack(margins)
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        return loss, margins.mean(), (margins > 0).double().mean()

    return by_hand(settings, policy, STEPS, terms, after=lambda done: after(policy, other, done))


NAMES = ("loss", "grad_norm", "reward_margin", "reward_chosen", "logprob_rejected", "drift")


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in NAMES:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
        assert a["reward_accuracy"] == pytest.approx(b["reward_accuracy"])


def formula(name: str, **options: float) -> Any:
    """A preference loss with those of these options that it reads."""
    row = PREFERENCES[name]
    return row(**{n: value for n, value in options.items() if n in row.reads})
