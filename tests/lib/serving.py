"""A server in the tests' process: what clients send, and workers that answer when they are told to.

`Served` has the API's application, called as an ASGI server would, and the workers on one process;
nothing listens, and nothing waits. Within `listening` it does, for clients that have sockets.
"""

import concurrent.futures
import contextlib
import itertools
import json
import pathlib
import socket
import threading

import httpx
import numpy as np
import torch
import torch.distributed as dist
import uvicorn
import yaml
from helpers import until
from starlette.testclient import TestClient
from training import QWEN3

from tilewright.server import messages_pb2 as wire
from tilewright.server.api import api_of, application
from tilewright.server.engines import Embedded
from tilewright.server.fields import load
from tilewright.server.keys import Keys
from tilewright.server.log import Log
from tilewright.server.worker import Workers, models_of
from tilewright.trainer.parallel.mesh import join

KEY, PROTOBUF = "tml-test", "application/x-protobuf"
LONGEST = 64


def write_model(folder, shape=QWEN3):
    """A folder of weights as transformers writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**shape)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


PLAIN = {
    "enable_mixed_precision": False,
    "enable_gradient_checkpointing": False,
    "data_parallel_mode": "none",
    "skip_initial_checkpoint": True,
}


def write_server(folder, model, plain=PLAIN, **changes):
    """plain: {} for the defaults of the server.   changes: None for what is not to be there."""
    given = {
        "model_path": str(model),
        "output_dir": str(folder / "out"),
        "lora_rank": 8,
        "sample_packing_sequence_len": LONGEST,
        "pad_to_multiple_of": 8,
        "api_port": 0,
        **plain,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in given.items() if value is not None}
    (folder / "server.yaml").write_text(yaml.safe_dump(given))
    return folder / "server.yaml"


class Served:
    """A server whose workers have one process. It can be killed, and started again.

    Within `with`. answer: does the requests that may run.   exact: of `Workers`.
    """

    def __init__(self, file, *, key=KEY, exact=True):
        self.file, self.key, self.exact = file, key, exact

    def __enter__(self):
        self.server, self.config = load(str(self.file), [])
        self.root = pathlib.Path(self.config.train.output_dir)
        self.root.mkdir(parents=True, exist_ok=True)
        self.mesh = join(self.config.train)
        self.log = Log(self.root, self.server.log_max_gb)
        self.workers = Workers(
            models_of(self.server, self.config, self.mesh),
            self.server,
            self.log,
            exact=self.exact,
        )
        self.workers.recover()
        self.log.tell("workers", "ready")
        file = self.server.api_token_file
        keys = Keys.of(self.key) if file is None else Keys.read(pathlib.Path(file))
        self.api = api_of(self.server, self.config, self.log, keys)
        self.base = self.api.base.names[0]
        if self.server.sampler == "embedded":
            engine = Embedded(httpx.AsyncClient(base_url="http://sampler"))
            self.api.rollouts.managed = self.api.endpoint(engine)
        self.client = TestClient(application(self.api), raise_server_exceptions=True)
        return self

    def __exit__(self, *_):
        self.log.close()
        dist.destroy_process_group()

    def answer(self):
        while (request := self.workers.next()) is not None:
            self.workers.answer(request)

    def post(self, path, body=None, *, raw=None, **headers):
        """(status, JSON or bytes)."""
        content = raw if raw is not None else json.dumps(body).encode()
        kind = PROTOBUF if raw is not None else "application/json"
        given = {"content-type": kind, "x-api-key": self.key, **headers}
        return _told(self.client.post(f"/api/v1/{path}", content=content, headers=given))

    def get(self, path):
        return _told(self.client.get(f"/api/v1/{path}", headers={"x-api-key": self.key}))

    def result(self, future, **headers):
        """What a request that was accepted has come to."""
        status, answer = future
        assert status == 200, answer
        self.answer()
        status, answer = self.post(
            "retrieve_future", {"request_id": answer["request_id"]}, **headers
        )
        assert status == 200, answer
        return answer

    def at_once(self, path, body):
        """As `post`, where the answer waits for the workers."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, path, body)
            until(lambda: (self.answer(), answer.done())[1])
            return answer.result()

    def model(self, number=0, **lora):
        """A new model's name."""
        status, session = self.post("create_session", {"tags": [], "sdk_version": "0"})
        assert status == 200
        body = {"session_id": session["session_id"], "model_seq_id": number}
        lora = {"rank": 4, "seed": 3, **lora}
        self.result(
            self.post("create_model", {**body, "base_model": self.base, "lora_config": lora})
        )
        return f"{session['session_id']}:train:{number}"

    def passes(self, model, seq, each, loss="cross_entropy", **options):
        return self.post("forward_backward", raw=pass_body(model, seq, each, loss, **options))

    def step(self, model, seq, **given):
        given = {"learning_rate": 1e-2, "eps": 1e-12, **given}
        return self.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": given})


