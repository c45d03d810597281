"""Distillation of a teacher's most probable tokens: whole runs beside transformers' logits."""

import json
import math
import random

import pytest
import torch
import yaml

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")

from ranks import metrics, run_modes  # noqa: E402

from tilewright.ops.loss.head import Plan  # noqa: E402
from tilewright.trainer import build, train  # noqa: E402
from tilewright.trainer.config import ConfigError, load  # noqa: E402
from tilewright.trainer.models.listed import How, listed  # noqa: E402
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
# The arguments of a run, by a name: of the section distillation.
CASES = {
    "forward": {"divergence": "forward", "top_k": 4},
    "reverse": {"divergence": "reverse", "top_k": 4},
    "jsd": {"divergence": "jsd", "top_k": 4, "beta": 0.3},
    "forward renormalized": {"divergence": "forward", "top_k": 4, "outside": "renormalize"},
    "jsd renormalized": {"divergence": "jsd", "top_k": 4, "outside": "renormalize"},
    "warm": {"divergence": "reverse", "top_k": 4, "temperature": 2.0},
    "warm shared": {"top_k": 4, "temperature": 2.0, "cross_entropy_share": 0.3},
    "shared": {"divergence": "jsd", "top_k": 4, "cross_entropy_share": 0.5},
    "labels": {"divergence": "forward", "top_k": 0},
    "whole forward": {"divergence": "forward", "top_k": VOCAB},
    "whole reverse": {"divergence": "reverse", "top_k": VOCAB},
    "whole jsd": {"divergence": "jsd", "top_k": VOCAB, "beta": 0.3, "temperature": 2.0},
}


def llama(seed):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


@torch.no_grad()
def with_teacher(teacher, row, top_k, temperature):
    """A row with a teacher's columns, in which nothing precedes the first token."""
    ids = torch.tensor([row["input_ids"]])
    logprob = (teacher(ids).logits[0, :-1].double() / temperature).log_softmax(-1)
    if not top_k:
        own = logprob.gather(1, ids[0, 1:, None])[:, 0]
        return {**row, "teacher_logprob": [0.0, *own.tolist()]}
    values, tokens = logprob.topk(top_k)
    return {
        **row,
        "teacher_ids": [[-1] * top_k, *tokens.tolist()],
        "teacher_logprobs": [[0.0] * top_k, *values.tolist()],
    }


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, rows, a function: a case -> the command's arguments)."""
    folder, rng = tmp_path_factory.mktemp("distillation"), random.Random(0)
    teacher, rows = llama(1), []
    teacher.save_pretrained(folder / "teacher")
    llama(0).save_pretrained(folder / "model")
    for _ in range(ROWS):
        prompt, answer = rng.randint(1, 5), rng.randint(1, 9)
        ids = [rng.randrange(VOCAB) for _ in range(prompt + answer)]
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    tree = {
        "model": {"model_path": str(folder / "model")},
        "data": {
            "datasets": [{"path": str(folder / "rows.jsonl"), "type": "tokenized"}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": 64,
            "pad_to_multiple_of": 16,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "loss": "distillation",
            "gradient_accumulation_steps": 2,
            "max_steps": 2,
            "lr": 1e-2,
            "optimizer": "sgd",
            "lr_decay_style": "constant",
            "max_grad_norm": 0.0,
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "save_hf_weights": False,
            "save_strategy": "no",
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))

    def arguments(case):
        section = CASES[case]
        made = section["top_k"], section.get("temperature", 1.0)
        file = folder / f"rows_{made[0]}_{made[1]}.jsonl"
        if not file.exists():
            found = (with_teacher(teacher, row, *made) for row in rows)
            file.write_text("".join(json.dumps(row) + "\n" for row in found))
        data = [{"path": str(file), "type": "tokenized"}]
        given = [f"--distillation.{n}={json.dumps(v)}" for n, v in section.items()]
        return [f"--data.datasets={json.dumps(data)}", *given]

    return folder, rows, arguments


def trained(settings, name, *options):
    folder, _, _ = settings
    path = str(folder / "config.yaml")
    train.train(load(path, [f"--train.output_dir={folder / name}", *options]), Mesh())
    return metrics(folder / name)


def of_trl(student, teacher, section):
    """The loss of tokens with all logits, as TRL computes it."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    beta = {"forward": 0.0, "reverse": 1.0}.get(section["divergence"], section.get("beta"))
    return gkd.GKDTrainer.generalized_jsd_loss(
        student[None],
        teacher[None],
        beta=beta,
        temperature=section.get("temperature", 1.0),
        reduction="sum",
    )


def of_entries(student, teacher, labels, section):
    """The same of a few entries, one token after the other."""
    tau, total = section.get("temperature", 1.0), 0.0
    share, beta = section.get("cross_entropy_share", 0.0), section.get("beta", 0.5)
    for z, y, label in zip(student, teacher, labels, strict=True):
        q, p = (z / tau).softmax(-1), (y / tau).softmax(-1)
        chosen = p.topk(section["top_k"]).indices if section["top_k"] else label[None]
        if section.get("outside") == "renormalize":
            q, p = (t[chosen] / t[chosen].sum() for t in (q, p))
        else:
            q, p = (torch.cat((t[chosen], 1 - t[chosen].sum()[None])) for t in (q, p))
        m = beta * p + (1 - beta) * q
        found = {
            "forward": (p * (p / q).log()).sum(),
            "reverse": (q * (q / p).log()).sum(),
            "jsd": beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum(),
        }[section.get("divergence", "forward")]
        total = total + (1 - share) * found - share * z.log_softmax(-1)[label]
    return total


def plain(settings, case):
    """The loss of all documents, one at a time, and its gradient's norm, in float64."""
    folder, rows, _ = settings
    student, teacher = (
        transformers.LlamaForCausalLM.from_pretrained(folder / n).double()
        for n in ("model", "teacher")
    )
    total, count, section = 0.0, 0, CASES[case]
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        learned = torch.tensor(row["labels"][1:]) != -100
        z = student(ids).logits[0, :-1][learned]
        with torch.no_grad():
            y = teacher(ids).logits[0, :-1][learned]
        if section["top_k"] == VOCAB:
            total = total + of_trl(z, y, section)
        else:
            total = total + of_entries(z, y, ids[0, 1:][learned], section)
        count += int(learned.sum())
    (total / count).backward()
    norm = math.sqrt(sum(p.grad.square().sum() for p in student.parameters()))
    return total.item() / count, norm


def whole_step(settings, arguments):
    folder = settings[0]
    unused = [f"--train.output_dir={folder / 'unused'}", *arguments]
    bins = build.build(load(str(folder / "config.yaml"), unused), Mesh()).batches.bins
    return [f"--train.micro_batch_size={len(bins)}", "--train.gradient_accumulation_steps=1"]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_a_plain_loop_over_all_logits(case, settings):
    """In float64, and where all tokens are listed, by TRL's formula."""
    arguments = settings[2](case)
    first, _ = trained(settings, case, *arguments, *whole_step(settings, arguments))
    loss, norm = plain(settings, case)
    # Log-probabilities in float32 of logits of about 10.
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
