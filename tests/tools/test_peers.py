"""Peers: the calls made to them, and that a wrong, failing or missing peer is distinguished from a
slow one.
"""

import functools
import importlib
import inspect
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch

from tilewright.bench import contract, peers, peers_attention, providers, report, run, timing
from tilewright.bench import peer as peer_module
from tilewright.bench.peer import Peer, Unsupported
from tilewright.bench.peers import PEERS
from tilewright.ops import OPS

pytestmark = pytest.mark.packages

ROOF = timing.Roofline(1e10, {"float32": 1e11})


def rows(op_name, case="ragged", dtype=torch.float32, only=None):
    return measured(OPS[op_name], case_of(op_name, case), dtype, only)


def case_of(op_name, name):
    return next(c for c in OPS[op_name].cases if c.name == name)


def measured(op, case, dtype, only):
    clock, settings = timing.CpuClock(0.0), run.Settings(rounds=1, sample_seconds=0.0)
    found = run.measure(op, case, "cpu", dtype, ROOF, clock, settings, only)
    return {r["provider"]: r for r in found}


@pytest.fixture
def fake(monkeypatch):
    """Adds a peer that runs anywhere to the table."""

    def put(name="fake", consumes=(), **ops):
        peer = Peer(f"{name}-kernels", lambda device: None, ops, frozenset(consumes))
        monkeypatch.setitem(PEERS, name, peer)

    return put


def eager(op_name, **kwargs):
    return OPS[op_name].public(**kwargs, implementation="eager")


# ---- the table


def test_the_baselines_are_the_peers_and_no_list_beside_them():
    assert list(providers.BASELINES) == ["eager", "compile", "torch", *PEERS]
    for peer in PEERS.values():
        assert set(peer.ops) <= set(OPS) and peer.consumes <= set(peer.ops)


def test_every_peer_is_listed_for_every_op_with_what_it_lacks():
    for op in OPS.values():
        found = {p.name: p for p in providers.providers(op, "cpu", torch.float32)}
        for name, peer in PEERS.items():
            p = found[name]
            if op.name in peer.ops:
                assert p.call is peer.ops[op.name] and p.reason == peer.missing("cpu")
                assert p.consumes == (op.name in peer.consumes)
            else:
                assert p.reason == f"{peer.distribution} has no such op, or none with this meaning"


def test_an_adapter_has_the_arguments_of_its_op():
    for name, peer in PEERS.items():
        for op_name, adapter in peer.ops.items():
            public = inspect.signature(OPS[op_name].public).parameters
            own = inspect.signature(adapter).parameters
            takes_more = any(p.kind is p.VAR_KEYWORD for p in own.values())
            missing = set(public) - set(own) - {"implementation"}
            assert takes_more or not missing, f"{name} {op_name} does not know {missing}"
            for key, p in own.items():
                if p.kind is not p.VAR_KEYWORD:
                    assert p.default == public[key].default, f"{name} {op_name}: {key} by default"


NO_IMPORT = """
import sys, torch
from tilewright.bench import peers, providers, run
from tilewright.ops import OPS
for op in OPS.values():
    providers.providers(op, "cuda", torch.float32)
peers.versions()
names = {"liger_kernel", "quack", "flash_attn", "flash_attn_interface", "bitsandbytes", "transformers"}
print(sorted(names & {m.split(".")[0] for m in sys.modules}))
"""


