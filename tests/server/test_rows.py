"""The rows of the reference server: each is as its table says."""

import ast
import pathlib

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from serving import Served, documents, pass_body, write_model, write_server

from tilewright.server import fields, rows
from tilewright.server.api import application
from tilewright.server.losses import LOSSES

pytestmark = pytest.mark.packages
ROOT = pathlib.Path(__file__).parents[2]
ROWS = rows.rows()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    with Served(write_server(folder, write_model(folder / "model"))) as served:
        yield served


def test_the_page_is_that_of_the_table():
    assert len(ROWS) == 165
    assert (ROOT / "docs/server_rows.md").read_text() == rows.page()


def test_a_field_has_the_references_default_or_says_why_not():
    named = [row for row in ROWS if row.there is not None]
    known = {*fields.Server.model_fields}
    assert {row.name for row in named} <= known
    for row in named:
        own = rows.default(row.name)
        same = own == row.there or (row.there.startswith("as ") and own == "null")
        same = same or own in (f"{row.there}.0", row.there.removesuffix(".0"))
        assert same != ("The default is" in row.says), (row, own)


def test_every_field_is_read_or_has_one_value():
    """By this package, or where the trainer has it."""
    text = "".join(f.read_text() for f in (ROOT / "tilewright/server").glob("*.py"))
    for name in fields.Server.model_fields:
        one = name in fields.ONE_VALUE or name in fields.UNBOUND
        read = f"server.{name}" in text or f'"{name}"' in text
        assert one or name in fields.PATHS or read or name == "load_weights_mode", name


def test_routes_answer_or_refuse_as_their_rows_say(served):
    known = {
        (method, route.path)
        for route in application(served.api).routes
        for method in getattr(route, "methods", ())
    }
    seen = 0
    for row in ROWS:
        for call in row.calls:
            method, _, path = call.partition(" ")
            headers = {"x-api-key": served.key, "content-type": "application/json"}
            answer = served.client.request(method, path, content=b"[]", headers=headers)
            refused = row.state == "refused"
            said = answer.json() if "json" in answer.headers.get("content-type", "") else {}
            assert (answer.status_code == 501) == refused, (call, answer.status_code)
            assert said != {"detail": f"there is no {path}"} and answer.status_code < 502, call
            seen += 1
    assert seen > 50 and len(known) > 50


def test_losses_are_accepted_or_refused_as_their_rows_say(served):
    tokens, inputs = documents()[0]
    model = served.model()
    names = {name: row.state for row in ROWS for name in row.losses}
    assert {n for n, state in names.items() if state == "works"} == {*LOSSES}
    for seq, (name, state) in enumerate(names.items(), 1):
        body = pass_body(model, seq, [(tokens, {"target_tokens": inputs["target_tokens"]})], name)
        detail = served.post("forward_backward", raw=body)[1].get("detail", "")
        assert ("loss_fn is" in detail) == (state == "refused"), name


def test_what_a_row_says_is_held_by_a_test():
    for row in ROWS:
        if row.test is not None:
            file, _, name = row.test.partition("::")
            tree = ast.parse((ROOT / "tests/server" / file).read_text())
            assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, row
        held = row.there is not None or row.calls or row.losses or row.test
        assert held and (row.says or row.state != "otherwise"), row


def test_nothing_is_pickled():
    """By what the server is made of: what torch and its collectives pickle by is not called."""
    found = set()
    for file in (ROOT / "tilewright/server").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                found |= {n for n in names if n in ("pickle", "shelve", "marshal", "dill")}
            if isinstance(node, ast.Attribute) and (
                node.attr.endswith(("_object_list", "_object"))
                or ast.unparse(node) in ("torch.load", "torch.save")
            ):
                found.add(node.attr)
    assert not found


@pytest.mark.parametrize("name", ["logprob_temperatures", "top_ks", "top_ps", "min_ps"])
def test_what_a_datum_may_not_have_is_refused(name, served):
    tokens, inputs = documents()[0]
    given = {**inputs, name: np.ones(len(tokens), np.float32)}
    model = served.model()
    body = pass_body(model, 1, [(tokens, given)])
    status, answer = served.post("forward_backward", raw=body)
    assert status == 400 and f"loss_fn_inputs has '{name}'" in answer["detail"]
