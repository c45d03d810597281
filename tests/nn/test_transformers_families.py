"""Every small-buildable language model of transformers, with attention by tilewright: it has the
logits of transformers' eager attention or is rejected in one sentence. Likewise for every class of
fused experts.
"""

import collections
import importlib
import inspect
import pathlib
import re

import pytest
import torch

from tilewright import ImplementationUnavailable
from tilewright.integrations import transformers as integration

pytestmark = pytest.mark.packages

AUTO = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
}
TESTED = "5.23"  # the version of transformers for the numbers and names below
# Least number of families with eager's logits, computed here (there are 140, 22 and 22). Others are
# rejected (13, 6 and 8), or have their own attention, or none, and never request one (24, 22 and
# 4).
COMPUTED = {"causal": 120, "masked": 18, "seq2seq": 18}
# whose masks alone say who sees whom, and those that compute with their mask or add keys of their
# own
NAMED = {
    **dict.fromkeys(
        ("nllb-moe", "pegasus_x", "qwen2_moe", "phimoe", "afmoe", "jetmoe", "llama4_text"),
        "computed",
    ),
    **dict.fromkeys(
        ("deepseek_v4", "doge", "hy_v4", "deepseek_v32", "glm_moe_dsa", "axk2", "t5gemma2"),
        "refused",
    ),
}
LEFT_OUT = {
    "blt": "its local encoder's width follows from several fields",
    "dbrx": "its configuration has no rope_theta, which its model reads",
    "dots3_note": "its vision tower's widths follow from several fields",
    "gemma3n": "needs timm (gemma3n_text is here)",
    "gemma4_assistant": "has no layers of its own without another model's cache",
    "gemma4_unified_assistant": "has no layers of its own without another model's cache",
    "mimo_v2_flash": "its rotary width is a third of a head's, and then odd",
    "musicgen": "is three models, and its configuration is of none",
    "musicgen_melody": "is three models, and its configuration is of none",
    "nemo_speechlm": "computes from sound",
    "reformer": "has an attention of its own, and needs factors of its width",
    "vibevoice_asr": "is 700 million parameters of sound, whatever its widths",
    "voxtral_realtime": "computes from sound",
    "zamba": "shares weights between layers, of which it needs dozens",
    "zamba2": "shares weights between layers, of which it needs dozens",
}

# ---- small models

# Upper bounds of a configuration's numbers, matched by full name; the first match applies.
SIZES = {
    re.compile(names): size
    for names, size in {
        r"(.*_)?vocab_size(_.*)?|.*_group_vocab": 64,
        r".*_token_(id|index)": 63,
        r"first_k_dense_replace|num_kv_shared_layers|num_(nextn_predict|mtp|dense|hash)_layers|.*_?groups?": 1,
        r"(.*_)?(n|num)_heads?|(.*_)?attention_heads|(.*_)?num_(key_value|kv|key|value|query)_(heads|groups)": 2,
        r"(.*_)?num_hidden_layers|n_layers?|(num_|.*_)?layers|num_blocks": 2,
        r"qk_head_dim": 32,
        r"(.*_)?head_(dim|size)|kv_channels|d_kv|d_head|dim_head|.*lora_rank|mamba_d_state|.*state_size": 16,
        r"(.*_)?hidden_size|d_model|n_embd|(emb_|embedding_)?dim|(.*_)?embedding_size|lru_width|word_embed_proj_dim|"
        r"dim_model_base|d_latents|intra_bottleneck_size|(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|d_?ff|dim_ff|d_inner|"
        r"(.*_)?hidden_dim|(.*_)?ffn_hidden_size|feed_forward_size|.*_width|embedding_rank|ple_embed_dim": 32,
        r"(moe_)?num_experts|n_routed_experts|num_local_experts": 4,
        r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": 2,
        r"(.*_)?max_.*position.*|n_positions|n_ctx|model_max_length|max_seq_len|max_(source|target)_positions": 128,
        r"sliding_window(_size)?|attention_window_size|window_size|local_attention": 4,
        r"rotary_dim": 8,
    }.items()
}
OWN = {  # models that need fields beyond these rules to build, or to have attention
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1]},
    "codegen": {"n_head": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 1e4}
            for k in ("sliding_attention", "full_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 32, "per_layer_config": {}},
    "esm": {"vocab_size": 64, "mask_token_id": 5, "pad_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
        "window_size": 4,
    },
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longformer": {"attention_window": [4, 4]},
    "mamba2": {"head_dim": 32},
    "mimo_v2_flash": {"head_dim": 24},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "output_gate_type": "sigmoid",
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
}


