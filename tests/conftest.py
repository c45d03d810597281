"""Set-up that every test shares. Triton's interpreter must be chosen before any kernel module is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    from tilewright.bench import contract

    with contract.poisoned():
        yield
