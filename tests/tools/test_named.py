"""Results with today's names of implementations."""

import copy

import pytest

from bench.page.named import named_now


def document(**changed):
    meta = {"capability": "9.0", "date": "2026-11-27T03:42:00+00:00"}
    row = {"op": "moe_mlp", "case": "a", "dtype": "bfloat16", "provider": "triton", "ms": 1.5}
    meta |= {n: changed.pop(n) for n in ("capability", "date") if n in changed}
    return {"meta": meta, "rows": [{**row, **changed}]}


@pytest.mark.parametrize(
    "changed, provider",
    [
        ({}, "gluon"),
        ({"date": "2026-11-26T15:54:00+00:00"}, "triton"),  # before Gluon's configurations
        ({"date": "2026-12-01T00:00:00+00:00"}, "triton"),  # with a name for each
        ({"capability": "10.0"}, "triton"),
        ({"dtype": "float32"}, "triton"),
        ({"op": "rmsnorm"}, "triton"),
        ({"op": "attention", "case": "dropout_documents"}, "triton"),
        ({"op": "low_precision_linear", "case": "mxfp8 a"}, "triton"),
        ({"op": "low_precision_linear", "case": "block_fp8 a"}, "gluon"),
        ({"provider": "native"}, "native"),
    ],
)
def test_what_was_measured_as_triton_with_gluons_kernels_is_gluons(changed, provider):
    before = document(**changed)
    as_was = copy.deepcopy(before)
    [row] = named_now(before)["rows"]
    assert row == {**as_was["rows"][0], "provider": provider} and before == as_was


def test_a_checks_result_has_its_op_from_the_document():
    about = {**document(), "op": "newton_schulz", "case": "square"}
    del about["rows"]
    result = {"implementation": "triton", "dtype": "bfloat16", "status": "holds"}
    [found] = named_now({**about, "results": [result]})["results"]
    assert found == {**result, "implementation": "gluon"}