def smaller(fields: dict) -> dict:
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            value = value if name.startswith("rope") else smaller(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = min(
                [value, *(size for names, size in SIZES.items() if names.fullmatch(name))][:2]
            )
        found[name] = value
    if "sliding_window" in found:  # narrow enough to matter, and enabled
        found["sliding_window"] = 4
    if "use_sliding_window" in found:
        found["use_sliding_window"] = True
    layers = found.get("num_hidden_layers", 2)
    for name in ("layer_types", "layers_block_type"):  # one layer of each kind
        kinds = list(dict.fromkeys(found.get(name) or ()))
        if found.get("sliding_window") and kinds == ["full_attention"]:
            kinds.insert(0, "sliding_attention")
        if kinds:
            layers = found["num_hidden_layers"] = max(layers, len(kinds))
            found[name] = (kinds * layers)[:layers]
    for name, value in found.items():
        if isinstance(value, list) and len(value) == fields.get("num_hidden_layers"):
            found[name] = value[:layers]
    if "qk_rope_head_dim" in found:
        found["head_dim"] = found["qk_rope_head_dim"]
    if "per_layer_config" in found:
        found["per_layer_config"] = {
            k: v for k, v in found["per_layer_config"].items() if int(k) < layers
        }
    return found


def build(transformers, kind: str, head: str):
    default = transformers.AutoConfig.for_model(kind)
    fields = {**smaller(default.to_dict()), **OWN.get(kind, {})}
    for value in fields.values():
        if isinstance(value, dict) and value.get("model_type") in OWN:
            value.update(OWN[value["model_type"]])
    for name in ("transformers_version", "architectures", "dtype"):
        fields.pop(name, None)
    torch.manual_seed(0)
    model = (
        getattr(transformers, AUTO[head][0])
        .from_config(type(default).from_dict(fields), attn_implementation="eager")
        .eval()
    )
    with torch.no_grad():  # transformers initializes weights too small for attention to matter
        for p in model.parameters():
            if p.dim() > 1 and p.is_floating_point():
                p.normal_(std=p.shape[-1] ** -0.5)
    return model


# ---- what they compute

TOKENS = torch.tensor(
    [[7, 12, 9, 33, 21, 40, 18, 25, 11], [7, 12, 9, 33, 21, 40, 18, 25, 14]]
)  # the last differs
KEPT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])


def logits(model, padded):
    """The logits of rows that differ in the last token, without a mask or, if padded, each with
    padding on the left and without: [rows, 9, vocabulary], 0 at padding; and how far the last token
    moves the earlier logits.
    """
    tokens, mask = (TOKENS.repeat_interleave(2, 0), KEPT.repeat(2, 1)) if padded else (TOKENS, None)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    kept = torch.ones_like(tokens) if mask is None else mask
    if model.config.is_encoder_decoder:
        inputs |= {"input_ids": tokens[:1].expand_as(tokens), "decoder_input_ids": tokens}
        kept = torch.ones_like(tokens)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    with torch.no_grad():
        found = model(**inputs)
    found = getattr(found, "logits", found[0])
    if found.shape[1] == tokens.shape[1]:
        found = found * kept[..., None]
    one, other = found.chunk(2)
    return found, (one - other)[:, :-1].abs().max().item()


@pytest.fixture
def attentions(monkeypatch):
    """Records calls of attention; transformers' tables are restored after the test."""
    transformers = pytest.importorskip(
        "transformers", minversion="5.17", reason="needs transformers 5.17 or later"
    )
    from transformers.integrations.moe import ExpertsInterface

    for table in (
        ExpertsInterface,
        transformers.AttentionInterface,
        transformers.AttentionMaskInterface,
    ):
        monkeypatch.setattr(table, "_global_mapping", dict(table._global_mapping))
    integration.register()
    seen, compute = [], integration.attention.attention
    monkeypatch.setattr(
        integration.attention, "attention", lambda *a, **k: (seen.append(k), compute(*a, **k))[1]
    )
    return seen


def check(model, attentions):
    """Returns "computed", "refused" or "not asked". Fails where logits differ from eager's, or a
    token sees a later one.
    """
    expected = [logits(model, padded) for padded in (False, True)]
    model.set_attn_implementation("tilewright")
    attentions.clear()
    outcome = "computed"
    for padded, (truth, moved) in enumerate(expected):
        try:
            found, moves = logits(model, padded)
        except ImplementationUnavailable as error:
            assert "\n" not in str(error) and 'attn_implementation="tilewright"' in str(error), (
                error
            )
            outcome = "refused"
            continue
        # 1e-4 of the largest: about a hundred float32 roundings in another order, after two to four
        # layers.
        error = ((found - truth).abs().max() / truth.abs().max()).item()
        assert error <= 1e-4, (
            f"padded {bool(padded)}: logits differ from eager's by {error:.1e} of the largest"
        )
        if moved <= 1e-5:
            assert moves <= 1e-5, (
                f"padded {bool(padded)}: the last token moves earlier logits by {moves:.1e}"
            )
    return outcome if outcome == "refused" or attentions else "not asked"


