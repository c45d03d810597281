"""Published training loops, unchanged, on a server: what a client sees, as JSON.

    python cookbook.py SERVER_FOLDER MODEL_FOLDER FOLDER

It runs in an environment of its own, with tinker and tinker-cookbook and without this project
(`make clients`), and opens no connection but to the server. SERVER_FOLDER has the server's url and
api.key; FOLDER gets what the loops write.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import shutil
import sys

from connection import FOLDER, MODEL, URL, metrics  # first: it sets the environment

import tinker  # isort: skip
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

COLORS = ("red", "green", "blue", "yellow", "white", "black", "brown", "grey")


def said(role, text):
    return {"role": role, "content": text}


def write_data():
    rows, pairs = [], []
    for i in range(32):
        color, other = COLORS[i % 8], COLORS[(i + 3) % 8]
        question = said("user", f"Which color has number {i}?")
        rows.append({"messages": [question, said("assistant", f"It is {color}.")]})
        comparison = {
            "prompt_conversation": [question],
            "completion_A": [said("assistant", f"It is {color}.")],
            "completion_B": [said("assistant", f"No idea, perhaps {other}?")],
        }
        pairs.append({"comparison": comparison, "label": "A"})
    for name, lines in (("chats", rows), ("pairs", pairs)):
        text = "\n".join(map(json.dumps, lines))
        (FOLDER / f"{name}.jsonl").write_text(text + "\n")


def common(batch_size):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=str(MODEL),
        renderer_name="role_colon",
        max_length=128,
        batch_size=batch_size,
    )


@contextlib.contextmanager
def recorded(file):
    """Writes what the passes within send: [step, datum, (tokens, targets, weights)]."""
    forward_backward, sent = tinker.TrainingClient.forward_backward, []

    def keeping(self, data, *args, **options):
        inputs = [
            [datum.loss_fn_inputs[name].data for name in ("target_tokens", "weights")]
            for datum in data
        ]
        pairs = zip(data, inputs, strict=True)
        sent.append([[datum.model_input.to_ints(), *own] for datum, own in pairs])
        return forward_backward(self, data, *args, **options)

    tinker.TrainingClient.forward_backward = keeping
    try:
        yield
    finally:
        tinker.TrainingClient.forward_backward = forward_backward
        file.write_text(json.dumps(sent))


def two_at_once():
    """Whether two clients at once get the losses that each gets alone."""
    service = tinker.ServiceClient(base_url=URL)

    def losses(seed):
        client = service.create_lora_training_client(base_model=str(MODEL), rank=8, seed=seed)
        found = []
        for step in range(4):
            tokens = [(seed + 7 * step + 3 * i) % 1000 for i in range(64)]
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData(
                        data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]
                    )
                },
            )
            passed = client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            found.append(passed.result().metrics["loss:sum"])
        return found

    alone = [losses(seed) for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [*pool.map(losses, (1, 2))] == alone


class Interrupted(BaseException):
    """Stands for a client that is killed."""


def interrupted_after(calls):
    """The next run ends instead of its pass after so many."""
    forward_backward, left = tinker.TrainingClient.forward_backward, [calls]

    def counted(self, *args, **options):
        if not left[0]:
            tinker.TrainingClient.forward_backward = forward_backward
            raise Interrupted
        left[0] -= 1
        return forward_backward(self, *args, **options)

    tinker.TrainingClient.forward_backward = counted


def supervised(name):
    """What a run reports, in a folder that it resumes from if there is one."""
    data = FromConversationFileBuilder(
        file_path=str(FOLDER / "chats.jsonl"), test_size=8, common_config=common(8)
    )
    config = train.Config(
        log_path=str(FOLDER / name),
        model_name=str(MODEL),
        recipe_name="conformance",
        dataset_builder=data,
        learning_rate=3e-2,
        lr_schedule="constant",
        num_epochs=3,
        lora_rank=8,
        save_every=2,
        eval_every=3,
        max_steps=6,
        base_url=URL,
    )
    asyncio.run(train.main(config))
    return metrics(FOLDER / name)


def preferences():
    data = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=str(FOLDER / "pairs.jsonl")),
        common_config=common(8),
    )
    config = train_dpo.Config(
        log_path=str(FOLDER / "dpo"),
        model_name=str(MODEL),
        recipe_name="conformance",
        dataset_builder=data,
        learning_rate=1e-2,
        lora_rank=8,
        renderer_name="role_colon",
        eval_every=0,
        infrequent_eval_every=0,
        save_every=2,
        base_url=URL,
    )
    train_dpo.main(config)
    return metrics(FOLDER / "dpo")


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_data()
    with recorded(FOLDER / "sent.json"):
        whole = supervised("sft")
    interrupted_after(5)
    with contextlib.suppress(Interrupted):
        supervised("resumed")
    resumed = supervised("resumed")
    losses, again = (
        {row["step"]: row["train_mean_nll"] for row in rows if "train_mean_nll" in row}
        for rows in (whole, resumed)
    )
    pairs = preferences()
    first = pairs[0]["dpo_loss"]
    found = {
        "sft": [losses[step] for step in sorted(losses)],
        "sft_evaluated": [row["test/nll"] for row in whole if "test/nll" in row],
        "sft_resumed": [again[step] for step in sorted(again)],
        "dpo": [row["dpo_loss"] for row in pairs],
        "dpo_accuracy": [row["accuracy"] for row in pairs],
        "two_at_once": two_at_once(),
    }
    problems = []
    if not found["sft"][-1] < found["sft"][0] - 1:
        problems.append("the loss of supervised training has not fallen")
    # The cookbook saves a step's state after it has sent the next one, and a run that goes on from
    # there repeats both: it is ahead of a whole run.
    if not (len(again) > 1 and again[max(again)] < losses[5]):
        problems.append("a run that was interrupted has not gone on from its checkpoint")
    if abs(first - math.log(2)) > 1e-5:
        problems.append(f"DPO begins at {first}, not at ln 2")
    if not found["dpo"][-1] < first:
        problems.append("the loss of DPO has not fallen")
    if not found["two_at_once"]:
        problems.append("two clients at once have other losses than each alone")
    print(json.dumps({**found, "problems": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