def test_no_peer_is_imported_before_it_is_called():
    command = [sys.executable, "-c", NO_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_versions_name_the_distribution_that_is_installed(monkeypatch):
    have = {"flash-attn": "2.8.3", "liger-kernel": "0.8.5"}
    monkeypatch.setattr(peer_module, "version_of", have.get)
    others = ("quack-kernels", "transformers", "bitsandbytes", "torchao")
    assert peers.versions() == have | dict.fromkeys(others, "not installed")
    assert peers_attention.no_flash("cpu") is not None
    have.clear()
    assert peers_attention.no_flash("cuda") == (
        "none of the packages flash-attn-4, flash-attn-3, flash-attn is installed "
        "(pip install --pre flash-attn-4)"
    )
    assert peers.versions()["flash-attn-4"] == "not installed"
    assert "flash-attn-4" in run.metadata("cpu", run.Settings(), [])["versions"]


def test_a_peer_on_cuda_says_so(monkeypatch):
    monkeypatch.setattr(peers.platform, "no_module", lambda name: None)
    monkeypatch.setattr(peer_module, "version_of", {"flash-attn-4": "4.0"}.get)
    for peer, op, distribution in (
        ("liger", "rmsnorm", "liger-kernel"),
        ("quack", "rmsnorm", "quack-kernels"),
        ("flash-attn", "attention", "flash-attn-4"),
    ):
        assert PEERS[peer].why_not(op, "cpu") == f"{distribution} takes CUDA tensors, not cpu"
    assert "no such op" in PEERS["liger"].why_not("attention", "cuda")


# ---- a peer in a run


def test_a_wrong_peer_gets_no_time(fake):
    fake(rmsnorm=lambda **given: 1.02 * eager("rmsnorm", **given))
    row = rows("rmsnorm", only=["eager", "fake"])["fake"]
    assert row["status"] == "failed" and "out 0: error" in row["reason"]
    assert row["forward"] is None and row["forward_backward"] is None


def test_a_loss_in_another_dtype_is_a_wrong_peer(fake):
    fake(cross_entropy=lambda **kw: eager("cross_entropy", **kw).bfloat16())
    assert "dtype torch.bfloat16" in rows("cross_entropy", only=["fake"])["fake"]["reason"]


def test_a_right_peer_gets_one_and_a_raising_one_loses_no_other(fake):
    def raises(**kwargs):
        raise RuntimeError("no kernel image\nand a long dump")

    fake(rmsnorm=raises)
    fake("right", rmsnorm=functools.partial(eager, "rmsnorm"))
    found = rows("rmsnorm", only=["eager", "fake", "right"])
    assert found["fake"]["status"] == "error" and found["fake"]["forward"] is None
    assert found["fake"]["reason"] == "RuntimeError: no kernel image"
    for name in ("eager", "right"):
        assert found[name]["status"] == "ok" and found[name]["forward_backward"]["median_ms"] > 0


def test_a_variant_that_a_peer_lacks_is_unavailable_with_the_reason(fake):
    def picky(**kwargs):
        raise Unsupported("fake-kernels does not take these")

    fake(rmsnorm=picky)
    found = rows("rmsnorm", only=["eager", "fake"])
    assert found["fake"]["status"] == "unavailable" and found["eager"]["status"] == "ok"
    assert found["fake"]["reason"] == "fake-kernels does not take these"
    found = rows("silu_mul", OPS["silu_mul"].cases[0].name, only=["fake"])["fake"]
    assert found["reason"] == "fake-kernels has no such op, or none with this meaning"


@pytest.mark.parametrize("consumes", [True, False])
def test_a_peer_that_overwrites_its_inputs_gets_its_own(consumes, fake, monkeypatch):
    given, made = [], []

    def watched(**kwargs):
        given.append(kwargs["x"].data_ptr())
        return eager("rmsnorm", **kwargs)

    fake(consumes=["rmsnorm"] if consumes else [], rmsnorm=watched)
    monkeypatch.setattr(run, "gate", lambda *a: [])  # it copies inputs for every provider
    case = case_of("rmsnorm", "ragged")

    def make(*a):
        made.append(case.make(*a))
        return made[-1]

    measured(OPS["rmsnorm"], replace(case, make=make), torch.float32, ["fake"])
    assert given and all((p == made[0]["x"].data_ptr()) is not consumes for p in given)


# ---- adapters against the peers' own signatures


class Called(Exception):
    """The arguments of a peer's call, by the peer's own names."""


def spy(real):
    """Stands in for a peer's function, or autograd function: binds the call to the real signature
    and stops there.
    """
    is_class = inspect.isclass(real)
    signature = inspect.signature(real.forward if is_class else real)

    def stand_in(*args, **kwargs):
        raise Called(signature.bind(*([None] if is_class else []), *args, **kwargs).arguments)

    return type(real.__name__, (), {"apply": staticmethod(stand_in)}) if is_class else stand_in


def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def given(**kwargs):
    return kwargs


ROWS, WEIGHT, HEADS = tensor(2, 3, 8), tensor(8), tensor(2, 3, 4, 8)
LOGITS, TARGET = tensor(2, 4, 16), torch.zeros(2, 4, dtype=torch.int64)
LOSS = given(label_smoothing=0.1, z_loss=1e-4, softcap=30.0, class_weight=tensor(16))
LOSS |= given(reduction="sum", ignore_index=7)
HEAD = given(x=tensor(8, 8), weight=tensor(16, 8), target=TARGET.view(8))
SIX_ROWS = given(x=ROWS, weight=tensor(16, 8), target=TARGET[:, :3])
QKV = given(q=tensor(2, 4, 6, 8), k=tensor(2, 2, 6, 8), v=tensor(2, 2, 6, 8))
PACKED = {n: t[:1] for n, t in QKV.items()} | {"cu_seqlens": torch.tensor([0, 1, 6])}
LIGER, LOSSES = "liger_kernel.ops", "liger_kernel.transformers.functional"
CUTE = "flash_attn.cute"


@pytest.mark.parametrize(
    "peer, op, function, kwargs, expected",
    [
        (
            "liger",
            "rmsnorm",
            f"{LIGER}.LigerRMSNormFunction",
            given(x=ROWS, weight=WEIGHT, offset=1.0, cast="gemma"),
            given(offset=1.0, casting_mode="gemma", in_place=False),
        ),
        (
            "liger",
            "add_rmsnorm",
            f"{LIGER}.LigerFusedAddRMSNormFunction",
            given(x=ROWS, residual=ROWS, weight=WEIGHT),
            given(eps=1e-6, casting_mode="llama", in_place=False),
        ),
        ("liger", "silu_mul", f"{LIGER}.LigerSiLUMulFunction", given(gate=ROWS, up=ROWS), {}),
        ("liger", "silu_mul", f"{LIGER}.LigerFusedGateUpSiLUMulFunction", given(gate=ROWS), {}),
        ("liger", "gelu_mul", f"{LIGER}.LigerGELUMulFunction", given(gate=ROWS), {}),
        (
            "liger",
            "rope",
            f"{LIGER}.LigerRopeFunction",
            given(q=HEADS, k=HEADS, cos=tensor(9, 4), sin=tensor(9, 4), rotary_dim=4),
            {},
        ),
        (
            "liger",
            "cross_entropy",
            f"{LOSSES}.liger_cross_entropy",
            given(logits=LOGITS, target=TARGET, **LOSS),
            given(lse_square_scale=1e-4, softcap=30.0, ignore_index=7, label_smoothing=0.1)
            | given(reduction="sum"),
        ),
        (
            "liger",
            "linear_cross_entropy",
            f"{LOSSES}.liger_fused_linear_cross_entropy",
            given(**SIX_ROWS, **LOSS),
            given(accum_dtype=torch.float32, softcap=30.0, reduction="sum"),
        ),
        (
            "quack",
            "rmsnorm",
            "quack.rmsnorm.rmsnorm",
            given(x=HEADS, weight=tensor(4, 8), offset=1.0),
            given(bias=None, eps=1e-6, weight_offset=1.0),
        ),
        (
            "quack",
            "add_rmsnorm",
            "quack.rmsnorm.rmsnorm",
            given(x=ROWS, residual=ROWS.float(), weight=WEIGHT, bias=WEIGHT, eps=1e-5),
            given(eps=1e-5, prenorm=True, residual_dtype=torch.float32),
        ),
        (
            "quack",
            "cross_entropy",
            "quack.cross_entropy.cross_entropy",
            given(logits=LOGITS, target=TARGET, ignore_index=7, inplace=True, reduction="sum"),
            given(weight=None, ignore_index=7, inplace_backward=True, reduction="sum"),
        ),
        (
            "quack",
            "linear_cross_entropy",
            "quack.linear_cross_entropy.chunked_linear_cross_entropy",
            given(**HEAD, ignore_index=7, chunk_size=8),
            given(chunk_size=8, ignore_index=7, reduction="mean"),
        ),
        (
            "flash-attn",
            "attention",
            f"{CUTE}.flash_attn_func",
            given(**QKV, scale=0.3),
            given(softmax_scale=0.3, causal=True),
        ),
        (
            "flash-attn",
            "attention",
            f"{CUTE}.flash_attn_varlen_func",
            given(**PACKED, causal=False),
            given(softmax_scale=None, causal=False, max_seqlen_q=5, max_seqlen_k=5),
        ),
    ],
)
def test_a_call_fits_the_peers_own_signature(peer, op, function, kwargs, expected, monkeypatch):
    module, _, function = function.rpartition(".")
    missing = peers.platform.no_module(module.split(".")[0])
    if missing or PEERS[peer].installed() is None:
        pytest.skip(missing or f"{PEERS[peer].distribution} is not installed")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} cannot be imported: {error}")
    inspect.signature(OPS[op].public).bind(**kwargs)
    monkeypatch.setattr(found, function, spy(getattr(found, function)))
    with pytest.raises(Called) as caught:
        PEERS[peer].ops[op](**kwargs)
    bound = caught.value.args[0]
    assert {k: bound[k] for k in expected} == expected
    if function == "flash_attn_func":
        assert bound["q"].shape == (2, 6, 4, 8) and bound["k"].shape == (2, 6, 2, 8)
    if function == "flash_attn_varlen_func":
        assert bound["q"].shape == (6, 4, 8) and bound["cu_seqlens_q"].dtype == torch.int32
    if op == "cross_entropy":
        assert bound.get("input", bound.get("x")).shape == (8, 16)


