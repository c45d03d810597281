"""The embedded sampler: what it draws, with which weights, and what it refuses."""

import collections
import itertools
import math

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import transformers
from starlette.testclient import TestClient

from tilewright.nn import add_lora, load_adapter, save_adapter
from tilewright.sampler.__main__ import served
from tilewright.sampler.app import Served, application
from tilewright.sampler.asked import Asked, drawn, number
from tilewright.sampler.engine import BASE, Engine, Unknown, Unsampled

pytestmark = pytest.mark.packages
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 96,
}
PROMPTS = [[1, 2, 3], [5, 4, 3, 2, 1, 0, 7], [3] * 20]


def model_of(kind, **more):
    torch.manual_seed(0)
    given = {name: value for name, value in {**SMALL, **more}.items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **given)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # larger differences between tokens than those of new weights
        for p in model.parameters():
            p.mul_(3)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampler")
    model_of("qwen3").save_pretrained(folder / "model")
    for name, rank, targets in (("a", 4, None), ("b", 8, ["q_proj", "lm_head"])):
        model = model_of("qwen3")
        model.adaptable = ("lm_head",)
        add_lora(model, targets, rank=rank)
        torch.manual_seed(rank)
        for path, p in model.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(p, std=0.5)
        save_adapter(model, folder / name)
    other = model_of("qwen3")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.8)
    other.save_pretrained(folder / "other")
    return folder


@pytest.fixture(scope="module")
def made(folder):
    made = served(str(folder / "model"), None, "float32", "cpu", 4096)
    yield made
    made.engine.close()


@pytest.fixture
def client(made):
    return TestClient(application(made))


def results(engine, each, weights=BASE):
    return [future.result(60) for future in engine.submit(weights, each)]


def greedy(model, prompt, count):
    """By transformers' generate."""
    tokens = torch.tensor([prompt])
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False
    )
    return found[0, len(prompt) :].tolist()


# Families that continuous batching takes, and one that it does not.
FAMILIES = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 8},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4": {},
}
# Those that it does not take, that it fails for, alone or beside another prompt, and that it
# computes otherwise.
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
JAMBA |= {"num_experts": 2, "num_experts_per_tok": 1}
BY_GENERATE = {"gemma2": {"sliding_window": 8}, "mamba": {}, "jamba": JAMBA}
BY_GENERATE |= {"doge": {}, "falcon": {"head_dim": None}}


@pytest.mark.parametrize("kind", [*FAMILIES, *BY_GENERATE])
def test_greedy_samples_are_those_of_generate(kind):
    model = model_of(kind, **(FAMILIES | BY_GENERATE)[kind])
    wanted = [greedy(model, prompt, 12) for prompt in PROMPTS]
    engine = Engine(model, "none", tokens=1024)
    try:
        assert engine.continuous == (kind in FAMILIES)
        ends = frozenset([96])
        asked = [Asked(p, 12, temperature=0.0, ends=ends) for p in PROMPTS]
        found = results(engine, asked)
        assert [sample.tokens for sample in found] == wanted
        # And the log-probabilities are the model's.
        for prompt, sample in zip(PROMPTS, found, strict=True):
            whole = torch.tensor([prompt + sample.tokens])
            with torch.no_grad():
                logprobs = model(whole).logits[0].float().log_softmax(-1)
            at = range(len(prompt) - 1, whole.shape[1] - 1)
            own = [logprobs[i, token].item() for i, token in zip(at, sample.tokens, strict=True)]
            assert sample.logprobs == pytest.approx(own, abs=1e-4)
    finally:
        engine.close()


def test_a_sample_does_not_depend_on_what_is_drawn_beside_it(made):
    """Its random numbers are counters; a token differs only where two candidates are as near as
    rounding, which happens nowhere here.
    """
    asked = [Asked(p, 24, seed=5, sample=i) for p in PROMPTS for i in range(4)]
    together = results(made.engine, asked)
    assert len({tuple(sample.tokens) for sample in together}) == len(asked)
    alone = [results(made.engine, [one])[0] for one in asked]
    assert [sample.tokens for sample in together] == [sample.tokens for sample in alone]
    [other] = results(made.engine, [asked[0]._replace(seed=6)])
    assert other.tokens != alone[0].tokens


