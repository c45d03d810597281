"""Preference training: formulas against TRL's code, whole runs against two transformers models."""

import collections
import dataclasses
import functools
import importlib
import itertools
import math
import random
import re
import types
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")


import pairs
from pairs import (
    VOCAB,
    Given,
    Words,
    answers,
    formula,
    plain,
    rows,
    same,
    samples,
    trained,
    trls_trainer,
)
from preparing import prepare_of
from small import built, data_set, evaluations, layouts, two_ranks
from whole import loss_of_run

from tilewright import ops
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.ops.loss.preference import OPTIONS, Pairs, log1mexp
from tilewright.trainer import build
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked, Prompts, Refused
from tilewright.trainer.data.types.preference import implicit_prompt, with_shorter_prompt
from tilewright.trainer.losses import preferences
from tilewright.trainer.losses.before import Compared
from tilewright.trainer.losses.loss import Loss, loss_of
from tilewright.trainer.losses.preference.row import PREFERENCES
from tilewright.trainer.losses.preference_fields import Preference, kind_of_reference
from tilewright.trainer.reference import adapters_off

pytestmark = pytest.mark.packages
settings = pairs.settings

EVERY = pytest.mark.parametrize("name", [n for n, row in PREFERENCES.items() if row.paired])


def pairs(*shape, seed=0, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    sums = [-scale * torch.rand(*shape, generator=g, dtype=torch.float64) * 9 for _ in range(4)]
    tokens = [torch.randint(1, 9, shape, generator=g).double() for _ in range(2)]
    gap = 3 * torch.rand(shape, generator=g, dtype=torch.float64)
    kl = torch.rand(2, generator=g, dtype=torch.float64)
    return Pairs(*sums, *tokens, gap, *kl)


# ---- formulas


def trls_dpo(name, p, *, beta, label_smoothing):
    """TRL's trainer on log-probabilities that a model would give, one token of them an answer."""
    trainer = pytest.importorskip("trl").DPOTrainer
    # Answers of as many tokens; their log-probability is on the first.
    tokens = torch.cat((p.chosen_tokens, p.rejected_tokens)).long()
    S = int(tokens.max())
    mask = torch.arange(S) < tokens[:, None]
    given = torch.zeros(len(tokens), S, dtype=torch.float64)
    given[:, 0] = torch.cat((p.chosen, p.rejected))
    zeros = torch.zeros_like(given)
    outputs = types.SimpleNamespace(
        log_probs=given, entropy=zeros, mean_logits=zeros, is_top1=mask, log_sum_sq_probs=zeros
    )
    this = trls_trainer(
        args=types.SimpleNamespace(),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        use_weighting=False,
        beta=beta,
        label_smoothing=label_smoothing,
    )
    completion = torch.cat((torch.zeros(len(mask), 1, dtype=torch.bool), mask), 1).long()
    inputs = dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), completion)
    inputs |= {"ref_chosen_logps": p.ref_chosen, "ref_rejected_logps": p.ref_rejected}
    return trainer._compute_loss(this, lambda **_: outputs, inputs, False)


DPO = "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down sigmoid_norm"


@pytest.mark.parametrize("name", DPO.split())
def test_a_formula_is_trls(name):
    """Where exo_pair's smoothing is 0, which TRL refuses, it is that which the paper recommends."""
    least = 1e-3 if name == "exo_pair" else 0.0
    for seed, smoothing in enumerate((0.0, 0.1) if name in ("exo_pair", "robust") else (0.0,) * 3):
        p = pairs(5, seed=seed)
        expected = trls_dpo(name, p, beta=0.3, label_smoothing=smoothing or least)
        found = formula(name, beta=0.3, label_smoothing=smoothing)(p).mean()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def of_answers(sums, tokens):
    """[T]: each answer's log-probability on its first token."""
    flat = sums.new_zeros(int(tokens.sum()))
    flat[(tokens.cumsum(0) - tokens).long()] = sums
    return flat


def micro_batch(p):
    """(given, batch) of these pairs."""
    own, refs, tokens = (torch.stack(p[i : i + 2], 1).flatten() for i in (0, 2, 4))
    batch = {
        "labels": torch.ones(1, int(tokens.sum()), dtype=torch.long),
        "lengths": tokens.long(),
        "role": torch.arange(len(tokens)) % 2,
        "reference_logprob": of_answers(refs, tokens)[None],
    }
    return Given(of_answers(own, tokens)), batch


@EVERY
def test_reports_of_pairs_are_those_of_a_plain_loop(name):
    """Without a reference rewards are log-probabilities per token."""
    p, beta = pairs(7, seed=3), 0.3
    loss = loss_of("preference", {"preference": Preference(loss=name, beta=beta)})
    total, count, *found = loss(*micro_batch(p))
    found = {n: float(t / count) for n, t in zip(loss.reports, found, strict=True)}
    row = PREFERENCES[name]
    if not row.kl:  # whose mean log-ratios are those of the micro-batch
        each = row(beta=beta)(p._replace(gap=None))
        torch.testing.assert_close(total, each.sum(), rtol=1e-12, atol=0)
    want = collections.defaultdict(float)
    for a, b, ref_a, ref_b, of_a, of_b in zip(*(t.tolist() for t in p[:6]), strict=True):
        up, down = (a - ref_a, b - ref_b) if row.reference else (a / of_a, b / of_b)
        each = {
            "reward_accuracy": up > down,
            "reward_margin": beta * (up - down),
            "reward_chosen": beta * up,
            "reward_rejected": beta * down,
            "logprob_chosen": a,
            "logprob_rejected": b,
            **({"drift": abs(up) + abs(down)} if row.reference else {}),
        }
        for key, value in each.items():
            want[key] += value / 7
    found.pop("saturated")
    assert found == pytest.approx(want, rel=1e-12)
    # By sums other pairs would be right.
    sums = p.means if row.reference else p
    assert float((sums.chosen > sums.rejected).double().mean()) != want["reward_accuracy"]


