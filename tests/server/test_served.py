"""A training server in one process: its API, its log and its workers, without sockets."""

import json
import sqlite3

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from helpers import until
from serving import (
    KEY,
    LONGEST,
    PROTOBUF,
    Served,
    documents,
    listed,
    pass_body,
    passed,
    trained,
    write_server,
)

from tilewright.nn.weights import adapted
from tilewright.server.frames import packed, unpacked

pytestmark = pytest.mark.packages


# ---- what is computed


def test_a_pass_has_the_losses_and_gradients_of_the_models_logits(file):
    """The sum, the log-probabilities of targets in the request's order, and after
    a step the weights of autograd's gradient.
    """
    with Served(file) as served:
        model = served.model()
        engine = served.workers.models.engine
        for _, module in adapted(engine.model):  # else A has no gradient
            torch.nn.init.normal_(module.lora_B, std=0.1)
        data = documents()
        logits = [engine.model(torch.tensor(tokens)[None])[0] for tokens, _ in data]
        logprobs = [
            row.log_softmax(-1).gather(1, torch.tensor(inputs["target_tokens"])[:, None])[:, 0]
            for row, (_, inputs) in zip(logits, data, strict=True)
        ]
        want = -sum(
            (lp * torch.tensor(inputs["weights"])).sum()
            for lp, (_, inputs) in zip(logprobs, data, strict=True)
        )
        trained = [p for p in engine.parameters if p.requires_grad]
        gradients = torch.autograd.grad(want, trained)
        metrics, fields = passed(served.result(served.passes(model, 1, data), accept=PROTOBUF))
        assert metrics["loss:sum"] == pytest.approx(want.item(), rel=1e-5)
        for got, own in zip(fields["logprobs"], logprobs, strict=True):
            np.testing.assert_allclose(got, own.detach().numpy(), rtol=1e-4, atol=1e-5)
        for p, gradient in zip(trained, gradients, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-4)
        norm = torch.stack([g.norm() for g in gradients]).norm().item()
        answer = served.result(served.step(model, 2, learning_rate=0.0))
        # The losses of the wire are sums, which nothing divides.
        assert answer["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_policys_loss_is_its_formula(loss, file):
    draw = np.random.default_rng(1)
    data = []
    for tokens, inputs in documents():
        own = {"target_tokens": inputs["target_tokens"]}
        own["logprobs"] = -draw.random(len(tokens)).astype(np.float32) - 4.2
        own["advantages"] = draw.normal(size=len(tokens)).astype(np.float32)
        data.append((tokens, own))
    with Served(file) as served:
        model = served.model()
        given = passed(served.result(served.passes(model, 1, data, loss), accept=PROTOBUF))
    metrics, fields = given
    total = 0.0
    for lp, (_, own) in zip(fields["logprobs"], data, strict=True):
        lp, old, a = (x.astype(np.float64) for x in (lp, own["logprobs"], own["advantages"]))
        r = np.exp(lp - old)
        if loss == "gspo":
            r = np.full_like(r, np.exp((lp - old).mean()))
        clipped = np.clip(r, *((0, 4) if loss == "cispo" else (0.8, 1.2)))
        each = {
            "importance_sampling": -(r * a),
            "ppo": -np.minimum(r * a, clipped * a),
            "gspo": -np.minimum(r * a, clipped * a),
            "cispo": -(clipped * lp * a),
            "dro": 0.025 * (lp - old) ** 2 - lp * a,
        }
        total += each[loss].sum()
    assert metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    assert all(name.rpartition(":")[2] in ("mean", "sum") for name in metrics)


def test_several_targets_of_a_token_have_weights(file):
    draw = np.random.default_rng(2)
    data = []
    for n, k in ((7, 3), (12, 2)):
        targets = np.stack([draw.permutation(97)[:k] for _ in range(n)])
        weights = draw.normal(size=(n, k)).astype(np.float32)
        weights[1, 0] = 0.0  # its log-probability is told all the same
        data.append((draw.integers(0, 97, n), {"target_tokens": targets, "weights": weights}))
    with Served(file) as served:
        metrics, fields = passed(
            served.result(served.passes(served.model(), 1, data), accept=PROTOBUF)
        )
        total = 0.0
        for got, (tokens, inputs) in zip(fields["logprobs"], data, strict=True):
            with torch.no_grad():
                own = served.workers.models.engine.model(torch.tensor(tokens)[None])[0]
            want = own.log_softmax(-1).gather(1, torch.tensor(inputs["target_tokens"]))
            k = inputs["weights"].shape[1]
            np.testing.assert_allclose(got.reshape(len(tokens), -1)[:, :k], want, rtol=1e-4)
            total -= (want * torch.tensor(inputs["weights"])).sum().item()
        assert metrics["loss:sum"] == pytest.approx(total, rel=1e-4)


def test_packing_changes_rounding_alone(model_folder, tmp_path):
    """Documents are isolated: one a sequence has the same losses, and so have results in JSON."""
    found = []
    for packing in (True, False):
        file = write_server(tmp_path / str(packing), model_folder, enable_packing=packing)
        with Served(file) as served:
            model = served.model()
            answer = served.result(served.passes(model, 1, documents()))
            found.append(answer)
            lengths = [out["logprobs"]["shape"] for out in answer["loss_fn_outputs"]]
            assert lengths == [[len(tokens)] for tokens, _ in documents()]
    assert found[0]["metrics"]["loss:sum"] == pytest.approx(
        found[1]["metrics"]["loss:sum"], rel=1e-5
    )
    for a, b in zip(*(f["loss_fn_outputs"] for f in found), strict=True):
        np.testing.assert_allclose(a["logprobs"]["data"], b["logprobs"]["data"], rtol=1e-4)


def test_a_forward_pass_leaves_no_gradient(file):
    with Served(file) as served:
        model = served.model()
        future = served.post("forward", raw=pass_body(model, 1, documents(), forward=True))
        metrics, fields = passed(served.result(future, accept=PROTOBUF))
        other, own = passed(served.result(served.passes(model, 2, documents()), accept=PROTOBUF))
        assert metrics["loss:sum"] == pytest.approx(other["loss:sum"], rel=1e-6)
        np.testing.assert_allclose(fields["logprobs"][3], own["logprobs"][3], rtol=1e-5)
        served.result(served.step(model, 3))
        served.result(
            served.post("forward_backward", raw=pass_body(model, 4, documents(), forward=True)),
            accept=PROTOBUF,
        )
        answer = served.result(served.step(model, 5))
        assert answer["category"] == "user" and "there is no gradient" in answer["error"]


def test_what_is_not_finite_is_an_error_that_leaves_nothing(file):
    with Served(file) as served:
        model, other = served.model(), served.model()
        huge = [(t, {**i, "weights": np.full(len(t), 3e38, np.float32)}) for t, i in documents()]
        for name in (model, other):
            served.result(served.passes(name, 1, documents()))
        answer = served.result(served.passes(model, 2, huge))
        assert answer["category"] == "user" and "the loss is inf" in answer["error"]
        answer = served.result(served.step(model, 3))
        assert "there is no gradient" in answer["error"]
        served.result(served.step(other, 2, learning_rate=0.0))
        # But for the number of the step.
        assert trained(served, model, 1, first=4)[:2] == trained(served, other, 1, first=3)[:2]


# ---- models


def test_models_that_are_mixed_have_the_bits_of_each_alone(file, model_folder, tmp_path):
    wanted = []
    for i in range(2):
        own = write_server(tmp_path / f"alone{i}", model_folder)
        with Served(own) as served:
            wanted.append(trained(served, served.model(rank=4 + i), 2, seed=10 * i))
    with Served(file) as served:
        models = [served.model(rank=4 + i) for i in range(2)]
        found = [[], []]
        for step in range(2):
            for i, model in enumerate(models):
                found[i] += trained(served, model, 1, first=1 + 3 * step, seed=10 * i + 2 * step)
    assert found == wanted


def test_a_model_has_the_adapters_that_it_was_asked_for(file):
    with Served(file) as served:
        model = served.model(rank=3, train_mlp=False, train_unembed=False)
        first = trained(served, model, 2)
        modules = dict(adapted(served.workers.models.engine.model))
        for path, module in modules.items():
            assert module.scale == 16 / 3
            A = module.lora_A.unflatten(0, (-1, 8))
            learned = ".self_attn" in path
            assert bool(A[:, :3].any()) == learned and bool(module.lora_B.any()) == learned
            assert not A[:, 3:].any()
        assert {path.rpartition(".")[2] for path in modules} > {"lm_head", "down_proj"}
        assert first != trained(served, served.model(rank=3), 2)
        info = served.post("get_info", {"model_id": model})[1]
        assert info["lora_rank"] == 3 and info["model_data"]["model_name"] == served.base


def test_a_saved_model_goes_on_as_it_was(file):
    """With its optimizer's states; or, loaded without them, as one that begins with its weights."""
    with Served(file) as served:
        model = served.model()
        trained(served, model, 2)
        answer = served.result(
            served.post("save_weights", {"model_id": model, "seq_id": 7, "path": "first"})
        )
        assert answer["path"] == f"tinker://{model}/weights/first"
        again = {"model_id": model, "seq_id": 8, "path": "first"}
        taken = served.result(served.post("save_weights", again))
        assert taken["category"] == "user" and "is there already" in taken["error"]
        body = {"session_id": "another", "model_seq_id": 0, "path": answer["path"]}
        loaded = served.result(served.post("load_weights", {**body, "optimizer": True}))
        assert loaded["model_id"] == "another:train:0"
        fresh = {**body, "model_seq_id": 1, "optimizer": False}
        served.result(served.post("load_weights", fresh))
        wanted = trained(served, model, 2, first=9, seed=50)
        assert trained(served, "another:train:0", 2, seed=50) == wanted
        without = trained(served, "another:train:1", 2, seed=50)
        assert without[0] == wanted[0] and without[-1] != wanted[-1]
        info = served.post("weights_info", {"tinker_path": answer["path"]})[1]
        assert info["lora_rank"] == 4 and info["train_unembed"]
        [known] = served.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
        assert known["checkpoint_id"] == "weights/first" and known["size_bytes"] > 0
        assert served.result(served.post("unload_model", {"model_id": model}))["model_id"] == model
        assert served.step(model, 30)[0] == 404


# ---- samplers

PROMPT = documents()[3][0].tolist()


def scores(served, sampler, seq=0, **more):
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 1},
        "prompt_logprobs": True,
        **more,
    }
    return served.result(served.post("asample", body))