@pytest.mark.parametrize("version", ["flash-attn-4", "flash-attn-3", "flash-attn"])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attention_is_laid_out_as_the_op_is(version, packed, monkeypatch):
    """With the modules of all three, which differ in their extra results."""

    def stand_in(q, k, v, *, softmax_scale, causal, cu_seqlens_q=None, max_seqlen_q=None, **of_k):
        assert (cu_seqlens_q is None) != packed and max_seqlen_q == (5 if packed else None)
        assert of_k.keys() == ({"cu_seqlens_k", "max_seqlen_k"} if packed else set())
        q, k, v = ((t.unsqueeze(0) if packed else t).transpose(1, 2) for t in (q, k, v))
        about = {"cu_seqlens": cu_seqlens_q, "causal": causal, "scale": softmax_scale}
        out = eager("attention", q=q, k=k, v=v, **about).transpose(1, 2)
        out = out.squeeze(0) if packed else out
        return (out, None) if version == "flash-attn-4" else out

    monkeypatch.setattr(peer_module, "version_of", {version: "1"}.get)
    module = types.SimpleNamespace(flash_attn_func=stand_in, flash_attn_varlen_func=stand_in)
    names = []
    monkeypatch.setattr(
        peers_attention.importlib, "import_module", lambda name: names.append(name) or module
    )
    g = torch.Generator().manual_seed(0)
    kwargs = dict(PACKED if packed else QKV)
    for n in "qkv":
        kwargs[n] = torch.randn(kwargs[n].shape, generator=g).bfloat16().requires_grad_()
    op = OPS["attention"]
    provider = providers.Provider("flash-attn", PEERS["flash-attn"].ops["attention"])
    by = contract.reference(op, kwargs, torch.bfloat16)
    assert providers.gate(op, provider, kwargs, by) == []
    assert names == [next(m for d, m, _ in peers_attention.FLASH if d == version)]


