"""tilewright verify: clean models have no finding; bad input ends in one sentence. Planted faults
are in test_plants.py.
"""

import contextlib
import io
import pathlib
import re
import shutil
import sys

import pytest
import safetensors.torch
import torch
from helpers import keep_tables
from plants.verify import COMMON, PLANTS, TOKENS, drawn, patched, tiny, with_adapter
from torch import nn

import tilewright
from tilewright.integrations.transformers import PARTS, accelerate
from tilewright_lab.verify import verify as tool

pytestmark = pytest.mark.packages

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    keep_tables(monkeypatch)


def verified(model, **options):
    return tilewright.verify(model, tokens=TOKENS, **options)


def test_a_class_that_a_library_has_patched_is_not_the_reference(monkeypatch):
    """As Liger does: classes and functions are replaced in transformers' own module."""
    from transformers.models.llama import modeling_llama

    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin)
    )
    found = verified(tiny(num_hidden_layers=1))
    assert {f.module for f in found.findings} == {
        "model.layers.0.mlp",
        "model.layers.0.self_attn",
    }, str(found)
    assert any(re.search(r"a forward of .*test_verify", by) for _, by in found.seen), found.seen


# ---- models without a fault


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("llama", "mistral", "qwen3_moe", "gemma3_text")
CLEAN = [f"accelerated-{dtype}-{kind}" for kind in KINDS for dtype in DTYPES]
# Models as they are: nothing but its fault is found in a planted one, too.
CLEAN += [
    "plain-bf16-llama",
    "plain-fp32-mistral",
    "plain-bf16-qwen3_moe",
    "plain-bf16-gemma3_text",
]


@pytest.mark.parametrize("case", CLEAN)
def test_a_clean_model_has_no_finding(case):
    patch, dtype, kind = case.split("-")
    patch, dtype = patch == "accelerated", DTYPES[dtype]
    # Roundings add up over layers in bfloat16; Gemma's layers have two types.
    layers = 2 if dtype == torch.bfloat16 or kind == "gemma3_text" else 1
    model = tiny(kind, dtype, num_hidden_layers=layers)
    if patch:
        accelerate(model, parts=PARTS, quiet=True)
    found = verified(model)
    assert found.ok, str(found)
    assert found.scenes == ("plain", "padded", "packed")
    assert max(row.units for row in found.rows) < 1 and not found.left.get("norm")
    seen = " ".join(by for _, by in found.seen)
    for op in ("rmsnorm[", "rope[", "attention[", "linear_cross_entropy["):
        assert (op in seen) == patch, seen
    assert patch or "sdpa" in seen, seen


def test_the_callers_autocast_and_no_grad_change_nothing():
    model = tiny(num_hidden_layers=1)
    rows = verified(model).rows
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = verified(model)
    assert found.ok and found.rows == rows
    assert any(row.what.startswith("gradient") for row in rows)


@pytest.mark.parametrize(
    "kind, dtype, changes",
    [
        ("falcon", torch.float32, {}),  # adds to the output of its attention in place
        ("opt", torch.bfloat16, {"ffn_dim": 48, "word_embed_proj_dim": 32}),  # large biases
        ("mamba", torch.float32, {"state_size": 4}),  # no attention, and a cache of its own
    ],
)
def test_a_clean_model_of_another_kind_has_no_finding(kind, dtype, changes):
    from transformers import AutoConfig

    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    config = AutoConfig.for_model(kind, **{n: COMMON[n] for n in names}, **changes)
    found = verified(drawn(config, dtype))
    assert found.ok and found.scenes[:2] == ("plain", "padded"), str(found)
    assert not any("Error" in note for note in found.notes), found.notes


def test_a_cache_may_differ_as_far_as_the_eager_twin_does(monkeypatch):
    """Roundings behind massive activations: of a trained model, so that its drift is planted."""
    from tilewright_lab.verify.probes import Moved, cache_drift
    from tilewright_lab.verify.record import observable
    from tilewright_lab.verify.reference import weights_of
    from tilewright_lab.verify.scenes import quiet_state, scenes

    model, drifts = tiny(num_hidden_layers=1), []
    for one in (model, PLANTS["stale_cache"].make()):
        with quiet_state(one, False):
            [plain, *_] = scenes(one, None, TOKENS)
            plain = plain._replace(batch=plain.without_labels())
            drifts.append(cache_drift(one, observable(one, weights_of(one)), plain))
    assert drifts[0] < 1e-4 < 0.1 < drifts[1]

    def far(root, *_):
        return Moved("model.norm", "far", 2.0, 0.3) if root is model else None

    monkeypatch.setattr(tool, "stale_cache", far)
    for drift, ok in ((0.1, True), (0.05, False)):
        monkeypatch.setattr(tool, "cache_drift", lambda root, *_, d=drift: d * (root is not model))
        found = verified(model)
        assert found.ok == ok, str(found)
    assert found.findings[0].message == "stale cache: far"


