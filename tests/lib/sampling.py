"""Samples of a server in the tests' process: requests for them, and engines that do them."""

import asyncio
import concurrent.futures
import contextlib
import json
import subprocess
import sys

import httpx
import numpy as np
from helpers import until
from serving import PROTOBUF, documents, pass_body, passed

from tilewright.server import inference
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
        request = served.workers.next()
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


class Through(httpx.AsyncBaseTransport):
    """An application whose requests and answers a function may change.

    change: of (path, body) to another one, to an answer's JSON as {"answer": ...}, or to None.
    """

    def __init__(self, app, change=lambda path, body: None):
        self.inner, self.change, self.calls = httpx.ASGITransport(app), change, []

    async def handle_async_request(self, request):
        path, body = request.url.path, json.loads(request.content or b"null")
        self.calls.append(path)
        told = self.change(path, body)
        if told is not None and "answer" in told:
            return httpx.Response(200, json=told["answer"])
        url = str(request.url)
        content = json.dumps(body if told is None else told).encode()
        given = httpx.Request(method=request.method, url=url, content=content, headers=JSON)
        if request.method == "GET":
            given = request
        return await self.inner.handle_async_request(given)


JSON = {"content-type": "application/json"}


def bare(served, path, body=None):
    """(status, JSON) of a route without the prefix, while the workers answer."""
    headers = {"x-api-key": served.key}

    def call():
        if body is None:
            return served.client.get(path, headers=headers)
        return served.client.post(path, json=body, headers=headers)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call)
        until(lambda: (served.answer(), answer.done())[1])
        return answer.result().status_code, answer.result().json()


def step(served, model, number, seed):
    """A pass and a step at a rate of 1e-4, the first of number 0."""
    served.result(served.passes(model, 2 * number + 1, documents(seed)))
    served.result(served.step(model, 2 * number + 2, learning_rate=1e-4))


def added(served, sampler, monkeypatch, change=lambda path, body: None):
    """The transport of an engine that is added."""
    transport = Through(sampler, change)
    monkeypatch.setattr(inference, "client_of", lambda url: client_of(transport, url))
    told = bare(served, "/add_inference_endpoint", {"host": "127.0.0.1", "port": 1})
    assert told[0] == 200, told
    transport.calls.clear()
    return transport


class Anew(httpx.AsyncBaseTransport):
    """A connection for each request: the loop of events is another one, too."""

    async def handle_async_request(self, request):
        async with httpx.AsyncHTTPTransport() as inner:
            answer = await inner.handle_async_request(request)
            return httpx.Response(answer.status_code, content=await answer.aread())


@contextlib.contextmanager
def sampler_process(folder):
    """The address of a sampler of a model in a process of its own, which is killed at the end."""
    command = [sys.executable, "-m", "tilewright.sampler", "--model", str(folder)]
    command += ["--port", "0", "--dtype", "float32", "--cache-tokens", "256"]
    # Its folder has no modules that would be imported in the place of others.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
