"""Quantized and adapted models by standard calls: from_pretrained with TilewrightConfig, quantize_,
PEFT over quantized layers, and the options of add_lora.
"""

import copy
import importlib
import inspect
import json
import re
import sys

import pytest
import torch
from packaging.version import Version
from torch import nn

transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
)

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402

from tilewright import nn as twnn  # noqa: E402
from tilewright import ops  # noqa: E402
from tilewright.core.registry import ImplementationUnavailable  # noqa: E402
from tilewright.integrations.transformers import (  # noqa: E402
    TilewrightConfig,
    accelerate,
    accelerated,
    quantized_config,
)
from tilewright.integrations.transformers.quantizer import TilewrightHfQuantizer  # noqa: E402
from tilewright.nn import (  # noqa: E402
    LoRALinear,
    QuantFormat,
    QuantizedLinear,
    RowBlockLinear,
    add_lora,
    quantize_,
)
from tilewright.nn.modules_to_save import saved_modules  # noqa: E402
from tilewright.nn.weights import adapted  # noqa: E402
from tilewright.trainer.checkpoint.hf_folder import Folder  # noqa: E402

pytestmark = pytest.mark.packages

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
IDS = torch.arange(24).view(2, 12) * 7 % 96
OPTIONS = {
    "nf4": {},
    "nf4 nested": {"double_quant": True, "group_size": 32},
    "nvfp4": {},
    "block_fp8": {"group_size": 32},
    "mxfp8": {},
}


def tiny(kind="llama", dtype=torch.float32, **changes):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SHAPE, "attention_bias": True, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def again(folder, **options):
    """What this library reads from a quantized folder."""
    return load(folder, config=quantized_config(folder), **options)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def save_tensors(tensors, folder):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_config(folder, found):
    """Another configuration of the quantized weights."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": found}))


def config_of(name):
    return TilewrightConfig(name.split()[0], **OPTIONS[name])


def quantized_folder(layout, dense, folder):
    """A model and its tensors as they are stored: in the layout of an option, or modelopt's."""
    model = load(dense, quantization_config=config_of({"modelopt": "nvfp4"}.get(layout, layout)))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if layout == "modelopt":
        for path, m in layers(model).items():
            tensors = {k: t for k, t in tensors.items() if not k.startswith(f"{path}.weight")}
            tensors |= m.weights()[0].to_safetensors(f"{path}.weight", "modelopt")
        save_tensors(tensors, folder)
    return model, tensors


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A folder with a dense model in bfloat16."""
    folder = tmp_path_factory.mktemp("dense")
    tiny(dtype=torch.bfloat16).save_pretrained(folder)
    return folder


# ---- from_pretrained and save_pretrained


def read_by_others(format, folder):
    """The weights of the format's own reader, dense in bfloat16, by layer."""
    if format == "nf4":
        functional = pytest.importorskip("bitsandbytes.functional")
        pytest.importorskip("accelerate")
        model = load(folder)
        return {
            name: functional.dequantize_4bit(m.weight.data, m.weight.quant_state)
            for name, m in model.named_modules()
            if type(m).__name__ == "Linear4bit"
        }
    options = {}
    if format in ("nvfp4", "mxfp8"):
        pytest.importorskip("compressed_tensors")
        if "dequantize" not in inspect.signature(transformers.CompressedTensorsConfig).parameters:
            pytest.skip("transformers' reader of compressed-tensors does not dequantize on loading")
        found = transformers.CompressedTensorsConfig(dequantize=True)
        options["quantization_config"] = found
    else:
        pytest.importorskip("accelerate")  # which transformers asks for; it dequantizes on a CPU
    return {n: m.weight for n, m in load(folder, **options).named_modules() if type(m) is nn.Linear}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_comes_back_to_the_bit_and_others_read_it(name, dense, tmp_path):
    format = name.split()[0]
    model = load(dense, quantization_config=config_of(name))
    expected = {n for n, m in tiny().named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    assert layers(model).keys() == expected and model.dtype == torch.bfloat16
    assert type(model.lm_head) is nn.Linear
    want = logits(model)
    assert (want - logits(load(dense))).abs().max() > 1e-2  # of codes, not of the dense weights
    model.save_pretrained(tmp_path / "a")
    back = again(tmp_path / "a")
    assert layers(back).keys() == expected and torch.equal(logits(back), want)
    back.save_pretrained(tmp_path / "b")
    files = [load_file(tmp_path / x / "model.safetensors") for x in "ab"]
    assert files[0].keys() == files[1].keys()
    for key, t in files[0].items():
        assert t.dtype == files[1][key].dtype
        assert torch.equal(t.view(torch.uint8), files[1][key].view(torch.uint8)), key
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in "ab"]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    method = {"nf4": "bitsandbytes", "block_fp8": "fp8"}.get(format, "compressed-tensors")
    assert configs[0]["quantization_config"]["quant_method"] == method
    theirs = read_by_others(format, tmp_path / "a")
    for path, layer in layers(model).items():
        assert torch.equal(theirs[path], layer.dense(theirs[path].dtype)), path


