"""README's claims: its Python runs, its numbers are those of the raw results, its links and make
targets exist.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MODEL = '"HuggingFaceTB/SmolLM2-135M"'


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def test_the_python_of_readme_and_guide_runs(tmp_path):
    """In one process, on a small model in place of the one on the hub."""
    transformers = pytest.importorskip("transformers", minversion="5.7")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model, op = blocks(ROOT / "README.md")
    assert MODEL in model
    code = [model.replace(MODEL, "'model'"), op, "print(x.grad.shape)", *blocks(DOCS / "guide.md")]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "rmsnorm[" in done.stdout and "linear_cross_entropy[" in done.stdout
    assert "torch.Size([512, 576])" in done.stdout
    refused = "rmsnorm[triton]: " in done.stdout
    assert refused != torch.cuda.is_available()


def test_readme_is_one_screen_and_says_what_is_not_measured_before_any_number():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    measured = any(
        "| cuda |" in line for line in (DOCS / "performance.md").read_text().splitlines()
    )
    if not measured:
        assert 0 < text.index("Not measured yet:** anything on a GPU") < text.index("MiB")


def test_its_numbers_are_those_of_the_raw_results():
    text = (ROOT / "README.md").read_text()
    folder = "bench_results/training-accelerate-amd-epyc-2026-11-23"
    assert f"]({folder}/README.md)" in text
    rows = {line.split(":")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    step = json.loads((ROOT / folder / "step_float32.json").read_text())
    before, after = (
        next(r for r in step["rows"] if r["variant"] == v) for v in ("before", "after")
    )
    seconds = [f"{r['median_s']:.2f} s" for r in (before, after)]
    assert re.findall(r"[\d.]+ s\b", rows["speed"]) == seconds
    assert f"{after['times_as_fast']:.2f} times as fast" in rows["speed"]
    loss = json.loads((ROOT / folder / "loss.json").read_text())
    peaks = [
        f"{r['peak_mib']:.0f} MiB" for v in ("before", "after") for r in loss["rows"]
        if (r["variant"], r["dtype"]) == (v, "float32")
    ]  # fmt: skip
    assert re.findall(r"\d+ MiB", rows["memory"]) == peaks


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page):
    text = page.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    assert "@@" not in text and "TODO" not in text


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for p in PAGES for t in re.findall(r"(?:^|`)make ([\w./-]+)", p.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets
