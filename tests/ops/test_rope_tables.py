"""Tables of cos and sin for rope: transformers' frequencies and multimodal positions."""

import pytest
import torch

from tilewright.ops import mrope_tables, rope, rope_tables

BASE, DIM, CONTEXT = 10000.0, 32, 64
EXTENDED = {"factor": 4.0, "original_max_position_embeddings": CONTEXT}
LLAMA3 = {**EXTENDED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "short_factor": [1.0 + i / 16 for i in range(DIM // 2)],
    "long_factor": [1.0 + i for i in range(DIM // 2)],
    "original_max_position_embeddings": CONTEXT,
}


@pytest.mark.packages
@pytest.mark.parametrize("length", [CONTEXT // 2, 3 * CONTEXT])
@pytest.mark.parametrize(
    "kind, settings",
    [
        ("default", {}),
        ("linear", {"factor": 2.5}),
        ("dynamic", EXTENDED),
        ("llama3", LLAMA3),
        ("yarn", EXTENDED),
        ("yarn", {**EXTENDED, "beta_fast": 8, "beta_slow": 2, "truncate": False}),
        ("yarn", {**EXTENDED, "mscale": 0.7, "mscale_all_dim": 1.3}),
        ("yarn", {**EXTENDED, "attention_factor": 1.25}),
        ("longrope", {**LONGROPE, "factor": 4.0}),
        ("longrope", {**LONGROPE, "attention_factor": 1.5}),
    ],
)
def test_tables_are_those_of_transformers(kind, settings, length):
    """Frequencies to a few units in the last place, which at the last position are as many times
    its number.
    """
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": kind, "rope_theta": BASE, **settings}
    config = LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(scaling),
    )
    make = utils.ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, amplitude = make(config, seq_len=length)
    angle = torch.outer(torch.arange(length).double(), inv_freq.double())
    for found, expected in zip(
        rope_tables(BASE, DIM, length, scaling), (angle.cos(), angle.sin()), strict=True
    ):
        assert found.dtype == torch.float32 and found.shape == (length, DIM // 2)
        atol = 4 * length * torch.finfo(torch.float32).eps
        torch.testing.assert_close(found.double(), amplitude * expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"scaling": []}, TypeError, "scaling must be a dict or None, got list"),
        ({"scaling": {"rope_type": "ntk"}}, ValueError, r"rope_type must be one of \['default'"),
        ({"scaling": {"rope_type": "llama3"}}, ValueError, "'llama3' needs factor, low_freq"),
        (
            {"scaling": {"rope_type": "longrope", **LONGROPE}},
            ValueError,
            "'longrope' needs factor or attention_factor",
        ),
        (
            {"scaling": {"rope_type": "longrope", **LONGROPE, "factor": 2.0}, "dim": 16},
            ValueError,
            "short_factor must have dim / 2 = 8 numbers",
        ),
        (
            {"scaling": {"rope_type": "linear", "factor": "8"}},
            ValueError,
            "factor must be finite and > 0, got '8'",
        ),
        (
            {"scaling": {"rope_type": "dynamic", **EXTENDED}, "dim": 2},
            ValueError,
            "dim must be at least 4",
        ),
        ({"dim": 7}, ValueError, "dim must be such that dim % 2 == 0"),
        ({"base": 1.0}, ValueError, r"base must be a number in \(1, inf\)"),
    ],
)
def test_bad_settings_are_one_clear_error(change, error, message):
    with pytest.raises(error, match=message):
        rope_tables(**{"base": BASE, "dim": DIM, "length": 4, **change})


# ---- multimodal positions


def positions(B=2, S=9, rows=40):
    return torch.randint(rows, (3, B, S), generator=torch.Generator().manual_seed(0))


@pytest.mark.packages
@pytest.mark.parametrize(
    "model, prefix, embedding",
    [
        ("qwen2_vl", "Qwen2VL", "RotaryEmbedding"),
        ("qwen2_5_vl", "Qwen2_5_VL", "RotaryEmbedding"),
        ("qwen3_vl", "Qwen3VL", "TextRotaryEmbedding"),
    ],
)
def test_multimodal_rotation_is_that_of_transformers_bit_for_bit(model, prefix, embedding):
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    sections = (8, 5, 3)
    config = getattr(modeling, f"{prefix}TextConfig")(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        head_dim=DIM,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": BASE,
            "mrope_section": list(sections),
        },
    )
    ids = positions()
    q, k = (torch.randn(2, h, 9, DIM) for h in (2, 1))
    cos, sin = getattr(modeling, prefix + embedding)(config)(q, ids)
    expected = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    found = mrope_tables(
        *rope_tables(BASE, DIM, 40), ids, sections, interleaved=model == "qwen3_vl"
    )
    for t, whole in zip(found, (cos, sin), strict=True):
        assert torch.equal(t, whole[..., : DIM // 2])
    for t, other in zip(rope(q, k, *found, implementation="eager"), expected, strict=True):
        assert torch.equal(t, other)


def test_equal_positions_are_those_of_text():
    cos, sin = rope_tables(BASE, 16, 12)
    ids = torch.arange(12).expand(3, 1, 12)
    for interleaved in (False, True):
        found = mrope_tables(cos, sin, ids, (4, 2, 2), interleaved=interleaved)
        assert torch.equal(found[0][0], cos) and torch.equal(found[1][0], sin)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"sections": (4, 2)}, ValueError, r"sections must be three .* R / 2 = 8, got \(4, 2\)"),
        ({"sections": (4, 2, 3)}, ValueError, "sections must be three numbers"),
        ({"sections": (0, 4, 4), "interleaved": True}, ValueError, "at most each third pair of 8"),
        (
            {"position_ids": positions()[:2]},
            ValueError,
            r"position_ids must have shape \[3, B, S\]",
        ),
        ({"position_ids": positions() + 1}, IndexError, r"position_ids\[\d, \d, \d\] = 40 is"),
    ],
)
def test_bad_multimodal_positions_are_one_clear_error(change, error, message):
    cos, sin = rope_tables(BASE, 16, 40)
    given = {"cos": cos, "sin": sin, "position_ids": positions(), "sections": (4, 2, 2)}
    with pytest.raises(error, match=message):
        mrope_tables(**{**given, **change})