class Hollow(types.ModuleType):
    """Has None for every function: a call is a TypeError or an AttributeError."""

    def __getattr__(self, name):
        return None


@pytest.fixture
def hollow(monkeypatch):
    """Peers that need not be installed."""
    parts = "rmsnorm", "cross_entropy", "linear_cross_entropy"
    of_liger = "liger_kernel", LIGER, "liger_kernel.transformers", LOSSES
    for module in (*of_liger, "quack", *(f"quack.{part}" for part in parts)):
        monkeypatch.setitem(sys.modules, module, Hollow(module))
    monkeypatch.setattr(peer_module, "version_of", lambda name: "1")


OF_HEADS = given(x=HEADS, weight=tensor(4, 8))
OF_LOGITS = given(logits=LOGITS, target=TARGET)


@pytest.mark.parametrize(
    "peer, op, kwargs, message",
    [
        ("liger", "rmsnorm", OF_HEADS, "takes one weight row, not one a head"),
        (
            "liger",
            "rmsnorm",
            given(x=ROWS, weight=WEIGHT, bias=WEIGHT),
            "liger-kernel does not take bias",
        ),
        ("liger", "cross_entropy", given(**OF_LOGITS, group="g"), "does not take group='g'"),
        ("quack", "rmsnorm", given(**OF_HEADS, bias=WEIGHT), "one bias a head"),
        ("quack", "cross_entropy", given(**OF_LOGITS, z_loss=1e-4), "not take z_loss=0.0001"),
        (
            "quack",
            "cross_entropy",
            given(**OF_LOGITS, token_weight=tensor(2, 4)),
            "does not take token_weight",
        ),
        ("quack", "linear_cross_entropy", SIX_ROWS, "takes rows in multiples of 8, not 6"),
        ("quack", "linear_cross_entropy", given(**HEAD, bias=tensor(16)), "does not take bias"),
        ("quack", "linear_cross_entropy", given(**HEAD, reduction="none"), "reduction='none'"),
        (
            "flash-attn",
            "attention",
            {n: t.float() for n, t in QKV.items()},
            "takes bfloat16 and float16, not float32",
        ),
        (
            "flash-attn",
            "attention",
            {n: t[..., :5] for n, t in QKV.items()},
            "multiples of 8 up to 256, not 5",
        ),
    ],
)
def test_what_a_peer_lacks_is_refused_before_it_is_called(peer, op, kwargs, message, hollow):
    inspect.signature(OPS[op].public).bind(**kwargs)
    with pytest.raises(Unsupported, match=message):
        PEERS[peer].ops[op](**kwargs)


