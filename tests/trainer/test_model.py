"""The trainer's models against transformers, on the same weights, in float32."""

import copy
import itertools
import json
import pathlib
import shutil
from unittest import mock

import pytest
import torch
from packaging.version import Version

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

from tilewright import ops as tw
from tilewright.core.registry import ImplementationUnavailable
from tilewright.nn import quantize_model
from tilewright.ops.attention.attention import takes_values
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.layers import AddRMSNorm
from tilewright.trainer.models.model import ModelConfig, Ops, Transformer
from tilewright.trainer.models.ops_choice import attention_request
from tilewright.trainer.parallel.recomputation import recompute_activations

pytestmark = pytest.mark.packages

SMOLLM2 = pathlib.Path(__file__).parents[2] / ".cache/smollm2"
SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
MIXED = {**MOE, "mlp_only_layers": [1], "norm_topk_prob": False}
WINDOW = {"sliding_window": 7}
LATE = {**WINDOW, "use_sliding_window": True}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # transformers' name of qk_rope_head_dim
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
}
LONGROPE = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 2.0],
        "long_factor": [1.0, 2.1, 3.3, 4.5, 5.6, 7.0],
    },
}
# A padding token's embedding would be zero, and without a gradient.
TOKENS = {"pad_token_id": None, "eos_token_id": 2}
SHAPES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-moe": {"model_type": "qwen3_moe", **MOE},
    "qwen3-moe-mixed": {"model_type": "qwen3_moe", **MIXED},
    "mistral": {"model_type": "mistral", **WINDOW},
    "mistral-without-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-windows": {
        "model_type": "qwen2",
        **LATE,
        "max_window_layers": 1,
        "rope_parameters": YARN,
    },
    "qwen3-windows": {"model_type": "qwen3", **LATE, "max_window_layers": 2},
    "gemma3": {
        "model_type": "gemma3_text",
        **WINDOW,
        "query_pre_attn_scalar": 24,
        **TOKENS,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **WINDOW,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {**YARN, "truncate": False, "beta_fast": 4.0},
        "swiglu_limit": 0.5,
    },
    "deepseek-v3": {"model_type": "deepseek_v3", **LATENT},
    "deepseek-v3-plain": {
        "model_type": "deepseek_v3",
        **LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmo2": {"model_type": "olmo2", **TOKENS, "rope_parameters": YARN},
    "phi3": {"model_type": "phi3", **TOKENS, **WINDOW, "tie_word_embeddings": True},
    "phi3-longrope": {"model_type": "phi3", **TOKENS, **LONGROPE},
    "glm4": {"model_type": "glm4", **TOKENS, "rope_parameters": YARN},
    "glm4-without-biases": {"model_type": "glm4", **TOKENS, "attention_bias": False},
}


IDS = torch.arange(12)[None]


def test_the_residual_stream_keeps_its_dtypes_under_autocast(monkeypatch):
    """On a GPU autocast would widen both of a fused norm's inputs to float32."""
    seen, op = [], tw.add_rmsnorm

    def recorded(x, residual, *args, **options):
        seen.append((torch.is_autocast_enabled("cpu"), x.dtype, residual.dtype))
        return op(x, residual, *args, **options)

    monkeypatch.setattr(tw, "add_rmsnorm", recorded)
    norm = AddRMSNorm(
        ModelConfig("llama", 8, 16, 16, 1, 1, 1, 16),
        Ops.resolve(device_type="cpu", dtype=torch.bfloat16),
    )
    x, residual = torch.randn(4, 16).bfloat16(), torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        _, total = norm(x, residual)
    assert seen == [(False, torch.bfloat16, torch.float32)]
    assert total.dtype == torch.float32, "of a model's embeddings, which are float32"


