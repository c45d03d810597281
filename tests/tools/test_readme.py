"""README's claims: its numbers are those of the raw results, its links and make
targets exist.
"""

import ast
import json
import pathlib
import re

import pytest

from bench.page import cited, raw
from bench.page.build import build
from bench.page.text import COMMAND
from tilewright.ops import OPS

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_readme_is_one_screen_and_says_at_once_what_is_not_measured():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100 and len(text.split()) <= 960
    assert 0 < text.index("**Not measured yet:**") < text.index("## Install")


def test_a_step_is_said_with_all_its_samples():
    """Its other figures are held by test_figures.py."""
    text = (ROOT / "README.md").read_text()
    folder = "bench/results/training-accelerate-amd-epyc-2026-11-23"
    assert f"]({folder}/README.md)" in text
    [row] = [line for line in text.splitlines() if line.startswith("| a fine-tuning step")]
    step = json.loads((ROOT / folder / "step_float32.json").read_text())
    rows = [r for v in ("before", "after") for r in step["rows"] if r["variant"] == v]
    assert re.findall(r"[\d.]+ s \([\d.]+ to [\d.]+\)", row) == [
        f"{r['median_s']:.2f} s ({min(r['samples_s']):.2f} to {max(r['samples_s']):.2f})"
        for r in rows
    ]
    assert f"{rows[1]['times_as_fast']:.2f} times as fast" in row


@pytest.fixture(scope="module")
def cites():
    return cited.Results(raw.read(ROOT / "bench/results"), ROOT / "bench/results")


def test_pages_cite_the_newest_raw_results():
    for page, text in cited.pages(ROOT / "bench/results", ROOT):
        assert page.read_text() == text, f"{page}: run `{COMMAND}`"


@pytest.mark.parametrize("name", cited.CITED)
def test_another_figure_of_a_page_is_seen(name, cites):
    """Each figure of each phrase: one more in its last digit, and the phrase without figures."""
    for phrase, figures in cited.CITED[name].items():
        text, right = (ROOT / name).read_text(), figures(cites)
        assert phrase.count("{}") == len(right) > 0 and text.count(phrase.format(*right)) == 1
        for i, figure in enumerate(right):
            digit = str((int(figure[-1]) + 1) % 10)
            other = [*right[:i], figure[:-1] + digit, *right[i + 1 :]]
            changed = text.replace(phrase.format(*right), phrase.format(*other))
            assert cited.with_figures(changed, phrase, right, name) == text != changed
        with pytest.raises(ValueError, match=r"must say .* once"):
            cited.with_figures(text.replace(phrase.format(*right), ""), phrase, right, name)


def test_a_cited_figure_is_of_the_newest_rounds_and_not_of_the_best(cites):
    several = 0
    for (op, case), name in (
        (cited.UP, "forward"),
        (cited.HEADS, "forward"),
        (cited.HEADS, "backward"),
        (("linear_logprob", "qwen3-8b"), "forward_backward"),
    ):
        rounds = {
            g.source.when: g.rows[own][name]["tflop_per_s"]
            for g in cites.raw.groups
            for own in ("gluon", "triton")
            if (g.source.device[1], g.op, g.case, g.dtype) == (cited.DEVICE, op, case, "bfloat16")
            and g.rows.get(own, {}).get("status") == "ok"
        }
        newest = rounds[max(rounds)]
        assert cites.rate(op, case, name) == [f"{newest:.0f}"]
        several += newest < max(rounds.values())
    assert several == 4, "none of these is a case in which an older run was better"


def test_rows_of_a_case_and_counts_of_utilization_are_the_raw_files_own(cites):
    """Without what the page's writer uses."""
    text = (ROOT / "README.md").read_text()
    line = next(n for n in text.splitlines() if "RMSNorm with its residual" in n)
    case = next(c for c in OPS["add_rmsnorm"].cases if c.name == "qwen3-8b")
    rows = case.cost(2).forward_bytes // (4 * 2 * 4096)
    assert f"{rows:,} rows of 4,096" in line
    steps = json.loads((ROOT / "bench/results/nvidia-h100-2026-11-27/end_to_end.json").read_text())
    [step] = steps["rows"]
    assert step["case"] == "llama-3.2-1b_8192_tokens"
    assert "Llama 3.2 1B's shape, 8,192 packed tokens" in text
    ratio = step["mfu_documents"] / step["mfu"]
    assert ratio == pytest.approx(step["flops_per_token_documents"] / step["flops_per_token"])
    assert f"MFU {100 * step['mfu']:.0f} %, of the documents trained" in text
    assert f"trained {100 * step['mfu_documents']:.1f} %" in text


