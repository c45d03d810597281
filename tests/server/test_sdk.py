"""A published client, Tinker's SDK, on a small model."""

import concurrent.futures
import math

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
tinker = pytest.importorskip("tinker")

from serving import (  # noqa: E402
    KEY,
    Served,
    documents,
    listening,
    write_model,
    write_server,
)

pytestmark = pytest.mark.packages
ADAM = tinker.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdk")
    file = write_server(folder, write_model(folder / "model"))
    with pytest.MonkeyPatch.context() as patch, Served(file) as served, listening(served) as url:
        patch.setenv("TINKER_TELEMETRY", "0")
        served.log._db.execute("PRAGMA synchronous = OFF")
        yield served, url


@pytest.fixture
def services(served):
    """Makes clients, which hear no more of the server once it has gone."""
    made = []

    def make():
        made.append(tinker.ServiceClient(base_url=served[1], api_key=KEY))
        return made[-1]

    yield make
    for one in made:
        one.holder.close()


@pytest.fixture
def service(services):
    return services()


def datums(seed=0):
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()
            },
        )
        for tokens, inputs in documents(seed)
    ]


def learned(client, steps, first=0):
    """The losses of so many steps of two passes, which are all sent before the first is done."""
    losses = []
    for step in range(first, first + steps):
        passes = [client.forward_backward(datums(2 * step + i), "cross_entropy") for i in range(2)]
        stepped = client.optim_step(ADAM)
        losses += [one.result().metrics["loss:sum"] for one in passes]
        stepped.result()
    return losses


def client_of(service, base, seed=3):
    return service.create_lora_training_client(base_model=base, rank=4, seed=seed)


def test_a_client_trains_saves_goes_on_and_scores(served, service):
    own, _ = served
    assert own.base in [m.model_name for m in service.get_server_capabilities().supported_models]
    client = client_of(service, own.base)
    losses = learned(client, 1) + learned(client, 1) + learned(client, 1)
    assert losses[4] < losses[2] < losses[0] and losses[5] < losses[1]
    outputs = client.forward(datums(), "cross_entropy").result().loss_fn_outputs
    logprobs = [output["logprobs"].to_numpy() for output in outputs]
    assert [len(one) for one in logprobs] == [len(tokens) for tokens, _ in documents()]
    saved = client.save_state("third").result().path
    wanted = learned(client, 1, first=3)
    again = service.create_training_client_from_state_with_optimizer(saved)
    assert learned(again, 1, first=3) == wanted
    # A sampler has the weights of the time, and its log-probabilities are those of the forward.
    tokens = documents()[3][0]
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(tokens[1:])},
        )
    ]
    [output] = client.forward(data, "cross_entropy").result().loss_fn_outputs
    sampler = client.save_weights_and_get_sampling_client("now")
    learned(client, 1, first=4)
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens.tolist())).result()
    assert found[0] is None
    np.testing.assert_allclose(found[1:], output["logprobs"].to_numpy(), rtol=1e-4, atol=1e-5)
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert "weights/third" in [one.checkpoint_id for one in listed]
    run = rest.get_training_run(client.model_id).result()
    assert run.last_checkpoint.tinker_path == saved and not run.corrupted
    rest.set_checkpoint_ttl_from_tinker_path(saved, 3600).result()
    [kept] = [
        one for one in rest.list_user_checkpoints().result().checkpoints if one.tinker_path == saved
    ]
    assert kept.expires_at is not None
    rest.delete_checkpoint_from_tinker_path(saved).result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(saved).result()


def test_two_clients_at_once_get_what_each_gets_alone(served, services):
    own, service = served[0], services()
    alone = [learned(client_of(service, own.base, seed), 3) for seed in (1, 2)]
    assert alone[0] != alone[1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        clients = [client_of(services(), own.base, seed) for seed in (1, 2)]
        assert [*pool.map(lambda client: learned(client, 3), clients)] == alone


def test_a_client_compares_two_answers_with_the_reference(served, service):
    """DPO by two forward passes and importance-weighted sums, as clients compute it themselves."""
    own, _ = served
    client = client_of(service, own.base)
    reference = service.create_sampling_client(base_model=own.base)
    pair = documents()[2:4]
    texts = [tokens for tokens, _ in pair]
    known = [
        np.array(
            reference.compute_logprobs(tinker.ModelInput.from_ints(t.tolist())).result()[1:],
            dtype=np.float32,
        )
        for t in texts
    ]
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(t[:-1].tolist()),
            loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(t[1:])},
        )
        for t in texts
    ]

    def dpo(data, logprobs):
        margin = sum(
            sign * (lp.flatten() - torch.tensor(ref)).sum()
            for sign, lp, ref in zip((1, -1), logprobs, known, strict=True)
        )
        loss = -torch.nn.functional.logsigmoid(0.1 * margin)
        return loss, {"dpo": loss.item()}

    found = []
    for _ in range(3):
        found.append(client.forward_backward_custom(data, dpo).result().metrics["dpo"])
        client.optim_step(ADAM).result()
    assert found[0] == pytest.approx(math.log(2), abs=1e-5) and found[2] < found[0]


def test_a_client_is_told_what_is_wrong(served, service):
    own, _ = served
    client = client_of(service, own.base)
    wrong = [tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 200]), loss_fn_inputs={})]
    with pytest.raises(tinker.BadRequestError, match="datum 0, token 1: model_input is 200"):
        client.forward_backward(wrong, "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="rank is 100; accepted are 1 to 8"):
        service.create_lora_training_client(base_model=own.base, rank=100).get_info()
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        client.optim_step(ADAM).result()
    learned(client, 1)  # refused requests have used up their numbers