@pytest.mark.parametrize("name", ["qwen2", "deepseek-v3"])
def test_every_projection_is_asked_for_float32_gradients(name, tmp_path, monkeypatch):
    """The model is under autocast, as in a step: PyTorch's gradients would be rounded on a GPU."""
    theirs(name, tmp_path)
    model, asked = ours(tmp_path / "theirs"), []
    monkeypatch.setattr(
        "tilewright.nn.linear.rounds_gradients", lambda x, weight: asked.append(weight)
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS)
    expected = [
        n
        for n, p in model.named_parameters()
        if n.endswith("proj.weight") or ("kv_a_proj" in n and p.dim() == 2)
    ]
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(w)] for w in asked} == set(expected) and expected


def theirs(name, tmp_path):
    torch.manual_seed(1)
    # A copy: a configuration writes into the dictionary that it is given.
    config = transformers.AutoConfig.for_model(**copy.deepcopy(SMALL | SHAPES[name]))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():  # norm weights of one would hide a missing norm
        for n, p in model.named_parameters():
            if p.dim() == 1 or n.endswith("_bias"):
                p.add_(0.3 * torch.randn_like(p))
        for n, b in model.named_buffers():
            if n.endswith("e_score_correction_bias"):
                b.add_(0.3 * torch.randn_like(b))
    model.save_pretrained(tmp_path / "theirs")
    return model


def ours(folder, merge_qkv=True, **ops):
    config = hf.load_config(folder)
    ops = Ops.resolve(attention_request=attention_request(config), **ops)
    model = Transformer(config, ops, merge_qkv)
    hf.load_weights(model, folder)
    return model


def close(a, b):
    assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("name", SHAPES)
def test_logits_loss_and_gradients_equal_transformers(name, tmp_path):
    if name == "gpt-oss" and Version(transformers.__version__) < Version("5.19"):
        pytest.skip("transformers before 5.19 does not read swiglu_limit from the configuration")
    reference = theirs(name, tmp_path)
    ids = torch.randint(0, 211, (2, 40))
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1)
    expected = reference(ids, labels=ids)
    expected.loss.backward()
    wanted = dict(reference.named_parameters())
    for merge_qkv in (True, False):
        model = ours(tmp_path / "theirs", merge_qkv)
        close(model(ids), expected.logits)
        loss = model(ids, labels=labels)
        torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
        loss.backward()
        for param, p in model.named_parameters():
            if not p.requires_grad:
                assert param.endswith("e_score_correction_bias") and p.grad is None
                continue
            names = hf.sources(param, model.config)
            if ".experts." in param:
                want = wanted[param].grad
                want = hf.fuse(param, [want], model.config) if names == [param] else want
            else:
                want = torch.cat([wanted[n].grad for n in names])
                rows = hf.rows_of(param, model.config)
                want = want if rows is None else want[rows.first : rows.end]
            assert (p.grad - want).abs().max() <= 1e-4 * want.abs().max(), param


def test_smollm2_logits_equal_transformers_on_the_real_weights():
    if not (SMOLLM2 / "config.json").is_file():
        pytest.skip("no .cache/smollm2; `make .cache/smollm2/config.json` makes it")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    ids = tokenizer(
        "The capital of France is Paris, and the sea around Brittany is cold in winter.",
        return_tensors="pt",
    ).input_ids
    with torch.no_grad():
        logits = ours(SMOLLM2)(ids)
        close(logits, reference(ids).logits)
    after_is = tokenizer("The capital of France is", return_tensors="pt").input_ids.shape[1] - 1
    assert tokenizer.decode(logits[0, after_is].argmax()) == " Paris"


