"""The suite that holds any server of the protocol, on ours: green, and red for planted faults."""

import ast
import os
import pathlib
import sys

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from serving import KEY, Served, listening, write_model, write_server

from tilewright.server import api, binary, models, passes
from tilewright.server.refused import Refused

pytestmark = pytest.mark.packages

SUITE = pathlib.Path(__file__).parents[2] / "lab/conform"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server and its address."""
    folder = tmp_path_factory.mktemp("served")
    file = write_server(folder, write_model(folder / "model"), max_body_mb=1)
    with pytest.MonkeyPatch.context() as patch, Served(file) as own, listening(own) as url:
        patch.setattr(api, "WAIT", 0.1)  # what waits for a missing number is told soon
        own.log._db.execute("PRAGMA synchronous = OFF")  # a thousand requests, and no kill
        yield own, url


class Outcomes:
    """What became of each test, by its name: a plugin."""

    def __init__(self):
        self.passed, self.failed = [], []

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.rpartition("/")[2]
        if report.failed:
            self.failed.append(name)
        elif report.when == "call" and report.passed:
            self.passed.append(name)


def held(served, monkeypatch, *tests):
    """The outcomes of tests of the suite, run in this process as the command would."""
    own, url = served
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    outcomes = Outcomes()
    # Without this checkout's configuration, as from a folder elsewhere.
    options = ["-c", os.devnull, "--rootdir", SUITE.parent, "-q", "--tb=short"]
    options += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--max-body-mb", "1"]
    options += ["--url", url, "--key", KEY, "--model", own.base, "--patience", "60"]
    pytest.main([str(one) for one in (*options, *tests)], plugins=[outcomes])
    return outcomes


def test_our_server_conforms(served, monkeypatch):
    outcomes = held(served, monkeypatch, SUITE)
    assert outcomes.failed == []
    files = {name.partition("::")[0] for name in outcomes.passed}
    assert files == {path.name for path in SUITE.glob("test_*.py")}
    assert len(outcomes.passed) > 120


# ---- faults


def gradients_of_repeated_requests(patch, own):
    append, seen = own.log.append, set()

    def again(model, seq, kind, *given, **more):
        name = append(model, seq, kind, *given, **more)
        if kind == "forward_backward" and (model, seq) in seen:
            append(model, None, kind, *given)
        seen.add((model, seq))
        return name

    patch.setattr(own.log, "append", again)


def order_of_arrival(patch, own):
    def first(kinds=()):
        rows = own.log._read(
            "SELECT number, id, model, seq, kind, body, attempts, ran FROM requests WHERE waits "
            "ORDER BY number LIMIT 1"
        )
        return own.log._request(rows[0]) if rows else None

    patch.setattr(own.log, "next", first)


def inexact_logprobs_of_a_document(patch, own):
    run = passes.run

    def shifted(*given, **how):
        value, arrays = run(*given, **how)
        arrays["logprobs"][: value["lengths"][0]] += 1e-2
        return value, arrays

    patch.setattr(passes, "run", shifted)


def weights_that_nobody_reads(patch, own):
    checked = api.checked_loss

    def plain(*given):
        whole = checked(*given)
        ones = {n: np.ones_like(a) for n, a in whole.inputs.items() if n == "weights"}
        return whole._replace(inputs={**whole.inputs, **ones})

    patch.setattr(api, "checked_loss", plain)


def results_in_packed_order(patch, own):
    in_order = passes.in_order

    def packed(engine, given, values):
        each = in_order(engine, given, values)
        return [each[n] for one in given.numbers[0] for n in one.tolist()]

    patch.setattr(passes, "in_order", packed)


def shared_adapters(patch, own):
    patch.setattr(own.workers.models.bank, "take", lambda name: None)


def conflicts_of_409(patch, own):
    accept = own.api.accept

    def conflicting(call):
        try:
            return accept(call)
        except Refused as refused:
            raise Refused(409 if refused.status == 422 else refused.status, str(refused)) from None

    patch.setattr(own.api, "accept", conflicting)


def accepted_nan(patch, own):
    check = api.check
    patch.setattr(api, "check", lambda data, *limits: check(data._replace(inputs={}), *limits))


def results_without_a_key(patch, own):
    patch.setattr(own.api, "authorized", lambda request: own.api.keys.owner(own.key))


def numbers_of_refused_requests(patch, own):
    patch.setattr(own.api, "_used", lambda *given: None)


def names_that_are_saved_again(patch, own):
    patch.setattr(own.workers, "_named", lambda request: request.body)


def lost_moments(patch, own):
    read = models.Models._read
    patch.setattr(models.Models, "_read", lambda *given, states: read(*given, states=False))


def gradients_that_replace_each_other(patch, own):
    run, engine = passes.run, own.workers.models.engine

    def alone(*given, **how):
        if how["backward"]:
            engine.zero()
        return run(*given, **how)

    patch.setattr(passes, "run", alone)


def bfloat16_read_as_float16(patch, own):
    def halves(data, shape, at):
        return np.frombuffer(data, "<f2").reshape(shape).astype(np.float32)

    patch.setattr(binary, "from_bfloat16", halves)


def an_eps_that_nobody_reads(patch, own):
    engine = own.workers.models.engine
    take = engine.set_values
    patch.setattr(engine, "set_values", lambda given: take({**given, "adam_epsilon": 1e-12}))


# The test that turns red.
FAULTS = {
    gradients_of_repeated_requests: "test_retries.py::test_a_repeated_pass_adds_its_gradient_once",
    order_of_arrival: "test_order.py::test_requests_sent_out_of_order_have_the_results_of_the_"
    "straight_order",
    inexact_logprobs_of_a_document: "test_losses.py::test_cross_entropy_has_the_models_logprobs_in_"
    "the_requests_order",
    weights_that_nobody_reads: "test_losses.py::test_twice_the_weights_have_twice_the_gradient",
    results_in_packed_order: "test_losses.py::test_cross_entropy_has_the_models_logprobs_in_the_"
    "requests_order",
    shared_adapters: "test_isolation.py::test_models_that_are_mixed_have_the_bits_of_each_alone",
    conflicts_of_409: "test_retries.py::test_another_request_under_a_number_that_was_done_is_422",
    accepted_nan: "test_limits.py::test_a_pass_that_cannot_be_computed_is_refused[NaN]",
    results_without_a_key: "test_isolation.py::test_another_key_sees_nothing[another]",
    numbers_of_refused_requests: "test_retries.py::test_a_refused_request_has_used_its_number[NaN]",
    names_that_are_saved_again: "test_checkpoints.py::test_a_name_is_not_saved_twice",
    gradients_that_replace_each_other: "test_chunks.py::test_a_batch_in_several_requests_has_the_"
    "gradient_of_the_whole",
    bfloat16_read_as_float16: "test_dtypes.py::test_a_dtype_changes_no_bit[bfloat16]",
    an_eps_that_nobody_reads: "test_optimizer.py::test_eps_and_the_norms_limit_hold_steps_back",
    lost_moments: "test_checkpoints.py::test_a_saved_model_goes_on_as_it_was",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_turns_its_test_red(fault, served, monkeypatch):
    """Without it the test is green on the same server."""
    with monkeypatch.context() as patch:
        fault(patch, served[0])
        outcomes = held(served, patch, SUITE / FAULTS[fault])
    assert (outcomes.failed, outcomes.passed) == ([FAULTS[fault]], [])
    assert held(served, monkeypatch, SUITE / FAULTS[fault]).passed == [FAULTS[fault]]


def test_the_suite_needs_nothing_of_tilewright():
    """It holds servers that were written without it, where it is not installed."""
    allowed = {*sys.stdlib_module_names, "conform", "numpy", "pytest", "torch", "transformers"}
    for path in SUITE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed, path.name