def test_a_model_with_adapters_and_quantized_layers():
    pytest.importorskip("peft")
    model = with_adapter(torch.float32, num_hidden_layers=1)
    assert verified(model).ok
    quantized = tiny(hidden_size=64, num_hidden_layers=1)
    tilewright.quantize_(quantized, "nf4")
    found = verified(quantized)
    assert found.ok, str(found)
    assert found.notes == ["7 quantized layers: right are their dequantized weights"]


def test_nothing_is_left_behind():
    model = tiny("qwen3_moe", num_hidden_layers=1)
    model.model.layers[0].mlp.train(False)
    weight = model.model.norm.weight
    weight.grad = torch.ones_like(weight)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    held = [dict(vars(m)) for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert verified(model).ok
    assert torch.equal(torch.rand(2), expected)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in model.parameters() if p is not weight)
    for module, before in zip(model.modules(), held, strict=True):
        assert vars(module).keys() == before.keys()
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_leak_in_the_mask_of_the_model_is_seen_without_a_reference(monkeypatch):
    """Documents that see each other, by a mask that the patched model builds."""
    model = tiny(num_hidden_layers=1)
    own = model.model.forward

    def forward(*args, position_ids=None, **kwargs):
        if position_ids is not None:
            position_ids = torch.arange(position_ids.shape[1])[None]
        return own(*args, position_ids=position_ids, **kwargs)

    model.model.forward = forward
    said = {f.module: f.message for f in verified(model).findings}
    assert "leak: " in said["model.layers.0.self_attn"]
    assert "documents that see each other" in said["model.layers.0.self_attn"]


# ---- the given batch, and what cannot be verified


def test_a_given_batch_with_padding_and_a_right_configuration(tmp_path):
    model = tiny(num_hidden_layers=1)
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = tilewright.verify(model, {"input_ids": ids, "labels": ids, "attention_mask": mask})
    assert found.ok and found.scenes == ("given", "padded", "packed"), str(found)
    tiny(num_hidden_layers=1, rms_norm_eps=1e-3).config.save_pretrained(tmp_path)
    [finding, *_] = verified(model, config=str(tmp_path)).findings
    assert "eps 1e-06 in the module, 0.001 by the configuration" in finding.message


def without_parameters():
    model = nn.Module()
    model.config = None
    return model


def with_nan():
    model = tiny(num_hidden_layers=1)
    model.model.norm.weight.data[3] = torch.nan
    return model


def rowed(rows=1, **filled):
    ids = torch.arange(3, 12).expand(rows, 9)
    return {"input_ids": ids} | {name: torch.full_like(ids, v) for name, v in filled.items()}


def raising(training):
    """A model that raises in one of its modes."""
    model = tiny(num_hidden_layers=1)

    def forward(own, *args, **kwargs):
        if model.training == training:
            raise KeyError("no")
        return own(*args, **kwargs)

    patched(model.model.norm, forward)
    return model


def without_embedding():
    model = tiny(num_hidden_layers=1)
    model.get_input_embeddings = lambda: None
    return model


def encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=8, num_layers=1, num_heads=1, d_ff=8, d_kv=8)
    )


def with_dora():
    model = tiny(num_hidden_layers=1)
    tilewright.nn.add_lora(model, ["q_proj"], rank=2, use_dora=True)
    return model