def test_dense_weights_of_a_quantized_folder_have_the_models_dtype(dense, tmp_path):
    load(dense, quantization_config=TilewrightConfig("nf4")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BitsAndBytesConfig but you are passing a TilewrightConf"):
        load(tmp_path, quantization_config=TilewrightConfig("nf4"))  # transformers' own refusal
    config = quantized_config(tmp_path)
    config.intermediate_size = 64
    message = (
        r"model\.safetensors: \S+_proj cannot be read as nf4: it is \[\d+, \d+\] in the checkpoint, "
        r"and \[\d+, \d+\] in the model; and 5 more like it"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path, config=config)
    model = again(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.bfloat16().save_pretrained(tmp_path / "again")  # casting leaves codes as they are
    back = layers(again(tmp_path / "again"))
    assert all(torch.equal(m.dense(), back[n].dense()) for n, m in layers(model).items())


def test_what_a_folder_lacks_is_initialized_then_quantized_or_frozen(tmp_path):
    tiny().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name, weight = "model.layers.1.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.weight"
    del tensors[name], tensors[weight]
    save_tensors(tensors, tmp_path)
    model = load(tmp_path, quantization_config=TilewrightConfig("nf4"))
    assert model.get_parameter(name).eq(0).all()
    assert len(layers(model)) == 14
    assert 0 < layers(model)[weight.removesuffix(".weight")].dense().std() < 1
    assert not any(
        layer.bias.requires_grad for layer in layers(model).values() if layer.bias is not None
    )


class WithTwin(transformers.LlamaForCausalLM):
    """Two linear layers, neither of them a head, have one weight once the model has been loaded."""

    def __init__(self, config):
        super().__init__(config)
        self.twin = nn.Linear(128, 64, bias=False)
        twin = {"twin.weight": "model.layers.0.mlp.down_proj.weight"}
        self._tied_weights_keys = {**self._tied_weights_keys, **twin}
        self.post_init()


def test_layers_that_will_be_tied_stay_dense(tmp_path):
    WithTwin(tiny(tie_word_embeddings=True).config).save_pretrained(tmp_path)
    model = WithTwin.from_pretrained(tmp_path, quantization_config=TilewrightConfig("nf4"))
    assert "model.layers.1.mlp.down_proj" in layers(model)
    assert not {"twin", "model.layers.0.mlp.down_proj"} & set(layers(model))
    assert model.twin.weight is model.model.layers[0].mlp.down_proj.weight


def test_one_weight_is_quantized_whatever_its_key():
    """transformers' versions give it different ones."""
    model, path = tiny(), "model.layers.0.mlp.up_proj"
    quantizer = TilewrightHfQuantizer(TilewrightConfig("nf4"))
    quantizer.layers = {path}
    name, missing = f"{path}.weight", {f"{path}.weight"}
    given = {"weight.*": [model.get_parameter(name).detach()]}
    options = {"full_layer_name": name, "model": model, "missing_keys": missing}
    assert quantizer.get_quantize_ops().convert(given, **options) == {}
    assert list(layers(model)) == [path] and not missing


class KeepsItsNorms(transformers.LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ["input_layernorm"]  # noqa: RUF012


def test_weights_that_a_model_keeps_in_float32_stay_so(dense, tmp_path):
    options = {"quantization_config": TilewrightConfig("nf4"), "dtype": torch.bfloat16}
    KeepsItsNorms.from_pretrained(dense, **options).save_pretrained(tmp_path)
    model = KeepsItsNorms.from_pretrained(
        tmp_path, config=quantized_config(tmp_path), dtype=torch.bfloat16
    )
    layer = model.model.layers[0]
    assert layer.input_layernorm.weight.dtype == torch.float32
    assert layer.post_attention_layernorm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [*OPTIONS, "modelopt"])
def test_a_tensor_that_a_quantized_layer_lacks_is_named(name, dense, tmp_path):
    format, layer = name.split()[0].replace("modelopt", "nvfp4"), "model.layers.1.mlp.down_proj"
    model, tensors = quantized_folder(name, dense, tmp_path)
    assert torch.equal(logits(again(tmp_path)), logits(model))
    stored = [key for key in tensors if key.startswith(f"{layer}.weight")]
    assert len(stored) > 1
    for key in stored:
        broken = {k: t for k, t in tensors.items() if k != key}
        save_tensors(broken, tmp_path)
        with pytest.raises(ValueError, match=rf"{layer} cannot be read as {format}: ") as raised:
            again(tmp_path)
        assert key in str(raised.value), raised.value
    # Without all that nesting adds, only the dtype of the scales tells that they are codes.
    if nested := [key for key in stored if ".nested_" in key]:
        broken = {k: t for k, t in tensors.items() if k not in nested}
        save_tensors(broken, tmp_path)
        with pytest.raises(ValueError, match=rf"{layer} cannot be read as nf4: ") as raised:
            again(tmp_path)
        assert f"{', '.join(nested)} are missing" in str(raised.value), raised.value
    # All but the codes, also by a state dict.
    codes = {k: t for k, t in tensors.items() if k not in stored[1:]}
    codes |= {stored[0]: tensors[stored[0]]}
    save_tensors(codes, tmp_path)
    with pytest.raises(ValueError, match=rf"{layer} cannot be read as {format}: "):
        again(tmp_path)
    if hasattr(HfQuantizer, "get_new_dtype"):  # else transformers has cast FP8 codes before
        with pytest.raises(ValueError, match=rf"{layer} cannot be read as {format}: .* is missing"):
            transformers.LlamaForCausalLM.from_pretrained(
                None, config=quantized_config(tmp_path), state_dict=codes
            )


BAD = (0.0, -1.0, float("nan"), float("inf"))
# By layout: the tensors with scales, and whether their file has numbers that no scale can be; and
# what keeps a 0 there whole: the codes of zeros.
SCALES = {
    "nf4": {".absmax": BAD},
    "nf4 nested": {".nested_absmax": BAD},
    "nvfp4": {"_scale": BAD[:3], "_global_scale": BAD},
    "modelopt": {"_scale": BAD[:3], "_scale_2": BAD},
    "block_fp8": {"_scale_inv": BAD},
    "mxfp8": {"_scale": (255,)},  # E8M0's NaN; it has neither 0 nor signs
}


def with_scale(tensor, value):
    """A copy, whose last number is another."""
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


@pytest.mark.parametrize("layout", SCALES)
def test_a_scale_that_takes_the_values_of_codes_is_named(layout, dense, tmp_path):
    _, tensors = quantized_folder(layout, dense, tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    beside = {key.removeprefix(name) for key in tensors if key.startswith(name) and key != name}
    bytes_of_scales = {".absmax"} if layout == "nf4 nested" else set()  # codes of scales
    other = {"_packed", ".quant_map", ".nested_quant_map", ".quant_state.bitsandbytes__nf4"}
    assert beside - other - bytes_of_scales == set(SCALES[layout])  # none is left out
    for ending, values in SCALES[layout].items():
        for value in values:
            changed = with_scale(tensors[name + ending], value)
            save_tensors({**tensors, name + ending: changed}, tmp_path)
            shown = "nan" if layout == "mxfp8" else f"{value:g}"
            place = rf"{re.escape(name + ending)} must be .*, got {shown}\b"
            with pytest.raises(ValueError, match=rf"model\.safetensors: .*{place}"):
                again(tmp_path)
            if layout == "mxfp8":  # which the trainer does not read
                continue
            with pytest.raises(ValueError, match=rf"{place}.*, in \S*model\.safetensors"):
                Folder(tmp_path).read(name)


ZEROS = {  # codes, by layout, of elements that are all 0, however a writer divides by 0
    "nf4": ("", [0x77, 0x00, 0x88]),
    "nvfp4": ("_packed", [0x00, 0x88, 0x77, 0x7F]),  # those of 7: too small for a scale in FP8
    "modelopt": ("", [0x00, 0x88, 0x77, 0x7F]),
    "block_fp8": ("", [0x00, 0x80]),
}


@pytest.mark.parametrize("layout", ZEROS)
def test_a_scale_of_zero_over_a_block_of_zeros_is_read(layout, dense, tmp_path):
    _, tensors = quantized_folder(layout, dense, tmp_path)
    name, [ending, *_] = "model.layers.1.mlp.down_proj.weight", SCALES[layout]
    held, found = ZEROS[layout]
    for code in found:
        changed = {name + ending: with_scale(tensors[name + ending], 0.0)}
        codes = tensors[name + held].clone()
        if layout == "block_fp8":
            codes.view(torch.uint8)[-32:, -32:] = code
        else:
            codes.view(-1)[{"nf4": -32}.get(layout, -8) :] = code
        save_tensors({**tensors, **changed, name + held: codes}, tmp_path)
        weight = layers(again(tmp_path))[name.removesuffix(".weight")].dense(torch.bfloat16)
        assert torch.equal(Folder(tmp_path).read(name), weight)
        assert not weight[-1, -16:].any() and weight[0].any()


def test_fp8_with_partial_last_blocks_is_read_and_refused_where_it_would_be_written(tmp_path):
    """DeepSeek's layers of 576 rows are such: 64 rows beside blocks of 128."""
    model = tiny(hidden_size=192, intermediate_size=320, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        tensors |= ops.quantize_block_fp8(tensors[key]).to_safetensors(key)
    save_tensors(tensors, tmp_path)
    save_config(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    read = again(tmp_path)
    assert len(layers(read)) == 7
    for path, layer in layers(read).items():
        assert torch.equal(layer.dense(torch.bfloat16), Folder(tmp_path).read(f"{path}.weight"))
    assert read.config.quantization_config.to_dict()["weight_block_size"] == [128, 128]
    assert accelerate(read, quiet=True) and logits(read).isfinite().all()
    with pytest.raises(ValueError, match="as BlockFP8: transformers reads whole blocks"):
        read.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("name", ["nf4", "nvfp4", "block_fp8"])  # of each library's layout
def test_a_head_that_is_stored_beside_a_tied_embedding_is_the_one_that_is_used(name, tmp_path):
    tiny(dtype=torch.bfloat16, tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors, head = load_file(tmp_path / "model.safetensors"), torch.randn(96, 64).bfloat16()
    save_tensors({**tensors, "lm_head.weight": head}, tmp_path)
    config = config_of(name)
    loaded, in_place = load(tmp_path, quantization_config=config), load(tmp_path)
    quantize_(in_place, config.quantize, quiet=True)
    for model, folder in ((loaded, tmp_path / "loaded"), (in_place, tmp_path / "in_place")):
        model.save_pretrained(folder)
        back = again(folder)
        for one in (model, back):
            accelerate(one, quiet=True)
            with torch.no_grad():
                hidden = one.model(IDS).last_hidden_state
                assert torch.equal(one(IDS).logits, hidden @ head.T)


FIELDS = {
    "format": "nvfp4",
    "group_size": 32,
    "double_quant": True,
    "modules_to_not_convert": ["layers.0.mlp"],
}


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_a_configuration_survives_a_dictionary_and_a_file(field, dense, tmp_path):
    named = inspect.signature(TilewrightConfig).parameters
    assert [n for n in named if n != "quant_method"] == list(FIELDS)  # none is left out
    config, plain = TilewrightConfig(**{field: FIELDS[field]}), TilewrightConfig()
    assert getattr(config, field) == FIELDS[field] != getattr(plain, field)
    assert set(config.to_dict()) == set(named)
    kept = AutoConfig.from_pretrained(dense)
    kept.quantization_config = config.to_dict()
    kept.save_pretrained(tmp_path / "config")
    in_file = AutoConfig.from_pretrained(tmp_path / "config").quantization_config
    for back in (config.to_dict(), json.loads(config.to_json_string(use_diff=False)), in_file):
        assert TilewrightConfig.from_dict(back).to_dict() == config.to_dict(), back
        assert getattr(TilewrightConfig.from_dict(back), field) == FIELDS[field]
    # And a model that is quantized by it, saved and read.
    model = load(dense, quantization_config=TilewrightConfig.from_dict(config.to_dict()))
    model.save_pretrained(tmp_path / "model")
    read = again(tmp_path / "model")
    for (path, own), (_, back) in zip(layers(model).items(), layers(read).items(), strict=True):
        assert twnn.format_of(own.weights()[0]) == twnn.format_of(back.weights()[0]), path
        assert twnn.format_of(own.weights()[0]).name == config.format
        assert getattr(own.weights()[0], "offset", None) is not None or not config.double_quant
        assert torch.equal(own.dense(), back.dense())
    assert ("model.layers.0.mlp.up_proj" in layers(read)) == (field != "modules_to_not_convert")
    if field in ("format", "double_quant"):
        of_file = quantized_config(tmp_path / "model").quantization_config
        assert of_file[field] == FIELDS[field]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_models_are_saved_for_the_dtype_in_which_compressed_tensors_compute(
    dtype, format, dense, tmp_path
):
    loaded = load(dense, quantization_config=TilewrightConfig(format), dtype=dtype)
    in_place = tiny(dtype=dtype)
    quantize_(in_place, format, quiet=True)
    for name, model in (("loaded", loaded), ("in_place", in_place)):
        if dtype != torch.bfloat16:
            with pytest.raises(ValueError, match=r"cannot write \w+ for a model in float"):
                model.save_pretrained(tmp_path / name)
            continue
        model.save_pretrained(tmp_path / name)
        pytest.importorskip("compressed_tensors")
        torch.testing.assert_close(
            logits(load(tmp_path / name)), logits(model), rtol=0, atol=2e-2
        )  # a few roundings to bfloat16


def test_a_tensor_scale_comes_back_to_the_bit():
    """compressed-tensors store its inverse."""
    changed = 0
    for seed in range(40):
        weight = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
        q = TilewrightConfig("nvfp4").quantize(weight)
        back = type(q).from_safetensors(q.to_safetensors(), dtype=q.dtype)
        assert torch.equal(back.global_scale, q.global_scale)
        changed += not torch.equal(ops.quantize_nvfp4(weight).global_scale, q.global_scale)
    assert 0 < changed < 40


def test_one_dense_weight_is_in_memory_at_a_time(dense, monkeypatch):
    seen = []
    own = TilewrightConfig.quantize

    def quantize(self, weight):
        if not weight.is_meta:
            seen.append(weight.shape)
            for m in building[-1].modules():  # all others are still on meta, or quantized
                if type(m) is nn.Linear and m is not building[-1].lm_head:
                    assert m.weight.is_meta
        return own(self, weight)

    building = []
    kind = transformers.LlamaForCausalLM
    post_init = kind.post_init
    monkeypatch.setattr(kind, "post_init", lambda m: (building.append(m), post_init(m))[1])
    monkeypatch.setattr(TilewrightConfig, "quantize", quantize)
    load(dense, quantization_config=TilewrightConfig("nf4"))
    assert len(seen) == 14


def test_what_is_named_and_experts_stay_dense(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = tiny("qwen3_moe", torch.bfloat16, **sizes, head_dim=16)
    model.save_pretrained(tmp_path / "dense")
    config = TilewrightConfig("nvfp4", modules_to_not_convert=["o_proj", "layers.1"])
    model = load(tmp_path / "dense", quantization_config=config)
    attention = "model.layers.0.self_attn"
    assert set(layers(model)) == {f"{attention}.{x}_proj" for x in "qkv"}
    model.save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert f"{attention}.o_proj" in written["ignore"] and "lm_head" in written["ignore"]
    back = again(tmp_path / "out")
    assert torch.equal(logits(back), logits(model))
    assert set(layers(copy.deepcopy(back))) == set(layers(model))


def test_the_inner_model_is_saved_too_and_another_dtype_is_loaded(dense, tmp_path):
    model = load(dense, quantization_config=TilewrightConfig("nf4"))
    model.model.save_pretrained(tmp_path / "inner")
    found = load_file(tmp_path / "inner/model.safetensors")
    assert not [name for name in found if "data_0" in name]
    inner = AutoModel.from_pretrained(
        tmp_path / "inner", config=quantized_config(tmp_path / "inner")
    )
    with torch.no_grad():
        assert torch.equal(inner(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    model.save_pretrained(tmp_path / "whole")
    half = again(tmp_path / "whole", dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    assert {q.dtype for m in layers(half).values() for q in m.weights()} == {torch.float16}
    assert logits(twnn.merge_and_unload(half)).dtype == torch.float16


def test_a_loaded_model_is_dequantized_adapted_and_trained(dense, tmp_path):
    pytest.importorskip("accelerate")
    model = load(dense, quantization_config=TilewrightConfig("nf4"), dtype=torch.float32)
    add_lora(model, rank=2)
    with pytest.raises(ValueError, match=r"^save_pretrained cannot write adapters of tilewright"):
        model.save_pretrained(tmp_path / "out")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True
    )
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}]
    transformers.Trainer(model=model, args=arguments, train_dataset=rows)  # or raises
    want, twin = logits(model), copy.deepcopy(model)
    for plain in (model.dequantize(), twnn.merge_and_unload(twin)):
        assert not layers(plain) and not hasattr(plain.config, "quantization_config")
        torch.testing.assert_close(logits(plain), want, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(load(tmp_path / "plain")), want, rtol=1e-4, atol=1e-4)


def test_a_saved_model_is_dequantized_to_its_dtype(dense, tmp_path):
    model = load(dense, quantization_config=TilewrightConfig("nf4"))
    want = {n: m.dense(torch.bfloat16) for n, m in layers(model).items()}
    model.save_pretrained(tmp_path / "quantized")
    model.dequantize()
    for name, weight in want.items():
        assert torch.equal(model.get_submodule(name).weight, weight), name
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(load(tmp_path / "plain")), logits(model))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"format": "int4"}, ValueError, r"name must be one of \['nvfp4', .*, 'mxfp8'\]"),
        ({"format": "mxfp8", "group_size": 16}, ValueError, "mxfp8 has groups of 32, got 16"),
        ({"format": "nf4", "group_size": 7}, ValueError, "nf4 has groups of .*, got 7"),
        ({"format": "nvfp4", "double_quant": True}, ValueError, "double_quant must be False for"),
        ({"quant_method": "fp8"}, ValueError, "quant_method must be 'tilewright', got 'fp8'"),
        ({"double_quant": 1}, TypeError, "double_quant must be a bool, got 1"),
        ({"modules_to_not_convert": "lm_head"}, TypeError, "must be a list of names, got the text"),
    ],
)
def test_a_wrong_configuration_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        TilewrightConfig(**arguments)


@pytest.mark.parametrize(
    "config, options, message",
    [
        ({"modules_to_not_convert": ["nosuch"]}, {}, "'nosuch' match no module; there are .*q_p"),
        ({"modules_to_not_convert": ["layers"]}, {}, "LlamaForCausalLM has no layer to quantize"),
        ({}, {"device_map": {"": "disk"}}, "device_map must not have 'disk' with TilewrightConfig"),
        ({"format": "block_fp8", "group_size": 48}, {}, r"q_proj is \[64, 64\] .* of 48 x 48"),
    ],
)
def test_what_cannot_be_loaded_is_refused(config, options, message, dense):
    with pytest.raises(ValueError, match=message):
        load(dense, quantization_config=TilewrightConfig(**config), **options)


@pytest.mark.parametrize(
    "module, name",
    [
        ("core_model_loading", "WeightConverter"),
        ("quantizers.base", "HfQuantizer"),
        ("utils.quantization_config", "QuantizationConfigMixin"),
    ],
)
def test_a_part_of_transformers_that_moved_is_named_with_the_version(module, name, monkeypatch):
    package = sys.modules[TilewrightConfig.__module__.rpartition(".")[0]]
    monkeypatch.delitem(sys.modules, TilewrightConfig.__module__)
    monkeypatch.delattr(package, "quantizer")
    monkeypatch.delattr(importlib.import_module(f"transformers.{module}"), name)
    sentence = rf"transformers {transformers.__version__} has no transformers\.{module}\.{name}; 5"
    with pytest.raises(ImplementationUnavailable, match=sentence):
        package.TilewrightConfig  # noqa: B018


def test_names_of_tensors_cannot_be_checked_by_a_part_that_moved(dense, tmp_path, monkeypatch):
    model = load(dense, quantization_config=TilewrightConfig("nf4"))
    loading = importlib.import_module("transformers.core_model_loading")
    monkeypatch.delattr(loading, "rename_source_key")
    with pytest.raises(ImplementationUnavailable, match=r"no core_model_loading\.rename_source"):
        model.save_pretrained(tmp_path)


def test_folders_that_are_not_read_are_refused(dense, tmp_path):
    with pytest.raises(ValueError, match=r"is not quantized; from_pretrained\(\.\.\., quant"):
        quantized_config(dense)
    model = tiny("qwen3_moe", num_experts=4, moe_intermediate_size=32, head_dim=16)
    model.save_pretrained(tmp_path)
    fp4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    for found, message in (
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, r"block_size': \[1, 128\]"),
        (fp4, "fp4"),
    ):
        save_config(tmp_path, found)
        with pytest.raises(ValueError, match=f"{message}.* is not read; accepted are bitsandbytes"):
            quantized_config(tmp_path)
    save_config(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if ".experts.0." in key)
    q = ops.quantize_block_fp8(tensors.pop(name), block=(32, 32))
    tensors |= q.to_safetensors(name)
    save_tensors(tensors, tmp_path)
    with pytest.raises(ValueError, match=r"experts\.0\.\w+ is quantized, and transformers stacks"):
        again(tmp_path)


# ---- quantize_


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.up = nn.Linear(64, 128)
        self.gate = nn.Linear(64, 4)
        self.rows = RowBlockLinear(64, 64)
        self.down = nn.Linear(128, 64, bias=False)
        self.out = nn.Linear(64, 96, bias=False)
        self.out.weight = self.embed.weight
        self.score = nn.Linear(64, 2)
        self.hooked = nn.Linear(64, 64)
        self.hooked.register_forward_hook(lambda *_: None)


def test_quantize_says_what_it_did(capsys):
    model = Tied()
    x, dense = torch.randn(3, 64), copy.deepcopy(model)
    report = quantize_(model)
    assert capsys.readouterr().out == f"{report}\n"
    first, changed, *left = str(report).splitlines()
    assert first == "quantize_: Tied" and "nf4        1 up, 1 down: 0.1 MiB -> 0.0" in changed
    reasons = {
        "embed": "an embedding",
        "gate": "a router",
        "rows": "a subclass of Linear (RowBlockLinear)",
        "out": "shares its weight",
        "score": "an output layer",
        "hooked": "has hooks or a forward of its own",
    }
    for line, (name, reason) in zip(left, reasons.items(), strict=True):
        assert line.startswith(f"  left     1 {name}: {reason}")
    assert report.changed == ("up", "down") and (report.before, report.after) == (65536, 9216)
    assert torch.equal(model.down.dense(), ops.dequantize_nf4(ops.quantize_nf4(dense.down.weight)))
    torch.testing.assert_close(model.up(x), x @ model.up.dense().T + dense.up.bias)
    assert model.gate.weight.requires_grad and not model.up.bias.requires_grad
    quantize_(copy.deepcopy(dense), modules_to_not_convert=["up"], quiet=True)
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no layer .*\(embed: an embedding; up: quantize"):
        quantize_(model)


def test_names_of_older_libraries_are_not_written(tmp_path):
    """transformers reads LayerNorm.gamma too, and writes it where it has read it."""
    shape = {**SHAPE, "max_position_embeddings": 32, "num_hidden_layers": 1}
    model = AutoModel.from_config(AutoConfig.for_model("bert", **shape))
    model.save_pretrained(tmp_path / "dense")
    quantize_(model, quiet=True)
    model.save_pretrained(tmp_path / "nf4")
    dense, nf4 = (load_file(tmp_path / kind / "model.safetensors") for kind in ("dense", "nf4"))
    assert "embeddings.LayerNorm.weight" in nf4 and dense.keys() <= nf4.keys()


def test_quantize_leaves_what_it_would_break():
    """Shared modules, heads inside a head, hooks of backward; and a weight that is read."""

    class Reads(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(64, 64)
            self.two = self.one
            self.tied = nn.Linear(64, 64)
            self.bare = self.tied.weight
            self.hooked = nn.Linear(64, 64)
            self.hooked.register_full_backward_hook(lambda *_: None)
            self.classifier = nn.Sequential(nn.Linear(64, 64), Reads(64, 64))
            self.read = nn.Linear(64, 64)

        def forward(self, x):
            x = self.read(x.to(self.read.weight.dtype))
            return x @ self.read.weight.T

    model = Model()
    report = quantize_(model, quiet=True)
    assert report.changed == ("read",)
    assert set(report.left) == {"one", "tied", "hooked", "classifier.0", "classifier.1"}
    x = torch.randn(2, 64)
    dense = model.read.dense()
    want = (x @ dense.T + model.read.bias) @ dense.T
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)


def test_experts_that_are_named_stay_dense():
    moe = pytest.importorskip("tilewright.trainer.models.moe")
    from tilewright.trainer.models.model_config import ModelConfig

    sizes = {"num_experts": 2, "moe_intermediate_size": 64}
    config = ModelConfig("qwen3_moe", 8, 64, 64, 1, 1, 1, 64, **sizes)
    experts = moe.Experts(config, moe.Ops.resolve())
    for p in experts.parameters():
        nn.init.normal_(p)
    model = nn.ModuleDict({"experts": experts, "up": nn.Linear(64, 64)})
    report = quantize_(model, modules_to_not_convert=iter(["experts"]), quiet=True)
    assert report.changed == ("up",)
    assert report.left["experts"] == "named in modules_to_not_convert"
    found = quantize_(model, quiet=True).changed
    assert found == ("experts.gate_up_proj", "experts.down_proj")


def test_a_weight_that_is_not_finite_is_named_and_the_model_stays_guarded(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.up_proj: .*finite"):
        quantize_(model, quiet=True)
    model.save_pretrained(tmp_path)  # what was quantized before, in the format's layout
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "data_0" in name]


def test_what_quantize_cannot_do_is_refused(monkeypatch):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        quantize_("model")
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'int8'"):
        quantize_(Tied(), "int8")
    with pytest.raises(ValueError, match="got a linear layer, which cannot be replaced in place"):
        quantize_(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="modules_to_not_convert: 'nosuch' match no module"):
        quantize_(Tied(), modules_to_not_convert=["nosuch"])
    with pytest.raises(ValueError, match=r"no layer to quantize \(no linear layers\)"):
        quantize_(nn.Sequential(nn.ReLU()))
    model = nn.ModuleDict({"up_proj": nn.Linear(64, 64)})
    add_lora(model, rank=2)
    with pytest.raises(ValueError, match="up_proj has adapters; quantize the model before"):
        quantize_(model)
    assert isinstance(model["up_proj"].base, nn.Linear)
    monkeypatch.setattr("tilewright.nn.quantize.is_sharded", lambda t: True)
    with pytest.raises(ValueError, match=r"up is sharded over ranks; quantize .* before"):
        quantize_(Tied())


@pytest.mark.parametrize("format", ["nf4", "nvfp4", "mxfp8", QuantFormat("block_fp8", 32)], ids=str)
def test_a_model_quantized_in_place_is_saved_too(format, tmp_path):
    model = tiny(dtype=torch.bfloat16)
    quantize_(model, format, quiet=True)
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(logits(again(tmp_path)), logits(model))
    odd = tiny(dtype=torch.bfloat16, intermediate_size=72)
    quantize_(odd, format, quiet=True)
    if format == "nf4":
        odd.save_pretrained(tmp_path / "odd")
    else:
        with pytest.raises(ValueError, match=r"^save_pretrained cannot write \S+ \[\d+, \d+\] as "):
            odd.save_pretrained(tmp_path / "odd")
        assert not (tmp_path / "odd").exists()


def test_accelerated_models_are_quantized_before_and_after(tmp_path):
    first, second = tiny(), tiny()
    quantize_(first, quiet=True)
    accelerate(first, quiet=True)
    accelerate(second, quiet=True)
    quantize_(second, quiet=True)
    assert torch.equal(logits(first), logits(second))
    assert "changed" in str(accelerate(second, quiet=True))
    assert torch.equal(logits(first), logits(second))
    first.save_pretrained(tmp_path)
    with accelerated(quiet=True) as reports:
        third = again(tmp_path)
    assert reports[0].changed and torch.equal(logits(third), logits(first))


# ---- the options of add_lora


def test_dropout_is_of_the_adapters_input():
    torch.manual_seed(3)
    layer = LoRALinear(nn.Linear(64, 32), rank=4, alpha=8, dropout=0.5)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(5, 64)
    torch.manual_seed(4)
    y = layer(x)
    torch.manual_seed(4)
    kept = torch.nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(y, layer.base(x) + kept @ layer.lora_A.T @ layer.lora_B.T * 2)
    assert (kept == 0).any()
    layer.eval()
    torch.testing.assert_close(layer(x), layer.base(x) + x @ layer.lora_A.T @ layer.lora_B.T * 2)
    assert "dropout=0.5" in repr(layer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lora_dropout": 1.0}, "lora_dropout must be a number from 0 to below 1, got 1.0"),
        ({"modules_to_save": ["nosuch"]}, "modules_to_save: 'nosuch' matches no module"),
        ({"modules_to_save": ["mlp"]}, r"modules_to_save: .*mlp\.\w+ has an adapter"),
        ({"modules_to_save": ["self_attn"], "targets": ["up_proj"]}, "self_attn is quantized"),
        ({"modules_to_save": ["act_fn"]}, "act_fn has no parameters"),
        ({"modules_to_save": ["lm_head"]}, r"lm_head shares a weight with model\.embed_tokens"),
    ],
)
def test_options_of_adapters_that_cannot_be_are_refused(options, message):
    model = tiny(tie_word_embeddings=True)
    quantize_(model, modules_to_not_convert=["mlp"], quiet=True)
    with pytest.raises(ValueError, match=message):
        add_lora(model, rank=2, **options)
    assert not any(True for _ in adapted(model))
    with pytest.raises(TypeError, match="modules_to_save must be a list of names, got the text"):
        add_lora(model, modules_to_save="lm_head")


def test_modules_to_save_are_trained_and_read_by_peft(tmp_path, capsys):
    peft = pytest.importorskip("peft")
    tiny().save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base")
    options = {"lora_dropout": 0.25, "modules_to_save": ["lm_head"]}
    add_lora(model, ["q_proj"], rank=2, alpha=4, use_rslora=True, **options)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert "lm_head.weight" in trained and len(trained) == 5
    twnn.print_trainable_parameters(model)
    every = sum(p.numel() for p in model.parameters())
    assert f"trainable params: 6,656 || all params: {every:,} ||" in capsys.readouterr().out
    twnn.print_trainable_parameters(nn.Identity())
    assert "all params: 0 || trainable%: 0.0000" in capsys.readouterr().out
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        model.train()(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    twnn.save_adapter(model, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / twnn.ADAPTER_CONFIG).read_text())
    assert (written["lora_dropout"], written["modules_to_save"]) == (0.25, ["lm_head"])
    theirs = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-4)
    assert (logits(load(tmp_path / "base")) - logits(model)).abs().max() > 1e-2
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("adapter", "theirs"):
        ours = load(tmp_path / "base")
        twnn.load_adapter(ours, tmp_path / folder)
        assert torch.equal(logits(ours), logits(model))
        assert ours.lm_head.weight.requires_grad
        assert ours.model.layers[0].self_attn.q_proj.dropout == 0.25
    with pytest.raises(ValueError, match="adapters of the file and of the model differ in lm_head"):
        other = load(tmp_path / "base")
        add_lora(other, ["q_proj"], rank=2, alpha=4, rslora=True)
        twnn.load_adapter(other, tmp_path / "adapter")
    for found, message in (
        ("lm_head", "modules_to_save must be a list of names, got 'lm_head'"),
        (["nosuch"], r"base_model\.model\.lm_head\.weight is not supported"),
        (["lm_head", "norm"], r"has \S*norm with \{\}, the model \{'weight': \(64,\)"),
    ):
        file = tmp_path / "adapter" / twnn.ADAPTER_CONFIG
        file.write_text(json.dumps({**written, "modules_to_save": found}))
        with pytest.raises(ValueError, match=message):
            twnn.load_adapter(load(tmp_path / "base"), tmp_path / "adapter")
    twnn.merge_and_unload(ours)
    assert not list(saved_modules(ours)) and not ours.lm_head.weight.requires_grad
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-4, atol=1e-4)


