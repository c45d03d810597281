"""The implementation `gluon`: its reasons, its configurations beside Triton's, and that no Triton
module launches it.
"""

import ast
import importlib.metadata
import json
import pathlib

import pytest
import torch

from tilewright.core import platform
from tilewright.kernels import tuning
from tilewright.ops import OPS
from tilewright.ops.attention.options import Request
from tilewright.ops.quant.low_precision_linear import Request as Recipe

KERNELS = pathlib.Path(tuning.__file__).parent
GLUON = [op for op in OPS.values() if "gluon" in op.names()]
BF16 = torch.bfloat16


@pytest.fixture
def on(monkeypatch):
    """on(capability, **names): as on a CUDA device of it, with these in place of torch.cuda's."""

    def place(capability, name="of no table"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: name)

    return place


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*_triton.py")), ids=lambda p: p.stem)
def test_no_triton_module_knows_gluon(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names = [a.name for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names]
    assert not [n for n in (*modules, *names) if "gluon" in n or "specialized" in n]


def test_gluon_precedes_triton_and_has_reasons_of_its_own(on, monkeypatch):
    pytest.importorskip("triton")
    assert {"attention", "grouped_gemm", "moe_mlp", "newton_schulz"} <= {op.name for op in GLUON}
    for op in GLUON:
        names, gluon = op.names(), op.implementation("gluon")
        assert names.index("gluon") + 1 == names.index("triton")
        assert gluon.why_not("cpu") == "Gluon kernels take CUDA tensors, not cpu"
        on((9, 0))
        assert gluon.why_not("cuda", BF16) is None
        assert gluon.why_not("cuda", torch.float32).endswith("not float32")
        assert gluon.does("cuda")
        on((12, 0))
        assert gluon.why_not("cuda", BF16).endswith("this device has 12.0")
        on((9, 0))
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda name: "3.5.1+git")
            assert "need triton 3.6 or later, this is 3.5.1" in gluon.why_not("cuda", BF16)


@pytest.mark.parametrize(
    "request_, reason",
    [
        (Request(head_dim=128), None),
        (Request(head_dim=192, value_dim=128), None),
        (Request(head_dim=100), "multiples of 8"),
        (Request(head_dim=264), "up to 256"),
        (Request(head_dim=128, value_dim=64), "not 64 beside 128"),
        (Request(head_dim=192, value_dim=128, softcap=True), "no softcap"),
        (Request(head_dim=64, dropout=True), "no dropout"),
    ],
)
def test_what_attention_refuses(request_, reason):
    said = OPS["attention"].implementation("gluon").refuses(request_)
    assert (said is None) == (reason is None) and (reason or "") in (said or "")


@pytest.mark.parametrize(
    "capability, recipe, auto",
    [
        ((9, 0), "block_fp8", "gluon"),
        ((10, 0), "block_fp8", "triton"),
        ((10, 0), "mxfp8", "triton"),
    ],
)
def test_auto_takes_what_is_not_measured_only_where_a_table_has_it(
    capability, recipe, auto, on, monkeypatch
):
    op, request_ = OPS["low_precision_linear"], Recipe(recipe, 10 * capability[0])
    on(capability)
    assert op.choose("cuda", BF16, request_) == auto
    assert OPS["low_precision_grouped_gemm"].choose("cuda", BF16, request_) == "triton"
    monkeypatch.setattr(tuning, "gives_gluon", lambda op: True)
    usable = recipe == "mxfp8" or capability == (9, 0)
    assert op.choose("cuda", BF16, request_) == ("gluon" if usable else "triton")


def _launches():
    return [t for op in GLUON for t in op.implementation("gluon").tunables()]


def _is_gluon(spec):
    return spec.kernel.fn.__module__.endswith("_gluon")


def test_launches_of_gluon_are_its_kernels_or_tritons():
    pytest.importorskip("triton")
    special = {t.name: t for t in _launches() if isinstance(t, tuning.Specialized)}
    assert len(special) >= 14
    for t in special.values():
        for key in map(t.named, t.keys):
            own = t.compiled(**key)
            assert all(c[tuning.ROLES] for c in own)
            assert all(_is_gluon(s) for c in own for s in t.specs(key, c)[:1])
            for config in t.beside.candidates(**key):
                assert tuning.ROLES not in config
                assert not any(map(_is_gluon, t.beside.specs(key, config)))


OLD = {"BLOCK": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4, "maxnreg": None}


@pytest.mark.parametrize("roles", [True, False], ids=["by gluon", "by triton"])
def test_a_table_from_before_gluon_had_a_name_is_read(roles, on, tmp_path, monkeypatch):
    """An entry of `triton` with ROLES is `gluon`'s; without, both take its constants."""
    pytest.importorskip("triton")
    from tilewright.kernels.optim.newton_schulz_gluon import SYMMETRIC

    key = {"M": 4096, "itemsize": 2, "hopper": True}
    entry = {"key": key, "config": {**OLD, "ROLES": roles}}
    document = {"schema": tuning.SCHEMA, "device": "gpu", "device_type": "cuda"}
    (tmp_path / "gpu").mkdir()
    path = tmp_path / "gpu/newton_schulz.json"
    path.write_text(json.dumps({**document, "launches": {"symmetric": [entry]}}))
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    on((9, 0), "gpu")
    tuning.table.cache_clear()
    for t in (SYMMETRIC, SYMMETRIC.beside):
        monkeypatch.setattr(t, "_chosen", {})
    try:
        device = torch.device("cuda")
        assert SYMMETRIC.config(device, *key.values()) == entry["config"]
        triton = SYMMETRIC.beside.config(device, *key.values())
        assert triton == (SYMMETRIC.beside.heuristic(**key) if roles else OLD)
        assert tuning.gives_gluon("newton_schulz") == roles
        tuned = [[c for _, _, c in tuning.tuned(t)] for t in (SYMMETRIC, SYMMETRIC.beside)]
        assert tuned == [[entry["config"]], [] if roles else [OLD]]
    finally:
        tuning.table.cache_clear()


def test_a_launch_that_the_kernel_does_not_take_is_tritons():
    pytest.importorskip("triton")
    from tilewright.kernels.optim.newton_schulz_gluon import SYMMETRIC

    beside, cpu, key = SYMMETRIC.beside, torch.device("cpu"), (4096, 2, True)
    fits, not_aligned = (torch.empty(1, 4096, n, dtype=BF16) for n in (64, 63))
    others = {beside: SYMMETRIC}
    assert tuning.choose(beside, others, cpu, key, fits)[1] is SYMMETRIC.run
    assert tuning.choose(beside, others, cpu, key, not_aligned) == (beside.config(cpu, *key), None)
    assert tuning.choose(beside, tuning.ALONE, cpu, key, fits) == (beside.config(cpu, *key), None)


def test_no_gluon_names_the_capabilities_that_it_needs(on):
    pytest.importorskip("triton")
    on((8, 9))
    said = "needs compute capability 9.x or 10.x, this device has 8.9"
    assert platform.no_gluon("cuda", (9, 10)) == said
