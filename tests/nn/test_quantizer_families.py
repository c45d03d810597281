"""Quantized loading over families of transformers: what `scripts/families_quantized.py` checks over
all of them, for those that stand for a fault.
"""

import importlib.util
import pathlib

import pytest

transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
)

pytestmark = pytest.mark.packages

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/families_quantized.py"


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("families_quantized", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Modules around a quantized layer that initialize its bias themselves (SigLIP's MLP, Mamba's time
# step, RecurrentGemma's block), and those that leave it to the layer.
WITH_BIASES = [
    ("causal", "gemma3"),
    ("causal", "mamba"),
    ("causal", "recurrent_gemma"),
    ("causal", "gpt_neox"),
    ("seq2seq", "bart"),
]


@pytest.mark.parametrize("head, kind", WITH_BIASES, ids=[kind for _, kind in WITH_BIASES])
def test_no_tensor_of_a_quantized_layer_is_initialized_again(script, head, kind, tmp_path):
    model = script.small_models().build(transformers, kind, head)
    found = script.check(
        kind, type(model), model.config, tmp_path, formats=["block_fp8"], readers=False
    )
    assert found == dict.fromkeys(["block_fp8 load", "block_fp8 save", "block_fp8 again"], "same")