def test_simpo_and_orpo_are_trls():
    pytest.importorskip("trl")
    p, beta, gamma = pairs(5), 2.0, 0.7
    means = p.means.chosen, p.means.rejected
    cpo = importlib.import_module("trl.experimental.cpo.cpo_trainer").CPOTrainer
    this = trls_trainer(
        beta=beta, alpha=0.0, loss_type="simpo", simpo_gamma=gamma, label_smoothing=0.0
    )
    found = ops.SimPO(beta=beta, simpo_gamma=gamma)(p)
    torch.testing.assert_close(found, cpo.cpo_loss(this, *means)[0])
    orpo = importlib.import_module("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    # It adds beta times the log-sigmoid to the log-likelihood, and computes it in float32.
    found = -ops.ORPO(beta=beta)(p)
    expected = orpo.odds_ratio_loss(this, *means)[0].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_formulas_that_trl_has_not_are_as_published():
    p = pairs(4)
    smoothed = {"beta": 0.2, "label_smoothing": 0.2, "dpop_lambda": 5.0}
    shifted = {"beta": 0.2, "offset_alpha": 0.7}

    def loss(z):
        return math.log1p(math.exp(-z))

    for i in range(4):
        c, r, C, R = (float(t[i]) for t in p[:4])
        z = 0.2 * ((c - r) - (C - R))
        up, down = (0.2 * v for v in (c - C - p.kl_rejected.item(), p.kl_chosen.item() - (r - R)))
        for name, options, expected in (
            ("sigmoid", smoothed, 0.8 * loss(z) + 0.2 * loss(-z)),
            ("dpop", smoothed, loss(z - 0.2 * 5 * max(0.0, C - c))),
            ("sigmoid", shifted, loss(z - 0.7 * math.log(float(p.gap[i]) + 1e-6))),
            ("kto_pair", shifted, 2 - sum(1 / (1 + math.exp(-v)) for v in (up, down))),
        ):
            given = p if options is shifted else p._replace(gap=None)
            found = formula(name, **options)(given)[i].item()
            assert found == pytest.approx(expected, rel=1e-12), name


@EVERY
def test_gradients_are_finite_differences(name):
    row, p = formula(name, beta=0.7, label_smoothing=0.1), pairs(6, seed=3)

    def loss(chosen, rejected):
        return row(p._replace(chosen=chosen, rejected=rejected))

    assert torch.autograd.gradcheck(loss, [t.requires_grad_() for t in p[:2]])


def test_a_pair_without_a_gradient_is_saturated():
    """hinge beyond its margin; log sigmoid where float32 has 0; ipo at its minimum."""
    p = pairs(4)
    margins = torch.tensor([0.5, 1.5, 120.0, -120.0], dtype=torch.float64)
    p = p._replace(chosen=p.rejected - p.ref_rejected + p.ref_chosen + margins)

    def found(name, given=p):
        row = formula(name, beta=1.0)
        return preferences.saturated(given, ("chosen", "rejected"), row).tolist()

    assert found("hinge") == [0, 1, 1, 0]
    assert found("sigmoid") == [0, 0, 1, 0] and found("robust") == found("sigmoid")
    assert found("ipo") == found("sppo_hard") == [0, 0, 0, 0]
    ones = torch.ones_like(margins)
    least = Pairs(0.5 * ones, 0 * ones, 0 * ones, 0 * ones, ones, ones)
    assert found("ipo", least) == [1, 1, 1, 1]


@EVERY
@pytest.mark.parametrize("margin", [1e4, -1e4, 1e-12], ids=str)
def test_extremes_are_finite(name, margin):
    """Margins of 1e4, answers that are certain, and a probability of exactly 1."""
    for other in (-1e-12, 0.0, -1e4):
        c = torch.tensor([min(0.0, other + margin), other], dtype=torch.float64).requires_grad_()
        r = torch.tensor([other, other], dtype=torch.float64).requires_grad_()
        ones = torch.ones(2, dtype=torch.float64)
        p = Pairs(c, r, torch.full_like(ones, -3.0), torch.full_like(ones, -2.0), ones, ones)
        loss = PREFERENCES[name]()(p)
        assert loss.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss.sum(), (c, r)))


def test_log1mexp_is_exact_on_both_sides():
    mpmath = pytest.importorskip("mpmath")
    for x in (-1e-12, -1e-3, -0.5, -math.log(2), -0.7, -5.0, -50.0, -700.0):
        found = log1mexp(torch.tensor(x, dtype=torch.float64)).item()
        with mpmath.workdps(60):
            expected = float(mpmath.log(1 - mpmath.exp(mpmath.mpf(x))))
        assert found == pytest.approx(expected, rel=1e-14)


@EVERY
def test_a_formula_reads_what_it_says(name):
    row, p = PREFERENCES[name], pairs(5, seed=1)
    options = {"beta": 0.3, "label_smoothing": 0.1, "dpop_lambda": 2.0, "offset_alpha": 0.1}
    base = formula(name, **options)(p)
    for option in OPTIONS:
        if option not in row.reads:
            with pytest.raises(TypeError, match=option):
                row(**{option: 0.23})
            continue
        other = formula(name, **options | {option: 0.23})(p)
        assert not torch.equal(other, base), option
    moved = formula(name, **options)(p._replace(ref_chosen=p.ref_chosen + 1))
    assert (not torch.equal(moved, base)) == row.reference
    for kl in ("kl_chosen", "kl_rejected"):
        moved = formula(name, **options)(p._replace(**{kl: 2.0}))
        assert (not torch.equal(moved, base)) == row.kl


# ---- data


def test_strings_are_two_documents_with_the_answers_labels():
    found = samples({"prompt": "to be ", "chosen": "or not", "rejected": "and so on"})
    assert [f[2]["role"] for f in found] == [0, 1] and len({f[2]["pair"] for f in found}) == 1
    (chosen, rejected), words = found, Words()
    assert list(chosen[0]) == words("to be or not")["input_ids"] + [1]
    assert answers(found) == [
        words("or not")["input_ids"] + [1],
        words("and so on")["input_ids"] + [1],
    ]
    assert list(rejected[0][:2]) == list(chosen[0][:2])


def test_an_implicit_prompt_is_what_both_conversations_begin_with():
    user = {"role": "user", "content": "why"}
    given = [[user, {"role": "assistant", "content": a}] for a in ("because", "no idea")]
    implicit = samples({"chosen": given[0], "rejected": given[1]})
    explicit = samples({"prompt": [user], "chosen": given[0][1:], "rejected": given[1][1:]})
    assert implicit == explicit and len(implicit) == 2
    assert answers(implicit)[0] == Words()("because ")["input_ids"][:-1] + answers(implicit)[0][1:]


def test_an_implicit_prompt_of_strings_is_trls():
    extract_prompt = pytest.importorskip("trl.data_utils").extract_prompt
    found = samples({"chosen": "to be or not", "rejected": "to be and so on"})
    assert found == samples({"prompt": "to be", "chosen": " or not", "rejected": " and so on"})
    rng, seen = random.Random(0), 0
    for _ in range(2000):
        begin, *ends = ("".join(rng.choices("ab ", k=rng.randint(0, 5))) for _ in range(3))
        row = {"chosen": f"{begin}{ends[0]}", "rejected": f"{begin}{ends[1]}"}
        if not all(row.values()):
            continue
        expected = extract_prompt(row)
        begins = row["chosen"][0] == row["rejected"][0] and min(map(len, row.values())) > 1
        try:
            count = implicit_prompt(**row)
        except Refused:
            # Where nothing is left TRL's prompt is empty, or by mistake a whole answer.
            assert not begins or expected["prompt"] == ""
        else:
            seen += 1
            assert row["chosen"][:count] == expected["prompt"] != ""
            assert row["rejected"][count:] == expected["rejected"]
    assert seen > 500
    turns = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"))]
    row = {"chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "c"}]}
    assert samples(row) == samples(extract_prompt(row))


def talk(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"rejected": "b"}, "is its rejected one"),
        ({"chosen": ""}, "chosen answer is empty"),
        ({"rejected": None}, "rejected must both be strings"),
        ({"prompt": ..., "chosen": "d"}, "no prompt, and chosen and rejected begin with other"),
        ({"prompt": ..., "rejected": None}, "prompt and chosen must both be strings"),
        ({"chosen": "b " * 40 + "c", "rejected": "b " * 40}, "equal within 32"),
        ({"prompt": "a " * 40}, "no token within 32"),
        ({"prompt": ..., "chosen": [], "rejected": []}, "lists of messages"),
        ({"prompt": ..., "chosen": talk("x"), "rejected": talk("y")}, "begin with other messages"),
        ({"chosen_score": 1, "rejected_score": 1}, "score 1 is not above its rejected_score 1"),
        ({"chosen_score": 1}, "rejected_score must be a finite number, got None"),
        ({"chosen": [{}], "rejected": [{}]}, "prompt must be a list"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_row_that_is_no_pair_is_refused(changed, said):
    row = {"prompt": "a ", "chosen": "b", "rejected": "c", **changed}
    with pytest.raises(Refused, match=said):
        samples({name: value for name, value in row.items() if value is not ...})


def test_tokens_are_taken_as_they_are_and_bad_ones_refused():
    row = {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9]}
    found = samples(row, kind="preference_tokenized")
    assert [[*ids] for ids, *_ in found] == [[5, 6, 7], [5, 6, 8, 9]]
    assert answers(found) == [[7], [8, 9]]
    for changed, said in (
        ({"chosen_ids": []}, "chosen_ids are empty"),
        ({"prompt_ids": None}, "prompt_ids are null"),
        ({"rejected_ids": [None]}, "rejected_ids is null"),
    ):
        with pytest.raises(Refused, match=said):
            samples(row | changed, kind="preference_tokenized")
    with pytest.raises(ValueError, match="reads no column `images`: models here read text alone"):
        samples({"chosen": "a", "rejected": "b"}, images=None)