@pytest.mark.parametrize(
    "name, attn",
    [
        *itertools.product(["qwen3", "qwen3-moe", "deepseek-v3"], ["eager", "sdpa"]),
        *(
            (name, "eager")
            for name in ("mistral", "qwen2-windows", "gemma3", "gpt-oss", "olmo2", "phi3", "glm4")
        ),
    ],
)
def test_packed_documents_equal_separate_ones(name, attn, tmp_path):
    theirs(name, tmp_path)
    model = ours(tmp_path / "theirs", attn_implementation=attn)
    documents = [torch.randint(0, 211, (n,)) for n in (5, 1, 17)]
    packed = model(
        torch.cat(documents)[None], cu_seqlens=torch.tensor([0, 5, 6, 23], dtype=torch.int32)
    )
    alone = torch.cat([model(d[None])[0] for d in documents])
    torch.testing.assert_close(packed[0], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_latent_attention_pads_values_only_for_implementations_of_one_width(attn, tmp_path):
    """Outputs and gradients are those of padded values."""
    theirs("deepseek-v3", tmp_path)
    found = []
    for padded in (False, True):
        model = ours(tmp_path / "theirs", attn_implementation=attn)
        for layer in model.model.layers:
            assert layer.self_attn.takes_values
            layer.self_attn.takes_values = not padded
        with mock.patch.object(tw, "attention", wraps=tw.attention) as calls:
            loss = model(IDS, labels=IDS)
        loss.backward()
        config = model.config
        widths = {call.args[2].shape[3] for call in calls.call_args_list}
        assert widths == {config.head_dim if padded else config.v_head_dim}
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for a, b in zip(*found, strict=True):
        # Sums of float32 in another order, relative to the largest number of the tensor.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(0.1, b.abs().max().item()))
    assert attention_request(config).value_dim == config.v_head_dim
    assert attention_request(config, implementation="native").value_dim is None
    assert not takes_values("flash_attention_2", config.head_dim, config.v_head_dim)


def test_boundaries_on_the_host_spare_attention_reading_them(monkeypatch):
    """Each layer gets a bound of the longest document, a power of two, so that compiled code has
    few variants.
    """
    given = []
    monkeypatch.setattr(
        tw, "attention", lambda q, k, v, max_seqlen, **_: given.append(max_seqlen) or q.clone()
    )
    made = Transformer(ModelConfig.from_hf({"model_type": "qwen3", **SMALL}), Ops.resolve())
    ids = torch.arange(23)[None]
    for ends, bound in (
        ((0, 5, 6, 23), 32),
        ((0, 4, 8, 23), 16),
        ((0, 11, 15, 23), 16),
        ((0, 23), 32),
        (None, None),
    ):
        made(ids, cu_seqlens=torch.tensor(ends or (0, 3, 23)), ends=ends)
        assert given == [bound] * 3
        given.clear()
    made(ids[:, :1], cu_seqlens=torch.tensor((0, 1, 1)), ends=(0, 1, 1))
    assert given == [1] * 3
    for cu, ends, message in (
        ((0, 5, 23), (0, 6, 23), "ends must be the values of cu_seqlens, got"),
        ((0, 5, 23), (0, 23), "ends must be the values of cu_seqlens, got"),
        (None, (0, 23), "ends are cu_seqlens on the host: give both"),
    ):
        with pytest.raises(ValueError, match=message):
            made(ids, cu_seqlens=cu and torch.tensor(cu), ends=ends)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_compiled_layers_are_not_made_anew_for_other_documents(attn):
    from torch._dynamo.testing import CompileCounter

    made = Transformer(ModelConfig.from_hf({"model_type": "qwen3", **SMALL}), Ops.resolve(attn))
    counter = CompileCounter()
    made.model.layers[0].compile(backend=counter)
    ids, counts = torch.randint(0, 211, (1, 16)), []
    for ends in (
        (0, 16),
        (0, 5, 16),
        (0, 7, 8, 16),
        (0, 1, 2, 3, 16),
        (0, 2, 4, 6, 8, 16),
        (0, 4, 8, 12, 16),
        range(0, 17, 2),
    ):
        made(ids, cu_seqlens=torch.tensor(tuple(ends)), ends=ends)
        counts.append(counter.frame_count)
    assert counts[0] > 0 and counts[3:] == counts[2:3] * 4


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-moe-mixed", "gemma3", "deepseek-v3", "olmo2", "phi3", "glm4"]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(name, reentrant, tmp_path):
    theirs(name, tmp_path)
    ids = torch.randint(0, 211, (1, 20))
    found, calls = [], []
    for modules in ("off", None, ["self_attn"], ["mlp"], ["self_attn", "mlp"]):
        model = ours(tmp_path / "theirs")
        if modules != "off":
            recompute_activations(model, modules, reentrant)
        calls.append(0)
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))
        model(ids, labels=ids).backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], grads, strict=True))
    off, whole, attn, mlp, both = calls
    assert off < min(attn, mlp) and max(attn, mlp) < both < whole


