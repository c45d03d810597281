"""Starts a server: the API, and the workers that train.

    python -m tilewright.server.launcher --mode auto --config server.yaml [--server.key value ...]

auto starts both. connect starts the API alone: workers are started by a cluster, with the same
file, as `torchrun ... -m tilewright.server.worker server.yaml`.

The launcher holds the lock of output_dir and the API's socket, so that requests wait while the API
is started again. What ends is started again, at most worker_max_retries times each. SIGTERM and
Ctrl-C end the request in progress, and the server.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import math
import os
import pathlib
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tilewright.core import platform
from tilewright.core.files import locked, write_text
from tilewright.server.fields import Own, load
from tilewright.server.keys import Keys
from tilewright.server.log import Log
from tilewright.trainer.config import Config
from tilewright.trainer.field_tree import ConfigError

log = logging.getLogger("tilewright.server")

MODULES = {
    "api": "tilewright.server.api",
    "worker": "tilewright.server.worker",
    "sampler": "tilewright.sampler",
}
LEAVING = 30.0  # seconds that a process has to end
LOOK = 0.05  # seconds between looks at the processes


def key_of(server: Own, root: pathlib.Path) -> pathlib.Path:
    """The file with the key, which is drawn if there is none."""
    if server.api_token_file is not None:
        file = pathlib.Path(server.api_token_file)
        Keys.read(file)  # or an error
        return file
    file = root / "api.key"
    if not file.is_file():
        # Published clients take keys with this beginning alone. By the umask, its mode is 0600.
        write_text(file, f"tml-{secrets.token_urlsafe(32)}\n")
    return file


class Supervised:
    """A process that is started again when it ends, so many times.

    since: when it was started, by the monotonic clock.
    """

    def __init__(self, name: str, command: list[str], retries: int, **options: Any):
        self.name, self.command, self.left, self.options = name, command, retries, options
        self.process = self._started()

    def _started(self) -> subprocess.Popen[Any]:
        self.since = time.monotonic()
        return subprocess.Popen(self.command, env=platform.for_server(), **self.options)

    def looked_at(self) -> int | None:
        """Starts it again if it has ended; its exit code if that was the last time."""
        code = self.process.poll()
        if code is None:
            return None
        if code == 2 or not self.left:  # 2: of a configuration, which stays wrong
            return code
        self.left -= 1
        log.warning(
            "%s has ended with %d and is started again; %d more times", self.name, code, self.left
        )
        self.process = self._started()
        return None

    def end(self) -> None:
        """Asks it to end, and kills it where it does not."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait(self, until: float) -> None:
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("%s does not end, and is killed", self.name)
            self.process.kill()
            self.process.wait()


class Ended(BaseException):
    """A signal has asked the server to end."""


def serve(server: Own, config: Config, arguments: list[str], *, workers: bool) -> int:
    """Runs a server until it is told to end. arguments: the file and the overrides.

    Returns 0, or 1 where a process has ended too often.
    """
    root = pathlib.Path(config.train.output_dir)
    os.umask(0o077)  # what clients send, and weights, are for the server's user alone
    root.mkdir(parents=True, exist_ok=True)
    family = socket.AF_INET6 if ":" in server.api_host else socket.AF_INET
    why = f"server.output_dir = {root}: another server runs there; give each a folder of its own"
    with locked(root / "server.lock", why), socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((server.api_host, server.api_port))
        except OSError as error:
            raise ValueError(
                f"server.api_port = {server.api_port}: cannot be bound on {server.api_host}: {error}"
            ) from error
        listening.listen(1024)
        key, requests = key_of(server, root), Log(root)
        requests.tell("workers", "starting")
        host = f"[{server.api_host}]" if family == socket.AF_INET6 else server.api_host
        url = f"http://{host}:{listening.getsockname()[1]}"
        write_text(root / "url", url + "\n")
        log.info("the API listens on %s; its key is in %s", url, key)
        log.info("the processes share %s: no other port is bound", requests.file)
        run = [sys.executable, "-m"]
        fd = listening.fileno()
        each = [
            Supervised(
                "the API",
                [*run, MODULES["api"], *arguments, str(fd)],
                server.worker_max_retries,
                pass_fds=(fd,),
            )
        ]
        if workers:
            command = [*run, *_launch(server), MODULES["worker"], *arguments]
            each.append(Supervised("the workers", command, server.worker_max_retries))
        with _sampler(server, config, root) as sampler:
            requests.tell("sampler", "")
            return _supervise(each, requests, server, sampler)