def test_a_sampler_scores_prompts_with_its_own_weights(file):
    """The base's, those of a model when it was saved, and none that came later."""
    tokens = PROMPT
    with Served(file) as served:
        model, engine = served.model(), served.workers.models.engine
        session = model.partition(":")[0]
        with torch.no_grad():  # adapters add nothing yet
            base = engine.model(torch.tensor(tokens)[None])[0].log_softmax(-1)
        trained(served, model, 1)
        save = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}
        future = served.post("save_weights_for_sampler", save)
        # A client that saw no answer sends it again, and numbers the sampler anew.
        assert (
            served.post("save_weights_for_sampler", {**save, "sampling_session_seq_id": 7})
            == future
        )
        assert served.result(future)["sampling_session_id"] == f"{session}:sample:0"
        with torch.no_grad():
            own = engine.model(torch.tensor(tokens)[None])[0].log_softmax(-1)
        trained(served, model, 1, first=5)
        body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": served.base}
        assert served.post("create_sampling_session", body)[0] == 200
        for sampler, want in ((f"{session}:sample:0", own), (f"{session}:sample:1", base)):
            found = scores(served, sampler, topk_prompt_logprobs=3, num_samples=2)
            target = want[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            assert found["prompt_logprobs"][0] is None
            np.testing.assert_allclose(found["prompt_logprobs"][1:], target, rtol=1e-4, atol=1e-5)
            best = want[:-1].topk(3).indices.tolist()
            assert found["topk_prompt_logprobs"][0] is None
            assert [[t for t, _ in row] for row in found["topk_prompt_logprobs"][1:]] == best
            for sequence in found["sequences"]:
                assert sequence["stop_reason"] == "length"
                [token], [logprob] = sequence["tokens"], sequence["logprobs"]
                assert logprob == pytest.approx(want[-1, token].item(), rel=1e-4)
        # The weights of the model that trains are as they were.
        assert not torch.equal(own, engine.model(torch.tensor(tokens)[None])[0].log_softmax(-1))
        greedy = {"max_tokens": 1, "temperature": 0.0}
        found = scores(served, f"{session}:sample:1", 1, sampling_params=greedy)
        assert found["sequences"][0]["tokens"] == [base[-1].argmax().item()]
        last = scores(served, f"{session}:sample:1", 2, prompt_logprobs_last_n=2)
        assert [p is None for p in last["prompt_logprobs"]] == [True] * 31 + [False] * 2


def test_a_name_that_is_saved_again_has_the_weights_of_that_time(file, monkeypatch):
    """Once it is deleted, or where a kill came before the end of its folder; else it is refused."""
    with Served(file) as served:
        model = served.model()
        session = model.partition(":")[0]
        trained(served, model, 1)
        found = []
        for time in range(2):
            save = {"model_id": model, "path": "here"}
            path = served.result(served.post("save_weights_for_sampler", save))["path"]
            assert (
                "is there already"
                in served.result(served.post("save_weights_for_sampler", save))["error"]
            )
            sampler = {"session_id": session, "sampling_session_seq_id": time, "model_path": path}
            made = served.post("create_sampling_session", sampler)[1]["sampling_session_id"]
            found.append(scores(served, made)["prompt_logprobs"])
            with monkeypatch.context() as patch:
                patch.setattr(served.log, "user_of", lambda path: None)  # as if it had none
                kind, name = path.split("/")[-2:]
                body = {"model_id": model, "checkpoint_id": f"{kind}/{name}"}
                assert served.post("delete_checkpoint", body)[0] == 200
            trained(served, model, 1, first=4 + 3 * time)
        assert found[0] != found[1]
        held = {"model_id": model, "sampling_session_seq_id": 9}
        served.result(served.post("save_weights_for_sampler", held))
        assert (
            "is there already"
            in served.result(served.post("save_weights_for_sampler", held))["error"]
        )


def test_samples_have_the_distribution_that_was_asked_for(file):
    from tilewright.server.passes import Asked, drawn

    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5], dtype=torch.float64)
    draws = ((np.arange(2000) + 0.5) / 2000).tolist()
    for temperature, top_k, top_p in (
        (1.0, -1, 1.0),
        (0.5, -1, 1.0),
        (1.0, 2, 1.0),
        (1.0, -1, 0.7),
    ):
        asked = Asked(0, draws, temperature, top_k, top_p)
        counts = np.bincount([drawn(logits, asked, x) for x in draws], minlength=5) / 2000
        want = (logits / temperature).softmax(-1)
        order = want.argsort(descending=True)
        kept = order[: top_k if top_k > 0 else 5]
        if top_p < 1:
            kept = order[: int((want[order].cumsum(0) < top_p).sum()) + 1]
        masked = torch.zeros(5, dtype=torch.float64)
        masked[kept] = want[kept] / want[kept].sum()
        np.testing.assert_allclose(counts, masked, atol=1e-3)


