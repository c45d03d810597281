"""The page of a run: what is on it, that it loads nothing, and that a browser shows it."""

import json
import re

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("matplotlib")

from browser import BROWSER, pixels

from tilewright.trainer import report

pytestmark = pytest.mark.packages

INFINITE = {"step": 4, "loss": float("inf")}


def made(folder, *, lr=0.1, more=()):
    """The folder of a run of three steps, with evaluations of two sets."""
    folder.mkdir()
    rows = [{"step": 0, "eval_loss": 5.0, "eval_loss/code": 6.0}]
    for step in (1, 2, 3):
        rows.append({"step": step, "loss": 5.0 - step, "lr": lr, "grad_norm": 1.0 + step})
        rows[-1] |= {"tokens": 8 * step, "tokens_per_second": 100.0 * step, "memory_gb": 2.0}
        rows[-1] |= {"grad_norm/mlp": 0.5, "grad_norm/norm": 0.25}
    rows += more
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "resolved_config.yaml").write_text(f"train:\n  lr: {lr}\n  seed: <42>\n")
    return folder


def test_a_page_shows_every_number_of_a_run_and_loads_nothing(tmp_path, capsys):
    run = made(tmp_path / "run")
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    titles = re.findall("<h2>(.*)</h2>", page)
    first = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Memory"]
    assert titles == [*first, "grad_norm"] and page.count("<svg") == 6
    assert all(f">{name}<" in page for name in ("loss", "eval_loss/code", "grad_norm/mlp"))
    assert "<td>200</td>" in page and "seed: &lt;42&gt;" in page  # the median; the configuration
    # Nothing that a browser would fetch or run: links of charts are to their own parts.
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)", page)
    assert {*re.findall(r"(?:src|href)=.(.)", page)} == {"#"}
    report.main([str(run)])
    assert (run / "report.html").read_text() == page


@pytest.fixture
def drawn(monkeypatch):
    """(points, color, dash) of each line."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    real, found = axes.plot, []

    def keep(self, steps, values, *, color, linestyle, **style):
        found.append(([*zip(steps, values, strict=True)], color, linestyle))
        return real(self, steps, values, color=color, linestyle=linestyle, **style)

    monkeypatch.setattr(axes, "plot", keep)
    return found


def test_colors_tell_names_of_one_run_apart_or_runs(tmp_path, drawn):
    runs = [made(tmp_path / name, more=[INFINITE]) for name in ("one", "two")]
    report.main([str(runs[0])])
    points, colors, dashes = zip(*drawn, strict=True)
    assert points[:3] == ([(1, 4.0), (2, 3.0), (3, 2.0)], [(0, 5.0)], [(0, 6.0)])
    assert len({*colors[:3]}) == 3 and {*dashes} == {"-"}
    drawn.clear()
    report.main([*map(str, runs), "--out", str(tmp_path / "both.html")])
    _, colors, dashes = zip(*drawn[:6], strict=True)  # of each run: loss, and two evaluations
    assert len({*colors[:3]}) == len({*colors[3:]}) == 1
    assert colors[0] != colors[3] and len({*dashes[:3]}) == 3


def test_several_runs_stand_in_the_same_charts(tmp_path):
    """Those of one name are told apart by their paths."""
    (tmp_path / "x").mkdir()
    a, b, other = made(tmp_path / "a"), made(tmp_path / "_$b$", lr=0.2), made(tmp_path / "x/a")
    target = tmp_path / "pages/both.html"
    assert report.main([str(a), str(b), "--out", str(target)]) == 0
    page = target.read_text()
    assert page.count("<svg") == 6 and ">a eval_loss/code<" in page and ">$b$ loss<" in page
    assert "<td>train.lr</td><td>0.1</td><td>0.2</td>" in page
    assert "<td>train.seed</td>" not in page
    assert not (a / "report.html").exists()
    assert report.main([str(a), str(other)]) == 0
    assert f">{other} loss<" in (a / "report.html").read_text()


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (None, "holds no metrics.jsonl; give the output_dir of a run"),
        ("", "has no step yet"),
        ('{"loss": 1.0}\n', "is damaged: {'loss': 1.0} is no row of it"),
        ('{"step": 1, "loss": "low"}\n', "is damaged: loss is low, not a number"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(rows, sentence, tmp_path, capsys):
    if rows is not None:
        (tmp_path / "metrics.jsonl").write_text(rows)
    assert report.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}") and said.count("\n") == 1 and sentence in said
    assert not (tmp_path / "report.html").exists()


def test_a_run_draws_its_page_at_its_end_on_one_rank(tmp_path):
    pytest.importorskip("datasets")
    from ranks import agents
    from training import write_config

    options = {"train__data_parallel_mode": "ddp", "train__save_hf_weights": False}
    path, pages = write_config(tmp_path, **options, train__max_steps=2), tmp_path / "pages"
    with agents(1, 2, tmp_path, [path, "--report", str(pages)]) as [agent]:
        agent.join()
    said = "".join((tmp_path / f"said_{rank}.txt").read_text() for rank in range(2))
    assert not (tmp_path / "cause.txt").exists(), said
    assert said.splitlines().count(f"{pages / 'report.html'}") == 1
    assert re.findall("<td>2</td>", (pages / "report.html").read_text()), "steps"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--report"], "--report needs a DIR"),
        (["--report", "--train.lr=1"], "--report needs a DIR"),
        (["--report", "pages", "--plan"], "--report is of a run, and --plan ends before it"),
    ],
)
def test_a_page_that_no_run_would_draw_is_refused(given, sentence, capsys):
    pytest.importorskip("datasets")
    from tilewright.trainer import train

    with pytest.raises(SystemExit) as ended:
        train.main(["config.yaml", *given])
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1] == sentence


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("file", "is no folder"),
        ("full", "is a folder; give a file"),
        ("/proc/pages", "/proc/pages"),
    ],
)
def test_a_page_that_cannot_be_written_is_found_before_the_run(
    where, said, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("datasets")
    from training import write_config

    from tilewright.trainer import train

    monkeypatch.setattr(train, "train", None)
    monkeypatch.setattr(train, "check_data", None)
    (tmp_path / "file").touch()
    (tmp_path / "full" / report.PAGE).mkdir(parents=True)
    path = write_config(tmp_path, train__max_steps=1)
    assert train.main([path, "--report", str(tmp_path / where)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path")
def test_a_browser_without_a_network_shows_the_charts(tmp_path):
    """In its picture are the colors of both runs' lines."""
    runs = [str(made(tmp_path / name, lr=lr)) for name, lr in (("a", 0.1), ("b", 0.2))]
    report.main(runs)
    shot = pixels(tmp_path / "a/report.html", tmp_path, "1240,1250")
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):  # matplotlib's C0 and C1
        # The learning rates are two level lines in the upper half of the page, on the right.
        near = abs(shot - color).max(-1) < 64  # edges are blended with the page's white
        found = near[: len(shot) // 2, shot.shape[1] // 2 :]
        assert found.sum() > 100, color
