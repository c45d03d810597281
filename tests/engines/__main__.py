"""A server whose samples come from vLLM, on a CPU: `make rollout-vllm`.

    python -m tests.engines PYTHON_OF_VLLM PYTHON_OF_THE_CLIENTS

It starts vLLM on a small model in float32, compares its log-probabilities under two adapters with
training's, and runs the clients' loop of reinforcement learning (`tests/clients/rollouts.py`)
through it. What vLLM answers goes to vllm.json, which `tests/server/test_engines.py` answers again,
and what was seen to results.json, with commit and date. Fails where that is not as it should be.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import httpx

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "lib")]

from serving import Served, write_model, write_server  # noqa: E402
from training import QWEN3  # noqa: E402

from tests.clients.__main__ import clients_versions, of_script, write_words  # noqa: E402
from tests.engines.exchanges import Recorder  # noqa: E402
from tests.engines.scenario import of_engine  # noqa: E402
from tests.lib.sweeps import now  # noqa: E402
from tilewright.server.engines import Vllm  # noqa: E402

SLOTS = 8  # of adapters: more than are sampled from beside the base
STARTED = 600  # seconds
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",
}


@contextlib.contextmanager
def vllm(python, model, rank, folder):
    """Its URL, once it answers. It ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"--model": model, "--host": "127.0.0.1", "--port": port, "--dtype": "float32"}
    options |= {"--max-loras": SLOTS, "--max-lora-rank": rank, "--max-model-len": 64}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enable-lora"]
    command += ["--enforce-eager", *(str(part) for pair in options.items() for part in pair)]
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTED
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **ENVIRONMENT}
        )
        try:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError((folder / "vllm.log").read_text()[-3000:])
                time.sleep(1)
            yield url
            if process.poll() is not None:
                raise RuntimeError((folder / "vllm.log").read_text()[-3000:])
        finally:
            process.terminate()
            process.wait()


def main(python, clients):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = write_model(folder / "model", {**QWEN3, "head_dim": 32})
        write_words(model)
        problems = []
        log = folder / "learned/server.log"
        with vllm(python, model, 8, folder) as url:
            recorder = Recorder(str(model))
            with Served(write_server(folder / "compared", model)) as served:
                told = of_engine(served, recorder, Vllm, url)
            file = write_server(folder / "learned", model, sampler="vllm", sampler_url=url)
            learned = of_script("rollouts.py", clients, file, model)
            if learned is None:
                print(*(f.read_text()[-9000:] for f in (log, folder / "vllm.log")), file=sys.stderr)
        if max(told["away"]) > 1e-5 or told["renewed"] != ["arrived"] * 2:
            problems.append(f"log-probabilities differ by {told['away']}: {told['renewed']}")
        problems += ["the loop has ended otherwise"] if learned is None else learned.pop("problems")
        about = {**now(), "vllm-cpu": told["facts"]["version"], **clients_versions(clients)}
        exchanges = {**about, "exchanges": recorder.kept}
        (HERE / "vllm.json").write_text(json.dumps(exchanges, separators=(",", ":")) + "\n")
        seen = {**about, "largest_differences": told["away"], **(learned or {})}
        seen["problems"] = problems
        (HERE / "results.json").write_text(json.dumps(seen, indent=1) + "\n")
        print(json.dumps(seen, indent=1))
        return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
