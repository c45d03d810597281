"""Distillation of a teacher's most probable tokens: whole runs beside transformers' logits."""

import copy
import functools
import json
import math
import random

import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
from small import SHAPE, built, data_set, evaluations, layouts, trained, two_ranks, write_run

from tilewright.ops.loss.head import Head, Plan
from tilewright.trainer import evaluate, teacher
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.losses.distillation_fields import Distillation
from tilewright.trainer.losses.loss import loss_of
from tilewright.trainer.models.listed import How, Listed, listed

pytestmark = pytest.mark.packages

VOCAB, ROWS = SHAPE["vocab_size"], 24
# A run's arguments of the section distillation, by a name.
CASES = {
    "forward": {"divergence": "forward", "top_k": 4},
    "jsd renormalized": {"divergence": "jsd", "top_k": 4, "outside": "renormalize"},
    "warm": {"divergence": "reverse", "top_k": 4, "temperature": 2.0},
    "warm shared": {"top_k": 4, "temperature": 2.0, "cross_entropy_share": 0.3},
    "shared": {"divergence": "jsd", "top_k": 4, "beta": 0.3, "cross_entropy_share": 0.5},
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
    """(folder, path of a configuration, rows, a function: a case -> the command's arguments)."""
    folder, rng = tmp_path_factory.mktemp("distillation"), random.Random(0)
    teacher, rows = llama(1), []
    teacher.save_pretrained(folder / "teacher")
    llama(0).save_pretrained(folder / "model")
    for _ in range(ROWS):
        prompt, answer = rng.randint(1, 5), rng.randint(1, 9)
        ids = [rng.randrange(VOCAB) for _ in range(prompt + answer)]
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    path = write_run(
        folder,
        "distillation",
        ("rows.jsonl", "tokenized"),
        train={"gradient_accumulation_steps": 2, "max_steps": 2},
    )

    @functools.cache
    def data(*made):
        found = [with_teacher(teacher, row, *made) for row in rows]
        return data_set(folder / f"rows_{made[0]}_{made[1]}.jsonl", found)

    def arguments(case):
        section = CASES[case]
        given = [f"--distillation.{n}={json.dumps(v)}" for n, v in section.items()]
        return [data(section["top_k"], section.get("temperature", 1.0)), *given]

    return folder, path, rows, arguments


@pytest.fixture(scope="module")
def taught(settings):
    """Rows with columns of 4 tokens."""
    model = transformers.LlamaForCausalLM.from_pretrained(settings[0] / "teacher")
    return [with_teacher(model, row, 4, 1.0) for row in settings[2]]


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
    folder, _, rows, _ = settings
    student, teacher = (
        transformers.LlamaForCausalLM.from_pretrained(folder / n).double()
        for n in ("model", "teacher")
    )
    total, count, section = torch.zeros((), dtype=torch.float64), 0, CASES[case]
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


ONE = "--train.max_steps=1"


def whole_step(settings, *options):
    """Arguments of a step of all documents."""
    bins = built(settings, *settings[3]("shared"), *options).batches.bins
    return [f"--train.micro_batch_size={len(bins)}", "--train.gradient_accumulation_steps=1", ONE]


@pytest.fixture(scope="module")
def at_once(settings):
    return whole_step(settings)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_a_plain_loop_over_all_logits(case, settings, at_once):
    """In float64, and where all tokens are listed, by TRL's formula."""
    [first] = trained(settings, case, *settings[3](case), *at_once)
    loss, norm = plain(settings, case)
    # Log-probabilities in float32 of logits of about 10.
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)


class Logits:
    """What a head gives losses, of logits [T, V]."""

    def __init__(self, logits, labels):
        self.logits, self.labels = logits, labels

    def listed(self, ids, temperature):
        q = (self.logits / temperature).log_softmax(-1)
        there = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, ids[0], True)
        others = q.masked_fill(there, -torch.inf).logsumexp(-1)
        label = q.gather(-1, self.labels[0][:, None])[:, 0]
        found = q.gather(-1, ids[0]), others, label, self.logits.argmax(-1)
        return Listed(*(t[None] for t in found))

    def values(self):
        return self.listed(self.labels[..., None], 1.0).label.neg()