def _launch(server: Own) -> list[str]:
    """What starts as many processes as there are to be."""
    count = server.nproc_per_node or max(1, torch.cuda.device_count())
    if count == 1:
        return []
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]


class Sampler(NamedTuple):
    """The embedded sampler, once it is started.   listening: from before; what is asked of it waits
    for it there, also while it is started again.
    """

    start: Callable[[], Supervised]
    listening: socket.socket


@contextlib.contextmanager
def _sampler(server: Own, config: Config, root: pathlib.Path) -> Iterator[Sampler | None]:
    if server.sampler != "embedded":
        yield None
        return
    model = config.model
    with socket.create_server(("127.0.0.1", 0)) as listening:
        write_text(root / "sampler_url", f"http://127.0.0.1:{listening.getsockname()[1]}\n")
        fd = listening.fileno()
        dtype = "auto" if config.train.enable_mixed_precision else "float32"
        given = {"--model": model.model_path, "--tokenizer": model.tokenizer_path, "--fd": str(fd)}
        given |= {"--dtype": dtype, "--cache-tokens": str(server.sampler_cache_tokens)}
        options = [part for pair in given.items() if pair[1] is not None for part in pair]
        command = [sys.executable, "-m", MODULES["sampler"], *options]
        start = functools.partial(
            Supervised, "the sampler", command, server.worker_max_retries, pass_fds=(fd,)
        )
        yield Sampler(start, listening)


def _supervise(each: list[Supervised], requests: Log, server: Own, sampler: Sampler | None) -> int:
    """sampler: is started once a client asks for samples."""

    def stop(signum: int, frame: Any) -> None:
        raise Ended

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    workers, code = [one for one in each if one.name == "the workers"], 0
    try:
        while True:
            if sampler is not None and requests.fact("sampler") == "wanted":
                each.append(sampler.start())
                _told(requests, "sampler", "started")
            for one in [*each]:
                left, ended = one.left, one.looked_at()
                if one in workers and one.left < left:
                    _told(requests, "workers", "starting")
                if ended is None:
                    continue
                log.error("%s has ended with %d", one.name, ended)
                if sampler is not None and one.name == "the sampler":  # the others go on
                    _told(requests, "sampler", f"failed: its exit code is {ended}")
                    sampler.listening.close()  # so that what waits for it there ends
                    each.remove(one)
                    continue
                if one in workers:
                    _told(requests, "workers", f"failed: their exit code is {ended}")
                return 2 if ended == 2 else 1
            late = time.monotonic() - max((one.since for one in workers), default=math.inf)
            if late > server.worker_connection_timeout and requests.fact("workers") == "starting":
                log.error(
                    "the workers are not ready after worker_connection_timeout = %g seconds",
                    server.worker_connection_timeout,
                )
                return 1
            time.sleep(LOOK)
    except Ended:
        log.info("the request in progress is finished, and the server ends")
    finally:
        # A second signal ends it at once: what was committed is on the disk.
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        until = time.monotonic() + LEAVING
        for one in each:
            one.end()
        for one in each:
            one.wait(until)
        requests.close()
    return code


def _told(requests: Log, name: str, state: str) -> None:
    """Says what processes do. On a full disk it is not said: workers say what follows."""
    with contextlib.suppress(sqlite3.OperationalError):
        requests.tell(name, state)


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 1, or 2 for the configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m tilewright.server.launcher", description=__doc__
    )
    parser.add_argument("--mode", choices=("auto", "connect"), default="auto")
    parser.add_argument("--config", required=True, help="the file")
    known, overrides = parser.parse_known_args(argv)
    try:
        server, config = load(known.config, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(level=server.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return serve(server, config, [known.config, *overrides], workers=known.mode == "auto")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
