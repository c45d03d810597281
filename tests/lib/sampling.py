"""Samples of a server in the tests' process: requests for them, and engines that do them."""

import asyncio

import httpx
import numpy as np
from serving import PROTOBUF, pass_body, passed

from tilewright.server.engines import Embedded
from tilewright.server.rollouts import Rollouts

PROMPT = [1, 2, 3, 4, 5]


def client_of(app, url="http://sampler"):
    """A client of an application or a transport."""
    transport = app if isinstance(app, httpx.AsyncBaseTransport) else httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url=url, timeout=None)


def generate(served, app, logprobs="trainer", *, scored=True):
    """Does what waits for the embedded sampler, an application or a transport, and for the workers.

    scored: False: but for scoring it.
    """

    async def all_of_it():
        async with client_of(app) as client:
            endpoint = served.api.endpoint(Embedded(client))
            rollouts = Rollouts(served.log, logprobs, managed=endpoint)
            await answering(served, rollouts.all(), scored=scored)

    asyncio.run(all_of_it())


async def answering(served, doing, *, scored=True):
    """What a coroutine returns, while the workers do what waits for them."""
    doing = asyncio.ensure_future(doing)
    while not doing.done():
        request = served.log.next()
        if request is not None and (scored or request.model == "probe"):
            served.workers.answer(request)
        await asyncio.wait([doing], timeout=0.001)
    return await doing


def ask(served, name, seq=0, prompt=PROMPT, params=None, **more):
    params = {"max_tokens": 8, **(params or {})}
    chunks = [{"type": "encoded_text", "tokens": prompt}]
    body = {"sampling_session_id": name, "seq_id": seq, "prompt": {"chunks": chunks}}
    return served.post("asample", {**body, "sampling_params": params, **more})


def saved(served, model, number=0):
    """The name of a sampler with a model's weights."""
    save = {"model_id": model, "sampling_session_seq_id": number}
    answer = served.result(served.post("save_weights_for_sampler", save))
    assert "sampling_session_id" in answer, answer
    return answer["sampling_session_id"]


def base(served, session, number=9):
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": served.base}
    return served.post("create_sampling_session", body)[1]["sampling_session_id"]


def forward(served, model, seq, tokens):
    """Log-probabilities of tokens by a forward pass of training."""
    data = [(np.array(tokens[:-1]), {"target_tokens": np.array(tokens[1:])})]
    future = served.post("forward", raw=pass_body(model, seq, data, forward=True))
    return passed(served.result(future, accept=PROTOBUF))[1]["logprobs"][0]


class Gone(httpx.AsyncBaseTransport):
    """An engine that does not answer."""

    async def handle_async_request(self, request):
        raise httpx.ConnectError("no")