@pytest.mark.parametrize("outside", [0.2, 1e-5], ids=str)
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_reports_are_those_of_a_plain_loop_whatever_the_mass_outside(divergence, outside):
    """The teacher's KL is the forward one, whichever divergence is trained."""
    T, V, k = 12, 9, 3
    generator = torch.Generator().manual_seed(0)
    z, y = (torch.randn(T, V, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.stack([torch.randperm(V, generator=generator)[:k] for _ in range(T)])
    p = y.gather(-1, ids).softmax(-1) * (1 - outside)
    labels = torch.randint(V, (T,), generator=generator)
    section = Distillation(divergence=divergence, beta=0.3, top_k=k)
    loss = loss_of("distillation", {"distillation": section})
    batch = {"labels": labels[None], "teacher_ids": ids[None], "teacher_logprobs": p.log()[None]}
    total, count, *found = loss(Logits(z, labels[None]), batch)
    want = dict.fromkeys(("loss", *loss.reports), 0.0)
    for t in range(T):
        q, own, listed = z[t].softmax(-1), p[t].tolist(), ids[t].tolist()
        own, other = [*own, outside], [*(float(q[i]) for i in listed), 0.0]
        other[-1] = 1 - sum(other)
        pairs = [(a, b, 0.3 * a + 0.7 * b) for a, b in zip(own, other, strict=True)]
        forward = sum(a * math.log(a / b) for a, b, _ in pairs)
        each = {
            "loss": {
                "forward": forward,
                "reverse": sum(b * math.log(b / a) for a, b, _ in pairs),
                "jsd": sum(
                    0.3 * a * math.log(a / m) + 0.7 * b * math.log(b / m) for a, b, m in pairs
                ),
            }[divergence],
            "teacher_kl": forward,
            "teacher_mass": sum(own[:-1]),
            "student_mass": sum(other[:-1]),
            "teacher_agreement": listed[int(p[t].argmax())] == int(z[t].argmax()),
            "cross_entropy": -math.log(q[labels[t]]),
        }
        want = {name: want[name] + value / T for name, value in each.items()}
    means = (t / count for t in (total, *found))
    assert dict(zip(want, map(float, means), strict=True)) == pytest.approx(want, rel=1e-9)


# ---- ranks

LORA = ["--lora.enable_lora=true", "--lora.lora_rank=4"]
LAYOUTS = layouts(1)
# What is listed and what is outside are exchanged in tensor parallelism.
MODES = {
    **{f"run_{name}": (options, "shared") for name, options in LAYOUTS.items()},
    "run_tp_warm": (LAYOUTS["tp"], "warm"),
    "run_tp_renormalized": (LAYOUTS["tp"], "jsd renormalized"),
    "run_lora": ([*LAYOUTS["fsdp2"], *LORA], "shared"),
}
WRITTEN = {f"teacher_{name}": (name, 4) for name in ("fsdp2", "ring", "pp", "tp")}
WRITTEN["teacher_tp_labels"] = ("tp", 0)
REPORTED = ("teacher_kl", "teacher_mass", "student_mass", "teacher_agreement", "cross_entropy")


@pytest.fixture(scope="module")
def spread(settings, texts):
    modes = {n: [*options, *settings[3](case)] for n, (options, case) in MODES.items()}
    for name, (layout, k) in WRITTEN.items():
        modes[name] = [*texts, *LAYOUTS[layout], f"--distillation.top_k={k}"]
    return two_ranks(settings, modes)


@pytest.fixture(scope="module")
def alone(settings):
    """The steps of a run in one process: of a case, with further arguments."""

    @functools.cache
    def run(case, *further):
        arguments = [*settings[3](case), *further, "--model.merge_qkv=false"]
        return trained(settings, f"{case} alone {len(further)}", *arguments)

    return run


@pytest.mark.parametrize("name", MODES)
def test_ranks_train_as_one_process(name, spread, alone):
    options, case = MODES[name]
    own = alone(case, *(LORA if LORA[0] in options else ()))
    # At another temperature there is no cross entropy.
    keys = [key for key in ("loss", "grad_norm", *REPORTED) if key in own[0]]
    for a, b in zip(spread[name], own, strict=True):
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key
    assert ("cross_entropy" in keys) == (case != "warm")


def test_packing_and_accumulation_do_not_change_a_step(settings, at_once):
    arguments = settings[3]("shared")
    [whole] = trained(settings, "packed", *arguments, *at_once)
    apart = [
        "--data.sample_packing_sequence_len=14",
        "--data.pad_to_multiple_of=1",
        "--data.sample_packing_method=multipack",
    ]
    bins = int(whole_step(settings, *apart)[0].partition("=")[2])
    steps = ["--train.micro_batch_size=1", f"--train.gradient_accumulation_steps={bins}", ONE]
    [found] = trained(settings, "apart", *arguments, *apart, *steps)
    for key in ("loss", "grad_norm", *REPORTED):
        assert whole[key] == pytest.approx(found[key], rel=1e-5), key


# ---- log-probabilities of listed tokens


def operands(dtype=torch.float64):
    """(x, weight, ids, labels): rows with a missing entry, without any, and with labels that are
    listed, that are not, and that are not there.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(40, 6, dtype=dtype), 2 * torch.randn(11, 6, dtype=dtype)
    ids = torch.stack([torch.randperm(11)[:4] for _ in range(40)])
    ids[3, 2], ids[4] = -1, -1
    labels = torch.randint(0, 11, (40,))
    labels[:9], labels[5] = ids[:9, 0], -100
    return x.requires_grad_(), weight.requires_grad_(), ids, labels


def test_gradients_are_finite_differences():
    """Also of what is outside, and over chunks of rows."""
    x, weight, ids, labels = operands()
    how = How("eager", Plan(False, chunk_size=16), temperature=1.7)

    def scalars(x, weight):
        found = listed(Head(x, weight), ids, labels, how)
        there = found.logprobs.where(ids >= 0, 0.0)
        return there, found.others, found.label.where(labels >= 0, 0.0)

    assert torch.autograd.gradcheck(scalars, (x, weight))


@pytest.mark.parametrize("implementation", ["eager", "cpp"])
def test_a_small_mass_outside_has_its_digits(implementation):
    """1 - sum p has none of them in float32, and a gradient through it is lost in rounding."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[40.0, 0.0], [0.0, 40.0], [0.0, 1.0], [1.0, 0.0]], requires_grad=True)
    ids = torch.tensor([[0], [1]])
    how = How(implementation, Plan(True))
    found = listed(Head(x, weight), ids, torch.tensor([0, 1]), how)
    want = math.log(2 + math.e) - 40
    assert found.others.tolist() == pytest.approx([want, want], rel=1e-6)
    (gradient,) = torch.autograd.grad(found.others.sum(), weight)
    assert gradient[0, 0].item() == pytest.approx(-1.0)


@pytest.mark.parametrize("implementation", ["eager", "cpp"])
def test_if_all_tokens_are_listed_nothing_is_outside(implementation):
    x, weight, _, labels = (t.detach() for t in operands(torch.float32))
    weight.requires_grad_()
    every = torch.arange(11).expand(40, 11).contiguous()
    found = listed(Head(x, weight), every, labels, How(implementation, Plan(True)))
    assert (found.others == -torch.inf).all()
    upstream = torch.randn(40, 11)
    found.logprobs.backward(upstream)
    (want,) = torch.autograd.grad((x @ weight.T).log_softmax(-1), weight, upstream)
    torch.testing.assert_close(weight.grad, want)


# ---- data


def second(entry):
    """A column with this entry of its second token."""
    return lambda v: [v[0], entry, *v[2:]]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("ids", lambda v: v[:-1], "[{less}, 4]; accepted is [{tokens}, 4], the row's"),
        ("ids", lambda v: [t[:3] for t in v], "has the shape [{tokens}, 3]; accepted is"),
        ("ids", lambda v: [*v[:-1], v[-1][:3]], "have no shape: lists of lengths"),
        ("ids", second([0, 1, 2, 1.5]), "token 2: 1.5: accepted are inte"),
        ("ids", second([48, 1, 2, 3]), "token 2: 48: accepted are -1 to"),
        ("ids", second([5, 1, 5, 3]), "token 2: an id is twice"),
        ("logprobs", second([0.5, -1, -1, -9]), "token 2: 0.5: accepted"),
        ("logprobs", second([-0.5] * 4), "token 2: these log-probabil"),
        ("logprobs", second([-math.inf] * 4), "token 2: -inf: accepted"),
        ("logprobs", second([None] * 4), "a number in its numbers is nu"),
        ("logprobs", lambda v: None, "it is missing"),
    ],
)
def test_a_wrong_value_is_named_with_its_row_and_column(
    column, value, said, settings, taught, tmp_path, caplog
):
    """Or skipped with its row."""
    column, tokens = f"teacher_{column}", len(taught[1]["input_ids"])
    spoiled = [taught[0], {**taught[1], column: value(taught[1][column])}, *taught[2:]]
    given = [data_set(tmp_path / "rows.jsonl", spoiled), "--distillation.top_k=4"]
    said = f"rows.jsonl: line 2: {column}: ", said.format(tokens=tokens, less=tokens - 1)
    with pytest.raises(ValueError) as caught:
        trained(settings, "refused", *given)
    assert all(part in str(caught.value) for part in said)
    if "twice" in said[1]:
        with caplog.at_level("WARNING", "tilewright"):
            trained(settings, "skipped", *given, "--data.on_bad_row=skip", ONE)
        assert "line 2: teacher_ids: token 2: an id is twice" in caplog.text


