"""Fixtures of several test files."""

import pytest
import torch


@pytest.fixture
def backend(monkeypatch):
    """torch.compile without a compiler behind it: records which code becomes a graph, and how
    often.
    """
    from torch._dynamo.testing import CompileCounter

    counter, real = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: real(*args, **options, backend=counter)
    )
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The datasets package caches in the test's folder, and shows no progress."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