def shortened(prompt, chosen, rejected, limit, keep):
    """The documents' tokens and answers, and what is told."""
    asked = Asked("d", "preference_tokenized", 64, None, {}, Prompts(limit, keep))
    made: Any = DATASETS[asked.kind].samples(asked)
    row = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    found = [*made(row)]
    return [[*ids] for ids, *_ in found], answers(found), dict(asked.told)


@pytest.mark.parametrize("keep, kept", [("keep_start", [0, 1, 2, 3]), ("keep_end", [5, 6, 7, 8])])
def test_a_long_prompt_is_cut_to_the_same_tokens_for_both_answers(keep, kept):
    prompt, one, other = [*range(9)], [20, 21], [30]
    ids, labels, told = shortened(prompt, one, other, 4, keep)
    assert ids == [kept + one, kept + other] and labels == [one, other]
    assert told == {f"prompts were cut to 4 tokens (preference.max_prompt_len, {keep})": 1}
    whole = shortened(prompt, one, other, 9, keep)
    assert whole == ([prompt + one, prompt + other], [one, other], {})


def test_a_cut_prompt_leaves_room_for_answers_which_are_cut_from_their_ends():
    prompt, one, other = [*range(30)], [*range(30, 60)], [*range(40, 45)]
    ids, labels, told = shortened(prompt, one, other, 25, "keep_end")
    assert ids == [[*range(8, 30), *range(30, 40)], [*range(8, 30), *other]]
    assert labels == [one[:10], other] and {*told.values()} == {1}
    assert [*told] == [
        "prompts were cut to 22 tokens (preference.max_prompt_len, keep_end)",
        "answers were cut at their ends, to documents of 32 tokens",
    ]


def test_a_token_of_both_prompt_and_answer_is_not_cut():
    """The last token of one of the documents' prompts belongs to the answer in the other one."""
    given = [([1, 2, 3, 4, 9], [IGNORE] * 4 + [9]), ([1, 2, 3, 8], [IGNORE] * 3 + [8])]
    for keep, kept in (("keep_end", [[3, 4, 9], [3, 8]]), ("keep_start", [[1, 4, 9], [1, 8]])):
        found, told = with_shorter_prompt(given, Prompts(2, keep), 64)
        assert [ids for ids, _ in found] == kept and len(told) == 1
        assert [labels[-1] for _, labels in found] == [9, 8]


def ranked(**changed):
    row = {"src": ["to be", "or"], "tgt": ["not"], "response": [["a"], ["b"], ["c"]]}
    return samples({**row, "sort": [1, 3, 2], **changed}, kind="preference_erniekit")


