"""A sample of `python -m tests.families quantized`: families that stand for a fault."""

import re

import pytest
from small_models import build, kinds

transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
)

pytestmark = pytest.mark.packages

# By family: the formats to try, and what is not "same".
FAMILIES = {
    # Modules around a quantized layer that initialize its bias themselves (SigLIP's MLP, Mamba's
    # time step, RecurrentGemma's block), and those that leave it to the layer.
    ("causal", "gemma3"): (["block_fp8"], {}),
    ("causal", "mamba"): (["block_fp8"], {}),
    ("causal", "recurrent_gemma"): (["block_fp8"], {}),
    ("causal", "gpt_neox"): (["block_fp8"], {}),
    ("seq2seq", "bart"): (["block_fp8"], {}),
    # One tensor of a file is several layers.
    ("causal", "hrm_text"): (
        ["nf4 double", "nvfp4", "block_fp8"],
        {
            "nvfp4 save": r"HrmTextForCausalLM for compressed-tensors: .*gate_up_proj\.weight",
            "block_fp8 save": r"HrmTextForCausalLM for fp8: .*gate_up_proj\.weight",
        },
    ),
    ("masked", "gte"): (["nf4", "block_fp8"], {}),
    ("masked", "nomic_bert"): (["nvfp4"], {}),
    # A layer of the input is tied to one of the output.
    ("masked", "neomme"): (["nf4"], {}),
    # Layers with "weight" in their names, experts that are joined, and an embedding in parts.
    ("causal", "qwen4_exp_text"): (["nf4", "nvfp4"], {}),
    ("causal", "inkling2_text"): (["nf4 double", "block_fp8"], {}),
    ("image-text", "minimax_m3_vl"): (["nf4"], {}),
    ("causal", "qwen3_moe"): (["nf4 double", "nvfp4", "mxfp8"], {}),
    # Layers that are kept in float32, and that bitsandbytes therefore leaves dense.
    ("seq2seq", "t5"): (["nf4"], {}),
    ("causal", "axk2"): (["nf4"], {}),
    ("causal", "bailing_hybrid"): (["nvfp4"], {}),
    # A layer without columns.
    ("masked", "mobilebert"): (["block_fp8"], {}),
    # Experts that transformers replaces when it reads the folder.
    ("causal", "llama4_text"): (
        ["nf4", "nvfp4"],
        {
            "nf4 save": r"cannot write model\.layers\.0\.feed_forward\.experts "
            r"\(Llama4TextExperts\) beside weights of bitsandbytes: ",
            "nvfp4 save": "beside weights of compressed-tensors: ",
        },
    ),
}


@pytest.mark.parametrize(
    "head, kind, formats, refused",
    [(*family, *expected) for family, expected in FAMILIES.items()],
    ids=[kind for _, kind in FAMILIES],
)
def test_a_family_is_loaded_saved_and_read_again(head, kind, formats, refused, tmp_path):
    from tests.families import quantized  # which imports transformers

    if kind not in kinds(head):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = build(kind, head)
    found = quantized.check(kind, type(model), model.config, tmp_path, formats=formats)
    assert {f"{name} load" for name in formats} <= found.keys()
    for key, outcome in found.items():
        if key in refused:
            assert outcome.startswith("refused: ") and re.search(refused[key], outcome), outcome
        else:
            assert outcome == "same", (key, outcome)
    assert refused.keys() <= found.keys()
