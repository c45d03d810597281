"""The server's page: what is on it, whom it is shown to, and that a browser shows it."""

import base64
import html
import html.parser
import re
import sqlite3

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from browser import BROWSER, pixels
from serving import KEY, PROTOBUF, Served, documents, passed, write_model, write_server

from tilewright.server.frames import packed
from tilewright.server.log import Log, Result
from tilewright.server.page import page

pytestmark = pytest.mark.packages

MARKUP = {"<script>alert(1)</script>": "\"'&amp;</td>"}
ODD = "</td><img src=x onerror=alert(2)>"  # no name that the API accepts
OTHER = "another key"


class Filled:
    """A server that has trained a model, of which the first two of three steps are in a checkpoint,
    with a checkpoint of a client, and requests that wait.

    losses: per token, of the passes.
    """

    def __init__(self, served):
        self.served, self.model = served, served.model()
        self.losses = []
        for step in range(3):
            for call in range(2):
                data = documents(2 * step + call)
                seq = 1 + 3 * step + call
                metrics, _ = passed(
                    served.result(served.passes(self.model, seq, data), accept=PROTOBUF)
                )
                tokens = sum((inputs["weights"] != 0).sum() for _, inputs in data)
                self.losses.append(metrics["loss:sum"] / tokens)
            served.result(served.step(self.model, 3 + 3 * step))
        save = {"model_id": self.model, "seq_id": 10, "path": "first"}
        self.saved = served.result(served.post("save_weights", save))["path"]
        served.result(served.post("save_weights_for_sampler", {"model_id": self.model}))
        served.step(self.model, 12)
        log, owner = served.log, served.api.keys.owner(served.key)
        about = {"rank": 2, "base_model": served.base}
        odd = {**about, "user_metadata": MARKUP}
        for name, whose in ((ODD, owner), ("others:train:0", OTHER)):
            log.append(name, 0, "create_model", packed({}), whose, creates=odd)
        log.append("others:train:0", None, "save_weights", packed({}), OTHER)
        log.append("failed:train:0", 0, "create_model", packed({}), owner, creates=about)
        log.fail("failed:train:0", f"its file is {ODD}")
        saved = {"kind": "training", "size": 1}
        log.remember("tinker://others:train:0/weights/secret", OTHER, saved)

    def get(self, **headers):
        return self.served.client.get("/", headers=headers)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    file = write_server(folder, write_model(folder / "model"), checkpoint_every=2)
    with Served(file) as served:
        yield Filled(served)


@pytest.fixture(scope="module")
def shown(filled):
    return filled.get(**{"x-api-key": KEY}).text


def of_browser(key, user="anyone"):
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


def test_without_the_key_a_browser_asks_for_it(filled):
    none = {"authorization": "Basic !"}
    bare = {"authorization": f"Basic {KEY}"}
    for given in ({}, of_browser("wrong"), of_browser(""), none, bare, {"x-api-key": "wrong"}):
        response = filled.get(**given)
        assert response.status_code == 401, given
        assert response.headers["www-authenticate"] == 'Basic realm="tilewright"'
        assert filled.model not in response.text
    bearer = {"authorization": f"Bearer {KEY}"}
    for given in (of_browser(KEY), of_browser(KEY, ""), bearer, {"x-api-key": KEY}):
        response = filled.get(**given)
        assert response.status_code == 200 and filled.model in response.text
        assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == (
        "default-src 'none'; style-src 'unsafe-inline'"
    )
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_a_browsers_password_opens_the_page_alone(filled):
    """Pages of others can make a browser that knows it send forms here."""
    path = "/api/v1/create_session"
    response = filled.served.client.post(path, content=b"{}", headers=of_browser(KEY))
    assert response.status_code == 401 and "www-authenticate" not in response.headers


