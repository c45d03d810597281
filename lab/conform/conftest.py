"""Options and fixtures."""

from __future__ import annotations

import itertools
import os
import pathlib

import numpy as np
import pytest

from conform import reference as tolerances
from conform.client import Model, Server
from conform.reference import Reference

LENGTHS = 5, 20, 9, 33  # of documents: the longest is neither first nor alone


def pytest_addoption(parser):
    group = parser.getgroup("conform", "the server that is held")
    env = os.environ.get
    group.addoption("--url", default=env("TINKER_BASE_URL"), help="its address, without /api/v1")
    group.addoption("--key", default=env("TINKER_API_KEY"), help="the key that it takes")
    group.addoption("--model", help="a folder with the weights of its base model")
    group.addoption("--base-model", help="what it calls this model; default: the folder's path")
    group.addoption("--dtype", choices=("float32", "bfloat16"), default="float32")
    group.addoption("--rank", type=int, default=4, help="of adapters")
    group.addoption("--max-body-mb", type=float, help="its limit of a request's size")
    group.addoption("--patience", type=float, default=600.0, help="seconds for one request")


@pytest.fixture(scope="session")
def server(pytestconfig):
    given = pytestconfig.getoption
    for name in ("url", "key", "model"):
        if not given(name):
            pytest.exit(f"--{name} is missing: see lab/conform/README.md", returncode=4)
    base = given("base_model") or given("model")
    return Server(given("url"), given("key"), base, given("patience"))


@pytest.fixture(scope="session")
def reference(pytestconfig, server):
    return Reference(pathlib.Path(pytestconfig.getoption("model")))


@pytest.fixture(scope="session")
def logprob_tolerance(pytestconfig):
    return tolerances.LOGPROB[pytestconfig.getoption("dtype")]


@pytest.fixture(scope="session")
def norm_tolerance(pytestconfig):
    return tolerances.NORM[pytestconfig.getoption("dtype")]


@pytest.fixture(scope="session")
def rest_tolerance(pytestconfig):
    return tolerances.REST[pytestconfig.getoption("dtype")]


@pytest.fixture(scope="session")
def session(server):
    answer = server.send("create_session", {"tags": [], "sdk_version": "0.0.0"})
    assert answer.status == 200, answer
    return answer.body["session_id"]


@pytest.fixture(scope="session")
def count():
    """Numbers that no other model or sampler of the session has."""
    return itertools.count()


@pytest.fixture(scope="session")
def creation(server, session, count, pytestconfig):
    """The body that creates another model; changes of its adapters as keywords."""

    def body(seed=7, **lora):
        own = {"rank": pytestconfig.getoption("rank"), "seed": seed, **lora}
        known = {"session_id": session, "model_seq_id": next(count)}
        return {**known, "base_model": server.base, "lora_config": own}

    return body


@pytest.fixture
def new_model(server, session, creation):
    """Creates models, which are unloaded behind the test."""
    made = []

    def create(seed=7, **lora):
        server.send("session_heartbeat", {"session_id": session})
        body = creation(seed, **lora)
        name = f"{session}:train:{body['model_seq_id']}"
        result = server.result(server.send("create_model", body))
        assert result["model_id"] == name, result
        made.append(Model(server, name))
        return made[-1]

    yield create
    for model in made:
        server.send("unload_model", {"model_id": model.name})


@pytest.fixture
def model(new_model):
    return new_model()


@pytest.fixture(scope="session")
def documents(reference):
    """Documents with a target and a positive weight for each token."""

    def draw(seed=0, lengths=LENGTHS):
        own = np.random.default_rng(seed)
        return [
            (
                own.integers(0, reference.vocabulary, n),
                {
                    "target_tokens": own.integers(0, reference.vocabulary, n),
                    # Numbers that bfloat16 has too.
                    "weights": own.integers(1, 9, n).astype(np.float32) / 8,
                },
            )
            for n in lengths
        ]

    return draw