def test_weights_for_sampling_are_an_adapter_that_peft_loads(file):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    with Served(file) as served:
        model = served.model(rank=3)
        trained(served, model, 2)
        save = {"model_id": model, "seq_id": 7, "path": "last"}
        answer = served.result(served.post("save_weights_for_sampler", save))
        ids = torch.arange(24)[None] % 97
        with torch.no_grad():
            want = served.workers.models.engine.model(ids)
        folder = served.root / f"models/{model}/sampler_weights/last/adapter"
        assert answer["path"] == f"tinker://{model}/sampler_weights/last"
        base = AutoModelForCausalLM.from_pretrained(served.base, dtype=torch.float32)
        with torch.no_grad():
            plain = base(ids).logits
            got = peft.PeftModel.from_pretrained(base, folder)(ids).logits
    assert not torch.allclose(plain, want, atol=1e-2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ---- order, and once


def test_requests_run_in_the_order_of_their_numbers_and_once(file, model_folder, tmp_path):
    with Served(write_server(tmp_path / "straight", model_folder)) as served:
        wanted = trained(served, served.model(), 2)
    with Served(file) as served:
        model = served.model()
        bodies = {}
        for step in range(2):
            for call in range(2):
                seq = 1 + 3 * step + call
                bodies[seq] = (
                    "forward_backward",
                    pass_body(model, seq, documents(2 * step + call)),
                )
        futures = {}
        draw = np.random.default_rng(0)
        for seq in draw.permutation([1, 2, 3, 4, 5, 6]).tolist():
            for _ in range(2):  # a client that saw no answer sends it again
                if seq % 3:
                    future = served.post("forward_backward", raw=bodies[seq][1])
                else:
                    future = served.step(model, seq)
                assert future[0] == 200 and futures.setdefault(seq, future) == future
            served.answer()
        found = []
        for seq in range(1, 7):
            answer = served.result(futures[seq], **({"accept": PROTOBUF} if seq % 3 else {}))
            found.append(answer if seq % 3 else json.dumps(answer))
        assert found == wanted
        status, answer = served.step(model, 3, learning_rate=1.0)
        assert status == 422 and "seq_id 3" in answer["detail"]


def test_a_request_whose_turn_has_not_come_says_what_is_missing(file, monkeypatch):
    monkeypatch.setattr("tilewright.server.api.WAIT", 0.0)
    with Served(file) as served:
        model = served.model()
        _, future = served.step(model, 4)
        served.answer()
        _, answer = served.post("retrieve_future", {"request_id": future["request_id"]})
        assert answer["type"] == "try_again" and answer["queue_state"] == "paused_capacity"
        assert "seq_id 1 has not come" in answer["queue_state_reason"]


def test_a_refused_request_has_used_up_its_number(file):
    with Served(file) as served:
        model = served.model()
        for _ in range(2):
            status, answer = served.passes(model, 1, documents(), "nothing")
            assert status == 400 and "accepted are cross_entropy" in answer["detail"]
        assert served.passes(model, 1, documents())[0] == 422
        assert "metrics" in served.result(served.passes(model, 2, documents()))


def test_requests_behind_a_number_that_does_not_come_end(model_folder, tmp_path):
    """With the gradients so far; what comes later runs, also after a kill."""
    file = write_server(tmp_path, model_folder, gap_timeout=1e-3)
    with Served(file) as served:
        model = served.model()
        served.result(served.passes(model, 1, documents()))
        waits = served.step(model, 3)
        served.answer()
        until(lambda: served.log.gaps(1e-3))
        served.workers.skip_gaps()
        answer = served.result(waits)
        assert answer["category"] == "user" and "seq_id 2 has not come" in answer["error"]
        assert "there is no gradient" in served.result(served.step(model, 4))["error"]
        wanted = trained(served, model, 1, first=5)
    with Served(file) as served:
        assert trained(served, model, 1, first=8) != wanted
        assert served.log.model(model).state == "live"


def test_what_waits_when_a_model_is_unloaded_ends(file):
    with Served(file) as served:
        model = served.model()
        waits = served.step(model, 2)
        ended = served.post("unload_model", {"model_id": model})
        assert served.post("unload_model", {"model_id": model}) == ended, "as if it saw no answer"
        assert served.result(ended) == {"model_id": model, "type": "unload_model"}
        assert served.post("unload_model", {"model_id": model}) == ended
        answer = served.result(waits)
        assert answer == {"error": "the model was unloaded", "category": "user"}


# ---- the JSON dialect


def test_the_json_dialect_trains_saves_and_goes_on(file):
    """Its steps divide by the tokens that are trained on, its models have names, and no adapter on
    the head.
    """

    def passes(seq, data, loss="causallm_loss", **options):
        own = {"data": data, "loss_fn": loss, "loss_fn_params": options}
        body = {"model_id": "mine", "seq_id": seq, "forward_backward_input": own}
        return served.result(served.post("forward_backward", body))

    with Served(file) as served:
        created = {"model_id": "mine", "base_model": served.base}
        created |= {"lora_config": {"rank": 4, "alpha": 8, "seed": 3}}
        created |= {"optimizer_config": {"type": "adamw", "learning_rate": 0.0}}
        first = served.post("create_model", created)
        assert served.post("create_model", created) == first
        assert served.result(first) == {"model_id": "mine", "type": "create_model"}
        other = served.model(train_unembed=False)
        data = documents()
        want = passed(served.result(served.passes(other, 1, data), accept=PROTOBUF))
        norm = served.result(served.step(other, 2, learning_rate=0.0))["metrics"]["grad_norm"]
        answer = passes(1, listed(data), num_chunks=4)
        assert answer["metrics"]["loss:sum"] == pytest.approx(want[0]["loss:sum"], rel=1e-6)
        losses = [output["loss"] for output in answer["loss_fn_outputs"]]
        assert sum(losses) == pytest.approx(want[0]["loss:sum"], rel=1e-5) and answer["info"] == {}
        step = {"model_id": "mine", "seq_id": 2, "gradient_clip": 0.0}
        answer = served.result(served.post("optim_step", step))
        count = sum(len(tokens) for tokens, _ in data)
        # The scale of adapters is 2 here and 4 there, which the gradient of B has.
        assert answer["metrics"]["grad_norm"] == pytest.approx(norm / count / 2, rel=1e-3)
        bare = {"data": listed([(data[0][0], {})]), "loss_fn": "causallm_loss"}
        bare = {"model_id": "mine", "forward_backward_input": bare}
        status, refused = served.post("forward_backward", bare)
        assert status == 400 and "has no 'target_tokens'" in refused["detail"]
        # Labels are the tokens themselves; -100 is not learned from.
        tokens = data[3][0]
        labels = np.where(np.arange(len(tokens)) < 9, -100, tokens)
        shifted = [{"model_input": {"input_ids": tokens.tolist()}, "loss_fn_inputs": {}}]
        shifted[0]["loss_fn_inputs"]["labels"] = {
            "data": labels.tolist(), "dtype": "int64", "shape": [len(tokens)],
        }  # fmt: skip
        answer = passes(3, shifted)
        [output] = answer["loss_fn_outputs"]
        assert output["logprobs"]["shape"] == [len(tokens) - 1]
        assert not any(output["elementwise_loss"]["data"][:8])
        assert output["loss"] == pytest.approx(-sum(output["logprobs"]["data"][8:]), rel=1e-5)
        aborted = served.at_once("abort_gradient_epoch", {"model_id": "mine", "seq_id": 4})
        assert aborted[1]["success"] and aborted[1]["step"] == 1
        step |= {"seq_id": 5}
        assert "there is no gradient" in served.result(served.post("optim_step", step))["error"]
        save = {"model_id": "mine", "seq_id": 6, "path": "one"}
        assert served.result(served.post("save_weights", save))["path"] == "xorl://mine/weights/one"
        [saved] = served.post("list_checkpoints", {"model_id": "mine"})[1]["checkpoints"]
        assert saved["checkpoint_id"] == "weights/one" and saved["checkpoint_type"] == "training"
        info = served.post("weights_info", {"xorl_path": saved["path"]})[1]
        assert info["lora_config"] == {"rank": 4, "alpha": 8.0}
        load = {"model_id": "mine", "seq_id": 7, "path": saved["path"], "optimizer": True}
        assert served.result(served.post("load_weights", load))["path"] == saved["path"]
        weaker = {**created, "model_id": "weaker", "lora_config": {"rank": 4, "alpha": 4}}
        served.result(served.post("create_model", weaker))
        wrong = served.result(
            served.post("load_weights", {**load, "model_id": "weaker", "seq_id": 1})
        )
        assert wrong["error"].endswith("its scale is 2.0, and that of weaker 1.0")
        served.result(served.post("unload_model", {"model_id": "weaker"}))
        removed = {"model_id": "mine", "checkpoint_id": "weights/one"}
        assert served.post("delete_checkpoint", removed)[1]["deleted_path"] == saved["path"]
        assert served.post("delete_checkpoint", removed)[0] == 404
        assert not (served.root / "models/mine/weights/one").exists()
        runs = served.get("training_runs?limit=1")[1]
        assert runs["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}
        assert served.get("session_info")[1]["active_sessions"] == ["mine", other]
        some = {**created, "model_id": "some"}
        some["lora_config"] = {"rank": 2, "target_modules": ["q_proj", "gate_up_proj"]}
        served.result(served.post("create_model", some))
        learned = set()
        for path, module in adapted(served.workers.models.engine.model):
            blocks = module.lora_A.unflatten(0, (-1, module.rank))
            assert not blocks[:, 2:].any()
            names = [name or path.rpartition(".")[2] for name in module.slices]
            learned |= {name for name, A in zip(names, blocks, strict=True) if A.any()}
        assert learned == {"q_proj", "gate_proj", "up_proj"}
        some |= {"model_id": "other", "lora_config": {"rank": 2, "target_modules": ["x"]}}
        refused = served.result(served.post("create_model", some))["error"]
        assert "x has no adapter here; accepted are down_proj, gate_proj" in refused
        served.result(served.post("unload_model", {"model_id": "some"}))
        # A model of the same name begins anew.
        served.result(served.post("create_model", created))
        assert passes(1, listed(data))["metrics"]["loss:sum"] == pytest.approx(
            want[0]["loss:sum"], rel=1e-6
        )
        killed = {"model_id": "mine", "save_checkpoint": True}
        answer = served.at_once("kill_session", killed)[1]
        assert answer["success"] and answer["checkpoint_path"].startswith("xorl://mine/weights/")
        # As a client that saw no answer sends it.
        assert served.at_once("kill_session", killed)[1] == answer
        assert served.post("optim_step", step)[0] == 404


@pytest.mark.parametrize(
    "loss, options",
    [
        ("policy_loss", {"eps_clip": 0.1, "eps_clip_high": 0.3, "compute_kl_stats": True}),
        ("policy_loss", {"eps_clip_c": 3.0, "use_tis": True, "tis_clip_high": 1.5}),
        ("drgrpo", {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.1, "kl_type": "k2"}),
        ("opd_loss", {}),
    ],
)
def test_the_json_dialects_losses_are_their_formulas(loss, options, file):
    draw = np.random.default_rng(5)

    def near(n):
        return (-draw.random(n) - 4.1).astype(np.float32)

    data = []
    for tokens, inputs in documents():
        n, own = len(tokens), {"target_tokens": inputs["target_tokens"]}
        if loss != "opd_loss":
            own |= {"logprobs": near(n), "advantages": draw.normal(size=n).astype(np.float32)}
        own |= {"rollout_logprobs": near(n)} if "use_tis" in options else {}
        own |= {"ref_logprobs": near(n)} if loss == "drgrpo" else {}
        own |= {"teacher_logprobs": near(n)} if loss == "opd_loss" else {}
        data.append((tokens, own))
    with Served(file) as served:
        model = served.model()
        own = {"data": listed(data), "loss_fn": loss, "loss_fn_params": options}
        body = {"model_id": model, "seq_id": 1, "forward_backward_input": own}
        answer = served.result(served.post("forward_backward", body))
    total = 0.0
    for output, (_, own) in zip(answer["loss_fn_outputs"], data, strict=True):
        lp = np.array(output["logprobs"]["data"])
        if loss == "opd_loss":
            each = lp - own["teacher_logprobs"]
            np.testing.assert_allclose(output["elementwise_loss"]["data"], each, rtol=1e-4)
            total += each.sum()
            continue
        a, old = own["advantages"], own["logprobs"]
        r = np.exp(lp - old)
        low, high = options.get("eps_clip", 0.2), options.get("eps_clip_high", 0.2)
        low, high = options.get("clip_low", low), options.get("clip_high", high)
        each = -np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)
        if "eps_clip_c" in options:
            each = np.where(a < 0, np.minimum(each, -3.0 * a), each)
            each = each * np.clip(np.exp(old - own["rollout_logprobs"]), 0.1, 1.5)
        if loss == "drgrpo":
            each = each + 0.1 * (lp - own["ref_logprobs"]) ** 2 / 2
        np.testing.assert_allclose(output["elementwise_loss"]["data"], each, rtol=1e-4, atol=1e-5)
        total += each.sum()
    assert answer["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-4)


def test_a_weight_of_zero_leaves_a_token_out_of_a_policys_loss(file):
    data = []
    for tokens, inputs in documents():
        own = {"target_tokens": inputs["target_tokens"]}
        own |= {"logprobs": np.full(len(tokens), -4.5, np.float32)}
        own |= {"advantages": np.ones(len(tokens), np.float32)}
        own |= {"weights": (np.arange(len(tokens)) % 2).astype(np.float32)}
        data.append((tokens, own))
    with Served(file) as served:
        model = served.model()
        metrics, fields = passed(
            served.result(served.passes(model, 1, data, "ppo"), accept=PROTOBUF)
        )
        total = 0.0
        for each, (_, own) in zip(fields["elementwise_loss"], data, strict=True):
            assert not each[own["weights"] == 0].any() and each[own["weights"] == 1].all()
            total += each.sum()
        assert metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
        wrong = [(t, {**own, "weights": own["weights"] * 0.5}) for t, own in data]
        status, answer = served.passes(model, 2, wrong, "ppo")
        assert status == 400 and "takes 0, for a token that is left out, and 1" in answer["detail"]


# ---- kills


class Killed(BaseException):
    """Stands for a kill: nothing of the process stays."""


@pytest.mark.parametrize("when", ["before", "applied", "committed"])
@pytest.mark.parametrize("kind", ["forward_backward", "optim_step", "save_weights"])
def test_a_server_that_is_killed_loses_nothing(kind, when, model_folder, tmp_path, monkeypatch):
    """Between a request's commit and its result's, at any place: the results are those of a server
    that was not disturbed.
    """

    def calls(served, model, step):
        seq = 1 + 3 * step
        save = {"model_id": model, "seq_id": seq + 2, "path": f"step{step}"}
        return [
            served.passes(model, seq, documents(step)),
            served.step(model, seq + 1),
            served.post("save_weights", save),
        ]

    def results(served, futures):
        return [json.dumps(served.result(future)) for future in futures]

    files = [
        write_server(tmp_path / name, model_folder, checkpoint_every=2)
        for name in ("straight", "killed")
    ]
    with Served(files[0]) as served:
        other = served.model()
        wanted = [r for step in range(3) for r in results(served, calls(served, other, step))]
    with Served(files[1]) as served:
        model = served.model()
        found = results(served, calls(served, model, 0))
        futures = calls(served, model, 1)
        _kill(monkeypatch, served, kind, when)
        with pytest.raises(Killed):
            served.answer()
    monkeypatch.undo()
    with Served(files[1]) as served:
        found += results(served, futures) + results(served, calls(served, model, 2))
        saved = served.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
        assert [one["checkpoint_id"] for one in saved] == [f"weights/step{i}" for i in range(3)]
    assert [one.replace(model, other) for one in found] == wanted


def test_a_kill_before_an_adapters_export_leaves_none_out(file, monkeypatch):
    with Served(file) as served:
        model = served.model()
        trained(served, model, 1)
        future = served.post("save_weights_for_sampler", {"model_id": model, "path": "last"})

        def killed(*_, **__):
            raise Killed

        monkeypatch.setattr(served.workers.models.engine, "export", killed)
        with pytest.raises(Killed):
            served.answer()
    with Served(file) as served:
        assert served.result(future)["path"].endswith("/sampler_weights/last")
        folder = served.root / f"models/{model}/sampler_weights/last"
        assert {f.name for f in (folder / "adapter").iterdir()} >= {"adapter_model.safetensors"}


def test_a_model_outlives_the_checkpoint_that_it_began_with(file, monkeypatch):
    """It is deleted, in two halves, before the model has one of its own; and a kill."""
    with Served(file) as served:
        first = served.model()
        trained(served, first, 1)
        path = served.result(served.post("save_weights", {"model_id": first, "path": "x"}))["path"]
        body = {"session_id": "b", "model_seq_id": 0, "path": path, "optimizer": True}
        served.result(served.post("load_weights", body))
        served.result(served.passes("b:train:0", 1, documents()))

        def killed(path):
            raise Killed

        monkeypatch.setattr(served.log, "drop", killed)
        removed = {"model_id": first, "checkpoint_id": "weights/x"}
        with pytest.raises(Killed):
            served.post("delete_checkpoint", removed)
    with Served(file) as served:
        assert served.post("delete_checkpoint", removed)[0] == 200
        assert served.post("delete_checkpoint", removed)[0] == 404
        assert "metrics" in served.result(served.step("b:train:0", 2))
        # A name that was deleted is free.
        save = {"model_id": first, "path": "x"}
        assert served.result(served.post("save_weights", save))["path"] == path


def test_a_model_whose_checkpoint_is_damaged_is_failed_alone(model_folder, tmp_path):
    file = write_server(tmp_path, model_folder, checkpoint_every=1)
    with Served(file) as served:
        model, other = served.model(), served.model()
        for name in (model, other):
            trained(served, name, 1)
        [part] = (served.root / f"models/{model}/state").glob("*/dcp/*.distcp")
        part.write_bytes(part.read_bytes()[:-9])
    with Served(file) as served:
        status, answer = served.passes(model, 4, documents())
        assert status == 400 and "its last checkpoint cannot be read" in answer["detail"]
        assert "metrics" in served.result(served.passes(other, 4, documents()))


def _kill(monkeypatch, served, kind, when):
    """Ends the workers at one place of a request of this kind."""
    models, log = served.workers.models, served.log
    run, finish = models.run, log.finish

    def dying(own, *rest):
        if own == kind and when == "before":
            raise Killed
        done = run(own, *rest)
        if own == kind and when == "applied":
            raise Killed
        return done

    def finishing(request, *rest, **options):
        finish(request, *rest, **options)
        if request.kind == kind and when == "committed":
            raise Killed

    monkeypatch.setattr(models, "run", dying)
    monkeypatch.setattr(log, "finish", finishing)


def test_a_model_whose_results_have_other_bits_again_is_failed_alone(file):
    """Both results are kept, and the other models go on."""
    with Served(file) as served:
        model, other = served.model(), served.model()
        for name in (model, other):
            trained(served, name, 1)
        log = served.log
        [(request, result)] = [one for one in log.ran(model, 0) if one[0].kind == "optim_step"]
        value, arrays = unpacked(result.body)
        value["metrics"]["grad_norm"] += 1e-7
        log.finish(request, result._replace(body=packed(value, arrays)), ran=False)
        with sqlite3.connect(log.file) as db:
            db.execute(
                "UPDATE requests SET ran = ? WHERE number = ?", (request.ran, request.number)
            )
    with Served(file) as served:
        status, answer = served.passes(model, 4, documents())
        assert (
            status == 400 and "has other bits than the result that was stored" in answer["detail"]
        )
        kept = [*served.root.glob(f"models/{model}/state/differs_*/*.safetensors")]
        assert sorted(f.name for f in kept) == ["again.safetensors", "before.safetensors"]
        assert "metrics" in served.result(served.passes(other, 4, documents()))


def test_a_request_that_ends_the_workers_again_and_again_fails_its_model(file, monkeypatch):
    with Served(file) as served:
        model, other = served.model(), served.model()
        future = served.passes(model, 1, documents())
        run = served.workers.models.run

        def crashing(kind, name, *rest):
            if name == model:
                raise RuntimeError("out of memory")
            return run(kind, name, *rest)

        monkeypatch.setattr(served.workers.models, "run", crashing)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                served.answer()
        answer = served.result(future)
        assert answer["category"] == "server" and "ended the workers 2 times" in answer["error"]
        assert served.step(model, 2)[0] == 400
        assert "metrics" in served.result(served.passes(other, 1, documents()))


def test_a_server_by_its_defaults_goes_on_after_a_kill(model_folder, tmp_path):
    """With FSDP2, autocast and checkpointing of activations: bit for bit as one that was neither
    killed nor asked for samples, and within bfloat16's rounding of float32.
    """
    prompt = [(np.array(PROMPT[:-1]), {"target_tokens": np.array(PROMPT[1:])})]

    def forward(served, model, seq):
        body = pass_body(model, seq, prompt, forward=True)
        return served.result(served.post("forward", raw=body), accept=PROTOBUF)

    def step(served, model):
        return json.dumps(served.result(served.step(model, 10)))

    def logprobs(data):
        return passed(data)[1]["logprobs"][0]

    files = [
        write_server(tmp_path / name, model_folder, checkpoint_every=2, **plain)
        for name, plain in (("float32", {}), ("straight", {"plain": {}}), ("killed", {"plain": {}}))
    ]
    found = []
    for file in files[:2]:
        with Served(file) as served:
            model = served.model()
            own = [*trained(served, model, 2), forward(served, model, 7)]
            own += [served.result(served.passes(model, 8 + i, documents(i))) for i in range(2)]
            found.append([*own, step(served, model), forward(served, model, 11)])
    with Served(files[2]) as served:
        model = served.model()
        again = [*trained(served, model, 2), forward(served, model, 7)]
        futures = [served.passes(model, 8 + i, documents(i)) for i in range(2)]
        save = {"model_id": model, "sampling_session_seq_id": 0}
        sampler = served.result(served.post("save_weights_for_sampler", save))
        sampler = sampler["sampling_session_id"]
    with Served(files[2]) as served:
        again += [served.result(future) for future in futures]
        sampled = scores(served, sampler)["prompt_logprobs"]
        np.testing.assert_allclose(sampled[1:], logprobs(again[6]), atol=2e-2)
        again.append(step(served, model))
        assert scores(served, sampler, 1)["prompt_logprobs"] == sampled
        assert [*again, forward(served, model, 11)] == found[1]
    assert not np.allclose(logprobs(found[1][-1]), logprobs(found[1][6]), atol=5e-2)
    first = [logprobs(own[0]) for own in found]
    assert not np.array_equal(*first)
    np.testing.assert_allclose(*first, atol=2e-2)


# ---- what is refused


def sparse(model, shape):
    """A pass whose targets are a sparse matrix."""
    targets = {"data": [1], "dtype": "int64", "shape": shape, "sparse_col_indices": [0]}
    targets["sparse_crow_indices"] = [0, 1, 1, 1, 1, 1]
    datum = {"model_input": {"input_ids": [1] * 5}, "loss_fn_inputs": {"target_tokens": targets}}
    own = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": 1, "forward_backward_input": own}


def refusals(model):
    """A raw body, or JSON, by name -> (path, body, status, what the sentence says)."""
    tokens, inputs = documents()[0]

    def data(**changes):
        return [(tokens, {**inputs, **changes})]

    def one(each, loss="cross_entropy", seq=1, **config):
        return pass_body(model, seq, each, loss, **config)

    adam = {"model_id": model, "seq_id": 1}
    created = {"session_id": "s", "model_seq_id": 0, "base_model": "/other"}
    return {
        "no protobuf": ("forward_backward", b"\xff\xff", 422, "no ForwardBackwardRequest"),
        "no document": ("forward_backward", one([]), 422, "there is no datum"),
        "no token": (
            "forward_backward",
            one([(tokens[:0], {n: a[:0] for n, a in inputs.items()})]),
            400,
            "datum 0: model_input has no tokens",
        ),
        "too long": (
            "forward_backward",
            one(documents(lengths=(4, LONGEST + 1))),
            400,
            f"datum 1: model_input is longer than the {LONGEST} tokens",
        ),
        "no such token": (
            "forward_backward",
            one([(tokens + 97, inputs)]),
            400,
            "datum 0, token 0: model_input is",
        ),
        "no such target": (
            "forward_backward",
            one(data(target_tokens=np.full(5, -1))),
            400,
            "target_tokens is -1; accepted are tokens from 0 to 96",
        ),
        "NaN": (
            "forward_backward",
            one(data(weights=np.full(5, np.nan, np.float32))),
            400,
            "datum 0, token 0: weights is nan",
        ),
        "unlike lengths": (
            "forward_backward",
            one(data(weights=np.ones(4, np.float32))),
            422,
            "datum 0: weights has the shape [4], and model_input 5 tokens",
        ),
        "unlike inputs": (
            "forward_backward",
            one([*data(), (tokens, {"target_tokens": inputs["target_tokens"]})]),
            422,
            "datum 1: loss_fn_inputs has target_tokens",
        ),
        "missing input": ("forward_backward", one(data(), "ppo"), 400, "no 'logprobs'"),
        "unread input": (
            "forward_backward",
            one(data(mask=np.ones(5, np.float32))),
            400,
            "'mask'; cross_entropy reads target_tokens, weights",
        ),
        "loss": ("forward_backward", one(data(), "custom"), 400, "loss_fn is 'custom'; accepted"),
        "option": (
            "forward_backward",
            one(data(), clip=1.0),
            400,
            "loss_fn_config has 'clip'; cross_entropy takes none",
        ),
        "number": ("forward_backward", one(data(), seq=0), 422, "seq_id is 0"),
        "no JSON": ("optim_step", b"{", 422, "no JSON"),
        "infinity": ("optim_step", b'{"seq_id": Infinity}', 422, "the body holds Infinity"),
        "too large": ("optim_step", b'{"seq_id": 1e999}', 422, "the body holds 1e999"),
        "surrogate": ("optim_step", b'{"model_id": "\\ud800"}', 422, "without its other half"),
        "long number": ("optim_step", {**adam, "seq_id": 10**30}, 422, "seq_id: "),
        "far": (
            "optim_step",
            {**adam, "seq_id": 1 << 30, "adam_params": {}},
            422,
            "; the next of ",
        ),
        "no eps": ("optim_step", {**adam, "adam_params": {"eps": 0.0}}, 422, "adam_params.eps"),
        "two rates": (
            "optim_step",
            {**adam, "adam_params": {"learning_rate": 0.1}, "learning_rate": 0.2},
            422,
            "learning_rate is 0.2, and that of adam_params 0.1",
        ),
        "setting": ("optim_step", {**adam, "optimizer_params": {"muon": 1}}, 422, "params.muon"),
        "alpha": (
            "create_model",
            {**created, "base_model": "BASE", "lora_config": {"rank": 4, "alpha": 8.0}},
            400,
            "lora_config.alpha is 8.0",
        ),
        "large alpha": (
            "create_model",
            {"base_model": "BASE", "lora_config": {"rank": 4, "alpha": 1e308}},
            422,
            "lora_config.alpha",
        ),
        "shape": (
            "forward_backward",
            sparse(model, ["a", 2]),
            422,
            "its shape is ['a', 2]",
        ),
        "large": ("forward_backward", sparse(model, [5, 1 << 21]), 422, "too large for its bytes"),
        "deep": ("optim_step", b"[" * 100_000, 422, "nested too deeply"),
        "list": ("optim_step", [], 422, "must be an object"),
        "no settings": ("optim_step", adam, 422, "adam_params: it is missing"),
        "negative": (
            "optim_step",
            {**adam, "adam_params": {"learning_rate": -1.0}},
            422,
            "adam_params.learning_rate",
        ),
        "optimizer": (
            "optim_step",
            {**adam, "optimizer_params": {"type": "dimuon"}},
            400,
            "'dimuon'; accepted is 'adamw'",
        ),
        "base": ("create_model", created, 400, "base_model is '/other'; this server has"),
        "rank": (
            "create_model",
            {**created, "base_model": "BASE", "lora_config": {"rank": 9}},
            400,
            "lora_config.rank is 9; accepted are 1 to 8",
        ),
        "session": (
            "create_model",
            {**created, "base_model": "BASE", "session_id": "../a"},
            400,
            "session_id is '../a:train:0'",
        ),
        "name": ("save_weights", {**adam, "path": "../../x"}, 400, "path is '../../x'; accepted"),
        "path": (
            "load_weights",
            {**adam, "path": "/etc/passwd", "optimizer": True},
            400,
            "accepted is tinker://MODEL/weights/NAME",
        ),
        "unknown path": (
            "load_weights",
            {**adam, "path": f"tinker://{model}/weights/none", "optimizer": True},
            404,
            "there is no checkpoint",
        ),
        "model": ("optim_step", {"model_id": "none", "adam_params": {}}, 404, "no model none"),
        "future": ("retrieve_future", {"request_id": "none"}, 404, "no request 'none'"),
        "feature": ("create_custom_loss", {}, 501, "losses of clients are code"),
        "sampler": ("asample", {"sampling_session_id": "none"}, 404, "no sampler none"),
    }


def test_what_cannot_be_done_is_refused_with_a_sentence(file):
    with Served(file) as served:
        for i, name in enumerate(refusals("m")):
            model = served.model()
            path, body, status, said = refusals(model)[name]
            if isinstance(body, dict) and body.get("base_model") == "BASE":
                body = {**body, "base_model": served.base}
            given = {"raw": body} if isinstance(body, bytes) else {"body": body}
            if isinstance(body, bytes) and path != "forward_backward":
                given |= {"content-type": "application/json"}
            found, answer = served.post(path, **given)
            assert (found, said in answer["detail"]) == (status, True), (name, i, found, answer)


def test_without_the_key_nothing_but_health_is_told(file):
    with Served(file) as served:
        for given in ({}, {"x-api-key": KEY + "x"}, {"authorization": f"Basic {KEY}"}):
            response = served.client.post("/api/v1/create_session", content=b"{}", headers=given)
            assert response.status_code == 401 and "Bearer KEY" in response.json()["detail"]
        own = {"authorization": f"Bearer {KEY}"}
        response = served.client.post("/api/v1/create_session", content=b"{}", headers=own)
        assert response.status_code == 200
        assert served.client.get("/api/v1/healthz").json() == {"status": "ok"}
        assert served.client.get("/health").json()["engine_running"]


def test_bodies_are_bounded(model_folder, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    with Served(write_server(tmp_path, model_folder, max_body_mb=0.1, max_pending=2)) as served:
        model = served.model()
        body = pass_body(model, 1, documents())
        small = zstandard.ZstdCompressor().compress(body)
        encoded = {"content-encoding": "zstd"}
        assert served.post("forward_backward", raw=small, **encoded)[0] == 200
        # All of it, in frames that follow each other.
        one = zstandard.ZstdCompressor().compress
        again = one(body[:50]) + one(body[50:])
        assert served.post("forward_backward", raw=again, **encoded)[0] == 200
        for raw, said in ((small[:-3], "its end is missing"), (small + b"x", "no zstd")):
            status, answer = served.post("forward_backward", raw=raw, **encoded)
            assert status == 422 and said in answer["detail"]
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
        for raw, more in ((bytes(200_000), {}), (bomb, encoded)):
            status, answer = served.post("forward_backward", raw=raw, **more)
            assert status == 413 and "larger than 0.1 MB" in answer["detail"]
        status, answer = served.post("forward_backward", raw=b"", **{"content-encoding": "br"})
        assert status == 415 and "accepted is 'zstd'" in answer["detail"]
        assert served.step(model, 2)[0] == 200
        status, answer = served.step(model, 3)
        assert status == 429 and "2 requests wait" in answer["detail"]


def test_300_malformed_requests_change_nothing(file, model_folder, tmp_path):
    """Bodies that are cut, and whose bytes are changed: each is answered, below 500, and a model's
    next steps have the bits of a server that never saw them.
    """
    with Served(write_server(tmp_path / "quiet", model_folder)) as served:
        wanted = trained(served, served.model(), 1)
    draw = np.random.default_rng(0)
    with Served(file) as served:
        model, victim = served.model(), served.model()
        whole = {
            "forward_backward": pass_body(victim, 1, documents()),
            "optim_step": json.dumps(
                {"model_id": victim, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
            ).encode(),
            "create_model": json.dumps(
                {"session_id": "s", "model_seq_id": 0, "base_model": served.base}
            ).encode(),
            "save_weights": json.dumps({"model_id": victim, "seq_id": 3, "path": "x"}).encode(),
        }
        seen = set()
        for i in range(300):
            path = [*whole][i % len(whole)]
            body = bytearray(whole[path])
            if draw.random() < 0.3:
                body = body[: draw.integers(len(body))]
            for at in draw.integers(max(1, len(body)), size=draw.integers(1, 6)):
                body[at % max(1, len(body)) : at + 1] = bytes([draw.integers(256)])
            kind = {} if path == "forward_backward" else {"content-type": "application/json"}
            status, _ = served.post(path, raw=bytes(body), **kind)
            assert status < 500
            seen.add(status)
        assert {200, 422} <= seen
        served.answer()
        assert trained(served, model, 1) == wanted


def test_old_results_and_the_bodies_of_what_is_saved_go(model_folder, tmp_path):
    """What a model is computed again from stays until a checkpoint has it."""
    with Served(write_server(tmp_path, model_folder, checkpoint_every=1)) as served:
        model, log = served.model(), served.log
        future = served.passes(model, 1, documents())
        served.result(future)
        log.forget(after_sent=0.0, after=0.0)
        assert served.result(future)["metrics"], "it is not in a checkpoint"
        served.result(served.step(model, 2))
        log.forget(after_sent=0.0, after=0.0)
        status, answer = served.post("retrieve_future", {"request_id": future[1]["request_id"]})
        assert status == 410 and "no longer kept" in answer["detail"]
        with sqlite3.connect(log.file) as db:
            [(bodies,)] = db.execute("SELECT count(*) FROM requests WHERE body IS NOT NULL")
        assert bodies == 0
    with Served(tmp_path / "server.yaml") as served:
        assert served.result(served.passes(model, 3, documents()))["metrics"]
