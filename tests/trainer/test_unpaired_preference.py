"""Answers that are desirable or not: KTO against TRL's code, and whole runs against two of
transformers' models."""

import collections
import itertools
import json
import random
import types
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")

from pairs import SMALL, VOCAB, Given, Words, trained  # noqa: E402
from ranks import metrics, run_modes  # noqa: E402
from small import write_run  # noqa: E402

from tilewright.ops.loss.preference import Answers, Options  # noqa: E402
from tilewright.trainer import build  # noqa: E402
from tilewright.trainer.checkpoint import hf  # noqa: E402
from tilewright.trainer.columns import IGNORE  # noqa: E402
from tilewright.trainer.config import load  # noqa: E402
from tilewright.trainer.config.preference import Preference  # noqa: E402
from tilewright.trainer.data.batches import keyed, mismatch  # noqa: E402
from tilewright.trainer.data.types.dataset_type import Asked, Refused  # noqa: E402
from tilewright.trainer.losses import preferences  # noqa: E402
from tilewright.trainer.losses.loss import loss_of  # noqa: E402
from tilewright.trainer.memory_plan import plan  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh  # noqa: E402
from tilewright.trainer.tables import DATASETS, PREFERENCES  # noqa: E402

pytestmark = pytest.mark.packages

KTO = PREFERENCES["kto"]
WEIGHED = Options(beta=0.3, kto_desirable_weight=1.5, kto_undesirable_weight=0.4)


def some(count=6, seed=0, scale=6.0):
    g = torch.Generator().manual_seed(seed)
    sums = [-scale * torch.rand(count, generator=g, dtype=torch.float64) for _ in range(4)]
    desirable = torch.arange(count) % 3 != 1
    kl = (sums[2] - sums[3]).mean().clamp(min=0)
    return Answers(*sums[:2], torch.ones(count), desirable, kl), sums[2:]


# ---- the formula


