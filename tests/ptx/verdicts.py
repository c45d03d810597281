"""Runs of compiled kernels (compiled.py), in processes that pytest's own does not touch."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, str(pathlib.Path(__file__).with_name("compiled.py"))]


def environment():
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "lab", ROOT / "tests/lib"))),
    }


class Verdicts:
    """The failures of each of these runs, from two processes that each take every second one, in
    order. They run ahead, so that asking for one waits only for its own work.
    """

    def __init__(self, names, command=COMMAND):
        self.found, self.news, self.running = {}, threading.Condition(), []
        self.seconds = {}
        self.folder = tempfile.TemporaryDirectory()  # of what they say beside their verdicts
        for i, share in enumerate(filter(None, (names[::2], names[1::2]))):
            path = pathlib.Path(self.folder.name, str(i))
            with path.open("w") as said:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    env=environment(),
                    cwd=ROOT,
                )
            listener = threading.Thread(
                target=self._listen, args=(process, share, path), daemon=True
            )
            listener.start()
            self.running.append((process, listener))

    def _listen(self, process, names, path):
        with (
            process,
            contextlib.suppress(BrokenPipeError),
        ):  # it died: its missing verdicts are reported below
            process.stdin.write(json.dumps(names))
            process.stdin.close()
            for line in process.stdout:
                if line.startswith("{"):
                    verdict = json.loads(line)
                    self.seconds[verdict["name"]] = verdict.get("seconds")
                    self._tell({verdict["name"]: verdict["wrong"]})
        why = f"no verdict, the process ended with {process.returncode}: {path.read_text()[-3000:]}"
        self._tell({name: why for name in names if name not in self.found})

    def _tell(self, verdicts):
        with self.news:
            self.found |= verdicts
            self.news.notify_all()

    def __getitem__(self, name):
        with self.news:
            self.news.wait_for(lambda: name in self.found)
            return self.found[name]

    def end(self):
        for process, listener in self.running:
            process.kill()
            listener.join()
        self.folder.cleanup()
