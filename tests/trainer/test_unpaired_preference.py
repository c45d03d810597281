"""Answers that are desirable or not: KTO against TRL's code, and whole runs against two of
transformers' models."""

import collections
import itertools
import random
import types
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
from pairs import SMALL, VOCAB, Given, Words, trained, trls_trainer
from small import built, by_hand, data_set, evaluations, layouts, two_ranks, write_run
from whole import planned

from tilewright.ops.loss.preference import Answers
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import load
from tilewright.trainer.data.batches import keyed, mismatch
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked, Refused
from tilewright.trainer.losses import preferences
from tilewright.trainer.losses.before import Compared
from tilewright.trainer.losses.loss import Loss, loss_of
from tilewright.trainer.losses.preference.row import PREFERENCES
from tilewright.trainer.losses.preference_fields import Preference

pytestmark = pytest.mark.packages

WITHOUT_PAIRS = [name for name, row in PREFERENCES.items() if not row.paired]
EVERY = pytest.mark.parametrize("name", WITHOUT_PAIRS)
WEIGHED = {"beta": 0.3, "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.4}


def some(count=6, seed=0, scale=6.0):
    g = torch.Generator().manual_seed(seed)
    sums = [-scale * torch.rand(count, generator=g, dtype=torch.float64) for _ in range(4)]
    desirable = torch.arange(count) % 3 != 1
    kl = (sums[2] - sums[3]).mean().clamp(min=0)
    return Answers(*sums[:2], torch.ones(count), desirable, kl), sums[2:]


# ---- the formula


def trls_kto(answers, mismatched, o, name):
    """TRL's trainer on log-probabilities that a model would give, one token of them an answer."""
    trainer = pytest.importorskip("trl").KTOTrainer
    count = len(answers.answer)
    with_kl = name == "kto"
    passes = iter((*mismatched[:with_kl], answers.answer))  # as it calls the model

    def model(**_):
        zeros = torch.zeros(count, 1, dtype=torch.float64)
        return types.SimpleNamespace(
            log_probs=next(passes)[:, None], entropy=zeros, mean_logits=zeros
        )

    names = ("input_ids", "attention_mask", "completion_mask")
    tokens = torch.ones(count, 2, dtype=torch.long)
    inputs = {f"{kind}{name}": tokens for kind in ("", "KL_") for name in names}
    inputs |= {"label": answers.desirable, "ref_logps": answers.reference}
    if with_kl:
        inputs["ref_KL_logps"] = mismatched[1]
    this = trls_trainer(
        calculate_KL=with_kl,
        loss_type=name,
        beta=o["beta"],
        desirable_weight=o["kto_desirable_weight"],
        undesirable_weight=o["kto_undesirable_weight"],
    )
    this._compute_kl_logps = types.MethodType(trainer._compute_kl_logps, this)
    return trainer._compute_loss(this, model, inputs, False)


@EVERY
def test_a_formula_is_trls(name):
    kls = []
    for seed in range(6):
        answers, mismatched = some(seed=seed)
        found = PREFERENCES[name](**WEIGHED)(answers).mean()
        expected = trls_kto(answers, mismatched, WEIGHED, name)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        kls.append(float(answers.kl))
    assert min(kls) == 0.0 < max(kls)


@EVERY
def test_gradients_are_finite_differences_and_extremes_finite(name):
    answers, _ = some()

    def loss(sums, answers=answers):
        return PREFERENCES[name](**WEIGHED)(answers._replace(answer=sums))

    assert torch.autograd.gradcheck(loss, [answers.answer.requires_grad_()])
    for reference in (-1e4, -1e-12, 0.0):
        sums = torch.tensor([0.0, -1e-12, -1e4] * 2, dtype=torch.float64, requires_grad=True)
        found = loss(sums, answers._replace(reference=torch.full_like(sums, reference)))
        [grad] = torch.autograd.grad(found.sum(), sums)
        assert found.isfinite().all() and grad.isfinite().all()


@EVERY
def test_a_formula_reads_what_it_says(name):
    row, (answers, _) = PREFERENCES[name], some(seed=1)
    answers = answers._replace(kl=0.7)
    base = row(**WEIGHED)(answers)
    assert {*row.reads} == {*WEIGHED}
    for option in row.reads:
        assert not torch.equal(row(**WEIGHED | {option: 0.23})(answers), base), option
    assert torch.equal(row(**WEIGHED)(answers._replace(kl=0.0)), base) == (not row.kl)


# ---- data


def samples(row, kind="unpaired_preference", **features):
    listed = isinstance(row.get("completion"), list)
    features = {
        "completion": types.SimpleNamespace(dtype="list" if listed else "string")
    } | features
    made: Any = DATASETS[kind].samples(Asked("data", kind, 16, Words(), features))(row)
    return [*made]


def test_strings_conversations_and_tokens_are_one_document_each():
    words = Words()
    [(ids, labels, more)] = samples({"prompt": "to be ", "completion": "or not", "label": True})
    assert ids == words("to be or not")["input_ids"] + [1] and more == {"desirable": 1}
    assert labels == [IGNORE] * 2 + words("or not")["input_ids"] + [1]
    turns = [{"role": r, "content": c} for r, c in (("user", "why"), ("assistant", "so"))]
    [found] = samples({"prompt": turns[:1], "completion": turns[1:], "label": False})
    assert [t for t in found[1] if t != IGNORE][:1] == words("so ")["input_ids"][:1]
    assert found[2] == {"desirable": 0}
    row = {"prompt_ids": [5, 6], "completion_ids": [7], "label": False}
    [found] = samples(row, "unpaired_preference_tokenized")
    assert found == ([5, 6, 7], [IGNORE, IGNORE, 7], {"desirable": 0})


@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "a ", "completion": "b", "label": None}, "must be true or false, got None"),
        ({"prompt": "a ", "completion": "b", "label": 1}, "must be true or false, got 1"),
        ({"prompt": "a ", "completion": "", "label": True}, "completion is empty"),
        ({"prompt": None, "completion": "b", "label": True}, "must be strings, or lists"),
        ({"prompt": "a " * 20, "completion": "b", "label": True}, "no token within 16"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_row_that_is_no_judged_answer_is_refused(row, said):
    with pytest.raises(Refused, match=said):
        samples(row)
    with pytest.raises(ValueError, match="reads no column `image`"):
        samples(row, image=None)


def test_mismatched_documents_are_prompts_with_the_answers_of_the_documents_before():
    def document(prompt, answer):
        return torch.tensor(prompt + answer).numpy(), torch.tensor(
            [IGNORE] * len(prompt) + answer
        ).numpy()

    own, other = document([1, 2], [3]), document([4], [5, 6])
    ids, labels = mismatch(own, other, 9)
    assert ids.tolist() == [1, 2, 5, 6] and labels.tolist() == [IGNORE, IGNORE, 5, 6]
    assert mismatch(own, other, 3)[0].tolist() == [1, 2, 5]
    assert mismatch(own, None, 9) is mismatch(own, document([4], []), 9) is None
    assert keyed([4, 2, 7, None]) == [(4, 7), (2, 4), (7, 2), None]


@EVERY
def test_an_answer_is_right_beside_the_mean_log_ratio_of_others(name):
    """Which is 0 for a loss without it: log-ratios of both kinds are on both sides of each."""
    ratios = torch.tensor([-0.5, 0.5, 1.5, 2.5, -0.5, 0.5, 0.5], dtype=torch.float64)
    desirable = torch.tensor([1, 1, 1, 0, 0, 0, 1])
    loss = loss_of("preference", {"preference": Preference(loss=name)})
    count = len(ratios)
    batch = {
        "labels": torch.ones(1, count, dtype=torch.long),
        "lengths": torch.ones(count, dtype=torch.long),
        "desirable": desirable,
        "reference_logprob": torch.full((1, count), -4.0, dtype=torch.float64),
        "first": torch.tensor([4.0, 4.0]),  # a mean of 1
    }
    _, answers, *found = loss(Given(ratios - 4.0), batch)
    reports = {n: float(t / answers) for n, t in zip(loss.reports, found, strict=True)}
    beside = 1.0 if PREFERENCES[name].kl else 0.0

    def accuracy(beside):
        each = zip(ratios.tolist(), desirable.tolist(), strict=True)
        return sum(r > beside if d else r < beside for r, d in each) / count

    assert reports["reward_accuracy"] == accuracy(beside) != accuracy(1 - beside)
    assert reports["drift"] == pytest.approx(float(ratios.abs().mean()))
    assert reports.get("kl", beside) == beside


# ---- runs

STEPS = 2


KIND = "unpaired_preference_tokenized"


def rows(count, seed):
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    return [
        {"prompt_ids": ids(2, 9), "completion_ids": ids(1, 8), "label": rng.random() < 0.6}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, path of a configuration): eight bins a step, of a document or more each."""
    folder = tmp_path_factory.mktemp("unpaired")
    # The other one is surer of what it is wrong about, so that mean log-ratios are above 0.
    for name, seed, scale in (("model", 0, 0.3), ("other", 1, 0.5)):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**SMALL | {"initializer_range": scale})
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    path = write_run(
        folder,
        "preference",
        ("answers.jsonl", KIND),
        rows(100, 1),
        length=40,
        train={"gradient_accumulation_steps": 8, "max_steps": STEPS, "lr": 1e-1},
        preference={
            "loss": "kto",
            "reference_path": str(folder / "other"),
            "kto_desirable_weight": 1.5,
            "kto_undesirable_weight": 0.8,
        },
    )
    return folder, path


OWN = "--preference.reference_path=null"
WHOLE = "--preference.kl_scope=step"
ONE = "--train.max_steps=1"
AT_ONCE = "--train.gradient_accumulation_steps=1"
NEUTRAL = [f"--preference.kto_{kind}_weight=1" for kind in ("desirable", "undesirable")]


@pytest.fixture(scope="module")
def alone(settings):
    return trained(settings, "alone")


@pytest.fixture(scope="module")
def whole(settings):
    return trained(settings, "whole", WHOLE)


def documents(batch):
    """(prompt, answer, desirable) of each document with an answer."""
    for i, (a, b) in enumerate(itertools.pairwise(batch["cu_seqlens"].tolist())):
        labels = batch["labels"][0, a:b]
        learned = (labels != IGNORE).nonzero()[:, 0]
        if len(learned):
            prompt = batch["input_ids"][0, a : a + int(learned[0]) + 1]
            yield prompt, labels[learned], int(batch["desirable"][i])


def plain(settings, scope, beta=0.1):
    """The losses and means of log-ratios of a loop over two of transformers' models."""
    load_model = transformers.LlamaForCausalLM.from_pretrained
    policy, other = (load_model(settings[0] / name) for name in ("model", "other"))

    def ratio(prompt, answer):
        ids = torch.cat((prompt, answer))[None]

        def logprob(model):
            given = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            return given.gather(1, answer[:, None]).double().sum()

        with torch.no_grad():
            reference = logprob(other)
        return logprob(policy) - reference

    def terms(batches):
        groups = [list(documents(batch)) for batch in batches]
        every = [d for group in groups for d in group]
        with torch.no_grad():
            all_kls = [ratio(d[0], every[i - 1][1]) for i, d in enumerate(every)]
        kls, losses, means = iter(all_kls), [], []
        for group in groups:
            own = [next(kls) for _ in group]
            kl = torch.stack(own if scope == "micro_batch" else all_kls).mean().clamp(min=0)
            for prompt, answer, desirable in group:
                z = beta * (ratio(prompt, answer) - kl)
                losses.append(1.5 * (1 - z.sigmoid()) if desirable else 0.8 * (1 - (-z).sigmoid()))
                means.append(kl)
        return torch.stack(losses).mean(), torch.stack(means).mean()

    return by_hand(settings, policy, STEPS, terms, lr=1e-1)


@pytest.mark.parametrize("scope", ["micro_batch", "step"])
def test_a_run_is_kto_on_two_models(scope, settings, alone, whole):
    found = alone if scope == "micro_batch" else whole
    for row, (loss, kl) in zip(found, plain(settings, scope), strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["kl"] == pytest.approx(kl, rel=1e-4) and kl > 0
    assert abs(alone[0]["loss"] - whole[0]["loss"]) > 1e-4


def test_rewards_are_means_over_their_kind(settings, alone):
    made = built(settings)
    found = collections.defaultdict(list)

    def look(per_token, batch):
        answers, there = preferences.answers_of(per_token, batch, reference=True)
        for ratio, good in zip(answers.ratio[there], answers.desirable[there], strict=True):
            found[bool(good)].append(0.1 * float(ratio))
        return per_token.values().sum(), torch.ones(())

    made.engine.forward(next(made.batches.steps()), Loss(look, before=Compared()), training=True)
    counts = {good: len(v) for good, v in found.items()}
    assert alone[0]["desirable"] == pytest.approx(counts[True] / sum(counts.values()))
    for good, name in ((True, "desirable"), (False, "undesirable")):
        mean = sum(found[good]) / counts[good]
        assert alone[0][f"reward_{name}"] == pytest.approx(mean, rel=1e-9)
        assert alone[0][f"logprob_{name}"] < 0


SFT = "--preference.sft_ratio=0.5"
LAYOUTS = layouts(4)
TWO = LAYOUTS["fsdp2"][1:]
OPTIONS = {
    "run_ddp": [*LAYOUTS["ddp"], WHOLE],
    "run_fsdp2": [*LAYOUTS["fsdp2"], WHOLE],
    "run_ulysses": LAYOUTS["ulysses"],
    "run_tp": LAYOUTS["tp"],
    "run_ring": [*LAYOUTS["ring"], WHOLE, SFT],
    "run_at_once": LAYOUTS["fsdp2"],
}


@pytest.fixture(scope="module")
def spread(settings):
    return two_ranks(settings, OPTIONS)


@pytest.fixture(scope="module")
def whole_sft(settings):
    return trained(settings, "whole_sft", WHOLE, SFT)


NAMES = ("loss", "grad_norm", "kl", "drift", "reward_desirable", "logprob_undesirable", "desirable")


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in NAMES:
            assert a[name] == pytest.approx(b[name], rel=2e-4, abs=1e-5), name


@pytest.fixture(scope="module")
def at_once(settings):
    """The micro-batches that two ranks compute at once are one here."""
    return trained(settings, "at_once", "--train.micro_batch_size=2", *TWO)


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_train_as_one_process(name, spread, alone, whole, whole_sft, at_once):
    expected = {"run_at_once": at_once, "run_ring": whole_sft}
    same(spread[name], expected.get(name, whole if WHOLE in OPTIONS[name] else alone))


def test_over_a_step_it_does_not_matter_how_the_step_is_cut(settings, alone, whole_sft, at_once):
    cut = ["--train.micro_batch_size=4", "--train.gradient_accumulation_steps=2"]
    same(trained(settings, "sft_cut", *cut, WHOLE, SFT), whole_sft)
    assert abs(at_once[0]["loss"] - alone[0]["loss"]) > 1e-5


def test_adapters_off_is_the_model_that_they_are_on(settings, capsys):
    lora = [OWN, "--lora.enable_lora=true", "--lora.lora_rank=4", "--train.optimizer=adamw"]
    lora.append("--train.lr=0.01")
    own = trained(settings, "adapters_off", *lora)
    assert "reference: all 26 answers of the first step" in capsys.readouterr().out
    same(own, trained(settings, "second", *lora, "--preference.reference=model"))
    assert own[0]["kl"] == own[0]["drift"] == 0.0 < own[-1]["drift"]
    good = own[0]["desirable"]
    assert own[0]["loss"] == pytest.approx(0.5 * (1.5 * good + 0.8 * (1 - good)), rel=1e-12)


def test_apo_of_unpaired_answers_trains_with_any_reference(settings, tmp_path, capsys):
    apo = ["--preference.loss=apo_zero_unpaired", OWN]
    own = trained(settings, "apo", *apo)
    assert "reference: all 26 answers of the first step" in capsys.readouterr().out
    good = own[0]["desirable"]
    assert own[0]["loss"] == pytest.approx(0.5 * (1.5 * good + 0.8 * (1 - good)), rel=1e-12)
    assert own[0]["drift"] == 0.0 < own[-1]["drift"] and "kl" not in own[0]
    read = ["--preference.reference=precomputed", f"--preference.reference_cache={tmp_path}"]
    found = trained(settings, "apo_read", *apo, *read)
    assert [r["loss"] for r in found] == [r["loss"] for r in own]
    given = [
        {"input_ids": [1, 2, 3 + i], "desirable": i, "reference_logprob": [0.0, -1.0, -0.5]}
        for i in range(2)
    ]
    column = [data_set(tmp_path / "rows.jsonl", given), "--preference.reference=column"]
    capsys.readouterr()
    [row] = trained(settings, "apo_column", *apo, *column, ONE, AT_ONCE)
    up, down = (torch.tensor(row[f"logprob_{k}"] + 1.5) for k in ("desirable", "undesirable"))
    terms = 1.5 * torch.sigmoid(-0.1 * up) + 0.8 * torch.sigmoid(0.1 * down)
    assert row["loss"] == pytest.approx(float(terms) / 2, rel=1e-6)
    said = "reference: the column reference_logprob, under which 2 of 2 answers of the first step"
    assert said in capsys.readouterr().out


def test_evaluations_over_all_of_a_set_do_not_depend_on_its_batches(settings, tmp_path):
    data = data_set(tmp_path / "held.jsonl", rows(11, 5), KIND, "test_datasets")
    found = []
    for size in (1, 3):
        name, hits = f"held_{size}", f"--train.eval_accuracy={size == 3}"
        size = f"--train.eval_micro_batch_size={size}"
        trained(settings, name, data, ONE, AT_ONCE, WHOLE, hits, size)
        found.append(evaluations(settings[0] / name)[0])
    for name in ("eval_loss", "eval_kl", "eval_reward_desirable"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5) and found[0][name]


def test_one_answer_a_step_has_no_mismatched_one(settings, tmp_path):
    data = data_set(tmp_path / "one.jsonl", rows(1, 2), KIND)
    [row] = trained(settings, "one", data, ONE, AT_ONCE)
    assert row["kl"] == 0.0 < row["drift"]


def test_a_likelihood_is_added_for_desirable_answers(settings, alone):
    [row] = trained(settings, "sft", SFT, ONE)
    made = built(settings)
    every = [d for batch in next(made.batches.steps()) for d in documents(batch)]
    good = [len(answer) for _, answer, desirable in every if desirable]
    added = -row["logprob_desirable"] * len(good) / sum(good)
    assert row["sft_loss"] == pytest.approx(added, rel=1e-9)
    assert row["preference_loss"] == pytest.approx(alone[0]["loss"], rel=1e-12)
    assert row["loss"] == pytest.approx(alone[0]["loss"] + 0.5 * added, rel=1e-9)


def test_a_policy_that_is_not_its_reference_is_named(settings, monkeypatch, capsys):
    with pytest.raises(
        ValueError,
        match=r"of 26 answers differ, first \S+answers.jsonl: line \d+ \(micro-batch 1\): log",
    ):
        trained(settings, "dropped", OWN, "--train.hidden_dropout=0.2")
    trained(settings, "said", ONE)
    assert "under which 26 of 26 answers of the first step" in capsys.readouterr().out
    made = preferences.mismatched_ratios

    def wrong(*arguments):
        total, count = made(*arguments)
        return total + 1e-3, count

    monkeypatch.setattr(preferences, "mismatched_ratios", wrong)
    with pytest.raises(
        ValueError, match="micro-batch 1: log-probabilities of answers to other pro"
    ):
        trained(settings, "wrong", OWN)


def test_pairs_and_answers_are_not_taken_for_each_other(settings, tmp_path):
    with pytest.raises(ValueError, match=r"train.loss = preference: .* has no column pair"):
        trained(settings, "pairs", "--preference.loss=sigmoid", *NEUTRAL)
    pair = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
    data = data_set(tmp_path / "pairs.jsonl", [pair], "preference_tokenized")
    with pytest.raises(ValueError, match=r"preference.loss = kto: .* has no column desirable"):
        trained(settings, "answers", data)


def test_a_plan_of_memory_takes_no_less_than_without_mismatched_answers(settings):
    config = load(settings[1], ["--data.sample_packing_sequence_len=256"])
    found = planned(config, 1)
    pairs = load(settings[1], ["--preference.loss=apo_zero", *NEUTRAL])
    pairs = pairs.model_copy(update={"data": config.data})
    assert found.total >= planned(pairs, 1).total
