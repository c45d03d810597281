"""The site's generated pages. `make docs` builds them, and fails for a warning or a broken link."""

import ast
import importlib
import inspect
import os
import pathlib
import re

import pytest
import torch

from bench.page import api, op
from bench.page import ops as table
from bench.page.build import build
from tilewright import ImplementationUnavailable, ops, use
from tilewright.core.registry import Implementation
from tilewright.ops.norm.rmsnorm import RMSNORM

pytestmark = pytest.mark.packages

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    return dict(op.pages(ROOT / "bench/results"))


def section(text, title):
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


MOST_WORDS = 26_000


def written(text):
    """The words of a page that a person wrote: no code, and nothing that says it is generated."""
    if re.search(r"do not edit this page", text[:400], re.I):
        return []
    text = re.sub(
        r"^<!-- (\w+): generated -->$.*?^<!-- end of \1 -->$", "", text, flags=re.S | re.M
    )
    text = re.sub(r"^( *`{3,}).*?^\1$", "", text, flags=re.S | re.M)
    return [word for word in text.split() if re.search(r"\w", word)]


def test_what_a_person_wrote_stays_short():
    """Who adds to the pages cuts elsewhere in them."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    counts = {page.name: len(written(page.read_text())) for page in pages}
    assert counts["performance.md"] == 0 < counts["trainer.md"]
    assert sum(counts.values()) <= MOST_WORDS, sorted(counts.items(), key=lambda c: -c[1])


@pytest.mark.parametrize("name", ops.OPS)
def test_an_op_has_a_page_with_its_implementations_and_numbers(pages, name):
    text = pages[name]
    arguments = section(text, "Arguments")
    for argument in ops.OPS[name].takes.arguments:
        assert f"\n| `{argument.name}` |" in arguments
    table = section(text, "Implementations")
    for impl in ops.OPS[name].implementations:
        assert f"\n| `{impl.name}`" in table
        for request in ops.OPS[name].requests:
            assert (impl.refuses(request) or "") in table
    assert op.FROM_OUTSIDE not in table, "an implementation is missing in KINDS"
    assert f"::: {ops.OPS[name].public.__module__}.{name}\n" in text
    goals = text.split("### Goals")[1] if ops.OPS[name].goals else ""
    assert goals.count(f"| `{name}` |") >= len(ops.OPS[name].goals)
    for target in re.findall(r"\]\(([^)#]+)[)#]", text):
        assert os.path.exists(os.path.normpath(ROOT / "docs/ops" / target)), target


def test_the_table_of_ops_is_that_of_the_ops():
    text = (ROOT / "docs/ops.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| \S", text, re.M) == list(ops.OPS)
    assert table.written(text) == text, f"write it by `{table.COMMAND}`"
    with pytest.raises(ValueError, match="must have one line <!-- ops: generated -->"):
        table.written("# Ops\n")


def test_numbers_are_those_of_the_report(pages):
    report = build(ROOT / "bench/results", ROOT / "docs/performance.md").by_op
    timed = report.split("#### `rmsnorm`\n\n")[1].split("\n#### ")[0].strip().splitlines()
    assert len(timed) > 4 and "\n".join(timed[:-2]) in pages["rmsnorm"]
    assert timed[-1] in pages["rmsnorm"], "commit and date"
    [checked] = [
        line for line in pages["rmsnorm"].splitlines() if line.startswith("| `rmsnorm` | cpp")
    ]
    assert checked in report


def test_an_eager_twin_within_a_function_is_shown_whole(pages):
    shown = 0
    for name, text in pages.items():
        if "## Definition" in text:
            source = re.search(r"```python\n(.*?)\n```", section(text, "Definition"), re.S)[1]
            [twin] = ast.parse(source).body
            eager = inspect.unwrap(ops.OPS[name].eager)
            assert twin.name == eager.__name__
            assert [a.arg for a in twin.args.args] == inspect.getfullargspec(eager).args
            in_place = name.endswith("_")
            assert in_place or any(isinstance(node, ast.Return) for node in ast.walk(twin))
            shown += 1
    assert shown > len(pages) // 2


def test_an_implementation_from_outside_is_listed(monkeypatch):
    other = Implementation("acme", lambda: RMSNORM.eager, devices=())
    monkeypatch.setattr(RMSNORM, "_implementations", (*RMSNORM.implementations, other))
    monkeypatch.setattr(op, "operations", lambda: {"rmsnorm": RMSNORM})
    [(_, text)] = op.pages(ROOT / "bench/results")
    assert f"| `acme` | {op.FROM_OUTSIDE} | never: by name only |" in text


def test_the_api_shows_what_is_not_an_op():
    shown = {name: re.findall(r"^ {8}- (\w+)$", text, re.M) for name, text in api.pages()}
    assert {"NF4", "checked_targets"} <= set(shown["tilewright.ops"])
    assert not set(ops.OPS) & set(shown["tilewright.ops"])
    assert {"add_lora", "quantize_model"} <= set(shown["tilewright.nn"])
    assert not {"fill", "read_json"} & set(shown["tilewright.nn"])


def test_docstrings_are_read_by_griffe():
    griffe = pytest.importorskip("griffe")
    package = griffe.load(
        "tilewright.ops.attention.attention",
        search_paths=[str(ROOT)],
        allow_inspection=False,
        extensions=griffe.load_extensions(str(ROOT / "scripts/docs_griffe.py")),
    )
    sections = package["attention"].docstring.parse("google", warn_unknown_params=True)
    kinds = {s.kind.value: s.value for s in sections}
    assert {"parameters", "returns", "raises", "examples"} <= set(kinds)
    assert [p.name for p in kinds["parameters"]] == [
        p.name for p in package["attention"].parameters
    ]


def test_the_function_of_a_kind_of_loss_is_read_by_griffe_from_its_module(monkeypatch):
    """It is no function in the source."""
    griffe = pytest.importorskip("griffe")
    folder = str(ROOT / "examples")
    monkeypatch.syspath_prepend(folder)
    extensions = griffe.load_extensions(str(ROOT / "scripts/docs_griffe.py"))
    package = griffe.load(
        "linear_focal", search_paths=[folder], allow_inspection=False, extensions=extensions
    )
    made = importlib.import_module("linear_focal").linear_focal
    read = package["linear_focal"]
    assert read.is_function and not package["LINEAR_FOCAL"].is_function
    signature = inspect.signature(made).parameters
    assert [p.name for p in read.parameters] == list(signature)
    gamma = read.parameters["gamma"]
    assert (gamma.annotation, gamma.default, gamma.kind.value) == ("float", "2.0", "keyword-only")
    assert read.parameters["x"].default is None and read.parameters["bias"].default == "None"
    sections = {s.kind.value: s.value for s in read.docstring.parse("google")}
    assert {p.name for p in sections["parameters"]} == set(signature)
    assert {"returns", "raises", "examples"} <= set(sections)


@pytest.fixture
def hook(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import docs_hook

    return docs_hook


def test_links_that_leave_the_pages(hook, monkeypatch):
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files

    config = MkDocsConfig()
    config.load_dict({"site_name": "x", "extra": {"source": "https://host/x"}})
    config.validate()
    said: list[str] = []
    monkeypatch.setattr(hook.log, "warning", said.append)
    names = ("index.md", "contributing.md", "guide.md", "ops/rope.md")
    files = Files([File(n, "docs", "site", True) for n in names])

    def shown(markdown, page):
        file = files.get_file_from_path(page)
        return hook.on_page_markdown(
            markdown, page=type("P", (), {"file": file}), config=config, files=files
        )

    assert shown("[a](docs/guide.md#b) [c](CONTRIBUTING.md)", "index.md") == (
        "[a](guide.md#b) [c](contributing.md)"
    )
    assert shown("[a](../guide.md) `[b](c)`", "ops/rope.md") == "[a](../guide.md) `[b](c)`"
    assert shown("[a](../README.md#b) [c](#d)", "guide.md") == "[a](index.md#b) [c](#d)"
    assert shown("[a](../Makefile) [b](../docs)", "guide.md") == (
        "[a](https://host/x/blob/main/Makefile) [b](https://host/x/tree/main/docs)"
    )
    # What the site alone has pages of.
    made = "[a](../bench/margins.json#b)"
    assert shown(made, "guide.md") == "[a](https://host/x/blob/main/bench/margins.json#b)"
    files.append(File("margins.md", "docs", "site", True))
    assert shown(made, "guide.md") == "[a](margins.md#b)"
    assert not said
    shown("[a](../nowhere.py)", "guide.md")
    assert "nowhere.py, which does not exist" in said[0]


def test_pages_of_results_are_made_for_the_site_alone(hook):
    pages = hook.of_results()
    assert {*pages} == {*hook.RESULTS.values()}
    for source, page in hook.RESULTS.items():
        assert (ROOT / source).exists() and not (ROOT / "docs" / page).exists()
        assert pages[page].startswith("# ") and "do not edit this page" in pages[page][:400]


# ---- troubleshooting: the messages that it quotes

X, W = torch.ones(4, 8), torch.ones(8)
LOGITS, TARGET = torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64)


def _qkv(*shapes):
    return [torch.zeros(shape) for shape in shapes]


def _twice():
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(ops.rmsnorm(x, W, implementation="cpp").sum(), x, create_graph=True)
    g.sum().backward()


SAID = {
    "no op has an implementation 'trition'; did you mean 'triton'?": lambda: use(
        "trition"
    ).__enter__(),
    "the layout is [B, H, S, D], heads before positions": lambda: ops.attention(
        *_qkv((1, 16, 4, 8), (1, 16, 2, 8), (1, 16, 2, 8))
    ),
    "attention() has no argument is_causal: causal (default: True)": lambda: ops.attention(
        X, X, X, is_causal=True
    ),
    "packed documents are cu_seqlens, windows are window; for other masks use "
    "torch.nn.functional.scaled_dot_product_attention": lambda: ops.attention(X, X, X, attn_mask=1),
    "cross_entropy() has no argument weight: it is class_weight here": lambda: ops.cross_entropy(
        LOGITS, TARGET, weight=W
    ),
    "target must have shape [*T], where T = [64], got [4]": lambda: ops.linear_cross_entropy(
        torch.zeros(64, 8), X, TARGET
    ),
    "target[0] is 110; accepted are 0 to 63 and ignore_index (-100)": lambda: ops.cross_entropy(
        LOGITS, TARGET + 110
    ),
    "x must have shape [T, H], got [2, 4, 8]": lambda: ops.moe_mlp(
        *_qkv((2, 4, 8), (2, 8, 8), (2, 8, 4)), TARGET.view(2, 2, 1), torch.ones(2, 2, 1)
    ),
    "is differentiable once; use implementation='eager' for higher derivatives": _twice,
}


@pytest.mark.parametrize("message", SAID)
def test_troubleshooting_quotes_what_is_said(message):
    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)) as error:
        SAID[message]()
    if isinstance(error.value, ImplementationUnavailable):
        pytest.skip(str(error.value))
    assert message in str(error.value)
    assert message in (ROOT / "docs/troubleshooting.md").read_text()


def test_the_step_of_the_architecture_is_that_of_the_code():
    """At most ten files, each with the functions that its line names, in the order of the file."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| `(\S+)` \| (.*?) \|", text, re.M)
    assert 5 < len(rows) <= 10
    for file, named in rows:
        tree = ast.parse((ROOT / "tilewright/trainer" / file).read_text())
        there = [
            f"{node.name}.{inner.name}" if inner is not node else node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            for inner in (node, *(n for n in getattr(node, "body", ()) if hasattr(n, "name")))
        ]
        assert {*re.findall(r"`(.*?)`", named)} <= {*there}, file
    loop = (ROOT / "tilewright/trainer/loop.py").read_text().splitlines()
    assert len(loop) < 350