def test_labels_without_an_entry_are_not_trained_on(settings, taught, tmp_path):
    """As if they were ignored; an entry that is missing is one of the others."""
    found = []
    for ignored in (True, False):
        made = copy.deepcopy(taught)
        for row in made:
            if ignored:
                row["labels"][-1] = -100
            else:
                row["teacher_ids"][-1] = [-1] * 4
            row["teacher_ids"][-2][3], row["teacher_logprobs"][-2][3] = -1, 0.0
        given = [data_set(tmp_path / f"{ignored}.jsonl", made), "--distillation.top_k=4"]
        found.append(trained(settings, f"entries {ignored}", *given))
    for a, b in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "teacher_mass"):
            assert a[name] == pytest.approx(b[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--distillation.divergence=kl"], "forward"),
        (["--distillation.beta=0.3"], "only jsd reads this"),
        (["--distillation.beta=1", "--distillation.divergence=jsd"], "less than 1"),
        (["--distillation.top_k=1", "--distillation.outside=renormalize"], "one token is all"),
        (["--train.z_loss=0.1"], "log-probabilities as they are"),
        (["--train.loss_temperature=2"], r"distillation\.temperature"),
        (["--train.loss=language_modeling", "--distillation.top_k=4"], "only distillation reads"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_settings_that_nothing_reads_are_refused(options, said, settings):
    with pytest.raises(ConfigError, match=said):
        load(settings[1], options)


# ---- the command that writes a teacher's columns


@pytest.fixture(scope="module")
def texts(settings):
    """Arguments of a teacher."""
    folder, _, rows, _ = settings
    data = data_set(folder / "plain.jsonl", rows)
    return [f"--model.model_path={folder / 'teacher'}", data]


@pytest.fixture
def write(settings, texts, tmp_path):
    """The command, to a folder of that name."""

    def call(*options, to="rows"):
        return teacher.main([settings[1], *texts, *options, "--to", str(tmp_path / to)])

    return call


def read(folder):
    """The rows of all processes, by their tokens."""
    tables = [pq.read_table(file).to_pylist() for file in sorted(folder.iterdir())]
    return {tuple(row["input_ids"]): row for table in tables for row in table}


def entries(row):
    """The log-probabilities of tokens at each label."""
    ids = row.get("teacher_ids") or [[t] for t in row["input_ids"]]
    values = row.get("teacher_logprobs") or [[v] for v in row["teacher_logprob"]]
    each = zip(row["labels"], ids, values, strict=True)
    return [dict(zip(i, v, strict=True)) for label, i, v in each if label != -100]


def check_rows(found, wanted):
    assert len(found) == len(wanted)
    for row in wanted:
        own = found[tuple(row["input_ids"])]
        assert own["labels"] == row["labels"]
        for a, b in zip(entries(own), entries(row), strict=True):
            # Logits of about 10, in float32.
            assert a == pytest.approx(b, abs=1e-4)


def transformers_rows(settings, top_k, temperature=1.0):
    model = transformers.LlamaForCausalLM.from_pretrained(settings[0] / "teacher").double()
    return [with_teacher(model, row, top_k, temperature) for row in settings[2]]


@pytest.mark.parametrize(("top_k", "temperature"), [(5, 2.0), (VOCAB, 1.0), (0, 2.0)])
def test_a_teacher_writes_what_transformers_says(top_k, temperature, write, settings, tmp_path):
    """What evaluations take is not left out: a configuration to train with says both."""
    held = ["--data.val_set_size=4", "--train.eval_max_batches=1"]
    options = [f"--distillation.top_k={top_k}", f"--distillation.temperature={temperature}"]
    assert write(*options, *held) == 0
    check_rows(read(tmp_path / "rows"), transformers_rows(settings, top_k, temperature))


def test_a_student_learns_from_what_its_teacher_wrote(texts, write, settings, tmp_path):
    """End to end, of a teacher that bins and batches do not change, with an evaluation."""
    invariant, k = "--model.batch_invariant=true", "--distillation.top_k=8"
    assert write(invariant, k) == 0
    data = json.dumps([{"path": str(tmp_path / "rows"), "type": "tokenized"}])
    options = [f"--data.datasets={data}", f"--data.test_datasets={data}", invariant, k]
    adam = ["--train.optimizer=adamw", "--train.max_steps=30", "--train.num_train_epochs=30"]
    start = "--train.eval_on_start=true"
    steps = trained(settings, "student", *options, *adam, start)
    held = evaluations(settings[0] / "student")
    assert steps[-1]["loss"] < 0.4 * steps[0]["loss"]
    assert held[-1]["eval_loss"] < 0.4 * held[0]["eval_loss"]
    assert held[-1]["eval_teacher_agreement"] > held[0]["eval_teacher_agreement"] + 0.2
    # The teacher's own numbers, in other bins and batches.
    trained(settings, "itself", texts[0], *options, ONE, start)
    own = evaluations(settings[0] / "itself")[0]
    assert own["eval_loss"] == pytest.approx(0, abs=1e-6)
    assert own["eval_teacher_agreement"] == 1
    assert own["eval_student_mass"] == pytest.approx(own["eval_teacher_mass"], abs=1e-6)


def test_a_student_at_another_temperature_than_its_teacher_is_refused(write, settings, tmp_path):
    """In training and in what is evaluated; rows of other programs do not say at which they are."""
    to, warm, k = tmp_path / "rows", "--distillation.temperature=2", "--distillation.top_k=4"
    assert write(k, warm) == 0
    data = f"--data.datasets={json.dumps([{'path': str(to), 'type': 'tokenized'}])}"
    said = r"distillation.temperature = 1.0: .*/rows/00000.parquet has .* at 2.0; set it to that"
    with pytest.raises(ValueError, match=said):
        trained(settings, "at 1 of 2", data, k, ONE)
    with pytest.raises(ValueError, match=said):
        held = data.replace("datasets", "test_datasets", 1)
        trained(settings, "held at 2", held, *settings[3]("forward"), ONE)
    trained(settings, "at 2 of 2", data, k, warm, ONE)
    table = pq.read_table(to / "00000.parquet").replace_schema_metadata(None)
    pq.write_table(table, to / "00000.parquet")
    trained(settings, "at 1 of any", data, k, ONE)


@pytest.mark.parametrize("name", WRITTEN)
def test_ranks_write_what_one_process_does(name, spread, settings):
    check_rows(read(settings[0] / name), transformers_rows(settings, WRITTEN[name][1]))


def test_what_a_teacher_cannot_write_is_refused(settings, write, capsys):
    assert write("--distillation.top_k=99") == 1
    assert "distillation.top_k = 99: the model has 48 tokens" in capsys.readouterr().err
    assert teacher.main([settings[1], "--to"]) == 2
    assert "--to needs a FOLDER" in capsys.readouterr().err


def test_a_teacher_overwrites_nothing(write, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert write(to=".") == 1
    assert "has files; give another folder" in capsys.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("file", "cannot be written: File exists"),
        ("file/rows", "cannot be written: Not a dir"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_folder_that_cannot_be_written_is_found_before_the_teacher_is_read(
    where, said, write, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(evaluate.build, "preparing", lambda *_: None)  # nothing reads documents
    monkeypatch.setattr(evaluate, "filled_engine", lambda *_: pytest.fail("weights are read"))
    (tmp_path / "file").touch()
    assert write(to=where) == 1
    assert f"--to {tmp_path / where}: {said}" in capsys.readouterr().err


def test_a_process_that_cannot_write_its_rows_says_so_first(write, capsys, monkeypatch):
    def refused(file, named):
        raise ValueError(f"{named} {file}: cannot be written: Read-only file system")

    monkeypatch.setattr(teacher, "check_writable", refused)
    monkeypatch.setattr(evaluate, "filled_engine", lambda *_: pytest.fail("weights are read"))
    assert write() == 1
    assert "rows/00000.parquet: cannot be written" in capsys.readouterr().err
