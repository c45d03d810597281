"""What the scripts of clients are told, and that they open no connection but to the server.

    python SCRIPT.py SERVER_FOLDER MODEL_FOLDER FOLDER

Imported before the clients' packages: those read the environment.
"""

import json
import os
import pathlib
import socket
import sys

SERVER, MODEL, FOLDER = map(pathlib.Path, sys.argv[1:4])
URL = (SERVER / "url").read_text().strip()
os.environ |= {
    "TINKER_API_KEY": (SERVER / "api.key").read_text().strip(),
    "TINKER_BASE_URL": URL,
    "HF_HUB_OFFLINE": "1",
    "TINKER_TELEMETRY": "0",
}
connect = socket.socket.connect


def loopback(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
        raise OSError(f"a connection to {address} was tried")
    return connect(self, address)


socket.socket.connect = loopback


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
