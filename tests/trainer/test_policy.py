"""Policy losses of sampled tokens: whole runs beside transformers' log-probabilities."""

import json
import math
import random

import pytest
import torch

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")

from ranks import metrics, run_modes  # noqa: E402
from small import write_run  # noqa: E402

from tilewright.ops.loss import policy  # noqa: E402
from tilewright.trainer import build, evaluate, loop, train  # noqa: E402
from tilewright.trainer.config import ConfigError, load  # noqa: E402
from tilewright.trainer.losses import policies  # noqa: E402
from tilewright.trainer.losses.policies import COLUMNS  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.packages

VOCAB, ROWS = 48, 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


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
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_run(
        folder,
        "policy",
        ("rows.jsonl", "tokenized"),
        train={"gradient_accumulation_steps": 2, "max_steps": 2},
    )
    return folder, path, rows


def trained(settings, name, *options):
    folder, path, _ = settings
    train.train(load(path, [f"--train.output_dir={folder / name}", *options]), Mesh())
    return metrics(folder / name)


class Alone:
    """A document."""

    def __init__(self, count):
        self.count = count

    def sums(self, values):
        return values.sum()[None]

    def each(self, values):
        return values.expand(self.count)


def plain(settings, name, options, average):
    """The loss of all documents, one at a time, and its gradient's norm."""
    folder, _, rows = settings
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    needed, total, count = policy.needed(name, options), [], 0
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
        losses = policy.losses(name, tokens, options)
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


def arguments(case):
    options, average = CASES[case]
    options = {"loss": case, **options}
    return [f"--policy.{n}={json.dumps(v)}" for n, v in {**options, "average": average}.items()]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_a_plain_loop(case, settings):
    """A step takes every bin."""
    options, average = CASES[case]
    name = options.get("loss", case)
    given = {n: v for n, v in options.items() if n != "loss"}
    size = [
        f"--train.micro_batch_size={len(packed(settings))}",
        "--train.gradient_accumulation_steps=1",
    ]
    first, _ = trained(settings, case, *arguments(case), *size)
    loss, norm = plain(settings, name, policy.settled(name, given), average)
    assert first["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)


def packed(settings):
    folder, path, _ = settings
    return build.build(load(path, [f"--train.output_dir={folder / 'unused'}"]), Mesh()).batches.bins


def test_the_ratios_of_documents_are_computed_once(settings, monkeypatch):
    """With context parallelism each sum over documents is an exchange."""
    calls, sums = [], policies.Documents.sums
    monkeypatch.setattr(policies.Documents, "sums", lambda *a: calls.append(0) or sums(*a))
    one = ["--train.max_steps=1", "--train.gradient_accumulation_steps=1"]
    trained(settings, "counted", *one, *arguments("gspo"))
    assert len(calls) == 2  # of log-ratios, and of tokens


def test_statistics_are_means_over_tokens(settings):
    found = trained(settings, "statistics", "--policy.average=documents")[0]
    assert {"ratio_mean", "clipped_low", "clipped_high", "k1_old", "k3_old"} <= {*found}
    assert "ratio_max" not in found and found["policy_tokens"] > 1
    assert 0 < found["clipped_low"] < 0.5 and 0.8 < found["ratio_mean"] < 1.3


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
    (folder / "sampled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    data = json.dumps([{"path": str(folder / "sampled.jsonl"), "type": "tokenized"}])
    both = [f"--data.datasets={data}", f"--data.test_datasets={data}"]
    return [*both, *STILL, f"--train.loss_temperature={TEMPERATURE}"]


def evaluations(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "eval_loss" in row]


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_is_at_the_temperature_of_training(case, settings, sampled):
    """All reports of a step that takes every row are those of an evaluation of the same rows; the
    ratios to what was sampled are 1.
    """
    bins = f"--train.gradient_accumulation_steps={len(packed(settings))}"
    more = ["--train.max_steps=1", "--train.eval_accuracy=true", bins]
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
        one = [*sampled[:-1], "--train.max_steps=1", f"--train.loss_temperature={value}"]
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
        evaluate.evaluate(config, Mesh(), folder / f"{name}.jsonl", each_token=True)
        lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        for line, row in zip(lines, rows, strict=True):
            own = logprobs(model, row, temperature)[torch.tensor(row["labels"][1:]) >= 0]
            assert line["logprobs"] == pytest.approx(own.tolist(), rel=1e-4, abs=1e-5)
    falling = json.dumps({"schedule": "linear", "from": 1, "to": 0.5, "steps": 3})
    options = [*sampled[:-1], f"--train.loss_temperature={falling}"]
    with pytest.raises(ValueError, match=r"^train\.loss_temperature follows the steps of a run"):
        evaluate.evaluate(load(path, options), Mesh())


MODES = {
    "ddp": ["--train.data_parallel_mode=ddp", "--train.gradient_accumulation_steps=1"],
    "fsdp2": ["--train.data_parallel_mode=fsdp2", "--train.gradient_accumulation_steps=1"],
    "ring": ["--train.data_parallel_mode=fsdp2", "--train.ringattn_parallel_size=2"],
    "ulysses": ["--train.data_parallel_mode=fsdp2", "--train.ulysses_parallel_size=2"],
}
KINDS = ("ppo", "sequences")
# Where evaluations take another way through the model.
WARM = {
    "warm stages": ["--train.data_parallel_mode=fsdp2", "--train.pipeline_parallel_size=2"],
    "warm matrices": ["--train.data_parallel_mode=fsdp2", "--train.tensor_parallel_size=2"],
}


@pytest.fixture(scope="module")
def spread(settings, sampled):
    folder, path, _ = settings
    modes = {
        f"{kind} {name}": [
            path,
            f"--train.output_dir={folder / f'{kind} {name}'}",
            "--model.merge_qkv=false",
            *options,
            *arguments(kind),
        ]
        for name, options in MODES.items()
        for kind in KINDS
    }
    warm = [*sampled, "--train.max_steps=1", "--model.merge_qkv=false"]
    for name, options in WARM.items():
        modes[name] = [path, f"--train.output_dir={folder / name}", *warm, *options]
    run_modes(2, folder, {f"run_{i}": m for i, m in enumerate(modes.values())})
    return {name: metrics(folder / name) for name in modes}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODES)
def test_ranks_train_as_one_process(name, kind, spread, settings):
    alone = trained(settings, f"{kind} alone {name}", *arguments(kind))
    for a, b in zip(spread[f"{kind} {name}"], alone, strict=True):
        for key in ("loss", "grad_norm", "ratio_mean", "k2_old", "policy_tokens"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", WARM)
def test_ranks_evaluate_at_the_temperature_of_training(name, spread, settings):
    first, *_ = evaluations(settings[0] / name)
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
    _, path, rows = settings
    few = [{k: v for k, v in row.items() if k != "teacher_logprob"} for row in rows]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    data = json.dumps([{"path": str(tmp_path / "few.jsonl"), "type": "tokenized"}])
    options = [f"--data.datasets={data}", f"--train.output_dir={tmp_path}", "--policy.loss=opd"]
    with pytest.raises(ValueError, match=r"policy\.loss = opd: .*no column teacher_logprob"):
        train.train(load(path, options), Mesh())