@pytest.mark.parametrize("head", AUTO)
def test_every_family_has_eagers_logits_or_is_refused(attentions, head):
    import transformers
    from transformers.models.auto import modeling_auto

    outcomes, failures, unbuilt = {}, [], []
    for kind in getattr(modeling_auto, AUTO[head][1]):
        if kind in LEFT_OUT:
            continue
        try:
            model = build(transformers, kind, head)
            logits(model, False)
        except Exception as error:
            unbuilt.append(f"{kind}: {type(error).__name__}: {error}")
            continue
        try:
            outcomes[kind] = check(model, attentions)
        except Exception as error:
            failures.append(f"{kind}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
    named = {kind: NAMED[kind] for kind in outcomes if kind in NAMED}
    assert {kind: outcomes[kind] for kind in named} == named
    if transformers.__version__.startswith(TESTED):
        assert not unbuilt, "\n".join(["not in LEFT_OUT:", *unbuilt])
    assert collections.Counter(outcomes.values())["computed"] >= COMPUTED[head], (outcomes, unbuilt)


# ---- experts

# Values of configuration fields that experts read, by name; limits low enough to matter.
EXPERTS = {
    re.compile(names): value
    for names, value in {
        r".*expert.*": 4,
        r".*latent.*": None,
        r".*intermediate.*": 24,
        r".*(hidden_size|dim)": 32,
        r"swiglu_limit": 0.71,
        r".*softcap": 1.3,
        r"swiglu_alpha": 1.702,
        r".*eps": 1e-6,
    }.items()
}
# Not of the form activation(gate) * up.
REFUSED = {"nemotron_h": "have no gate", "muse_spark": "normalize what each of them gives"}


def experts_of(module):
    """The experts that a module of transformers' models defines, with weights large enough to reach
    the limits.
    """
    from transformers import PreTrainedConfig

    settings = next(
        v
        for v in vars(module).values()
        if isinstance(v, type) and issubclass(v, PreTrainedConfig) and v is not PreTrainedConfig
    )
    # The activation is the family's default.
    activations = {
        n: v
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, PreTrainedConfig)
        for n, v in vars(c).items()
        if re.fullmatch(r".*hidden_act(ivation)?", n) and isinstance(v, str)
    }

    class Settings:
        model_type, _experts_implementation = settings.model_type, "eager"

        def __getattr__(self, name):
            if name in activations:
                return activations[name]
            for names, value in EXPERTS.items():
                if names.fullmatch(name):
                    return value
            raise AttributeError(name)

    for cls in vars(module).values():
        if (
            isinstance(cls, type)
            and hasattr(cls, "_apply_gate")
            and cls.__module__ == module.__name__
        ):
            experts, g = cls(Settings()), torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in experts.parameters():
                    p.copy_(torch.randn(p.shape, generator=g) * 0.3)
            yield experts


def result(experts, implementation):
    experts.config._experts_implementation = implementation
    g = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(9, 32, generator=g).requires_grad_(),
        torch.rand(9, 2, generator=g).requires_grad_(),
    )
    index = torch.rand(9, 4, generator=g).topk(2, -1).indices
    y = experts(x, index, weight)
    return y, *torch.autograd.grad(
        y, (x, weight, *experts.parameters()), torch.randn(9, 32, generator=g)
    )


def test_every_familys_experts_are_computed_whatever_their_activation_and_biases(attentions):
    import transformers

    found, wrong = {}, []
    for path in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "@use_experts_implementation" not in path.read_text():
            continue
        for experts in experts_of(
            importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        ):
            name = type(experts).__name__
            truth = result(experts, "eager")
            try:
                ours = result(experts, "tilewright")
            except ImplementationUnavailable as error:
                found[path.parent.name] = str(error)
                continue
            found[path.parent.name] = None
            # 1e-5 of a tensor's norm: a few dozen float32 roundings in another order.
            for i, (a, b) in enumerate(zip(ours, truth, strict=True)):
                if not (a - b).norm() <= 1e-5 * b.norm():
                    wrong.append(f"{name}, tensor {i}: {(a - b).norm() / b.norm():.1e}")
    assert not wrong, "\n".join(wrong)
    refused = {kind: reason for kind, reason in found.items() if reason}
    assert refused.keys() <= REFUSED.keys(), refused
    assert all(REFUSED[kind] in reason for kind, reason in refused.items()), refused
    if transformers.__version__.startswith(TESTED):
        assert len(found) == 64 and refused.keys() == REFUSED.keys()