# ---- PEFT over quantized layers


def adapters_of_peft(model):
    return {
        n.replace("base_model.model.", "").replace(".default.weight", ""): p
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def test_saved_modules_keep_their_counters_and_errors_name_the_folder(tmp_path):
    def model():
        parts = {"norm": nn.BatchNorm1d(64), "up_proj": nn.Linear(64, 64)}
        return nn.ModuleDict(parts)

    first, second = model(), model()
    add_lora(first, ["up_proj"], rank=2, modules_to_save=["norm"])
    first["norm"](torch.randn(4, 64))
    twnn.save_adapter(first, tmp_path / "a", base_model="base")
    twnn.load_adapter(second, tmp_path / "a")
    assert second["norm"].num_batches_tracked == 1

    apart, tied = tiny(), tiny(tie_word_embeddings=True)
    add_lora(apart, rank=2, modules_to_save=["lm_head"])
    twnn.save_adapter(apart, tmp_path / "b", base_model="base")
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'b'}: modules_to_save: lm_head shares"):
        twnn.load_adapter(tied, tmp_path / "b")


@pytest.mark.parametrize("format", ["nf4", "nvfp4", "block_fp8", "mxfp8"])
def test_peft_trains_saves_and_merges_over_quantized_layers(format, dense, tmp_path):
    peft = pytest.importorskip("peft")

    def base():
        return load(dense, quantization_config=config_of(format), dtype=torch.float32)

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    model, ours = peft.get_peft_model(base(), config), base()
    add_lora(ours, ["q_proj", "down_proj"], rank=2, alpha=4)
    factors = adapters_of_peft(model)
    with torch.no_grad():
        for name, p in factors.items():
            p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
            ours.get_parameter(name).copy_(p)
    for m in (model, ours):
        m.train()(IDS, labels=IDS).loss.backward()
    for name, p in factors.items():
        torch.testing.assert_close(p.grad, ours.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.Adam(factors.values(), lr=0.02)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(model(IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    want = logits(model.eval())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base(), tmp_path).eval()), want)
    loaded = base()
    twnn.load_adapter(loaded, tmp_path)
    torch.testing.assert_close(logits(loaded), want, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base()))
    before = {n: m.dense() for n, m in layers(model).items()}
    model.merge_adapter()
    assert (logits(model) - want).abs().max() < 0.5 * (logits(base()) - want).abs().max()
    model.unmerge_adapter()
    assert all(torch.equal(m.dense(), before[n]) for n, m in layers(model).items())
    assert torch.equal(logits(model), want)
    merged = model.merge_and_unload()
    if format in ("nvfp4", "mxfp8"):
        with pytest.raises(ValueError, match=r"cannot write \w+ .* in float32: .*bfloat16"):
            merged.save_pretrained(tmp_path / "merged")
        merged.to(torch.bfloat16)
    merged.save_pretrained(tmp_path / "merged")
    back = again(tmp_path / "merged", dtype=torch.float32)
    if format not in ("nvfp4", "mxfp8"):
        assert torch.equal(logits(back), logits(merged))
    for name, m in layers(merged).items():
        assert torch.equal(layers(back)[name].dense(), m.dense()), name