class Reader(html.parser.HTMLParser):
    """Reads a page whose elements are all closed, in their order.

    tags: of all elements.   tables: by the names of their columns, rows of cells' text.
    """

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.tables = [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "meta":
            return
        self.open.append(tag)
        if tag == "table":
            self.head, self.rows = [], []
        elif tag == "th":
            self.head.append("")
        elif tag == "tr":
            self.rows.append([])
        elif tag == "td":
            assert dict(attributes)["data-name"] == self.head[len(self.rows[-1])]
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        assert "svg" in self.open, tag
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[tuple(self.head)] = [row for row in self.rows if row]

    def handle_data(self, data):
        if "td" in self.open:
            self.rows[-1][-1] += data
        elif "th" in self.open:
            self.head[-1] += data


def table(text, first):
    """The rows of the table whose first column has this name."""
    [rows] = [rows for head, rows in Reader(text).tables.items() if head[0] == first]
    return rows


def test_models_have_their_states_and_steps(filled, shown):
    rows = table(shown, "model")
    model = next(row for row in rows if row[0] == filled.model)
    assert model[1:5] == ["live", "4", "3", "10"]  # its creation, six passes and three steps ran
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", model[5])
    states = {row[0]: row[1] for row in rows}
    assert states["failed:train:0"] == f"failedits file is {ODD}"
    odd = next(name for name in states if name.startswith(ODD))
    assert states[odd] == "new" and "<script>alert(1)</script>" in odd


def test_losses_are_a_picture_with_a_point_for_each_pass(filled, shown):
    [line] = re.findall('<polyline points="(.*?)"', shown)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    told = re.findall(r"<title>request (\d+): (.*?)</title>", shown)
    assert [int(place) for place, _ in told] == [2, 3, 5, 6, 8, 9]
    assert [float(loss) for _, loss in told] == pytest.approx(filled.losses, rel=1e-4)
    assert len(points) == 6 and sorted(points) == points
    # y grows downward.
    y = [-below for _, below in points]
    heights, wanted = (
        [(one - min(each)) / (max(each) - min(each)) for one in each] for each in (y, filled.losses)
    )
    assert heights == pytest.approx(wanted, abs=2e-3)
    assert "6 passes" in shown and f"now {filled.losses[-1]:.4g};" in shown


def test_what_the_log_has_dropped_leaves_the_picture(filled):
    """But for what the pages of this process have read; a long picture has no dots."""
    served = filled.served
    page(served.log, served.api.keys.owner(served.key), base="base", about={})
    served.log.forget(after_sent=-1.0, after=-1.0)
    told = {}
    again = Log(served.root)
    for log in (served.log, again):
        text = page(log, served.api.keys.owner(served.key), base="base", about={})
        [line] = re.findall('<polyline points="(.*?)"', text)
        told[log] = len(line.split()), "2 of 6 passes" in text
    again.close()
    assert [*told.values()] == [(6, False), (2, True)]


def test_what_waits_says_for_what(filled, shown):
    rows = {(row[0], row[1]): row for row in table(shown, "request")}
    assert {*rows} == {("optim_step", filled.model), ("create_model", ODD)}
    step = rows["optim_step", filled.model]
    assert step[2] == "12" and step[4] == "seq_id 11 has not come yet"
    assert rows["create_model", ODD][4] == "its turn"
    log = filled.served.log
    log.tell("workers", "failed: their exit code is 1")
    text = filled.get(**{"x-api-key": KEY}).text
    log.tell("workers", "ready")
    assert table(text, "workers")[0][0] == "failedtheir exit code is 1"
    [row] = [row for row in table(text, "request") if row[0] == "create_model"]
    assert row[4] == "the workers: failed: their exit code is 1"


def test_checkpoints_and_the_server_are_told(filled, shown):
    rows = table(shown, "path")
    assert [row[0] for row in rows][-1] == filled.saved
    assert [row[1] for row in rows][-1] == "training" and re.fullmatch(r"[\d.]+ kB", rows[-1][2])
    [server] = table(shown, "workers")
    assert server[:2] == ["ready", filled.served.base] and server[2].endswith("B")


def test_text_of_clients_is_text(filled, shown):
    assert not {"script", "img", "link", "iframe", "a"} & {*Reader(shown).tags}
    assert html.escape(ODD) in shown and "&lt;script&gt;alert(1)" in shown
    assert not re.search(r"(?:src|href)=", shown.replace(html.escape(ODD), ""))


def test_what_came_with_another_key_is_not_shown(filled, shown):
    assert "others" not in shown and "secret" not in shown
    served = filled.served
    text = page(served.log, OTHER, base="base", about={})
    assert "others:train:0" in text and "weights/secret" in text
    assert filled.model not in text and "failed:train:0" not in text
    empty = page(served.log, "a third one", base="base", about={})
    for said in ("There is no model yet", "No request waits", "Nothing is saved yet"):
        assert said in empty
    assert Reader(empty).tables.keys() == {("workers", "base", "log")}


def test_a_page_is_of_one_time(filled, monkeypatch):
    log, models = filled.served.log, Log.models

    def changing(self):
        read = models(self)
        log.tell("workers", "failed: later")
        return read

    with monkeypatch.context() as patch:
        patch.setattr(Log, "models", changing)
        text = page(log, filled.served.api.keys.owner(filled.served.key), base="base", about={})
    assert log.fact("workers") == "failed: later" and "later" not in text
    log.tell("workers", "ready")


def test_a_page_changes_nothing_and_is_had_while_others_write(filled):
    log = filled.served.log
    with log.apart() as other, pytest.raises(sqlite3.OperationalError, match="readonly"):
        other.tell("workers", "gone")
    writer = sqlite3.connect(log.file, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM models")
    text = page(log, filled.served.api.keys.owner(filled.served.key), base="base", about={})
    writer.execute("ROLLBACK")
    writer.close()
    assert filled.model in text


class Logged:
    """A log with models whose passes have the losses that they are given, without workers."""

    def __init__(self, folder):
        self.log = Log(folder)

    def model(self, name, losses):
        self.log.append(name, 0, "create_model", packed({}), OTHER, creates={"rank": 1})
        self._finish({}, {}, state="live")
        for seq, loss in enumerate(losses, 1):
            self.log.append(name, seq, "forward_backward", packed({}), OTHER)
            self._finish({"metrics": {"loss:sum": loss}}, {"elementwise_loss": np.zeros(3)})

    def _finish(self, value, arrays, **options):
        self.log.finish(self.log.next(), Result(packed(value, arrays)), **options)

    def page(self):
        return page(self.log, OTHER, base="base", about={})

    def points(self):
        """How many each picture has."""
        return [len(line.split()) for line in re.findall('points="(.*?)"', self.page())]


@pytest.mark.parametrize(
    "losses", [[0.0], [3.0, 3.0], [-2.5, 7.1, 0.3], [1e-9, 3e-9], [-3e38, 3e38], [9.9985, 9.9986]]
)
def test_an_axis_has_round_numbers_around_all_losses(losses, tmp_path):
    """Also of a pass none of whose tokens adds to the loss: its sum is shown."""
    logged = Logged(tmp_path)
    logged.model("m", losses)
    ticks = [float(tick) for tick in re.findall('text-anchor="end">([-0-9.e+]+)<', logged.page())]
    if len(losses) > 1:
        assert ticks.pop() == len(losses) + 1  # the last place
    assert 2 <= len(ticks) <= 6 and ticks == sorted({*ticks})
    assert ticks[0] <= min(losses) and max(losses) <= ticks[-1]
    assert len(re.findall("<circle", logged.page())) == len(losses)


def test_a_page_is_bounded_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    limits = {"PASSES": 4, "PICTURES": 2, "MODELS": 2, "QUEUED": 1, "FEW": 3, "READ": 1}
    for name, value in limits.items():
        monkeypatch.setattr(f"tilewright.server.page.{name}", value)
    logged = Logged(tmp_path)
    for i in range(3):
        logged.model(f"m{i}", [1.0] * 6)
    for seq in (7, 8):
        logged.log.append("m0", seq, "optim_step", packed({}), OTHER)
    assert [logged.points() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    text = logged.page()
    assert logged.points() == [4, 4] and text.count("4 passes") == 2 and "<circle" not in text
    assert [row[0] for row in table(text, "model")] == ["m2", "m1"]
    assert len(table(text, "request")) == 1
    assert text.count("1 more not shown") == 2


@pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path")
@pytest.mark.parametrize("scheme, color", [("1", (0x1F, 0x77, 0xB4)), ("0", (0x6C, 0xB4, 0xEE))])
def test_a_browser_without_a_network_shows_the_losses(scheme, color, shown, tmp_path):
    """In light and dark, as it prefers: the line is in its picture."""
    pytest.importorskip("matplotlib.image")
    (tmp_path / "page.html").write_text(shown)
    prefers = f"--blink-settings=preferredColorScheme={scheme}"
    shot = pixels(tmp_path / "page.html", tmp_path, "1200,1000", prefers)
    assert (shot[-1, 0] > 128).all() == (scheme == "1")
    assert (abs(shot - color).max(-1) < 64).sum() > 100