def test_tokens_have_their_probabilities():
    """Over 4,000 places, with each option; within four standard deviations."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(12)
    for options in (
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"top_k": 5, "top_p": 0.6},
    ):
        asked = Asked([0], 1, **options)
        p = (logits.double() / asked.temperature).softmax(-1)
        order = p.argsort(descending=True)
        kept = order[: asked.top_k] if asked.top_k > 0 else order
        before = p[kept].cumsum(0) - p[kept]
        kept = kept[before < asked.top_p * p[kept].sum()]
        wanted = torch.zeros(12, dtype=torch.double).scatter(0, kept, p[kept] / p[kept].sum())
        count = 4000
        drawn_at = [drawn(logits, asked, number(1, 2, i)) for i in range(count)]
        seen = collections.Counter(drawn_at)
        for token in range(12):
            mean = count * wanted[token].item()
            assert abs(seen[token] - mean) <= 4 * math.sqrt(mean) + bool(mean), (options, token)
    for place in (0.0, 1 - 2**-53):
        assert 0 <= drawn(logits, Asked([0], 1), place) < 12
    numbers = [number(*at) for at in itertools.product((0, 1), (0, 1), (0, 1))]
    assert len({*numbers}) == 8 and all(0 <= n < 1 for n in numbers)


def test_weights_come_and_go(made, folder):
    """Adapters of another rank and other modules, all weights, and the base again, in turns."""
    engine, prompt = made.engine, PROMPTS[1] * 6  # of several pages, which prompts share
    wanted = {BASE: greedy(model_of("qwen3"), prompt, 8)}
    for name in ("a", "b", "other"):
        engine.load(name, folder / name)
        model = model_of("qwen3")
        if name == "other":
            model = type(model).from_pretrained(folder / "other")
        else:
            model.adaptable = ("lm_head",)
            load_adapter(model, folder / name)
        wanted[name] = greedy(model, prompt, 8)
    assert len({*map(tuple, wanted.values())}) == 4
    order = ("a", BASE, "other", "b", "a", "other", BASE, "b")
    asked = Asked(prompt, 8, temperature=0.0, ends=frozenset([96]))
    futures = [engine.submit(name, [asked])[0] for name in order]
    for name, future in zip(order, futures, strict=True):
        sample = future.result(60)
        assert (sample.weights, sample.tokens) == (name, wanted[name])
    # Others under a name that was known.
    engine.load("a", folder / "b")
    assert results(engine, [asked], "a")[0].tokens == wanted["b"]
    for name in ("a", "b", "other"):
        engine.forget(name)
    with pytest.raises(Unknown, match="no weights 'a'; known are"):
        engine.submit("a", [asked])
    with pytest.raises(FileNotFoundError, match="no adapter_config"):
        engine.load("c", folder)


def test_what_ends_a_sample(made):
    engine = made.engine
    [free] = results(engine, [Asked(PROMPTS[0], 12, seed=3)])
    assert free.reason == "length" and len(free.tokens) == 12
    end = free.tokens[4]
    first = free.tokens.index(end)
    [ended] = results(engine, [Asked(PROMPTS[0], 12, seed=3, ends=frozenset([end]))])
    assert (ended.tokens, ended.reason) == (free.tokens[: first + 1], "stop")
    with pytest.raises(Unsampled, match="texts need a tokenizer"):
        engine.submit(BASE, [Asked(PROMPTS[0], 12, stops=("x",))])
    with pytest.raises(Unsampled, match="accepted are 1 to 128 in all"):
        engine.submit(BASE, [Asked([1] * 120, 9)])


def test_texts_end_samples_and_others_go_on():
    engine = Engine(model_of("qwen3"), "none", tokens=1024, text=lambda t: "".join(map(chr, t)))
    try:
        asked = [Asked(PROMPTS[0], 12, seed=seed) for seed in range(4)]
        free = results(engine, asked)
        stop = "".join(map(chr, free[0].tokens[2:4]))
        found = results(engine, [asked[0]._replace(stops=(stop,)), *asked[1:]])
        assert (found[0].tokens, found[0].reason) == (free[0].tokens[:4], "stop")
        assert [s.tokens for s in found[1:]] == [s.tokens for s in free[1:]]
    finally:
        engine.close()


def test_what_is_aborted_ends_and_others_go_on(made):
    engine = made.engine
    asked = Asked(PROMPTS[0], 100)
    [running] = engine.submit(BASE, [asked], "one")
    with engine.pausing():
        [waiting] = engine.submit(BASE, [asked], "one")
        [other] = engine.submit(BASE, [asked._replace(max_tokens=3)], "other")
        engine.abort("one")
    for future in (running, waiting):
        try:
            assert len(future.result(60).tokens) == 100  # it had ended before
        except Unsampled as error:
            assert "aborted" in str(error)
    assert waiting.exception() is not None
    assert len(other.result(60).tokens) == 3


def test_an_error_ends_what_was_asked_and_nothing_else(made, monkeypatch):
    engine = made.engine
    asked = Asked(PROMPTS[0], 4)

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", broken)
        with pytest.raises(Unsampled, match="out of memory"):
            results(engine, [asked])
    assert len(results(engine, [asked])[0].tokens) == 4


def test_prompts_that_a_batch_cannot_hold_whole_are_sampled():
    """They go on in the next one, beside others that have their next token."""
    model = model_of("qwen3")
    prompts = [[1 + i] * (20 + 7 * i) for i in range(6)]
    wanted = [greedy(model, prompt, 4) for prompt in prompts]
    engine = Engine(model, "none", tokens=64)
    try:
        given = results(engine, [Asked(p, 4, temperature=0.0, scored=(5, 6)) for p in prompts])
        assert [sample.tokens for sample in given] == wanted
        for prompt, sample in zip(prompts, given, strict=True):
            logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[[5, 6]]
            assert sample.scored[0] == pytest.approx(logprobs.tolist(), abs=1e-5)
    finally:
        engine.close()


def test_what_generate_cannot_sample_ends_alone(monkeypatch):
    """And the model's own tokens of an end do not end a sample before it is whole."""
    model = model_of("gemma2", sliding_window=8)
    asked = Asked(PROMPTS[0], 12, temperature=0.0)
    model.generation_config.eos_token_id = None
    wanted = greedy(model, PROMPTS[0], 12)
    model.generation_config.eos_token_id = wanted[2]
    engine = Engine(model, "none", tokens=256)
    try:
        made = model.generate

        def fails_once(*args, **options):
            monkeypatch.setattr(model, "generate", made, raising=False)
            raise ValueError("not this one")

        monkeypatch.setattr(model, "generate", fails_once, raising=False)
        first, second = engine.submit(BASE, [asked, asked])
        with pytest.raises(Unsampled, match="not this one"):
            first.result(60)
        assert second.result(60).tokens == wanted
    finally:
        engine.close()