@pytest.mark.parametrize(
    "peer, op, kwargs",
    [
        ("liger", "rmsnorm", given(x=ROWS, weight=WEIGHT)),
        ("liger", "gelu_mul", given(gate=ROWS)),
        ("liger", "cross_entropy", OF_LOGITS),
        ("liger", "linear_cross_entropy", SIX_ROWS),
        ("liger", "rope", given(q=HEADS, k=HEADS, cos=tensor(9, 8), sin=tensor(9, 8))),
        ("quack", "add_rmsnorm", given(x=ROWS, residual=ROWS, weight=WEIGHT)),
        ("quack", "cross_entropy", OF_LOGITS),
        ("quack", "linear_cross_entropy", HEAD),
    ],
)
def test_an_option_that_is_written_out_at_its_default_is_not_refused(peer, op, kwargs, hollow):
    parameters = inspect.signature(OPS[op].public).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    # Peers know no adapter, and no case writes one out.
    for name in ("implementation", "lora_A", "lora_B", "lora_scale"):
        defaults.pop(name, None)
    with pytest.raises((TypeError, AttributeError), match="NoneType"):  # the call itself
        PEERS[peer].ops[op](**{**defaults, **kwargs})


@pytest.mark.parametrize("name", ["transformers", "transformers-grouped"])
def test_transformers_experts_are_what_they_say(name):
    pytest.importorskip("transformers")
    op = OPS["moe_mlp"]
    # transformers' grouped_mm requires rows at multiples of 16 bytes.
    kwargs = case_of("moe_mlp", "aligned").make("cpu", torch.float32, 0)
    by = contract.reference(op, kwargs, torch.float32)
    provider = providers.Provider(name, PEERS[name].ops["moe_mlp"])
    # Twice the tolerance: its sums are in another order.
    assert all(f.error <= 2 * f.budget for f in providers.gate(op, provider, kwargs, by))