def test_erniekits_responses_are_pairs_in_the_order_of_sort():
    found = ranked()
    pairs_of = [Words()(f"{x} ")["input_ids"][0] for x in "bcbaca"]
    assert [a[0] for a in answers(found)] == pairs_of
    assert [f[2]["role"] for f in found] == [0, 1] * 3
    assert [f[2]["reward"] for f in found] == [3, 2, 3, 1, 2, 1]
    assert len({f[2]["pair"] for f in found}) == 3
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(("to be", "not", "or", "a", "so", "b"))
    ]
    [chosen, _] = ranked(response=[["a", "so", "b"], ["c"]], sort=[1, 0])
    assert [*chosen[0]] == Words()(Words().apply_chat_template(messages))["input_ids"]
    system = ranked(system="s")
    assert [*system[0][0][:2]] == Words()("<system> s")["input_ids"]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"sort": [1, 2, 1]}, "two of its responses have one value of sort"),
        ({"sort": [1, 2]}, "its sort must be 3 numbers"),
        ({"tgt": []}, "2 src and 0 tgt"),
        ({"src": ["a", ""]}, "its src must be strings that are not empty"),
        ({"response": [["a"]], "sort": [1]}, "two responses or more"),
        ({"response": [["a", "b"], ["c"]], "sort": [1, 0]}, "a response has 2 turns"),
        ({"response": [["a"], ["a"]], "sort": [1, 0]}, "is its rejected one"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_ranked_responses_that_are_no_pairs_are_refused(changed, said):
    with pytest.raises(Refused, match=said):
        ranked(**changed)


# ---- runs


KIND = "preference_tokenized"
ONE, TWO = (f"--train.max_steps={n}" for n in (1, 2))
AT_ONCE = "--train.gradient_accumulation_steps=1"


@pytest.fixture(scope="module")
def alone(settings):
    return trained(settings, "alone")


def test_ranked_responses_of_files_are_prepared_with_their_scores(settings, tmp_path):
    first = {"src": ["to be", "or"], "tgt": ["not"], "response": [["a"], ["b"]], "sort": [2, 5]}
    second = {"system": "s", "src": ["x"], "tgt": [], "response": [["c"], ["d"]], "sort": [1, 0]}
    data = data_set(tmp_path / "r.jsonl", [first, second], "preference_erniekit")
    config = load(settings[1], [data, "--preference.offset_alpha=1"])
    loss = loss_of_run(config)
    columns = build.columns_of(config.train, loss, hf.shape_of(config.model), share_prefix=False)
    made = prepare_of(config, Words, VOCAB, columns=columns, shuffle=False)
    assert made["reward"] == [5, 2, 1, 0] and made["pair"] == [0, 0, 1, 1]
    assert made["role"] == [0, 1, 0, 1]


def test_scores_of_answers_are_an_offset_and_are_asked_for(settings, tmp_path):
    given = [{**row, "chosen_score": 1.5, "rejected_score": 1.0} for row in rows(120, 1)]
    data, offset = data_set(tmp_path / "scored.jsonl", given, KIND), "--preference.offset_alpha=0.5"
    [row] = trained(settings, "offset", offset, data, ONE)
    assert row["loss"] == pytest.approx(math.log1p(math.exp(0.5 * math.log(0.5 + 1e-6))), rel=1e-9)
    with pytest.raises(ValueError, match=r"line 1: reward: .* \(preference.offset_alpha = 0.5\)"):
        trained(settings, "unscored", offset)


def test_mean_log_ratios_are_those_of_a_micro_batch_or_of_a_step(settings):
    other = f"--preference.reference_path={settings[0] / 'other'}"
    options = ["--preference.loss=kto_pair", other, ONE, "--data.shuffle_merged_datasets=false"]
    made, sums = built(settings, *options), []

    def look(per_token, batch):
        p, there = preferences.pairs_of(per_token, batch, reference=True)
        sums.append([t[there].detach() for t in (p.up, p.down)])
        return per_token.values().sum(), torch.ones(())

    made.engine.forward(next(made.batches.steps()), Loss(look, before=Compared()), training=True)

    def expected(groups):
        total = count = 0
        for group in groups:
            up, down = (torch.cat([s[i] for s in group]) for i in (0, 1))
            kl = [float(t.mean().clamp(min=0)) for t in (up, down)]
            loss = 2 - torch.sigmoid(0.1 * (up - kl[1])) - torch.sigmoid(0.1 * (kl[0] - down))
            total, count = total + float(loss.sum()), count + len(up)
        return total / count

    micro, step = expected([[s] for s in sums]), expected([sums])
    assert abs(micro - step) > 1e-4
    found = [
        trained(settings, f"scope_{scope}", *options, f"--preference.kl_scope={scope}")[0]["loss"]
        for scope in ("micro_batch", "step")
    ]
    assert found == pytest.approx([micro, step], rel=1e-6)
    cut = ["--train.micro_batch_size=2", "--train.gradient_accumulation_steps=4"]
    [other] = trained(settings, "scope_cut", *options, *cut, "--preference.kl_scope=step")
    assert other["loss"] == pytest.approx(step, rel=1e-6)
    [other] = trained(settings, "scope_moved", *options, *cut)
    assert abs(other["loss"] - micro) > 1e-5


@pytest.mark.parametrize("reference", ["model", "other"])
def test_a_run_is_dpo_on_two_models(reference, settings, alone, capsys):
    option = f"--preference.reference_path={settings[0] / reference}"
    found = alone if reference == "model" else trained(settings, "elsewhere", option)
    for row, (loss, margin, accuracy) in zip(found, plain(settings, reference), strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["reward_margin"] == pytest.approx(margin, rel=1e-3, abs=1e-6)
        assert row["reward_accuracy"] == pytest.approx(accuracy)
    if reference == "model":
        first, *_, last = found
        assert first["loss"] == math.log(2) and first["drift"] == first["reward_margin"] == 0.0
        assert first["saturated"] == 0 and last["drift"] > 0
    else:
        said = "reference: other weights than .*, under which (\\d+) of \\1 pairs of"
        assert re.search(said, capsys.readouterr().out)


SFT = "--preference.sft_ratio=0.5"
LORA = ["--lora.enable_lora=true", "--lora.lora_rank=4", "--train.optimizer=adamw"]
QUANTIZED = ["--lora.enable_qlora=true", "--lora.quant_format=nf4", "--lora.quant_group_size=32"]
MODES = {f"run_{name}": [*options, TWO] for name, options in layouts(4).items() if name != "pp"}
for name in ("run_fsdp2", "run_ring"):
    MODES[name].append(SFT)
# The workers plant another weight in the references of these.
OTHER = {
    "run_other": layouts(4)["fsdp2"],
    "run_other_ring": layouts(4)["ring"],
    "run_other_pipeline": layouts(4)["pp"],
}


@pytest.fixture(scope="module")
def spread(settings):
    return two_ranks(settings, MODES | OTHER)


@pytest.fixture(scope="module")
def with_sft(settings):
    return trained(settings, "with_sft", SFT, TWO)


@pytest.mark.parametrize("name", MODES)
def test_ranks_train_as_one_process(name, spread, alone, with_sft):
    same(spread[name], with_sft if SFT in MODES[name] else alone[:2])


def test_the_added_likelihood_does_not_depend_on_how_a_step_is_split(settings, with_sft):
    """Gradients and all, over micro-batches of unlike numbers of tokens."""
    cut = ["--train.micro_batch_size=8", "--train.gradient_accumulation_steps=1"]
    same(trained(settings, "sft_at_once", SFT, TWO, *cut), with_sft)


@pytest.mark.parametrize(
    "options",
    [
        [
            "--train.micro_batch_size=4",
            "--train.gradient_accumulation_steps=2",
            "--train.enable_gradient_checkpointing=true",
        ],
        ["--model.batch_invariant=true"],
    ],
    ids=["micro_batches, recomputed", "batch_invariant"],
)
def test_a_step_does_not_depend_on_how_it_is_computed(options, settings, alone):
    same(trained(settings, options[0][8:30], TWO, *options), alone[:2])


def test_both_passes_round_alike(settings):
    """In bfloat16, with quantized weights and adapters."""
    rounded = [*LORA, *QUANTIZED, "--train.enable_mixed_precision=true", TWO]
    first, last = trained(settings, "rounded", *rounded)
    assert first["loss"] == math.log(2) and first["drift"] == 0.0 < last["drift"]


def test_adapters_of_experts_are_off_too():
    torch.manual_seed(0)
    layer = LoRAExperts(torch.randn(4, 12, 8), torch.randn(4, 8, 6), rank=2, alpha=4)
    for p in layer.adapters().values():
        torch.nn.init.normal_(p)
    x, index = torch.randn(5, 8), torch.randint(4, (5, 2))
    arguments = x, index, torch.rand(5, 2)
    with adapters_off(layer):
        off = layer(*arguments)
    expected = ops.moe_mlp(x, layer.gate_up_proj, layer.down_proj, *arguments[1:])
    torch.testing.assert_close(off, expected)
    assert (layer(*arguments) - off).abs().max() > 0.1 and layer.scale == 2.0


def test_adapters_off_is_the_model_that_they_are_on(settings):
    own = trained(settings, "adapters_off", *LORA, TWO)
    same(own, trained(settings, "second", *LORA, TWO, "--preference.reference=model"))
    assert own[0]["loss"] == math.log(2) and own[-1]["drift"] > 0


def test_a_formula_and_the_likelihood_of_chosen_answers_have_weights(settings, alone, with_sft):
    first, plain = alone[0], with_sft[0]
    assert plain["logprob_chosen"] == first["logprob_chosen"] < 0
    assert plain["preference_loss"] == math.log(2) and "sft_loss" not in first
    counts = []
    for batch in next(built(settings).batches.steps()):
        ends = itertools.pairwise(batch["cu_seqlens"].tolist())
        for (a, b), role in zip(ends, batch["role"].tolist(), strict=True):
            if role == preferences.CHOSEN:
                counts.append(int((batch["labels"][0, a:b] != IGNORE).sum()))
    added = -plain["logprob_chosen"] * len(counts) / sum(counts)
    assert plain["sft_loss"] == pytest.approx(added, rel=1e-9)
    assert plain["loss"] == pytest.approx(math.log(2) + 0.5 * plain["sft_loss"], rel=1e-12)
    [double] = trained(settings, "weight_2", ONE, SFT, "--preference.loss_ratio=2")
    assert double["loss"] == pytest.approx(plain["loss"] + math.log(2), rel=1e-12)
    [triple] = trained(settings, "weight_3", ONE, "--preference.loss_ratio=3")
    assert triple["loss"] == pytest.approx(3 * math.log(2), rel=1e-15)
    assert triple["grad_norm"] == pytest.approx(3 * first["grad_norm"], rel=1e-6)
    assert triple["reward_chosen"] == first["reward_chosen"]


def test_without_a_reference_log_ratios_are_the_policys_own(settings):
    none = "--preference.reference=none"
    [row] = trained(settings, "free", none, ONE)
    up, down = row["logprob_chosen"], row["logprob_rejected"]
    assert row["reward_chosen"] == pytest.approx(0.1 * up, rel=1e-9) and "drift" not in row
    assert row["reward_margin"] == pytest.approx(0.1 * (up - down), rel=1e-9)
    simpo = "--preference.loss=simpo", ONE
    [own], [said] = (trained(settings, n, *simpo, *o) for n, o in (("own", []), ("said", [none])))
    assert own["loss"] == said["loss"] and own["grad_norm"] > 0


def test_prompts_of_a_run_are_cut_and_counted(settings, tmp_path, caplog):
    given = [
        {**row, "prompt_ids": [*range(i % 3, i % 3 + 20)]} for i, row in enumerate(rows(30, 1))
    ]
    own = [data_set(tmp_path / "long.jsonl", given, KIND), ONE, AT_ONCE]
    losses = {}
    for name, options in {
        "whole": [],
        "start": ["--preference.max_prompt_len=12"],
        "end": ["--preference.max_prompt_len=12", "--preference.truncation_mode=keep_end"],
        "shared": ["--preference.max_prompt_len=12", "--preference.share_prefix=true"],
    }.items():
        caplog.clear()
        losses[name] = trained(settings, f"cut_{name}", *own, *options)[0]["logprob_chosen"]
        said = "long.jsonl: 30 prompts were cut to 12 tokens (preference.max_prompt_len, keep_"
        assert (said in caplog.text) == (name != "whole")
    assert losses["shared"] != losses["start"] != losses["end"] != losses["whole"]
    batch = next(built(settings, *own, "--preference.max_prompt_len=12").batches.steps())[0]
    ends = batch["cu_seqlens"].tolist()
    assert all((batch["labels"][0, a : a + 11] == IGNORE).all() for a in ends[:-2])
    assert all(batch["labels"][0, a + 11] != IGNORE for a in ends[:-2])


def test_evaluations_have_the_parts_of_the_loss_of_all_of_a_set(settings):
    data = data_set(settings[0] / "held.jsonl", rows(9, 5), KIND, "test_datasets")
    options = [SFT, "--preference.beta=8", "--preference.loss=hinge", "--train.lr=0.1", data, TWO]
    found = []
    for size in (1, 4):
        trained(settings, f"held_{size}", *options, f"--train.eval_micro_batch_size={size}")
        found.append(evaluations(settings[0] / f"held_{size}"))
    for name in ("eval_loss", "eval_sft_loss", "eval_preference_loss", "eval_saturated"):
        assert found[0][-1][name] == pytest.approx(found[1][-1][name], rel=1e-5), name
    before, *_, after = found[0]
    for row in found[0]:
        parts = row["eval_preference_loss"] + 0.5 * row["eval_sft_loss"]
        assert row["eval_loss"] == pytest.approx(parts, rel=1e-12)
    assert before["eval_saturated"] == 0 < after["eval_saturated"] < 1
    assert before["eval_preference_loss"] == 1, "a hinge's at the reference"
    assert before["eval_reward_margin"] == before["eval_drift"] == 0 < after["eval_drift"]


# ---- the check before the first step


def refused(settings, name, *options):
    with pytest.raises(ValueError, match="the policy is not its reference") as told:
        trained(settings, name, *options)
    return str(told.value)


def changed(monkeypatch, name, change):
    """What `build` makes by that name is changed."""
    made = getattr(build, name)

    def wrong(*arguments, **options):
        found: Any = made(*arguments, **options)
        with torch.no_grad():
            change(found)
        return found

    monkeypatch.setattr(build, name, wrong)


def test_dropout_is_named_with_the_first_pair_and_its_terms(settings):
    folder, dropped = settings[0], "--train.hidden_dropout=0.2"
    said = refused(settings, "dropped", dropped, "--train.load_checkpoint_path=auto")
    assert "Found: train.hidden_dropout = 0.2, which the reference's pass does not have" in said
    first = rf"first {folder}/pairs.jsonl: line (\d+) \(micro-batch 1\): "
    term = r"log-probability of the {}answer (\S+), under the reference (\S+) \((\S+)\)"
    numbers = re.search(first + ", ".join(term.format(t) for t in ("chosen ", "rejected ")), said)
    assert numbers is not None, said
    line, own, reference, difference, *_ = map(float, numbers.groups())
    assert difference == pytest.approx(own - reference, rel=1e-2) != 0
    row = rows(120, 1)[int(line) - 1]
    batch = next(built(settings).batches.steps())[0]
    ids = batch["input_ids"][0, : batch["cu_seqlens"][1]].tolist()
    assert ids == row["prompt_ids"] + row["chosen_ids"]
    # With a warm-up the first step drops nothing.
    [row] = trained(settings, "warm", dropped, ONE, "--train.dropout_warmup_steps=9")
    assert row["loss"] == math.log(2)


def test_a_reference_with_another_weight_is_named(settings, monkeypatch):
    def change(found):
        found.parts.model.model.norm.weight[0] += 1e-3

    changed(monkeypatch, "reference", change)
    said = refused(settings, "wrong")
    assert re.search(r"\d+ of \d+ pairs differ, first", said)
    assert "Found: the reference has another model.norm.weight than the policy" in said


@pytest.mark.parametrize("name", OTHER)
def test_ranks_end_with_the_same_words(name, settings, spread):
    folder, _ = settings
    said = [(folder / f"{name.removeprefix('run_')}_{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert re.search(r"(\d+) of \1 pairs differ, first \S+/pairs.jsonl: line \d+ \(micro", said[0])
    assert "Found: the reference has another model.norm.weight than the policy" in said[0]


def test_a_reference_of_unlike_numerics_is_named(settings, monkeypatch):
    made = build.second_model

    def eager(*arguments):
        *rest, model = arguments
        ops = dataclasses.replace(model.keywords["ops"], attention="eager")
        return made(*rest, functools.partial(model, ops=ops))

    monkeypatch.setattr(build, "second_model", eager)
    said = refused(settings, "eager")
    assert re.search(
        "unlike numerics: attention (cpp|sdpa) in the policy, eager in the refere", said
    )
    monkeypatch.setattr(build, "second_model", made)

    def half(found):
        found.parts.autocast = torch.bfloat16

    changed(monkeypatch, "reference", half)
    said = refused(settings, "half")
    assert "matrix products torch.float32 in the policy, torch.bfloat16 in the reference" in said


def test_adapters_that_another_run_has_trained_are_declared(settings, capsys):
    save = ["--train.save_strategy=steps", "--train.save_steps=1", ONE]
    trained(settings, "adapters", *LORA, *save)
    capsys.readouterr()
    weights = settings[0] / "adapters/checkpoints/global_step_1"
    onward = [f"--train.load_checkpoint_path={weights}", "--train.load_optimizer=false", ONE]
    trained(settings, "onward", *LORA, *onward)
    said = capsys.readouterr().out
    assert "reference: other weights than the policy begins with, under which" in said
    assert "; the policy begins with adapters that add something, model.layers.0." in said


@pytest.mark.parametrize(
    "name, options", [("lora_B", []), ("lora_magnitude_change", ["--lora.use_dora=true"])]
)
def test_adapters_that_add_something_are_named(name, options, settings, monkeypatch):
    name = f"model.layers.1.mlp.down_proj.{name}"

    def change(parts):
        parts.model.get_parameter(name).view(-1)[0] = 0.1

    changed(monkeypatch, "build_model", change)
    said = refused(settings, "added", *LORA, *options)
    assert f"Found: the policy begins with adapters that add something, {name} is not 0" in said


def test_a_quantized_policy_beside_a_reference_that_is_not_is_named(settings):
    said = refused(settings, "q_alone", *LORA, *QUANTIZED, "--preference.reference=model")
    assert "quantized (lora.quant_format) and the reference's are not" in said


def test_a_resumed_run_is_not_checked_again_and_goes_on(settings, alone, capsys):
    trained(settings, "resumed half", "--train.save_strategy=steps", "--train.save_steps=1", ONE)
    capsys.readouterr()
    found = trained(settings, "resumed half", "--train.load_checkpoint_path=auto", TWO)
    assert "reference:" not in capsys.readouterr().out
    assert [r["loss"] for r in found] == [r["loss"] for r in alone[:2]]


@pytest.mark.parametrize(
    "fields, said",
    [
        ("train.loss=language_modeling preference.beta=0.2", "preference reads this"),
        ("preference.loss=hinge preference.label_smoothing=0.1", "exo_pair"),
        ("preference.loss=simpo preference.reference=model", "preference.loss"),
        ("preference.offset_alpha=0.1 preference.loss=ipo", "only sigmoid reads this"),
        ("preference.kl_scope=step", "only kto and kto_pair read this"),
        ("preference.kto_desirable_weight=2", "only apo_zero_unpaired and kto read this"),
        ("preference.loss=apo_zero_unpaired preference.kl_scope=step", "only kto and"),
        ("preference.loss=kto_pair preference.reference=none", "mean log-ratios to a ref"),
        ("preference.reference=none preference.reference_path=x", "no second model"),
        ("preference.loss_ratio=0", "greater than 0"),
        ("preference.truncation_mode=keep_end", "max_prompt_len = null"),
        (
            "preference.max_prompt_len=9 data.sample_packing_sequence_len=21",
            "no prompt is left",
        ),
        (
            'preference.max_prompt_len=9 data.datasets=[{"path":"x","type":"tokenized"}]',
            "no row of these types has a prompt",
        ),
        (
            "preference.loss=kto_pair preference.reference=column "
            "train.pipeline_parallel_size=2 train.data_parallel_mode=fsdp2",
            "log-ratios are on its last stage",
        ),
        ("preference.loss=kto preference.reference=column", "answers to other prompts"),
        ("preference.loss=simp", "did you mean simpo"),
        # The one of two fields that is wrong is blamed.
        ("train.z_loss=0.1", r"train\.z_loss = 0\.1, train\.loss = .*log-probabilities as they"),
        ("train.loss_temperature=2", r"train\.loss_temperature = \S+, train\.loss = .*as they are"),
        ("preference.reference=adapters_off", "there are no adapters"),
        ("preference.reference=column preference.reference_path=x", "no second model"),
    ],
)
def test_settings_that_nothing_reads_are_refused(fields, said, settings):
    with pytest.raises(ConfigError, match=said):
        load(settings[1], [f"--{field}" for field in fields.split()])


def of_tokens(path, roles):
    """Arguments of a run on rows that are tokens, whose columns are the user's."""
    given = [
        {"input_ids": [1, 2, 3 + i], "pair": 4, "role": r, "reference_logprob": [0.0, -1.0, -0.5]}
        for i, r in enumerate(roles)
    ]
    return "--preference.reference=column", data_set(path, given)


@pytest.mark.parametrize(
    "roles, document", [((1, 0), 0), ((0, 0), 1), ((0,), 0), ((0, 1, 0), 2)], ids=str
)
def test_documents_that_are_no_pairs_are_refused(roles, document, settings, tmp_path):
    options = of_tokens(tmp_path / "rows.jsonl", roles)
    with pytest.raises(ValueError, match=f"document {document} has role {roles[document]}: a pair"):
        trained(settings, "no_pairs", *options)


def test_the_reference_may_be_a_column(settings, tmp_path):
    [row] = trained(settings, "column", *of_tokens(tmp_path / "rows.jsonl", (0, 1)), ONE, AT_ONCE)
    up, down = row["logprob_chosen"] + 1.5, row["logprob_rejected"] + 1.5
    assert row["reward_chosen"] == pytest.approx(0.1 * up, rel=1e-6)
    assert row["loss"] == pytest.approx(math.log1p(math.exp(-0.1 * (up - down))), rel=1e-6)


def test_what_the_reference_is_by_default(settings):
    for option, kind in (
        ("--preference.loss=sigmoid", "model"),
        ("--lora.enable_lora=true", "adapters_off"),
        ("--preference.loss=orpo", "none"),
    ):
        assert kind_of_reference(load(settings[1], [option])) == kind
