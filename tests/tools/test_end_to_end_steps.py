"""The benchmark of optimizer steps: all providers train the same, and what it reports."""

import json

import forked
import pytest

from bench import end_to_end_steps as steps
from bench import step_kernels
from bench.__main__ import main
from bench.page.build import build

pytest.importorskip("transformers")
pytest.importorskip("pydantic")
pytest.importorskip("datasets")
PROVIDERS = ("trainer", "transformers", "accelerate")
IMPORTS = """
import bench.end_to_end_steps, tilewright.trainer.train
import accelerate, datasets, transformers.models.llama.modeling_llama
"""


@pytest.fixture(scope="module", autouse=True)
def forks():
    with forked.starts(steps, IMPORTS):
        yield


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """The document of the command, on a tiny shape."""
    out = tmp_path_factory.mktemp("results") / "steps"
    options = ["--shape", "tiny", "--steps", "3", "--skip", "1", "--out", str(out)]
    names = ",".join((*PROVIDERS, "liger"))
    assert main(["end-to-end", "--device", "cpu", "--providers", names, *options]) == 0
    build(out.parent, out.parent / "performance.md")  # can be read beside other results
    return json.loads((out / "end_to_end.json").read_text())


def test_all_train_the_same(document):
    ours, *others, liger = document["rows"]
    assert [r["provider"] for r in (ours, *others)] == list(PROVIDERS)
    assert liger["status"] == "unavailable" and liger["reason"]
    for r in (ours, *others):
        assert r["status"] == "ok" and r["reason"] is None and r["mfu"] is None
        assert len(r["losses"]) == len(set(r["losses"])) == 3 and len(r["samples_ms"]) == 2
        assert 0 < r["p20_ms"] <= r["median_ms"] <= r["p80_ms"] and r["peak_mib"] > 50
        assert r["tokens_per_second"] == pytest.approx(128e3 / r["median_ms"])
        assert 0 < r["flops_per_token_documents"] < r["flops_per_token"]
    for r in others:
        assert r["loss_difference"] < 1e-5 and r["grad_norm_difference"] < 1e-4


def test_the_trainer_runs_in_each_precision(tmp_path):
    """The runs differ by rounding, which is told."""
    options = ["--shape", "tiny", "--steps", "3", "--skip", "1", "--out", str(tmp_path)]
    options += ["--providers", "trainer", "--dtype", "bfloat16", "--precision", "block_fp8,bf16SR"]
    assert main(["end-to-end", "--device", "cpu", *options]) == 0
    ours, *others = json.loads((tmp_path / "end_to_end.json").read_text())["rows"]
    assert [r["provider"] for r in others] == ["trainer-block_fp8", "trainer-bf16SR"]
    for r in others:
        assert r["status"] == "ok" and 0 < r["loss_difference"] < 0.01, r["reason"]
        assert len(r["samples_ms"]) == 2 and r["losses"] != ours["losses"]


def test_precisions_are_of_products_in_bfloat16(capsys):
    with pytest.raises(SystemExit):
        main(["end-to-end", "--device", "cpu", "--precision", "all"])
    assert "--precision: needs --dtype bfloat16" in capsys.readouterr().err


def row(**values):
    return {"dtype": "bfloat16", "status": "ok", "reason": None, "grad_norms": [1.0]} | values


def test_another_loss_is_told():
    near, far = row(losses=[10.0, 9.05]), row(losses=[10.0, 9.2])
    other = row(losses=[10.0, 9.0], grad_norms=[1.05])
    for r in (near, far, other):
        steps.compare(r, row(losses=[10.0, 9.0]))
    assert near["status"] == "ok" and near["loss_difference"] == pytest.approx(0.05 / 9)
    assert far["status"] == "differs" and far["reason"].startswith("loss_difference is 0.022;")
    assert other["status"] == "differs" and "first_grad_norm_difference" in other["reason"]


def test_a_failure_is_recorded_and_the_others_run(tmp_path, monkeypatch):
    job = steps.Job(steps.SHAPES["tiny"], "cpu", "float32", 2, str(tmp_path))
    line = {"loss": 6.0, "grad_norm": 1.0, "seconds": 0.5, "memory_gb": 1.0}
    made = {
        "trainer": ([], "exit code 1, 0 of 2 steps done: no", "no"),
        "transformers": ([line, line], None, ""),
    }
    monkeypatch.setattr(steps, "launch", lambda job, provider, limit: made[provider])
    monkeypatch.setattr(steps, "write_inputs", lambda job: None)
    monkeypatch.setattr(steps, "flops", lambda job: (2e12, 1e12))
    name = "NVIDIA H100 80GB HBM3"
    failed, fine = steps.measure(job, "tiny", PROVIDERS[:2], 1, (60, 60), name)
    assert failed["status"] == "error" and "exit code 1" in failed["reason"]
    assert fine["status"] == "ok" and fine["losses"] == [6.0, 6.0]
    assert fine["mfu"] == pytest.approx(256 * 2e12 / 989e12) == 2 * fine["mfu_documents"]


def test_a_process_is_stopped_at_its_limit(tmp_path, monkeypatch):
    job = steps.Job(steps.SHAPES["tiny"], "cpu", "float32", 2, str(tmp_path))
    monkeypatch.setattr(steps, "command", lambda job, provider: ["sleep", "60"])
    assert steps.launch(job, "liger", 0.2)[1] == (
        "stopped after 0.2 s, 0 of 2 steps done: it printed nothing"
    )


def test_documents_fill_each_step():
    shape = steps.SHAPES["llama-3.2-1b"]
    for made in steps.documents(shape, 3):
        assert sum(map(len, made)) == shape.tokens and min(map(len, made)) >= shape.tokens // 32
        assert all(d.min() >= 0 and d.max() < shape.vocabulary for d in made)
        fields = steps.packed(made, "cpu")
        assert (fields["position_ids"] == 0).sum() == (fields["labels"] == -100).sum() == len(made)


def test_kernels_of_a_step_are_those_of_the_trace(tmp_path):
    out = tmp_path / "out"
    options = ["--shape", "tiny", "--profile", "--out", str(out)]
    assert main(["end-to-end", "--device", "cpu", *options]) == 0
    (row,) = json.loads((out / "step_kernels.json").read_text())["rows"]
    assert row["status"] == "ok" and len(row["samples_ms"]) == step_kernels.AFTER + 2
    launches = {k["kernel"]: k["launches"] for k in row["kernels"]}
    # Two layers with four products each, and the head, each product with both gradients.
    assert sum(launches.get(n, 0) for n in ("aten::mm", "tilewright::product_cpp_")) == 27
    assert 0 < row["busy_ms"] <= row["span_ms"]


def test_a_product_is_a_kernel_although_it_calls_operators_that_compute_nothing():
    def event(name, begin, length):
        return {"cat": "cpu_op", "name": name, "ts": begin, "dur": length, "tid": 1}

    within = [event("aten::resolve_conj", 2.0, 1.0), event("aten::resolve_neg", 4.0, 1.0)]
    found = step_kernels.summary(
        [event("aten::linear", 0.0, 20.0), event("aten::mm", 1.0, 18.0), *within], steps=1
    )
    assert [(k["kernel"], k["us"]) for k in found["kernels"]] == [("aten::mm", 18.0)]


def test_a_kernel_is_told_by_the_operator_that_launched_it():
    def event(kind, name, begin, length, number):
        about = {"cat": kind, "name": name, "ts": begin, "dur": length, "tid": 1}
        return about | {"args": {"External id": number}}

    found = step_kernels.summary(
        [
            event("cpu_op", "rope", 0.0, 5.0, 1),
            event("cpu_op", "rmsnorm", 6.0, 2.0, 2),
            event("kernel", "_forward", 10.0, 30.0, 1),
            event("kernel", "_forward", 50.0, 10.0, 1),
            event("kernel", "_forward", 100.0, 20.0, 2),
            event("gpu_memset", "Memset", 130.0, 2.0, 7),
        ],
        steps=2,
    )
    assert [(k["operator"], k["kernel"], k["launches"], k["us"]) for k in found["kernels"]] == [
        ("rope", "_forward", 1.0, 20.0),
        ("rmsnorm", "_forward", 0.5, 10.0),
        ("", "Memset", 0.5, 1.0),
    ]
    assert found["span_ms"] == pytest.approx(122e-3 / 2) and found["busy_ms"] == 31e-3
    assert [(g["after"], g["before"], g["times"], g["us"]) for g in found["gaps"]] == [
        ("rope", "rmsnorm", 0.5, 20.0),
        ("rope", "rope", 0.5, 5.0),
        ("rmsnorm", "", 0.5, 5.0),
    ]
    assert "between rope and rmsnorm" in step_kernels.table(found)
    with pytest.raises(ValueError, match="no operator"):
        step_kernels.summary([])
