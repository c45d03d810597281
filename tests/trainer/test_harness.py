"""lm-evaluation-harness on the trainer's models: its own numbers, without a network."""

import json
import socket

import pytest
import torch
import yaml

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra harness)")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tilewright import ImplementationUnavailable  # noqa: E402
from tilewright.trainer.harness import LanguageModel  # noqa: E402

pytestmark = pytest.mark.packages

WORDS = ["the", "king", "queen", "speaks", "sleeps", "and", "storm", "sea"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """This trainer's model and the harness's own, of one folder."""
    import torch.distributed as dist
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("harness")
    vocabulary = {word: i for i, word in enumerate(["<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tree = {
        "model": {"model_path": str(folder / "model")},
        "data": {"datasets": [{"path": "dummy"}], "sample_packing_sequence_len": 64},
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "enable_mixed_precision": False,
            "micro_batch_size": 2,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    own = LanguageModel.of(str(folder / "config.yaml"))
    theirs = HFLM(str(folder / "model"), device="cpu", batch_size=1, dtype="float32")
    yield own, theirs, folder
    dist.destroy_process_group()


def instances(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_log_likelihoods_are_the_harness_own(models):
    own, theirs, _ = models
    pairs = [
        ("the king", " speaks"),
        ("the king", " speaks and sleeps"),
        ("", "the storm and the sea"),
        ("the queen ", "sleeps"),
        (" ".join(WORDS * 6), " king queen"),  # cut to the model's positions
    ]
    given = instances("loglikelihood", *pairs)
    found, want = own.loglikelihood(given), theirs.loglikelihood(given)
    for (logprob, greedy), (other, also) in zip(found, want, strict=True):
        assert logprob == pytest.approx(other, abs=1e-4) and greedy == also
    # What the model itself says next is greedy.
    model = transformers.LlamaForCausalLM.from_pretrained(models[2] / "model")
    context = own.tok_encode("the king")
    best = model(torch.tensor([context])).logits[0, -1].argmax().item()
    [(_, greedy)] = own._loglikelihood_tokens([(None, context, [best])])
    assert greedy


def test_rolling_windows_count_each_token_once(models):
    own, theirs, _ = models
    texts = [(" ".join(WORDS[:3]),), (" ".join(WORDS * 10),)]
    given = instances("loglikelihood_rolling", *texts)
    found, want = own.loglikelihood_rolling(given), theirs.loglikelihood_rolling(given)
    assert found == pytest.approx(want, abs=1e-3)


def test_a_task_whose_data_are_at_hand_needs_no_network(models, monkeypatch):
    own, theirs, folder = models

    def blocked(*_, **__):
        raise AssertionError("a socket is opened")

    rows = [
        {"text": "the king", "choices": ["speaks", "sleeps"], "answer": 0},
        {"text": "the storm and", "choices": ["the sea", "queen king"], "answer": 0},
        {"text": "queen", "choices": ["and", "sleeps"], "answer": 1},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "courtly",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "tasks").mkdir()
    (folder / "tasks/courtly.yaml").write_text(yaml.safe_dump(task))
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    monkeypatch.setattr(socket.socket, "connect", blocked)
    found, want = (
        lm_eval.simple_evaluate(
            model, tasks=["courtly"], task_manager=manager, bootstrap_iters=0, log_samples=True
        )
        for model in (own, theirs)
    )
    assert found["results"]["courtly"]["acc,none"] == want["results"]["courtly"]["acc,none"]
    for a, b in zip(found["samples"]["courtly"], want["samples"]["courtly"], strict=True):
        for one, other in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
            assert one[0] == pytest.approx(other[0], abs=1e-4)


def test_text_is_not_generated(models):
    with pytest.raises(ImplementationUnavailable, match="do not generate text: choose tasks that"):
        models[0].generate_until(instances("generate_until", ("the king", {})))


def test_an_answer_longer_than_a_bin_is_refused(models):
    with pytest.raises(ValueError, match="an answer has 40 tokens, and at most 32 fit"):
        models[0]._loglikelihood_tokens([(None, [2], [3] * 40)])