def test_what_a_row_says_of_its_case_is_of_the_case():
    """Sizes from the operations and bytes of the cases, versions and days from the raw files."""
    text = (ROOT / "README.md").read_text()

    def said(pattern):
        [numbers] = re.findall(pattern, text)
        return [int(n.replace(",", "")) for n in numbers]

    def cost(op, name):
        return next(c for c in OPS[op].cases if c.name == name).cost(2)

    tokens, heads, width, keys = said(r"attention, ([\d,]+) tokens, (\d+) heads of (\d+), (\d+) of")
    of = cost(*cited.HEADS)
    assert of.forward_flops == 2 * heads * width * tokens**2  # half of the square
    vectors = of.forward_bytes // (2 * width * tokens)  # of q, k, v and the result
    assert vectors == 2 * heads + 2 * keys
    experts, tokens = said(r"(\d+) experts of Qwen3-30B-A3B, ([\d,]+) tokens")
    chosen, hidden, inner = 8, 2048, 768
    of = cost(*cited.EXPERTS)
    assert of.forward_flops == pytest.approx(6 * tokens * chosen * hidden * inner, rel=0.01)
    weights, moved = 3 * experts * hidden * inner, tokens * chosen * (hidden + 2 * inner)
    assert of.forward_bytes == 2 * (weights + moved)
    metas = [
        json.loads(path.read_text())["meta"]
        for path in sorted((ROOT / "bench/results").glob("nvidia-h100-2026-11-2*/end_to_end.json"))
    ]
    assert f"Medians of {metas[0]['date'][:10]} and {metas[-1]['date'][8:10]}, of code" in text
    for meta in metas:
        names = (("torch", "torch"), ("Triton", "triton"), ("transformers", "transformers"))
        shorts = (f"{s} {meta['versions'][n].rpartition('.')[0]}" for s, n in names)
        assert ", ".join(shorts) + ", random weights" in text


def test_its_counts_are_those_of_the_library_and_of_the_page():
    text = (ROOT / "README.md").read_text()
    page = build(ROOT / "bench/results", DOCS / "performance.md")
    [picture] = (p for p in page.pictures if p.link in text)
    points = [p for panel in picture.data["panels"] for p in panel["points"]]
    over = {kind: {y for y, of, *_ in points if of == kind} for kind in ("eager", "compile")}
    # Whoever measures again removes the sentence.
    of_device = next(t for t in page.texts.values() if picture.link in t)
    assert ("the code has changed since" in text) == ("No comparison here is of" in of_device)
    assert f"{len(over['eager'])} of the {len(OPS)} ops beside their references" in text
    assert f"and {len(over['compile'])} of them beside `torch.compile`" in text
    source = ast.parse((ROOT / "tests/nn/test_accelerate.py").read_text())
    assigned = {
        ast.unparse(n.targets[0]): n.value for n in source.body if isinstance(n, ast.Assign)
    }
    families = assigned["FAMILIES"]
    for known in (text, (DOCS / "comparison.md").read_text()):
        assert f"{len(families.keys)} families tested" in known
    [goals] = re.findall(rf"{cited.DEVICE}: (\d+ of \d+ measured) goals met", page.text)
    assert f"{goals} [goals](docs/goals.md) are met" in text


def test_nothing_is_left_to_fill_in():
    """Links are checked by `make docs`."""
    for page in PAGES:
        text = page.read_text()
        assert "@@" not in text and "TODO" not in text, page


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for p in PAGES for t in re.findall(r"(?:^|`)make ([\w./-]+)", p.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets
