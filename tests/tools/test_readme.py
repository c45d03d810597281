"""README's claims: its Python runs, its numbers are those of the raw results, its links and make
targets exist.
"""

import importlib.util
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


def run(code, cwd=ROOT):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_of_readme_runs(tmp_path):
    """Both blocks in one process, on a small model in place of the one on the hub."""
    transformers = pytest.importorskip("transformers", minversion="5.7")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model, op = blocks(ROOT / "README.md")
    assert MODEL in model
    said = run(f"{model.replace(MODEL, repr('model'))}\n{op}\nprint(x.grad.shape)", tmp_path)
    assert "rmsnorm[" in said and "linear_cross_entropy[" in said
    assert "torch.Size([512, 576])" in said


def test_the_python_of_the_guide_runs():
    code = blocks(DOCS / "guide.md")
    said = run("\n".join(code if importlib.util.find_spec("transformers") else code[:2]))
    refused = "rmsnorm[triton]: " in said
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
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    assert "@@" not in text and "TODO" not in text


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for p in PAGES for t in re.findall(r"(?:^|`)make ([\w./-]+)", p.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets
