"""The model's numerics switches: the effect of each, and that it has no other."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import OperatorNames

from tilewright import ops as tw
from tilewright.trainer.build import choose_ops
from tilewright.trainer.config import config, load
from tilewright.trainer.models import layers
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.moe import MoE
from tilewright.trainer.models.ops_choice import Numerics, Ops
from tilewright.trainer.models.positions import Sequence
from tilewright.trainer.parallel.mesh import Mesh

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
SWITCHES = [f.name for f in dataclasses.fields(Numerics)]
BF16 = torch.bfloat16


def build(shape=SHAPE, dtype=torch.float32, merge_qkv=True, **switches):
    ops = Ops.resolve(numerics=Numerics(**switches), dtype=dtype, experts="num_experts" in shape)
    made = Transformer(ModelConfig.from_hf(shape), ops, merge_qkv)
    init_weights(made, 0, std=0.3)
    return made.to(dtype)


def tokens():
    return torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))


def hidden_of(made):
    ids = tokens()
    return made.model(ids, Sequence.of(ids, made.config, made.cp))[0]


def representable(t):
    return torch.equal(t, t.to(BF16).to(t.dtype))


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_is_a_field_that_reaches_the_model(switch, tmp_path):
    chosen = not getattr(Numerics(), switch)
    made = load(
        None,
        [
            "--data.datasets",
            '[{"path": "dummy"}]',
            "--train.output_dir",
            str(tmp_path),
            "--model.config_path",
            str(tmp_path),
            f"--model.{switch}",
            str(chosen).lower(),
        ],
    )
    shape = ModelConfig.from_hf(EXPERTS if switch == "router_fp32" else SHAPE)
    found = choose_ops(made.model, shape, Mesh(), torch.float32).numerics
    assert found == dataclasses.replace(Numerics(), **{switch: chosen})
    assert config.Model.model_fields[switch].default == getattr(Numerics(), switch)


def test_router_fp32():
    """Two experts whose logits differ by less than bfloat16 resolves: rounded, the first
    is chosen.
    """
    x = torch.zeros(1, 1, 32, dtype=BF16)
    x[..., 0], x[..., 1] = 1.0, 2.0**-10
    for fp32, expert in ((True, 5), (False, 2)):
        made = build(EXPERTS, BF16, router_fp32=fp32)
        layer = next(m for m in made.modules() if isinstance(m, MoE))
        with torch.no_grad():
            layer.gate.weight.zero_()
            layer.gate.weight[2, 0] = layer.gate.weight[5, 0] = 3.0
            layer.gate.weight[5, 1] = 1.0
        logits = layer.gate(x)
        assert logits.dtype == (torch.float32 if fp32 else BF16)
        assert tw.route(logits.view(1, -1), 1)[0].item() == expert
    for fp32 in (
        True,
        False,
    ):  # autocast, used with DDP and single processes, does not undo it
        layer = next(m for m in build(EXPERTS, router_fp32=fp32).modules() if isinstance(m, MoE))
        with torch.autocast("cpu", BF16):
            assert layer.gate(torch.randn(3, 32)).dtype == (torch.float32 if fp32 else BF16)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_lm_head_fp32(batch_invariant):
    """Logits, and the loss computed from them, are those of the unrounded products."""
    found = {}
    for fp32 in (True, False):
        made = build(dtype=BF16, lm_head_fp32=fp32, batch_invariant=batch_invariant)
        hidden = hidden_of(made)
        logits = made(tokens())
        exact = hidden.double() @ made.lm_head.weight.double().T
        assert logits.dtype == (torch.float32 if fp32 else BF16) and representable(logits) != fp32
        truth = F.cross_entropy(exact.flatten(0, 1), tokens().flatten())
        found[fp32] = (abs(made(tokens(), labels=tokens()).double() - truth) / truth).item()
    assert found[True] < 1e-6 < found[False]


def test_lm_head_fp32_in_autocast_rounds_the_operands_only():
    made = build(lm_head_fp32=True)
    with torch.autocast("cpu", BF16):
        logits = made(tokens())
        hidden = hidden_of(made)
    expected = hidden.to(BF16).float() @ made.lm_head.weight.to(BF16).float().T
    torch.testing.assert_close(logits, expected)
    assert logits.dtype == torch.float32 and not representable(logits)


def ran(made):
    with OperatorNames() as calls, torch.no_grad():
        made(tokens())
    return {n.split("::")[1] for n in calls.names if n.startswith("tilewright")}


def norms(name):
    return "norm" in name


def rotations(name):
    return "rope" in name


@pytest.mark.parametrize(
    "switch, gone",
    [
        ("rmsnorm_native", norms),
        ("rope_native", rotations),
        ("activation_native", lambda name: "act_mul" in name),
    ],
    ids=["norm", "rope", "activation"],
)
@pytest.mark.parametrize("merge_qkv", [True, False], ids=["merged", "apart"])
def test_native_switches_take_the_fused_operators_out(switch, gone, merge_qkv):
    """Exactly those, and the logits stay within float32's rounding."""
    plain, native = build(merge_qkv=merge_qkv), build(merge_qkv=merge_qkv, **{switch: True})
    before, after = ran(plain), ran(native)
    assert any(map(gone, before)) and not any(map(gone, after))
    assert {n for n in before if not norms(n) and not rotations(n) and not gone(n)} <= after
    torch.testing.assert_close(native(tokens()), plain(tokens()), rtol=1e-4, atol=1e-4)


def test_native_norm_and_activation_are_pytorchs_bit_for_bit():
    """In bfloat16, where they round at other points than the fused kernels."""
    torch.manual_seed(0)
    made = build(dtype=BF16, rmsnorm_native=True, activation_native=True)
    block, x, residual = (
        made.model.layers[0],
        torch.randn(2, 7, 32, dtype=BF16),
        torch.randn(2, 7, 32, dtype=BF16),
    )
    norm = block.post_attention_layernorm
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, F.rms_norm(total, (32,), norm.weight, norm.eps))
    gate, up = block.mlp.gate_up_proj(x).chunk(2, -1)
    assert torch.equal(block.mlp(x), block.mlp.down_proj(F.silu(gate) * up))
    fused = build(dtype=BF16).model.layers[0]
    assert not torch.equal(fused.mlp(x), block.mlp(x))


def test_attention_cast_bf16(monkeypatch):
    """The inputs of attention in float32 training: rounded queries and keys, unrounded values."""
    seen, attention = [], tw.attention

    def spy(q, k, v, **options):
        seen.append([representable(t) for t in (q, k, v)])
        assert q.dtype == k.dtype == v.dtype == torch.float32
        return attention(q, k, v, **options)

    monkeypatch.setattr(layers.tw, "attention", spy)
    plain, cast = build()(tokens()), build(attention_cast_bf16=True)(tokens())
    assert seen == [[False] * 3] * 2 + [[True, True, False]] * 2
    assert not torch.equal(plain, cast)
    torch.testing.assert_close(cast, plain, rtol=0.1, atol=0.1)
