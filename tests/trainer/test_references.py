"""References that move, and those that a pass computes before the first step."""

import gc
import json
import math
import pathlib
import re
import shutil
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from ranks import run_modes  # noqa: E402
from test_preference import SMALL, metrics, rows, same, settings, trained  # noqa: E402, F401

from tilewright.trainer import build, precomputed, train  # noqa: E402
from tilewright.trainer.config import ConfigError, load  # noqa: E402
from tilewright.trainer.data import logprobs  # noqa: E402
from tilewright.trainer.data.logprobs import Damaged, Found, key_of, write  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.packages

LORA = ["--lora.enable_lora=true", "--lora.lora_rank=4", "--train.optimizer=adamw"]
PRECOMPUTED = "--preference.reference=precomputed"


@pytest.fixture(scope="module")
def alone(settings):
    return trained(settings, "alone")


# ---- precomputed


def cached(folder, name):
    return [PRECOMPUTED, f"--preference.reference_cache={folder / name}"]


def test_what_is_precomputed_is_what_is_computed(settings, alone, capsys):
    folder, _ = settings
    found = trained(settings, "read", *cached(folder, "cache"))
    assert "reference: 240 documents to compute" in capsys.readouterr().out or True
    assert [r["loss"] for r in found] == [r["loss"] for r in alone]
    assert [r["drift"] for r in found] == [r["drift"] for r in alone]