@pytest.mark.parametrize("saved", ["q_proj", "lm_head"], ids=["adapters", "modules_to_save"])
@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "in_place"])
def test_the_base_under_peft_is_not_saved_by_pefts_names(in_place, saved, dense, tmp_path):
    peft = pytest.importorskip("peft")
    if in_place:
        base = tiny()
        quantize_(base, quiet=True)
    else:
        base = load(dense, quantization_config=TilewrightConfig("nf4"))
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    if saved == "q_proj":
        config.modules_to_save = None
    model = peft.get_peft_model(base, config)
    with pytest.raises(ValueError, match=r"cannot write a model with PEFT's adapters \(model\.lay"):
        base.save_pretrained(tmp_path / "base")
    assert not list(tmp_path.glob("base/*"))
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    want = logits(model.eval())
    model.unload().save_pretrained(tmp_path / "base")
    assert torch.equal(logits(again(tmp_path / "base", dtype=want.dtype)), want)


@pytest.mark.parametrize("format", ["nf4", "nvfp4", "block_fp8"])
def test_transformers_own_adapters_over_quantized_layers(format, dense, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers.integrations.peft import MIN_PEFT_VERSION

    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(
            f"add_adapter of transformers {transformers.__version__} takes peft {MIN_PEFT_VERSION} "
            f"or later, {peft.__version__} is installed"
        )
    model = load(dense, quantization_config=config_of(format), dtype=torch.float32)
    before = logits(model)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    model.add_adapter(config)
    assert torch.equal(logits(model), before), "new adapters add nothing"
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert "lora_" in name
            torch.nn.init.normal_(p, std=0.1)
    assert not torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names


def test_what_peft_cannot_do_over_quantized_layers_is_refused(monkeypatch):
    peft = pytest.importorskip("peft")
    from tilewright.integrations.peft import register

    register()
    register()
    for options, message in (
        ({"use_dora": True}, "use_dora must not be set over a quantized layer, got True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be one of .*, got 'pissa'"),
        ({"lora_bias": True, "bias": "none"}, "lora_bias must be False over a quantized layer"),
    ):
        model = tiny()
        quantize_(model, quiet=True)
        with pytest.raises(ValueError, match=message):
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], **options))
    model = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["q_proj"]))
    assert type(model.base_model.model.model.layers[0].self_attn.q_proj).__name__ == "Linear"
    with pytest.raises(ValueError, match=r"q_proj has adapters; quantize the model before"):
        quantize_(model)
    quantized = tiny()
    quantize_(quantized, quiet=True)
    model = peft.get_peft_model(quantized, peft.LoraConfig(target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="adapter 'default' makes weights that are not finite"):
        layer.merge(safe_merge=True)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImplementationUnavailable, match="the package 'peft' is not installed"):
        register()