def trls_kto(answers, mismatched, o, name="kto"):
    """TRL's trainer on log-probabilities that a model would give, one token of them an answer."""
    trainer = pytest.importorskip("trl").KTOTrainer
    count = len(answers.answer)
    passes = iter((*mismatched[:1], answers.answer))  # as it calls the model

    def model(**_):
        zeros = torch.zeros(count, 1, dtype=torch.float64)
        return types.SimpleNamespace(
            log_probs=next(passes)[:, None], entropy=zeros, mean_logits=zeros
        )

    one = {"input_ids": 0, "attention_mask": 0, "completion_mask": 0}
    tokens = torch.ones(count, 2, dtype=torch.long)
    inputs = {f"{kind}{name}": tokens for kind in ("", "KL_") for name in one}
    inputs |= {"label": answers.desirable, "ref_logps": answers.reference}
    this = types.SimpleNamespace(
        model=types.SimpleNamespace(training=False),
        accelerator=types.SimpleNamespace(
            device=torch.device("cpu"), gather_for_metrics=lambda t: t
        ),
        aux_loss_enabled=False,
        calculate_KL=name == "kto",
        precompute_ref_logps=True,
        loss_type=name,
        beta=o.beta,
        desirable_weight=o.kto_desirable_weight,
        undesirable_weight=o.kto_undesirable_weight,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    this._compute_kl_logps = types.MethodType(trainer._compute_kl_logps, this)
    if mismatched:
        inputs["ref_KL_logps"] = mismatched[1]
    return trainer._compute_loss(this, model, inputs, False)


def test_the_formula_is_trls():
    kls = []
    for seed in range(6):
        answers, mismatched = some(seed=seed)
        found = KTO.function(answers, WEIGHED).mean()
        torch.testing.assert_close(
            found, trls_kto(answers, mismatched, WEIGHED), rtol=1e-12, atol=0
        )
        kls.append(float(answers.kl))
    assert min(kls) == 0.0 < max(kls)


def test_apo_of_unpaired_answers_is_trls_and_has_a_closed_value():
    row = PREFERENCES["apo_zero_unpaired"]
    answers, _ = some()
    expected = trls_kto(answers, (), WEIGHED, "apo_zero_unpaired")
    found = row.function(answers, WEIGHED)
    torch.testing.assert_close(found.mean(), expected, rtol=1e-12, atol=0)
    assert answers.kl > 0 and torch.equal(found, row.function(answers._replace(kl=0.0), WEIGHED))
    for option in Options._fields:
        other = row.function(answers, WEIGHED._replace(**{option: 0.23}))
        assert (not torch.equal(other, found)) == (option in row.reads), option
    equal = row.function(answers._replace(reference=answers.answer), WEIGHED)
    assert equal.tolist() == [0.75 if d else 0.2 for d in answers.desirable.tolist()]

    def loss(sums):
        return row.function(answers._replace(answer=sums), WEIGHED)

    assert torch.autograd.gradcheck(loss, [answers.answer.requires_grad_()])


def test_gradients_are_finite_differences_and_extremes_finite():
    answers, _ = some()

    def loss(sums):
        return KTO.function(answers._replace(answer=sums), WEIGHED)

    assert torch.autograd.gradcheck(loss, [answers.answer.requires_grad_()])
    for reference in (-1e4, -1e-12, 0.0):
        sums = torch.tensor([0.0, -1e-12, -1e4] * 2, dtype=torch.float64, requires_grad=True)
        found = KTO.function(
            answers._replace(answer=sums, reference=torch.full_like(sums, reference)), WEIGHED
        )
        [grad] = torch.autograd.grad(found.sum(), sums)
        assert found.isfinite().all() and grad.isfinite().all()


def test_it_reads_what_it_says_and_has_a_closed_value_at_the_reference():
    answers, _ = some(seed=1)
    answers = answers._replace(kl=0.7)
    base = KTO.function(answers, WEIGHED)
    for option in Options._fields:
        other = KTO.function(answers, WEIGHED._replace(**{option: 0.23}))
        assert (not torch.equal(other, base)) == (option in KTO.reads), option
    assert not torch.equal(KTO.function(answers._replace(kl=0.0), WEIGHED), base)
    equal = answers._replace(reference=answers.answer, kl=0.0)
    expected = torch.tensor(
        [0.75 if d else 0.2 for d in answers.desirable.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(KTO.function(equal, WEIGHED), expected, rtol=1e-15, atol=0)


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


@pytest.mark.parametrize("name", [n for n, row in PREFERENCES.items() if not row.paired])
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

STEPS = 3


def rows(count, seed):
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    return [
        {"prompt_ids": ids(2, 9), "completion_ids": ids(1, 8), "label": rng.random() < 0.6}
        for _ in range(count)
    ]


def write(path, given):
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return json.dumps([{"path": str(path), "type": "unpaired_preference_tokenized"}])


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, path of a configuration): eight bins a step, of a document or more each."""
    folder = tmp_path_factory.mktemp("unpaired")
    # The other one is surer of what it is wrong about, so that mean log-ratios are above 0.
    for name, seed, scale in (("model", 0, 0.3), ("other", 1, 0.5)):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**SMALL | {"initializer_range": scale})
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    write(folder / "answers.jsonl", rows(100, 1))
    path = write_run(
        folder,
        "preference",
        ("answers.jsonl", "unpaired_preference_tokenized"),
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
    folder, path = settings
    load_model = transformers.LlamaForCausalLM.from_pretrained
    policy, other = (load_model(folder / name) for name in ("model", "other"))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-1)
    steps = build.build(
        load(path, [f"--train.output_dir={folder / 'unused'}"]), Mesh()
    ).batches.steps()

    def ratio(prompt, answer):
        ids = torch.cat((prompt, answer))[None]

        def logprob(model):
            given = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            return given.gather(1, answer[:, None]).double().sum()

        with torch.no_grad():
            reference = logprob(other)
        return logprob(policy) - reference

    found = []
    for _ in range(STEPS):
        groups = [list(documents(batch)) for batch in next(steps)]
        every = [d for group in groups for d in group]
        with torch.no_grad():
            all_kls = [ratio(d[0], every[i - 1][1]) for i, d in enumerate(every)]
        kls = iter(all_kls)
        terms, means = [], []
        for group in groups:
            own = [next(kls) for _ in group]
            kl = torch.stack(own if scope == "micro_batch" else all_kls).mean().clamp(min=0)
            for prompt, answer, desirable in group:
                z = beta * (ratio(prompt, answer) - kl)
                terms.append(1.5 * (1 - z.sigmoid()) if desirable else 0.8 * (1 - (-z).sigmoid()))
                means.append(float(kl))
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), sum(means) / len(means)))
    return found


@pytest.mark.parametrize("scope", ["micro_batch", "step"])
def test_a_run_is_kto_on_two_models(scope, settings, alone, whole):
    found = alone if scope == "micro_batch" else whole
    for row, (loss, kl) in zip(found, plain(settings, scope), strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["kl"] == pytest.approx(kl, rel=1e-4) and kl > 0
    assert abs(alone[0]["loss"] - whole[0]["loss"]) > 1e-4


def test_rewards_are_means_over_their_kind(settings, alone):
    folder, path = settings
    made = build.build(load(path, [f"--train.output_dir={folder / 'unused'}"]), Mesh())
    found = collections.defaultdict(list)

    def look(per_token, batch):
        answers, there = preferences.answers_of(per_token, batch, reference=True)
        for ratio, good in zip(answers.ratio[there], answers.desirable[there], strict=True):
            found[bool(good)].append(0.1 * float(ratio))
        return per_token.values().sum(), torch.ones(())

    made.engine.forward(next(made.batches.steps()), look, training=True)
    counts = {good: len(v) for good, v in found.items()}
    assert alone[0]["desirable"] == pytest.approx(counts[True] / sum(counts.values()))
    for good, name in ((True, "desirable"), (False, "undesirable")):
        mean = sum(found[good]) / counts[good]
        assert alone[0][f"reward_{name}"] == pytest.approx(mean, rel=1e-9)
        assert alone[0][f"logprob_{name}"] < 0


SFT = "--preference.sft_ratio=0.5"
TWO = ["--train.gradient_accumulation_steps=4"]
OPTIONS = {
    "run_ddp": ["--train.data_parallel_mode=ddp", *TWO, WHOLE],
    "run_fsdp2": ["--train.data_parallel_mode=fsdp2", *TWO, WHOLE],
    "run_ring": ["--train.data_parallel_mode=fsdp2", "--train.ringattn_parallel_size=2", WHOLE],
    "run_ulysses": ["--train.data_parallel_mode=fsdp2", "--train.ulysses_parallel_size=2"],
    "run_tp": ["--train.data_parallel_mode=fsdp2", "--train.tensor_parallel_size=2"],
    "run_sft": ["--train.data_parallel_mode=fsdp2", "--train.ringattn_parallel_size=2", WHOLE, SFT],
    "run_at_once": ["--train.data_parallel_mode=fsdp2", *TWO],
}


@pytest.fixture(scope="module")
def spread(settings):
    folder, path = settings
    modes = {
        name: [path, f"--train.output_dir={folder / name}", "--model.merge_qkv=false", *options]
        for name, options in OPTIONS.items()
    }
    run_modes(2, folder, modes)
    return {name: metrics(folder / name) for name in OPTIONS}


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
def test_ranks_train_as_one_process(name, settings, spread, alone, whole, at_once):
    expected = at_once if name == "run_at_once" else whole if WHOLE in OPTIONS[name] else alone
    if SFT in OPTIONS[name]:
        expected = trained(settings, "whole_sft", WHOLE, SFT)
    same(spread[name], expected)


def test_over_a_step_it_does_not_matter_how_the_step_is_cut(settings, alone, whole, at_once):
    cut = ["--train.micro_batch_size=4", "--train.gradient_accumulation_steps=2"]
    same(trained(settings, "cut", *cut, WHOLE), whole)
    added = trained(settings, "sft_at_once", WHOLE, SFT)
    same(trained(settings, "sft_cut", *cut, WHOLE, SFT), added)
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
    apo = ["--preference.loss=apo_zero_unpaired"]
    own = trained(settings, "apo", *apo, OWN)
    assert "reference: all 26 answers of the first step" in capsys.readouterr().out
    good = own[0]["desirable"]
    assert own[0]["loss"] == pytest.approx(0.5 * (1.5 * good + 0.8 * (1 - good)), rel=1e-12)
    assert own[0]["drift"] == 0.0 < own[-1]["drift"] and "kl" not in own[0]
    read = ["--preference.reference=precomputed", f"--preference.reference_cache={tmp_path}"]
    found = trained(settings, "apo_read", *apo, OWN, *read)
    assert [r["loss"] for r in found] == [r["loss"] for r in own]
    given = [
        {"input_ids": [1, 2, 3 + i], "desirable": i, "reference_logprob": [0.0, -1.0, -0.5]}
        for i in range(2)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in given))
    data = json.dumps([{"path": str(path), "type": "tokenized"}])
    column = [
        f"--data.datasets={data}",
        "--preference.reference=column",
        OWN,
        "--train.max_steps=1",
    ]
    column.append("--train.gradient_accumulation_steps=1")
    capsys.readouterr()
    [row] = trained(settings, "apo_column", *apo, *column)
    up, down = (torch.tensor(row[f"logprob_{k}"] + 1.5) for k in ("desirable", "undesirable"))
    terms = 1.5 * torch.sigmoid(-0.1 * up) + 0.8 * torch.sigmoid(0.1 * down)
    assert row["loss"] == pytest.approx(float(terms) / 2, rel=1e-6)
    said = "reference: the column reference_logprob, under which 2 of 2 answers of the first step"
    assert said in capsys.readouterr().out


def test_evaluations_over_all_of_a_set_do_not_depend_on_its_batches(settings, tmp_path):
    data = write(tmp_path / "held.jsonl", rows(11, 5))
    options = [f"--data.test_datasets={data}", "--train.max_steps=1", WHOLE]
    found = []
    for size in (1, 3):
        name, hits = f"held_{size}", f"--train.eval_accuracy={size == 3}"
        trained(settings, name, *options, hits, f"--train.eval_micro_batch_size={size}")
        lines = map(json.loads, (settings[0] / name / "metrics.jsonl").read_text().splitlines())
        found.append(next(row for row in lines if "eval_loss" in row))
    for name in ("eval_loss", "eval_kl", "eval_reward_desirable"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5) and found[0][name]


def test_one_answer_a_step_has_no_mismatched_one(settings, tmp_path):
    data = write(tmp_path / "one.jsonl", rows(1, 2))
    one = ["--train.gradient_accumulation_steps=1", "--train.max_steps=1"]
    [row] = trained(settings, "one", f"--data.datasets={data}", *one)
    assert row["kl"] == 0.0 < row["drift"]


def test_a_likelihood_is_added_for_desirable_answers(settings, alone):
    folder, path = settings
    [row] = trained(settings, "sft", SFT, "--train.max_steps=1")
    made = build.build(load(path, [f"--train.output_dir={folder / 'unused'}"]), Mesh())
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
    trained(settings, "said", "--train.max_steps=1")
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


def test_pairs_and_answers_are_not_taken_for_each_other(settings):
    with pytest.raises(ValueError, match=r"train.loss = preference: .* has no column pair"):
        trained(settings, "pairs", "--preference.loss=sigmoid", *NEUTRAL)
    pair = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
    path = settings[0] / "pairs.jsonl"
    path.write_text(json.dumps(pair))
    data = json.dumps([{"path": str(path), "type": "preference_tokenized"}])
    with pytest.raises(ValueError, match=r"preference.loss = kto: .* has no column desirable"):
        trained(settings, "answers", f"--data.datasets={data}")


def test_a_plan_of_memory_takes_no_less_than_without_mismatched_answers(settings):
    config = load(settings[1], ["--data.sample_packing_sequence_len=256"])
    shape, device = hf.shape_of(config.model), torch.device("cpu")
    found = plan(config, shape, 1, 0, device, otherwise=False)
    pairs = load(settings[1], ["--preference.loss=apo_zero", *NEUTRAL])
    pairs = pairs.model_copy(update={"data": config.data})
    assert found.total >= plan(pairs, shape, 1, 0, device, otherwise=False).total