def test_what_has_begun_ends_before_a_pause_and_what_comes_waits(made):
    engine = made.engine
    begun = engine.submit(BASE, [Asked(PROMPTS[0], 40)])[0]
    with engine.pausing():
        assert begun.done() or begun in [d.done for d in engine._waiting]
        waits = engine.submit(BASE, [Asked(PROMPTS[0], 2)])[0]
        assert not waits.done()
    assert len(waits.result(60).tokens) == 2


def test_a_pause_aborts_where_it_is_asked_to(client, made):
    """In its other modes what has begun ends first."""
    asked = Asked(PROMPTS[0], 100)
    for mode, aborted in (("retract", False), ("abort", True)):
        [running] = made.engine.submit(BASE, [asked])
        assert client.post("/pause_generation", json={"mode": mode}).status_code == 200
        [waiting] = made.engine.submit(BASE, [asked._replace(max_tokens=2)])
        assert running.done() or not aborted
        assert not waiting.done()
        assert client.post("/continue_generation").status_code == 200
        assert len(waiting.result(60).tokens) == 2
        ended = running.exception(60)
        assert isinstance(ended, Unsampled) == aborted, (mode, ended)


def test_it_answers_as_sglang_and_openai_have_it(client, made, folder):
    asked = {"input_ids": PROMPTS[0], "return_logprob": True, "top_logprobs_num": 2}
    params = {"max_new_tokens": 5, "n": 2, "sampling_seed": 4}
    two = client.post("/generate", json={**asked, "sampling_params": params}).json()
    assert len(two) == 2 and two[0]["output_ids"] != two[1]["output_ids"]
    for answer in two:
        about = answer["meta_info"]
        assert about["finish_reason"] == {"type": "length"} and about["completion_tokens"] == 5
        assert [pair[1] for pair in about["output_token_logprobs"]] == answer["output_ids"]
        for (own, token, _), best in zip(
            about["output_token_logprobs"], about["output_top_logprobs"], strict=True
        ):
            assert len(best) == 2 and best[0][0] >= best[1][0] >= own - 1e-6 * (token == best[1][1])
    body = {"model": made.name, "prompt": PROMPTS[0], "max_tokens": 5, "n": 2, "seed": 4}
    answer = client.post("/v1/completions", json={**body, "logprobs": 0}).json()
    assert [c["token_ids"] for c in answer["choices"]] == [a["output_ids"] for a in two]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    adapter = {"lora_name": "x", "lora_path": str(folder / "a")}
    assert client.post("/load_lora_adapter", json=adapter).json()["loaded_adapters"] == ["x"]
    assert client.get("/v1/models").json()["data"][1]["id"] == "x"
    own = client.post("/generate", json={**asked, "lora_path": "x", "sampling_params": params})
    assert own.json()[0]["meta_info"]["weight_version"] == "x"
    assert own.json()[0]["output_ids"] != two[0]["output_ids"]
    assert client.post("/unload_lora_adapter", json={"lora_name": "x"}).status_code == 200
    info, server = (client.get(f"/get_{name}_info").json() for name in ("model", "server"))
    assert info["vocab_size"] == 97 and server["continuous_batching"]


