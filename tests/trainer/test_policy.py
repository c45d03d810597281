"""Policy losses of sampled tokens: whole runs beside transformers' log-probabilities."""

import json
import math
import random
import types

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
from small import SHAPE, built, data_set, evaluations, layouts, trained, two_ranks, write_run
from whole import scored

from tilewright.ops.loss import head, policy
from tilewright.trainer import loop
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.losses import policies
from tilewright.trainer.losses.policies import COLUMNS
from tilewright.trainer.models.head import Around, Shaping, TokenLosses
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages

VOCAB, ROWS = SHAPE["vocab_size"], 24


def logprobs(model, row, temperature=1.0):
    ids = torch.tensor([row["input_ids"]])
    found = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return found.gather(1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, path of a configuration): a step takes every document."""
    folder, rng = tmp_path_factory.mktemp("policy"), random.Random(0)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(folder / "model")
    rows = []
    for _ in range(ROWS):
        prompt, answer = rng.randint(1, 5), rng.randint(1, 9)
        ids = [rng.randrange(VOCAB) for _ in range(prompt + answer)]
        row = {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}
        with torch.no_grad():
            own = [0.0, *logprobs(model, row).tolist()]
        for column in COLUMNS.values():
            row[column] = [min(0.0, x + rng.gauss(0, 0.3)) for x in own]
        row["advantage"] = [rng.gauss(0, 1)] * len(ids)
        rows.append(row)
    path = write_run(
        folder,
        "policy",
        ("rows.jsonl", "tokenized"),
        rows,
        train={"gradient_accumulation_steps": 2, "max_steps": 2},
    )
    return folder, path, rows


@pytest.fixture(scope="module")
def bins(settings):
    """How many there are."""
    return len(built(settings).batches.bins)


class Alone:
    """A document."""

    def __init__(self, count):
        self.count = count

    def sums(self, values):
        return values.sum()[None]

    def each(self, values):
        return values.expand(self.count)


def plain(settings, policy_of, average):
    """The loss of all documents, one at a time, and its gradient's norm."""
    folder, _, rows = settings
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    needed, total, count = policy_of.needed, [], 0
    for row in rows:
        kept = [t != -100 for t in row["labels"]][1:]
        given = {
            tensor: torch.tensor(row[column][1:])[kept].double()
            for tensor, column in COLUMNS.items()
            if tensor in needed
        }
        of = Alone(sum(kept)) if "documents" in needed else None
        logprob = logprobs(model, row)[kept].double()
        tokens = policy.Tokens(logprob, torch.ones(sum(kept)).double(), documents=of, **given)
        losses = policy.losses(policy_of, tokens)
        total.append(losses.mean() if average == "documents" else losses.sum())
        count += 1 if average == "documents" else sum(kept)
    loss = torch.stack(total).sum() / count
    loss.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
    return loss.item(), norm


CASES = {
    **{name: ({}, "tokens") for name in policy.FORMULAS},
    "documents": ({"loss": "ppo"}, "documents"),
    "sequences": (
        {"loss": "dr_grpo", "ratio_type": "sequence", "beta": 0.1, "kl_type": "k2"},
        "documents",
    ),
    "everything": (
        {"loss": "policy_loss", "dual_clip": 1.5, "use_tis": True, "icepop_beta": 3.0}
        | {"tis_clip_low": 0.8, "tis_clip_high": 1.1, "clip_low_threshold": 0.9},
        "tokens",
    ),
}


ONE, AT_ONCE = "--train.max_steps=1", "--train.gradient_accumulation_steps=1"