def _told(response):
    kind = response.headers.get("content-type", "")
    if PROTOBUF in kind:
        return response.status_code, response.content
    return response.status_code, response.json() if response.content else None


def tensor(array):
    array = np.asarray(array)
    whole = array.dtype.kind == "i"
    made = wire.Tensor(shape=array.shape, dtype=wire.DTYPE_INT64 if whole else wire.DTYPE_FLOAT32)
    made.dense = array.astype("<i8" if whole else "<f4").tobytes()
    return made


def pass_body(model, seq, each, loss="cross_entropy", forward=False, **config):
    """each: (tokens, {input: array})."""
    body = wire.ForwardBackwardRequest(
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward
    )
    for name, value in config.items():
        body.loss_fn_config_v2[name].number = value
    for tokens, inputs in each:
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, array in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(tensor(array))
    return body.SerializeToString()


def documents(seed=0, lengths=(5, 20, 9, 33)):
    """Documents with a target and a weight for each token."""
    draw = np.random.default_rng(seed)
    return [
        (
            draw.integers(0, 97, n),
            {
                "target_tokens": draw.integers(0, 97, n),
                "weights": draw.random(n).astype(np.float32),
            },
        )
        for n in lengths
    ]


def listed(each, **more):
    """Documents as JSON has them."""
    return [
        {
            "model_input": {"input_ids": tokens.tolist()},
            "loss_fn_inputs": {name: array.tolist() for name, array in inputs.items()} | more,
        }
        for tokens, inputs in each
    ]


def passed(data):
    """The metrics of a pass in protobuf, and by field the values of each document."""
    output = wire.ForwardBackwardOutput()
    output.ParseFromString(data)
    [record] = output.loss_fn_outputs
    fields = {}
    for name, field in record.fields.items():
        ends = np.frombuffer(field.offsets, "<i8") // 4
        values = np.frombuffer(field.data, "<f4")
        fields[name] = [values[a:b] for a, b in itertools.pairwise(ends)]
    return dict(output.metrics), fields


def trained(served, model, steps, first=1, seed=0):
    """What so many steps have sent, two passes each."""
    found = []
    for step in range(steps):
        seq = first + 3 * step
        for call in range(2):
            data = documents(seed + 2 * step + call)
            future = served.passes(model, seq + call, data)
            found.append(served.result(future, accept=PROTOBUF))
        found.append(json.dumps(served.result(served.step(model, seq + 2))))
    return found


@contextlib.contextmanager
def listening(served):
    """The address of a server whose API and workers have a thread each."""
    port = socket.create_server(("127.0.0.1", 0))
    given = uvicorn.Config(application(served.api), log_level="warning", lifespan="off")
    web, ended = uvicorn.Server(given), threading.Event()

    def work():
        while not ended.wait(0.001):
            served.answer()

    threads = [threading.Thread(target=web.run, args=([port],)), threading.Thread(target=work)]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{port.getsockname()[1]}"
    finally:
        web.should_exit = True
        ended.set()
        for thread in threads:
            thread.join()