@pytest.mark.parametrize("modules", [None, ["mlp"], ["self_attn", "mlp"]])
def test_experts_alone_are_recomputed_without_choosing_again(modules, tmp_path):
    """The same gradients; each router runs once, each layer's experts twice; and less memory is
    saved than without.
    """
    theirs("qwen3-moe-mixed", tmp_path)
    ids = torch.randint(0, 211, (1, 20))

    def measure(alone):
        model = ours(tmp_path / "theirs")
        if alone:
            recompute_activations(model, modules, experts_alone=True)
        calls, kept = {"gate": 0, "experts": 0}, {}

        def counted(name, call):
            def wrapped(*args):
                calls[name] += 1
                return call(*args)

            return wrapped

        for block in model.model.layers:
            if hasattr(block.mlp, "experts"):
                block.mlp.gate.forward = counted("gate", block.mlp.gate.forward)
                block.mlp.experts._compute = counted("experts", block.mlp.experts._compute)

        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(ids, labels=ids)
        loss.backward()
        return [p.grad for p in model.parameters()], calls, sum(kept.values())

    found = measure(False), measure(True)
    (plain, once, much), (recomputed, twice, little) = found
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert once == {"gate": 2, "experts": 2} and twice == {"gate": 2, "experts": 4}
    assert little < much - 2 * 20 * 2 * 2 * 48 * 4  # gate and up of two layers