@pytest.mark.parametrize(
    "op, case",
    [
        ("quantize_nf4", "matrix"),
        ("quantize_nf4", "ragged nested"),
        ("dequantize_nf4", "matrix"),
        ("dequantize_nf4", "ragged nested"),
        ("quantize_nvfp4", "matrix"),
        ("dequantize_nvfp4", "matrix"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_formats_of_others_are_what_they_say(op, case, dtype):
    name = "bitsandbytes" if op.endswith("nf4") else "torchao"
    pytest.importorskip(name)
    kwargs = case_of(op, case).make("cpu", dtype, 0)
    if "x" in kwargs and name == "torchao":  # its scales are never subnormal
        g = torch.Generator().manual_seed(0)
        kwargs["x"] = torch.randn(kwargs["x"].shape, generator=g).to(dtype)
    provider = providers.Provider(name, PEERS[name].ops[op])
    by = contract.reference(OPS[op], kwargs, dtype)
    found = providers.gate(OPS[op], provider, kwargs, by)
    assert not found, "; ".join(map(str, found))


def test_what_torchao_lacks_is_refused():
    x = torch.randn(4, 40)
    with pytest.raises(Unsupported, match=r"multiple of 16, not \[4, 40\]"):
        PEERS["torchao"].ops["quantize_nvfp4"](x)
    with pytest.raises(Unsupported, match="torchao does not take seed=3"):
        PEERS["torchao"].ops["quantize_nvfp4"](x[:, :32], seed=3)


# ---- ways of a peer


@pytest.mark.parametrize(
    "op_name, case, way",
    [
        ("linear_cross_entropy", "ragged", "torch-default"),
        ("dequantize_nvfp4", "matrix", "torchao-compiled"),
        ("quantize_nf4", "matrix", "bitsandbytes-compiled"),
        ("dequantize_nf4", "matrix", "bitsandbytes-compiled"),
        ("dequantize_nf4", "ragged nested", "bitsandbytes-compiled"),
    ],
)
def test_a_peer_is_timed_in_each_of_its_ways(op_name, case, way):
    peer = way.rpartition("-")[0]
    if reason := PEERS[way].why_not(op_name, "cpu"):
        pytest.skip(reason)
    found = rows(op_name, case, only=(peer, way))
    assert {name: r["status"] for name, r in found.items()} == {peer: "ok", way: "ok"}, found
    assert peers.peer_of(way) == peers.peer_of(peer) == peer


def test_random_values_of_a_peer_are_not_compared_but_their_shape_is(monkeypatch):
    found = rows("aqn_noise", only=("torch-randn",))["torch-randn"]
    assert (found["status"], found["contract"]) == ("ok", report.DRAWS)
    assert not report.beyond(found)
    wrong = {"aqn_noise": lambda size, noise, **how: torch.ones(3)}
    monkeypatch.setitem(PEERS, "torch-randn", replace(PEERS["torch-randn"], ops=wrong))
    found = rows("aqn_noise", only=("torch-randn",))["torch-randn"]
    assert found["status"] == "error" and "another shape" in found["reason"]