def test_the_version_that_comes_with_weights_is_told(client):
    """By a group of one process, which sends nothing."""
    group = {"master_address": "127.0.0.1", "master_port": 0, "rank_offset": 0, "world_size": 1}
    group |= {"group_name": "alone", "backend": "gloo"}
    assert client.post("/init_weights_update_group", json=group).status_code == 200
    none = {"names": [], "dtypes": [], "shapes": [], "group_name": "alone"}
    for more, told in (({"weight_version": "v1"}, "v1"), ({}, "v1")):
        answer = client.post("/update_weights_from_distributed", json={**none, **more})
        assert answer.status_code == 200, answer.json()
        assert client.get("/get_model_info").json()["weight_version"] == told
    left = {"group_name": "alone"}
    assert client.post("/destroy_weights_update_group", json=left).status_code == 200
    assert "no group" in client.post("/update_weights_from_distributed", json=none).text
    assert client.post("/pause_generation", json={"mode": "none"}).status_code == 422


REFUSALS = {
    "token": ({"input_ids": [97]}, 400, "has the token 97; accepted are 0 to 96"),
    "none": ({}, 400, "one of text and input_ids"),
    "text": ({"text": "x"}, 400, "this model has no tokenizer"),
    "long": ({"input_ids": [1] * 120}, 400, "accepted are 1 to 128 in all"),
    "empty": ({"input_ids": []}, 400, "the prompt has 0 tokens"),
    "weights": (
        {"input_ids": [1], "lora_path": "no", "sampling_params": {"max_new_tokens": 4}},
        404,
        "no weights 'no'",
    ),
    "field": ({"input_ids": [1], "stream": True}, 422, "stream: "),
    "number": ({"input_ids": [1], "sampling_params": {"top_p": 0}}, 422, "params.top_p: "),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_sampled_is_refused_with_a_sentence(client, name):
    body, status, said = REFUSALS[name]
    answer = client.post("/generate", json=body)
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_other_requests_are_refused_with_a_sentence(client, folder):
    for path, body, status in (
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/none"}, 400),
        ("load_lora_adapter", {"lora_name": "x"}, 400),
        ("unload_lora_adapter", {"lora_name": "x"}, 404),
        ("v1/completions", {"model": "none", "prompt": [1]}, 404),
    ):
        answer = client.post(f"/{path}", json=body)
        assert answer.status_code == status and answer.json()["error"]["message"], path


def test_texts_are_encoded_and_decoded(made):
    class Words:
        def encode(self, text):
            return [int(word) for word in text.split()]

        def decode(self, tokens):
            return " ".join(map(str, tokens))

    own = Served(made.engine, Words(), made.ends, made.name)
    with TestClient(application(own)) as client:
        body = {"text": "1 2 3", "sampling_params": {"max_new_tokens": 3}}
        answer = client.post("/generate", json=body).json()
        assert answer["text"] == " ".join(map(str, answer["output_ids"]))