@pytest.mark.parametrize("name", SHAPES)
def test_folders_round_trip_bit_for_bit_and_load_in_transformers(name, tmp_path):
    reference = theirs(name, tmp_path)
    hf.save_weights(ours(tmp_path / "theirs"), tmp_path / "ours", max_shard_bytes=100_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    stored = again.state_dict()
    for n, t in reference.state_dict().items():
        assert torch.equal(t, stored.pop(n)), n
    assert not stored
    ids = torch.randint(0, 211, (1, 12))
    torch.testing.assert_close(again(ids).logits, reference(ids).logits, rtol=0, atol=0)
    assert not list(tmp_path.glob(".*"))


def test_projections_that_are_one_tensor_on_disk_are_its_rows_in_the_model(tmp_path):
    reference = theirs("phi3-longrope", tmp_path)
    model = ours(tmp_path / "theirs", merge_qkv=False)
    hf.save_weights(model, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / hf.SINGLE)
    assert all(torch.equal(t, stored.pop(n)) for n, t in reference.state_dict().items())
    assert not stored
    name = "model.layers.1.self_attn.qkv_proj.weight"
    rewrite(tmp_path / "theirs", lambda t: {**t, name: t[name][1:]})
    for merge_qkv in (True, False):
        with pytest.raises(
            ValueError, match=r"qkv_proj.weight has shape \[127, 64\], .* \[128, 64\]"
        ):
            ours(tmp_path / "theirs", merge_qkv)


def test_a_quantized_tensor_is_not_cut_into_projections(tmp_path):
    """Merged, its codes are read as they are."""
    reference, name = theirs("phi3", tmp_path), "model.layers.1.self_attn.qkv_proj.weight"
    codes = tw.quantize_nf4(reference.state_dict()[name])
    rewrite(
        tmp_path / "theirs",
        lambda t: {n: t[n] for n in t if n != name} | codes.to_safetensors(name),
    )
    config, found = hf.load_config(tmp_path / "theirs"), {}
    for merge_qkv in (True, False):
        model = Transformer(
            config, Ops.resolve(attention_request=attention_request(config)), merge_qkv
        )
        quantize_model(model, "nf4")
        found[merge_qkv] = model
    hf.load_weights(found[True], tmp_path / "theirs")
    [weight] = found[True].model.layers[1].self_attn.qkv_proj.weights()
    assert torch.equal(weight.data, codes.data)
    with pytest.raises(
        ValueError, match=r"qkv_proj.weight is nf4, and .*q_proj.weight would be some"
    ):
        hf.load_weights(found[False], tmp_path / "theirs")


def test_longrope_turns_each_document_by_its_own_length(tmp_path):
    """As transformers alone: the original context has 64 tokens."""
    reference = theirs("phi3-longrope", tmp_path)
    model, ids = ours(tmp_path / "theirs"), torch.randint(0, 211, (1, 70 + 64 + 9))
    documents = ids.split((70, 64, 9), 1)
    want = [reference(d).logits for d in documents]
    cu_seqlens = torch.tensor([0, 70, 134, 143], dtype=torch.int32)
    close(model(ids, cu_seqlens=cu_seqlens), torch.cat(want, 1))
    for document, logits in zip(documents, want, strict=True):
        close(model(document), logits)
        close(model(document, position_ids=torch.arange(document.shape[1])[None]), logits)
    with pytest.raises(ValueError, match="share_prefix = True: documents of more than 64 tokens"):
        model(ids, cu_seqlens=cu_seqlens, prefixes=((134, 143, 70, 75),))


def test_meta_construction_and_initialisation_depend_on_the_seed_alone():
    config = ModelConfig.from_hf({"model_type": "qwen3", **SMALL, "tie_word_embeddings": True})
    models = []
    for meta, seed in ((True, 3), (False, 3), (False, 4)):
        with torch.device("meta" if meta else "cpu"):
            model = Transformer(config, Ops.resolve())
        if meta:
            model.to_empty(device="cpu")
            model.tie()
        init_weights(model, seed)
        models.append(model)
    a, b, c = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    assert 0.015 < models[0].model.layers[0].self_attn.qkv_proj.weight.std() < 0.025


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_no_two_parameters_start_from_the_same_numbers(kind):
    """Nor layers, gates and ups, or experts, whatever their shapes."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = {"model_type": kind, **SMALL, **(experts if kind == "qwen3_moe" else {})}
    model = Transformer(ModelConfig.from_hf(shape), Ops.resolve())
    init_weights(model, 3)
    drawn = {}
    for name, p in model.named_parameters():
        if p.std() > 0:  # norms are constant
            half = p.shape[-2] // 2
            for i, matrix in enumerate(p.detach().reshape(-1, *p.shape[-2:])):
                for part, rows in (("first", matrix[:half]), ("second", matrix[half:])):
                    drawn[name, i, part] = tuple(rows.flatten()[:16].tolist())
    assert len(drawn) > 2 * 2 * 4 and len(set(drawn.values())) == len(drawn)


NUMBERS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
]
OPTIONAL = ["num_key_value_heads", "head_dim", "max_position_embeddings"]
EXPERTS = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"]
COUNT = "config.json: {} must be an integer of at least 1 and at most 16777216, got {!r}".format
ABOVE_0 = "{} must be a finite number above 0, got {!r}".format


@pytest.mark.parametrize(
    "change, message",
    [
        *(
            ({name: value}, COUNT(name, value))
            for name in (*NUMBERS, *OPTIONAL, *EXPERTS)
            for value in (0, 10**12)
        ),
        *(({"head_dim": value}, COUNT("head_dim", value)) for value in (16.0, True, -16)),
        *(({name: None}, COUNT(name, None)) for name in (*NUMBERS, "moe_intermediate_size")),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 must divide"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts = 8, got 9"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of integers, got 1"),
        *(
            ({"rope_theta": value}, ABOVE_0("config.json: rope_theta", value))
            for value in (0, -1.0, "10000", float("inf"))
        ),
        ({"rope_parameters": {"rope_theta": 0}}, ABOVE_0("rope_theta", 0)),
        ({"rope_parameters": {**LLAMA3, "factor": 0}}, ABOVE_0("factor", 0)),
        ({"rope_parameters": [8]}, "rope_parameters must be an object, got"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "rope type .*'linear'.* is not supported"),
        ({"rms_norm_eps": 0}, ABOVE_0("rms_norm_eps", 0)),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, got 'false'",
        ),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ],
)
def test_a_number_of_config_json_is_taken_as_it_is_or_refused(change, message):
    whole = {"model_type": "qwen3_moe", **SMALL, **MOE}
    assert ModelConfig.from_hf(
        {**whole, **dict.fromkeys((*OPTIONAL, "decoder_sparse_step", "rope_theta"))}
    ) == (
        ModelConfig.from_hf({**whole, "num_key_value_heads": 4, "max_position_embeddings": 4096})
    )  # null: the default
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**whole, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mamba"}, "model_type must be one of .*'mamba'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({"model_type": "llama", **SMALL, **change})


def test_unknown_and_unusable_implementations_are_refused_before_anything_is_built():
    for options, said in (
        ({"attn_implementation": "flash_attention_9"}, "attention: unknown .* 'flash_attention_9'"),
        ({"moe_implementation": "nosuch"}, r"moe_mlp: unknown .* have \['auto', 'gluon'"),
    ):
        with pytest.raises(ValueError, match=said):
            Ops.resolve(**options)
    with pytest.raises(ImplementationUnavailable, match=r"moe_mlp\[triton\]"):
        Ops.resolve(moe_implementation="triton", device_type="xpu")
    assert Ops.resolve(moe_implementation="eager").names()["moe_mlp"] == "eager"
    elsewhere = "xpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ImplementationUnavailable, match=r"rmsnorm.*triton"):
        Ops.resolve(rmsnorm="triton", device_type=elsewhere)


def rewrite(folder, change):
    """The tensors of a folder, modified; as one file."""
    tensors = change(load_file(folder / hf.SINGLE))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / hf.SINGLE)


Q, K = (f"model.layers.1.self_attn.{n}_proj.weight" for n in "qk")


def test_weights_of_a_dtype_that_is_no_weights_are_refused(tmp_path):
    theirs("qwen3", tmp_path)
    folder, accepted = tmp_path / "theirs", r"in model\.safetensors; accepted are F32, BF16, F16, "
    for dtype, name in ((torch.int8, "I8"), (torch.bool, "BOOL"), (torch.complex64, "C64")):
        rewrite(folder, lambda t, dtype=dtype: {**t, K: torch.ones(32, 64, dtype=dtype)})
        with pytest.raises(ValueError, match=rf"\n  {K} is {name} {accepted}"):
            ours(folder)
    for good in (torch.float64, torch.float16):
        rewrite(folder, lambda t, good=good: {**t, K: torch.ones(32, 64, dtype=good)})
        ours(folder)


def test_an_index_names_files_of_its_folder(tmp_path):
    theirs("qwen3", tmp_path)
    folder, outside = tmp_path / "theirs", tmp_path / "outside.safetensors"
    names = list(load_file(folder / hf.SINGLE))
    (folder / hf.SINGLE).rename(outside)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "inner").mkdir()
    shutil.copy(outside, folder / "inner/x.safetensors")
    index = folder / hf.INDEX

    def weight_map(file, **others):
        return {"weight_map": dict.fromkeys(names, file) | others}

    def refused(text, message):
        index.write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(ValueError, match=message) as caught:
            ours(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)

    save_file({Q: torch.ones(1)}, folder / "inner/y.safetensors")
    up = "../outside.safetensors"
    for file in (up, str(outside), "link.safetensors", f"inner/../{up}"):
        refused(weight_map(file), f"weight_map names {file!r}, which is not in the folder")
    for text, message in (
        (weight_map(3), "weight_map must name files, got 3"),
        ({}, "weight_map must be an object, from tensors' names to files', got NoneType"),
        ({"weight_map": names}, "weight_map must be an object, .*, got list"),
        ([], "must hold a JSON object, got list"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        (
            weight_map("inner/x.safetensors", **{K: "inner/y.safetensors"}),
            rf"y\.safetensors: holds no {K}, although",
        ),
    ):
        refused(text, message)
    index.write_text(json.dumps(weight_map("inner/x.safetensors")))
    want = ours(folder)(IDS)
    # A snapshot in the Hub's cache contains links to blobs beside it.
    cache = tmp_path / "models--a--b"
    (cache / "snapshots/c0ffee").mkdir(parents=True)
    (cache / "blobs").mkdir()
    shutil.copy(outside, cache / "blobs/5eed")
    shutil.copy(folder / "config.json", cache / "snapshots/c0ffee")
    (cache / "snapshots/c0ffee/x.safetensors").symlink_to("../../blobs/5eed")
    (cache / "snapshots/c0ffee" / hf.INDEX).write_text(json.dumps(weight_map("x.safetensors")))
    assert torch.equal(ours(cache / "snapshots/c0ffee")(IDS), want)


@pytest.mark.parametrize(
    "quantization, message",
    [
        ([], "quantization_config must be an object, got list"),
        ({"weight_block_size": 128}, "weight_block_size must be two integers of .*, got 128"),
        ({"weight_block_size": []}, r"weight_block_size must be two integers .*, got \[\]"),
        ({"weight_block_size": [128.0, 128]}, "weight_block_size must be two integers"),
        ({"ignore": "lm_head"}, "ignore of .* must be a list of names, got 'lm_head'"),
    ],
)
def test_a_quantization_that_config_json_describes_wrongly_is_refused(
    quantization, message, tmp_path
):
    theirs("qwen3", tmp_path)
    folder, file = tmp_path / "theirs", tmp_path / "theirs/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ValueError, match=message):
        hf.excluded(folder)
        ours(folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": []}')
    file.unlink()
    with pytest.raises(ValueError, match=r"config\.json: quantization must be an object, got list"):
        hf.excluded(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_that_a_folder_holds(dtype, tmp_path):
    reference = theirs("qwen3", tmp_path).to(dtype)
    folder = tmp_path / "theirs"
    for options in ({}, {"max_shard_size": "100KB"}):
        reference.save_pretrained(folder, **options)
        assert hf.stored_dtype(folder) == dtype
    hf.save_weights(ours(folder), tmp_path / "again", dtype=hf.stored_dtype(folder))
    assert {t.dtype for t in load_file(tmp_path / "again" / hf.SINGLE).values()} == {dtype}
    for file in folder.glob("model*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    for where in (folder, folder / "config.json"):
        assert hf.stored_dtype(where, weights=False) == dtype
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        hf.stored_dtype(folder)
    for name in ("dtype", "torch_dtype"):
        for value, want in ((str(dtype)[6:], dtype), (None, torch.float32)):
            (folder / "config.json").write_text(json.dumps({**config, "dtype": None, name: value}))
            assert hf.stored_dtype(folder, weights=False) == want
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "int8"}))
    with pytest.raises(
        ValueError, match=r"config\.json's dtype must be one of float32, bfloat16, .*, got 'int8'"
    ):
        hf.stored_dtype(folder, weights=False)


def test_a_checkpoint_that_does_not_fit_reports_everything_at_once(tmp_path):
    theirs("qwen3", tmp_path)
    folder, absent = tmp_path / "theirs", "model.layers.0.self_attn.k_proj.weight"
    other = {"model.norm.weight": torch.ones(3), "model.layers.9.extra": torch.ones(1)}
    rewrite(folder, lambda t: {n: t[n] for n in t if n != absent} | {Q: t[K], K: t[Q]} | other)
    with pytest.raises(ValueError) as caught:
        ours(folder)
    assert {*str(caught.value).splitlines()[1:]} == {
        f"  missing {absent}",
        "  unexpected model.layers.9.extra",
        "  model.norm.weight has shape [3], the model's has [64]",
        f"  {Q} has shape [32, 64], the model's has [64, 64]",
        f"  {K} has shape [64, 64], the model's has [32, 64]",
    }
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        hf.load_weights(Transformer(hf.load_config(folder), Ops.resolve()), tmp_path)
