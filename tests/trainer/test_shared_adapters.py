"""Adapters whose factors the experts of a layer share."""

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from ranks import STEEP, fsdp2, same_training, selected, together_and_alone
from training import LORA, MOE, QWEN3, build, make_bins, write_config

from tilewright import nn
from tilewright.trainer.config import ConfigError
from tilewright.trainer.plugins import adapters
from tilewright.trainer.plugins.flops import flops_per_token

pytestmark = pytest.mark.packages

# Field -> the factors that have one matrix, not one an expert.
FACTORS = ("gate_A", "gate_B", "up_A", "up_B", "down_A", "down_B")
FIELDS = {"moe_shared_lora": FACTORS, "moe_hybrid_shared_lora": ("gate_A", "up_A", "down_B")}
MODES = {
    f"train_{name}_{field}": fsdp2(**sizes, **{f"lora__{field}": True})
    for field in FIELDS
    for name, sizes in (
        ("fsdp2", {"micro_batch_size": 1}),
        ("tp", {"tensor_parallel_size": 2, "micro_batch_size": 2}),
        (
            "pp",
            {
                "pipeline_parallel_size": 2,
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 2,
            },
        ),
    )
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("shared")
    shape = {**MOE, "vocab_size": 100}
    path = write_config(folder, shape, model__merge_qkv=False, **{**STEEP, **LORA})
    modes = selected(request, MODES)
    alone = {field: [f"--lora.{field}=true"] for field in FIELDS}
    return together_and_alone(folder, path, make_bins(), modes, alone)


@pytest.mark.parametrize("mode", MODES)
def test_every_layout_trains_as_one_process(mode, trained):
    found, alone = trained
    field = next(field for field in FIELDS if mode.endswith(field))
    same_training(found[mode], alone[field], rel=2e-5)


@pytest.mark.parametrize("field", FIELDS)
def test_experts_share_factors_which_are_exported_for_each(field, tmp_path):
    path = write_config(tmp_path, MOE, **LORA, **{f"lora__{field}": True})
    model = build(path)[1]
    own = write_config(tmp_path / "own", MOE, **LORA)
    for module in adapters.mixtures(model):
        for name, p in module.adapters().items():
            assert p.shape[0] == (1 if name in FIELDS[field] else MOE["num_experts"])
            torch.nn.init.normal_(p)
    # A token's work is that of experts with adapters of their own.
    assert flops_per_token(model, 8) == flops_per_token(build(own)[1], 8)
    nn.save_adapter(model, tmp_path / "adapter", base_model="base")
    _, other = build(own)
    nn.load_adapter(other, tmp_path / "adapter")
    ids = torch.arange(24)[None] % MOE["vocab_size"]
    with torch.no_grad():
        torch.testing.assert_close(other(ids), model(ids), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_shared_is_refused(tmp_path):
    both = {"lora__moe_shared_lora": True, "lora__moe_hybrid_shared_lora": True}
    with pytest.raises(ConfigError, match="experts share all factors or some"):
        build(write_config(tmp_path, MOE, **LORA, **both))
    one = {"lora__moe_shared_lora": True}
    with pytest.raises(ConfigError, match="gradient of a shared factor would have to be summed"):
        sharded = {"train__data_parallel_mode": "fsdp2", "train__expert_parallel_size": 2}
        build(write_config(tmp_path, MOE, **LORA, **one, **sharded))
    with pytest.raises(ValueError, match="moe_shared_lora = True: there are no experts with adapt"):
        build(write_config(tmp_path, QWEN3, **LORA, **one))