def arguments(case):
    options, average = CASES[case]
    options = {"loss": case, **options}
    return [f"--policy.{n}={json.dumps(v)}" for n, v in {**options, "average": average}.items()]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_a_plain_loop(case, settings, bins):
    options, average = CASES[case]
    name = options.get("loss", case)
    given = {n: v for n, v in options.items() if n != "loss"}
    size = [f"--train.micro_batch_size={bins}", AT_ONCE, ONE]
    [first] = trained(settings, case, *arguments(case), *size)
    loss, norm = plain(settings, policy.FORMULAS[name](**given), average)
    assert first["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if case == "documents":
        assert {"ratio_mean", "clipped_low", "clipped_high", "k1_old", "k3_old"} <= {*first}
        assert "ratio_max" not in first and first["policy_tokens"] > 1
        assert 0 < first["clipped_low"] < 0.5 and 0.8 < first["ratio_mean"] < 1.3


def test_the_ratios_of_documents_are_computed_once(settings, monkeypatch):
    """With context parallelism each sum over documents is an exchange."""
    calls, sums = [], policies.Documents.sums
    monkeypatch.setattr(policies.Documents, "sums", lambda *a: calls.append(0) or sums(*a))
    trained(settings, "counted", ONE, AT_ONCE, *arguments("gspo"))
    assert len(calls) == 2  # of log-ratios, and of tokens


@pytest.mark.parametrize(
    ("case", "passes"), [("ppo", 1), ("documents", 1), ("everything", 1), ("gspo", 2)]
)
def test_a_step_computes_the_logits_of_a_policy_of_tokens_once(case, passes, settings, monkeypatch):
    """6 T H V flops: the head's forward computes the gradients; 8 where documents have a ratio."""
    made, chunks = [], head.Chunks.__iter__
    monkeypatch.setattr(head.Chunks, "__iter__", lambda self: (made.append(self), chunks(self))[1])
    trained(settings, f"once {case}", ONE, AT_ONCE, *arguments(case))
    assert len(made) == passes


@pytest.mark.parametrize(("z_loss", "fused"), [(0.0, True), (0.1, False)])
def test_a_z_loss_is_not_dropped_where_an_engine_has_one(z_loss, fused):
    """Configurations refuse it with a policy; the head's forward has none beside that loss."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 3, 8, generator=g), torch.randn(11, 8, generator=g)
    numerics = types.SimpleNamespace(batch_invariant=False, lm_head_fp32=False)
    ops = types.SimpleNamespace(numerics=numerics, linear_cross_entropy="eager")
    around, labels = Around(ops, shaping=Shaping(z_loss=z_loss)), torch.tensor([[1, 2, 3]])
    given = dict.fromkeys(("advantage", "old_logprob"), torch.zeros(1, 3))
    found = TokenLosses(hidden, weight, labels, around).policy(policy.PPO(), **given)
    assert (found is not None) == fused


# ---- evaluations

TEMPERATURE = 0.6
# A rate at which no weight changes.
STILL = ["--train.lr=1e-30", "--train.lr_min=0", "--train.eval_on_start=true"]


@pytest.fixture(scope="module")
def sampled(settings):
    """Arguments of a run whose rows the policy has sampled, at a temperature."""
    folder, _, rows = settings
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    made = []
    for row in rows:
        with torch.no_grad():
            own = logprobs(model, row, TEMPERATURE)
        old = [0.0, *own.clamp_max(0.0).tolist()]
        others = dict.fromkeys(("rollout_logprob", "reference_logprob"), old)
        made.append({**row, "old_logprob": old, **others})
    fields = "datasets", "test_datasets"
    both = [data_set(folder / "sampled.jsonl", made, field=field) for field in fields]
    return [*both, *STILL, f"--train.loss_temperature={TEMPERATURE}"]


@pytest.mark.parametrize("case", ["reinforce", "gspo", "sequences", "everything"])
def test_an_evaluation_is_at_the_temperature_of_training(case, settings, sampled, bins):
    """All reports of a step that takes every row are those of an evaluation of the same rows; the
    ratios to what was sampled are 1.
    """
    more = [ONE, "--train.eval_accuracy=true", f"--train.gradient_accumulation_steps={bins}"]
    [step] = trained(settings, f"warm {case}", *arguments(case), *sampled, *more)
    first, _ = evaluations(settings[0] / f"warm {case}")
    keys = {k.removeprefix("eval_") for k in first if k.startswith("eval_")} - {"accuracy"}
    assert {"loss", "policy_tokens"} <= keys < {*step}
    for key in keys:
        assert first[f"eval_{key}"] == pytest.approx(step[key], rel=1e-5, abs=1e-6), key
    if "ratio_mean" in keys:
        assert first["eval_ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_an_evaluation_after_a_step_is_at_the_temperature_of_that_step(settings, sampled):
    """Before the first step at that of the first; in a run that resumes at that of the last one."""
    folder, path, _ = settings
    falling = {"schedule": "linear", "from": 1.2, "to": TEMPERATURE, "steps": 3}
    options = [*sampled[:-1], "--train.max_steps=3", "--train.eval_strategy=steps"]
    options += ["--train.eval_steps=1", f"--train.loss_temperature={json.dumps(falling)}"]
    options += ["--train.save_strategy=steps", "--train.save_steps=2"]
    trained(settings, "falling", *options)
    found = evaluations(folder / "falling")
    assert [row["step"] for row in found] == [0, 1, 2, 3]
    for i, value in enumerate((1.2, 1.2, 0.9, TEMPERATURE)):
        name = f"constant {i}"
        one = [*sampled[:-1], ONE, f"--train.loss_temperature={value}"]
        trained(settings, name, *one)
        assert found[i]["eval_loss"] == evaluations(folder / name)[0]["eval_loss"]
    assert found[1]["eval_loss"] != found[2]["eval_loss"] != found[3]["eval_loss"]
    last = f"--train.load_checkpoint_path={folder / 'falling/checkpoints/global_step_2'}"
    again = load(path, [f"--train.output_dir={folder / 'again'}", *options, last])
    resumed = loop.prepare(again, Mesh())
    resumed.owes = True
    resumed.begin()
    resumed.close()
    assert evaluations(folder / "again")[0]["eval_loss"] == found[2]["eval_loss"]


def test_the_command_scores_at_the_temperature_of_the_policy(settings, sampled):
    """So what it writes are old log-probabilities; a language model's are its own."""
    folder, path, rows = settings
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    for name, loss, temperature in (
        ("policy", [], TEMPERATURE),
        ("language", ["--train.loss=language_modeling"], 1.0),
    ):
        config = load(path, [f"--train.output_dir={folder / name}", *sampled, *loss])
        scored(config, Mesh(), folder / f"{name}.jsonl", each_token=True)
        lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        for line, row in zip(lines, rows, strict=True):
            own = logprobs(model, row, temperature)[torch.tensor(row["labels"][1:]) >= 0]
            assert line["logprobs"] == pytest.approx(own.tolist(), rel=1e-4, abs=1e-5)
    falling = json.dumps({"schedule": "linear", "from": 1, "to": 0.5, "steps": 3})
    options = [*sampled[:-1], f"--train.loss_temperature={falling}"]
    with pytest.raises(ValueError, match=r"^train\.loss_temperature follows the steps of a run"):
        scored(load(path, options), Mesh())


LAYOUTS = layouts(1)
COMPARED = "ppo", "documents", "sequences"
# Log-ratios of sequences are exchanged where ranks share one.
MODES = {
    "run_ddp": (LAYOUTS["ddp"], "ppo"),
    **{f"run_{n}_documents": (LAYOUTS[n], "documents") for n in ("ring", "tp", "pp")},
    **{f"run_{n}_sequences": (LAYOUTS[n], "sequences") for n in ("fsdp2", "ring", "ulysses")},
}


@pytest.fixture(scope="module")
def spread(settings, sampled):
    modes = {name: [*options, *arguments(case)] for name, (options, case) in MODES.items()}
    # Where evaluations take another way through the model.
    for name in ("pp", "tp"):
        modes[f"run_warm_{name}"] = [*sampled, ONE, *LAYOUTS[name]]
    return two_ranks(settings, modes)


@pytest.fixture(scope="module")
def alone(settings):
    return {case: trained(settings, f"{case} alone", *arguments(case)) for case in COMPARED}


@pytest.mark.parametrize("name", MODES)
def test_ranks_train_as_one_process(name, spread, alone):
    for a, b in zip(spread[name], alone[MODES[name][1]], strict=True):
        for key in ("loss", "grad_norm", "ratio_mean", "k2_old", "policy_tokens"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", ["pp", "tp"])
def test_ranks_evaluate_at_the_temperature_of_training(name, spread, settings):
    first, *_ = evaluations(settings[0] / f"run_warm_{name}")
    assert first["eval_ratio_mean"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy.loss=ppoo"], "must be one of cispo|must be one of reinforce"),
        (["--policy.loss=gspo", "--policy.beta=0.1"], "only dro and dr_grpo read this"),
        (["--train.loss=language_modeling", "--policy.loss=gspo"], "only policy reads this"),
        (["--train.z_loss=0.1"], "log-probabilities as they are"),
        (["--policy.dual_clip=0.5"], "greater than 1"),
        (["--policy.kl_type=k4"], "k1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_settings_that_nothing_reads_are_refused(options, said, settings):
    with pytest.raises(ConfigError, match=said):
        load(settings[1], options)


def test_a_column_that_is_not_there_is_named_with_what_reads_it(settings, tmp_path):
    few = [{k: v for k, v in row.items() if k != "teacher_logprob"} for row in settings[2]]
    options = [data_set(tmp_path / "few.jsonl", few), "--policy.loss=opd"]
    with pytest.raises(ValueError, match=r"policy\.loss = opd: .*no column teacher_logprob"):
        trained(settings, "few", *options)
