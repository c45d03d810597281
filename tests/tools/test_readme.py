"""README's claims: its Python runs, its links and its make targets exist."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_its_python_runs():
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    refused = "rmsnorm[triton]: " in done.stdout
    assert refused != torch.cuda.is_available()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    assert "@@" not in text and "TODO" not in text


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for p in PAGES for t in re.findall(r"(?:^|`)make ([\w./-]+)", p.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets
