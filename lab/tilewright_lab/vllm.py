"""vLLM on a CPU, in an environment of its own."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping

import httpx

from tilewright.core import platform

STARTED = 600  # seconds
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": "",
}


@contextlib.contextmanager
def vllm(
    python: str, model: pathlib.Path, folder: pathlib.Path, *, threads: int, **options: int
) -> Iterator[str]:
    """Its URL, once it answers, in float32 and without compilation. It ends with the block.

    python: of the environment.   folder: where it writes vllm.log.   options: by their names on
    its command line, such as max_model_len.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given: Mapping[str, object] = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        **options,
    }
    command = [
        str(pathlib.Path(python).absolute()),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
    ]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", f"{value}"]
    if "max_loras" in options:
        command.append("--enable-lora")
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTED
    own = platform.with_variables(**ENVIRONMENT, OMP_NUM_THREADS=f"{threads}")
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=own)
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
