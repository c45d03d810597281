"""Reinforcement learning by a server, over HTTP: sample, reward, train, send the weights, again.

    python examples/rl_loop.py

Starts a server (`tilewright.server`) of a small model that is drawn at random, on a CPU or a GPU.
The reward is the share of one token in what follows a prompt; in half a minute it rises from
about 0.01 to 1. Needs the extra `server`.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import httpx
import torch
from transformers import AutoConfig, AutoModelForCausalLM

RIGHT = 7  # the token that is rewarded
PROMPTS = [[50 + i, 3, 20] for i in range(8)]
SAMPLES, TOKENS = 8, 4  # of a prompt; of a sample
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


class Client:
    """Requests of the protocol; each has a number in the sequence of the model or the sampler."""

    def __init__(self, url: str, key: str):
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=None)
        self.numbers = itertools.count(1)

    def post(self, path: str, **body) -> dict:
        answer = self.http.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.text}")
        return answer.json()

    def result(self, future: dict) -> dict:
        """What a request has come to: it is accepted at once, and done in its turn."""
        while True:
            answer = self.post("retrieve_future", request_id=future["request_id"])
            if "error" in answer:
                raise RuntimeError(answer["error"])
            if answer.get("type") != "try_again":
                return answer

    def done(self, path: str, **body) -> dict:
        return self.result(self.post(path, seq_id=next(self.numbers), **body))


@contextlib.contextmanager
def server(folder: pathlib.Path):
    """A client of a server in `folder`, which ends with the block."""
    model, out = folder / "model", folder / "out"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE)).save_pretrained(model)
    # JSON is YAML.
    (folder / "server.yaml").write_text(
        json.dumps(
            {
                "model_path": str(model),
                "output_dir": str(out),
                "lora_rank": 8,
                "sample_packing_sequence_len": 64,
                "enable_mixed_precision": False,
                "data_parallel_mode": "none",
                "api_port": 0,
                "log_level": "WARNING",
            }
        )
    )
    command = [sys.executable, "-m", "tilewright.server.launcher"]
    process = subprocess.Popen([*command, "--config", str(folder / "server.yaml")])
    try:
        while not (out / "url").is_file():
            if process.poll() is not None:
                raise RuntimeError("the server has ended")
            time.sleep(0.1)
        yield Client(*((out / name).read_text().strip() for name in ("url", "api.key"))), str(model)
    finally:
        process.terminate()
        process.wait()


def datum(prompt: list[int], sample: dict, advantage: float) -> dict:
    """A document: inputs, and of each the token that follows; prompts are not learned from."""
    tokens, before = prompt + sample["tokens"], [0.0] * (len(prompt) - 1)
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": tokens[1:],
            "logprobs": before + sample["logprobs"],
            "advantages": before + [advantage] * len(sample["tokens"]),
        },
    }


def step(client: Client, model: str, number: int) -> float:
    """One step of a policy gradient, and the mean reward of the samples that it is made of."""
    # The sampler that this makes has the weights as they are now.
    saved = client.done("save_weights_for_sampler", model_id=model, sampling_session_seq_id=number)
    futures = [
        client.post(
            "asample",
            sampling_session_id=saved["sampling_session_id"],
            seq_id=i,
            num_samples=SAMPLES,
            prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            sampling_params={"max_tokens": TOKENS, "temperature": 1.0, "seed": 1000 * number + i},
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    data, rewards = [], []
    for prompt, future in zip(PROMPTS, futures, strict=True):
        samples = client.result(future)["sequences"]
        own = [sample["tokens"].count(RIGHT) / TOKENS for sample in samples]
        mean = sum(own) / len(own)
        data += [datum(prompt, s, r - mean) for s, r in zip(samples, own, strict=True)]
        rewards += own
    client.done(
        "forward_backward",
        model_id=model,
        forward_backward_input={"data": data, "loss_fn": "importance_sampling"},
    )
    client.done("optim_step", model_id=model, adam_params={"learning_rate": 3e-2})
    return sum(rewards) / len(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(pathlib.Path(folder)) as (client, base):
        session = client.post("create_session")["session_id"]
        made = {"session_id": session, "model_seq_id": 0, "base_model": base}
        created = client.post("create_model", **made, lora_config={"rank": 8, "seed": 0})
        model = client.result(created)["model_id"]
        for number in range(args.steps):
            print(f"step {number}: reward {step(client, model, number):.3f}", flush=True)


if __name__ == "__main__":
    main()