# The sentence, and the model or the options that have it.
REFUSED = {
    "without a config": lambda: (nn.Linear(2, 2), {}),
    "model must be a torch.nn.Module, got int": lambda: (3, {}),
    "tokens must be an int of 8 or more, got 4": lambda: {"tokens": 4},
    "lengths must be ints of 8 or more, got 4": lambda: {"lengths": [40, 4]},
    "batch must be a mapping with input_ids": lambda: {"batch": {"ids": 1}},
    "batch must be a mapping with input_ids, got list": lambda: {"batch": [1]},
    "input_ids must be from 0 to 63, got 64": lambda: {"batch": rowed(input_ids=64)},
    "input_ids must be from 0 to 63, got -1": lambda: {"batch": rowed(input_ids=-1)},
    "batch must have a row of tokens, got input_ids [0, 9]": lambda: {"batch": rowed(0)},
    "batch must have a target: labels after": lambda: {"batch": rowed(labels=-100)},
    "batch must have a target: labels aft": lambda: {"batch": rowed(attention_mask=0)},
    "labels that are not -100 must be from 0 to 63, got 64": lambda: {"batch": rowed(labels=64)},
    "labels must be a tensor of input_ids' shape [1, 9], got [1, 4]": lambda: {
        "batch": rowed() | {"labels": torch.zeros(1, 4).long()}
    },
    "config must be a configuration of transformers, or a folder with one, got int": lambda: {
        "config": 5
    },
    "gate_proj.weight is [48, 32] in the model and [40, 32] by its configuration": lambda: {
        "config": tiny(intermediate_size=40).config
    },
    "parameters on 200000000 tokens takes about": lambda: {"tokens": 10**8},
    "verify it before torch.compile": lambda: (torch.compile(tiny()), {}),
    "model is a Module without parameters": lambda: (without_parameters(), {}),
    "model.norm.weight has values that are not finite": lambda: (with_nan(), {}),
    "a training step on the plain input fails with KeyError: 'no'": lambda: (raising(True), {}),
    "a forward in evaluation mode fails with KeyError: 'no'": lambda: (raising(False), {}),
    "it has no embedding of them (LlamaForCausalLM); only language models are verified": lambda: (
        without_embedding(),
        {},
    ),
    "model is an encoder and a decoder (T5ForConditional": lambda: (encoder_decoder(), {}),
    "is on the meta device": lambda: (tiny().to("meta"), {}),
    "q_proj: its adapter is a variant of LoRA (use_dora)": lambda: (with_dora(), {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_verified_is_said_in_a_sentence(words):
    given = REFUSED[words]()
    model, options = given if isinstance(given, tuple) else (tiny(), given)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        tilewright.verify(model, **options)
    assert "\n" not in str(error.value)


def test_the_command(tmp_path, capsys, monkeypatch):
    from tilewright.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "recipe", None)
    del sys.modules["recipe"]  # and none is left afterwards
    folder = tmp_path / "model"
    tiny(num_hidden_layers=1).save_pretrained(folder)
    out = tmp_path / "page"
    assert main(["verify", str(folder), "--tokens", "12", "--accelerate", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "no findings" in said and "rmsnorm[" in said
    [page] = out.iterdir()
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2 and "http" not in text

    (tmp_path / "recipe.py").write_text(
        "from transformers import AutoModelForCausalLM\n"
        "def faulty():\n"
        f"    model = AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        "    model.model.norm.variance_epsilon = 0.1\n"
        "    return model\n"
        "def nothing():\n"
        "    return 3\n"
        "def leaving():\n"
        "    raise SystemExit(0)\n"
    )
    state = safetensors.torch.load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    shutil.copytree(folder, tmp_path / "partial")
    safetensors.torch.save_file(state, tmp_path / "partial/model.safetensors", {"format": "pt"})
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "a.C", "AutoModelForCausalLM": "a.M"}}'
    )
    assert main(["verify", "recipe:faulty", "--tokens", "12", "--dtype", "bfloat16"]) == 1
    assert "model.norm: " in capsys.readouterr().out
    for name, words in (
        ("recipe:nothing", "recipe:nothing must return a torch.nn.Module, or one and a batch"),
        ("recipe.py:nothing", "recipe.py:nothing must return a torch.nn.Module, or one and"),
        ("recipe:fault", "recipe has no 'fault'; did you mean 'faulty'?"),
        ("absent.py:build", "absent.py: no such file"),
        ("recipe", "recipe names no function: give recipe.py:FUNCTION"),
        ("./recipe.py", "./recipe.py names no function: give ./recipe.py:FUNCTION"),
        ("./model --config /nowhere", "/nowhere: no such folder"),
        ("./model --config ./remote", "config './remote' cannot be read: ValueError: "),
        ("./nowhere", "./nowhere: no such folder"),
        (str(out), "cannot be loaded: "),
        ("recipe:leaving", "recipe:leaving cannot be called: SystemExit: 0"),
        ("./partial", "has no weights for model.norm.weight, which would be random"),
        ("./remote", "its class is code beside its weights; load it in a function"),
        ("./model --tokens 0", "--tokens must be 8 or more, got 0"),
        ("./model --lengths 40,4", "--lengths must be 8 or more, got 4"),
        ("./model --out recipe.py/x", "--out must be a folder that can be written to, got recipe"),
        ("./model --device cuda:99", "./model cannot be moved to cuda:99: "),
    ):
        assert main(["verify", *name.split()]) == 2
        said = capsys.readouterr().err
        assert words in said and said.splitlines()[-1].startswith("tilewright verify: "), said


def test_example_of_the_page():
    """docs/verify.md: its program runs, and prints what the page shows of it."""
    text = (pathlib.Path(__file__).parents[2] / "docs/verify.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    [shown] = re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "docs/verify.md", "exec"), {})
    numbers = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
    said = [numbers.sub("#", line) for line in out.getvalue().splitlines()]
    for line in shown.splitlines():
        assert numbers.sub("#", line) in said, out.getvalue()
