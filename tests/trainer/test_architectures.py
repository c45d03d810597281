"""Every family of models in several layouts of ranks: the same training as in one process, from the
same folder of weights; and what a family cannot do, in a sentence.
"""

import functools
import json

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import distributed_worker
from ranks import nearly_same_training, run_modes, same_training, selected
from safetensors.torch import load_file, save_file
from shapes import ALTERNATING, SHAPES, SMALL, YARN
from training import MOE as QWEN3_MOE
from training import check_moves, make_bins, write_config
from whole import parts_of, planned

from tilewright import nn
from tilewright import ops as tw
from tilewright.core.registry import ImplementationUnavailable
from tilewright.nn.weights import is_adapter
from tilewright.trainer.build import build_model, choose_ops, second_model, shape_of_run
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import Train, load
from tilewright.trainer.data.batches import FILLER, collate
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models.families.architecture import FAMILIES
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.moe import MoE
from tilewright.trainer.models.ops_choice import Numerics, Ops, attention_request
from tilewright.trainer.optim import matrices
from tilewright.trainer.parallel.compiling import compile_layers, compiled_parts
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins.flops import flops_per_token

pytestmark = pytest.mark.packages


def layout(**train):
    """Four processes that train on the eight bins of a step in two micro-batches."""
    sizes = [
        train.get(f"{axis}_parallel_size", 1)
        for axis in ("tensor", "pipeline", "ringattn", "ulysses")
    ]
    data = functools.reduce(int.__floordiv__, sizes, 4)
    settings = {"data_parallel_mode": "fsdp2", "micro_batch_size": 4 // data, **train}
    return [f"--train.{name}={value}" for name, value in settings.items()]


ADAM = {"optimizer": "adamw", "lr": 1e-3}
RECOMPUTE = {"enable_gradient_checkpointing": "true"}
LORA = ["--lora.enable_lora=true", "--lora.lora_rank=2"]
# One of the projections that are one tensor on disk has an adapter over all its rows.
BEHIND = ["--lora.lora_target_modules=[o_proj, gate_up_proj, down_proj]"]
MODES = {
    "mistral/train_ring": layout(ringattn_parallel_size=2),
    "qwen2/train_tp_lora": [*layout(tensor_parallel_size=2), *LORA],
    "gemma3/train_pp_tp": layout(pipeline_parallel_size=2, tensor_parallel_size=2),
    "gemma3/train_ulysses": layout(ulysses_parallel_size=2, recompute_modules="[mlp]", **RECOMPUTE),
    "gpt_oss/train_and_save": layout(expert_parallel_size=2, **ADAM),
    "gpt_oss/train_after_loading": layout(
        tensor_parallel_size=2, pipeline_parallel_size=2, expert_parallel_size=2, **ADAM
    ),
    "gpt_oss/train_ring": layout(
        ringattn_parallel_size=2,
        expert_parallel_size=4,
        moe_checkpoint_method="moe_act",
        **RECOMPUTE,
    ),
    "odd/train_tp": layout(tensor_parallel_size=2),
    "gpt_oss/train_tp_ulysses": layout(tensor_parallel_size=2, ulysses_parallel_size=2),
    "deepseek_v3/train_and_save": layout(
        tensor_parallel_size=2, expert_parallel_size=2, **ADAM, **RECOMPUTE
    ),
    "deepseek_v3/train_after_loading": layout(
        pipeline_parallel_size=2, expert_parallel_size=2, **ADAM
    ),
    "deepseek_v3/train_ulysses_ring": layout(ulysses_parallel_size=2, ringattn_parallel_size=2),
    "deepseek_v3/train_in_bfloat16": layout(enable_mixed_precision="true"),
    "olmo2/train_pp_tp": layout(pipeline_parallel_size=2, tensor_parallel_size=2),
    "olmo2/train_lora": [*layout(**RECOMPUTE), *LORA],
    "phi3/train_pp_tp": layout(pipeline_parallel_size=2, tensor_parallel_size=2),
    "phi3/train_ulysses_ring": layout(ulysses_parallel_size=2, ringattn_parallel_size=2),
    "phi3/train_lora": [*layout(**RECOMPUTE), *LORA, "--model.merge_qkv=true"],
    "phi3/train_tp_lora": [*layout(tensor_parallel_size=2), *LORA, *BEHIND],
    "glm4/train_pp_tp": layout(pipeline_parallel_size=2, tensor_parallel_size=2),
    "glm4/train_ring_lora": [*layout(ringattn_parallel_size=2, **RECOMPUTE), *LORA],
}
# Whose checkpoints move.
MOVED = ("gpt_oss", "deepseek_v3")
# What a mode does not change of the training in one process.
SAME = ("train.optimizer=", "train.lr=", "lora.", "model.")


def two_layers(shape):
    """One of each kind."""
    kinds = {"layer_types": ALTERNATING[:2]} if "layer_types" in shape else {}
    return {**shape, "num_hidden_layers": 2, **kinds}


def ops_for(shape):
    return Ops.resolve(attention_request=attention_request(shape))


def write_weights(folder, shape):
    """A folder of weights none of which is zero or one."""
    config = ModelConfig.from_hf(shape)
    model = Transformer(config, ops_for(config))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=draw) + name.endswith("norm.weight"))
    hf.save_weights(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """Two steps in four processes in each of those modes."""
    root = tmp_path_factory.mktemp("families")
    paths = {}
    for name in SHAPES:
        shape = two_layers(SHAPES[name])
        paths[name] = write_config(
            root / name,
            shape,
            model__model_path=write_weights(root / name / "model", shape),
            model__merge_qkv=False,
            train__gradient_accumulation_steps=2,
            # SGD shows a wrong gradient scale, which AdamW hides.
            train__optimizer="sgd",
            train__lr=0.1,
            train__max_grad_norm=0.5,
            train__max_steps=2,
            data__pad_to_multiple_of=1,
        )
        torch.save(make_bins(), root / name / "bins.pt")
    moved = [f"{kind}/train_{what}" for kind in MOVED for what in ("and_save", "after_loading")]
    modes = selected(request, MODES, *moved)
    run_modes(4, root, modes)
    return root, paths, {mode: torch.load(root / f"{mode}.pt") for mode in modes}


@functools.cache
def in_one_process(path, options):
    return distributed_worker.several_steps(load(path, list(options)), Mesh(), make_bins(), 2)[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_family_trains_on_ranks_as_in_one_process(mode, trained):
    _, paths, found = trained
    options = [a for a in MODES[mode] if a.removeprefix("--").startswith(SAME)]
    options.append("--train.micro_batch_size=4")
    found, want = found[mode], in_one_process(paths[mode.partition("/")[0]], tuple(options))
    if mode.endswith("bfloat16"):
        nearly_same_training(*({n: r[n][:1] for n in ("loss", "norm")} for r in (found, want)))
        # Later a rounding may choose a token's expert: 1e-3 without AVX-512.
        assert found["loss"][1:] == pytest.approx(want["loss"][1:], rel=2e-3)
        assert found["norm"][1:] == pytest.approx(want["norm"][1:], rel=6e-3)
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert torch.equal(found["weights"][bias], want["weights"][bias])
        return
    sgd = not any("optimizer" in option for option in options)
    # The first step's gradients of gpt-oss agree to 8e-7. In its second step a rounding decides
    # something in the last layer's experts (its gates have limits, its router ties): 5e-5 of the
    # norm.
    rel = 1e-4 if mode.startswith("gpt_oss") else 1e-5
    same_training(found, want, rel, weights=None if sgd else 1e-3)


@pytest.mark.parametrize("family", MOVED)
def test_checkpoints_of_a_family_move_between_layouts(family, trained):
    root, paths, found = trained
    alike = {mode.partition("/")[2]: f for mode, f in found.items() if mode.startswith(family)}
    options = ("--train.optimizer=adamw", "--model.merge_qkv=false")
    check_moves((root / family, paths[family], alike, None), options)


# ---- in one process


def model_of(family, merge_qkv=False, **change):
    shape = ModelConfig.from_hf({**SHAPES[family], **change})
    return Transformer(shape, ops_for(shape), merge_qkv)


WITH_EXPERTS = {n: s for n, s in SHAPES.items() if ModelConfig.from_hf(s).num_experts}
WITH_EXPERTS["qwen3_moe"] = QWEN3_MOE


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_routers_report_no_padding(family, tmp_path):
    """Nine tokens in a row of any length, in training and evaluation, beside a row without any, and
    what `ops.route` says of them alone.
    """
    shape = WITH_EXPERTS[family]
    recomputed = {"train__enable_gradient_checkpointing": family == "qwen3_moe"}
    config = load(write_config(tmp_path, shape, **recomputed))
    engine = distributed_worker.engine_of(config, Mesh())
    blocks = [b.mlp for b in engine.model.model.blocks if isinstance(b.mlp, MoE)]
    seen = {}
    hooks = [
        moe.gate.register_forward_hook(lambda *call, moe=moe: seen.update({moe: call[-1].detach()}))
        for moe in blocks
    ]
    bins = [[(ids[:9], labels[:9]) for ids, labels in make_bins()[0][:1]]]
    ids, labels = np.zeros(2, np.int64), np.full(2, IGNORE)
    none = collate([[(ids, labels, {FILLER: True})]], 8)
    plain = engine.forward([collate(bins, 1)], language_modeling).router()
    of = [
        tw.route(
            seen[moe].float(),
            moe.top_k,
            **{**moe.options, "implementation": "eager"},
            bias=moe.gate.e_score_correction_bias,
        )
        for moe in blocks
    ]
    loads = [float(r.tokens_per_expert.max() / r.tokens_per_expert.double().mean()) for r in of]
    assert plain == pytest.approx(
        {
            "expert_load": sum(loads) / len(loads),
            "worst_expert_load": max(loads),
            "load_balance_loss": float(sum(r.load_balance_loss for r in of)) / len(of),
            "z_loss": float(sum(r.z_loss for r in of)) / len(of),
        },
        rel=1e-5,
    )
    for hook in hooks:
        hook.remove()
    for multiple in (1, 16, 128):
        for call in (engine.forward, engine.forward_backward):
            found = call([collate(bins, multiple), none], language_modeling)
            assert found.router() == pytest.approx(plain, rel=1e-5), multiple
    assert engine.forward([none], language_modeling).router() == {}


@pytest.mark.parametrize("family", SHAPES)
def test_what_is_written_as_config_json_is_read_again(family):
    shape = ModelConfig.from_hf(SHAPES[family])
    assert ModelConfig.from_hf(json.loads(json.dumps(shape.to_hf()))) == shape


def published(kind, sizes, **more):
    """What config.json of a published model says."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), **more}


OLMO2 = {"rope_theta": 500_000, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
PUBLISHED_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
# Published models, by their numbers of parameters.
PUBLISHED = {
    494_032_768: published(  # Qwen/Qwen2.5-0.5B
        "qwen2",
        (151936, 896, 4864, 24, 14, 2),
        max_window_layers=24,
        use_sliding_window=False,
        sliding_window=32768,
        tie_word_embeddings=True,
    ),
    999_885_952: published(  # google/gemma-3-1b-it
        "gemma3_text",
        (262144, 1152, 6912, 26, 4, 1),
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=None,
        rope_scaling=None,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    1_484_916_736: published(  # allenai/OLMo-2-0425-1B
        "olmo2", (100352, 2048, 8192, 16, 16, 16), attention_bias=False, **OLMO2
    ),
    3_836_021_760: published(  # microsoft/Phi-4-mini-instruct
        "phi3",
        (200064, 3072, 8192, 32, 24, 8),
        tie_word_embeddings=True,
        attention_bias=False,
        attention_dropout=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        partial_rotary_factor=0.75,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + i for i in range(48)],
        },
        sliding_window=262144,
    ),
    9_400_279_040: published(  # zai-org/GLM-4-9B-0414
        "glm4", (151552, 4096, 13696, 40, 32, 2), head_dim=128, partial_rotary_factor=0.5
    ),
    20_914_757_184: published(  # openai/gpt-oss-20b, dequantized
        "gpt_oss",
        (201088, 2880, 2880, 24, 64, 8),
        head_dim=64,
        attention_bias=True,
        num_local_experts=32,
        num_experts_per_tok=4,
        experts_per_token=4,
        rope_scaling={**PUBLISHED_YARN, "rope_type": "yarn", "factor": 32.0, "truncate": False},
        rope_theta=150000,
        sliding_window=128,
        swiglu_limit=7.0,
    ),
    671_026_419_200: published(  # deepseek-ai/DeepSeek-V3
        "deepseek_v3",
        (129280, 7168, 18432, 61, 128, 128),
        num_nextn_predict_layers=1,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_scaling={
            **PUBLISHED_YARN,
            "type": "yarn",
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
}


@pytest.mark.parametrize("parameters", PUBLISHED)
def test_published_models_have_their_number_of_parameters(parameters):
    shape = ModelConfig.from_hf(PUBLISHED[parameters])
    with torch.device("meta"):
        model = Transformer(shape, ops_for(shape))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert ModelConfig.from_hf(json.loads(json.dumps(shape.to_hf()))) == shape


LOCAL = {"use_sliding_window": True, "sliding_window": 4}


def rope(**changed):
    return {"rope_parameters": {**YARN, **changed}}


@pytest.mark.parametrize(
    "family, change, sentence",
    [
        ("mistral", {"layer_types": ALTERNATING}, "layer_types = .* is not supported"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("qwen2", rope(partial_rotary_factor=0.5), "factor = 0.5 is not supported; accepted: 1.0"),
        ("qwen2", rope(beta_fast="32"), "beta_fast must be a finite number above 0, got '32'"),
        ("qwen2", rope(truncate=0), "truncate must be true or false, got 0"),
        (
            "qwen2",
            {**LOCAL, "layer_types": ["global"] * 4},
            "layer_types must name full_attention ",
        ),
        ("qwen2", {**LOCAL, "max_window_layers": "28"}, "max_window_layers must be an .* got '28'"),
        ("olmo2", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop = 0.1 is not supported; accepted: 0.0"),
        ("phi3", {"partial_rotary_factor": 0.7}, "0.7: must rotate an even number of the 8 .* 5.6"),
        ("phi3", {"partial_rotary_factor": 1.5}, "1.5: must rotate an even number of the 8 .* 12"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "'longrope' needs short_factor, long_factor"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1, 1], "long_factor": [1]}},
            r"long_factor must be a list of 2 numbers, .* got \[1\]",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1, 0], "long_factor": [1, 1]}},
            "short_factor must be a finite number above 0, got 0",
        ),
        ("glm4", {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ("glm4", {"partial_rotary_factor": 0.1}, "0.1: must rotate an even number of the 16"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ("gemma3", {"sliding_window": None}, "sliding_window must be an integer of .* got None"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": YARN}},
            "sliding_attention = .* accepted: rope type 'default'",
        ),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quant_method = 'mxfp4' is",
        ),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False is not .* accepted: True"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a finite number above 0, got 0"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
        ("deepseek_v3", {"v_head_dim": 21}, "v_head_dim = 21 at most .* = 20"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "head_dim must be even, got 19"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3, topk_group = 2: 8 experts must make equal"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "the best of which have 5 experts or more"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer"),
    ],
)
def test_what_a_family_has_not_is_refused_by_name(family, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf({**SHAPES[family], **change})


def test_windows_of_older_configurations():
    """Without layer_types; and Gemma 3's of transformers 4: one rope_scaling, and two bases."""
    layers = {"layer_types": None, "num_hidden_layers": 4}
    late = {**SHAPES["qwen2"], **layers, "use_sliding_window": True, "max_window_layers": 3}
    assert [ModelConfig.from_hf(late).is_local(i) for i in range(4)] == [False] * 3 + [True]
    every_second = ModelConfig.from_hf({**SHAPES["gpt_oss"], **layers})
    assert [every_second.is_local(i) for i in range(4)] == [True, False] * 2
    older = {k: v for k, v in SHAPES["gemma3"].items() if k != "layer_types"}
    older |= {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    shape = ModelConfig.from_hf(older)
    assert [shape.is_local(i) for i in range(7)] == [True] * 5 + [False, True]
    assert (shape.rope_theta, shape.rope_local_base_freq) == (10000.0, 100.0)
    assert dict(shape.rope_scaling)["factor"] == 8.0
    for absent in ({"rope_parameters": None}, {"rope_parameters": None, "rope_scaling": None}):
        shape = ModelConfig.from_hf({**SHAPES["gpt_oss"], **absent})
        assert dict(shape.rope_scaling)["factor"] == 32.0


@pytest.mark.parametrize("family", SHAPES)
def test_what_config_json_omits_is_as_in_transformers(family):
    """Items with a default of their own; the number of key-value heads where it is not that of
    queries.
    """
    import transformers

    of_sizes = ("layer_types", "rope_scaling")
    omitted = ("head_dim", "max_position_embeddings", "sliding_window", "rms_norm_eps")
    short = {k: v for k, v in SHAPES[family].items() if k not in (*omitted, *of_sizes)}
    short["num_attention_heads"] = short["num_key_value_heads"] = 8
    if family in ("mistral", "gemma3", "gpt_oss", "odd", "olmo2", "phi3", "glm4"):
        del short["num_key_value_heads"]
    ours, theirs = ModelConfig.from_hf(short), transformers.AutoConfig.for_model(**short)
    for name in (*omitted, "num_key_value_heads"):
        want = getattr(theirs, name, None)
        if want is not None and (name, family) not in (
            ("head_dim", "deepseek_v3"),  # of the rotated part there
            ("sliding_window", "qwen2"),
        ):
            assert getattr(ours, name) == want, name


def test_an_entry_that_changes_the_model_is_taken_whatever_is_written(tmp_path):
    older = {k: v for k, v in SHAPES["gemma3"].items() if k != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(older))
    every_second = hf.load_config(tmp_path, {"sliding_window_pattern": 2})
    assert [every_second.is_local(i) for i in range(4)] == [True, False] * 2
    with pytest.raises(ValueError, match="sliding_window_pattern is no entry that"):
        hf.load_config(tmp_path, {"sliding_window_pattern": 6})


@pytest.mark.parametrize("merge_qkv", [False, True])
def test_experts_with_biases_take_neither_adapters_nor_codes(merge_qkv):
    def model():
        return model_of("gpt_oss", merge_qkv)

    with pytest.raises(ValueError, match=r"experts of Experts have biases .* Name targets without"):
        nn.add_lora(model(), rank=2)
    with pytest.raises(ValueError, match=r"have biases .* cannot be quantized; name them"):
        nn.quantize_model(model(), "nf4")
    adapted = model()
    paths = nn.add_lora(adapted, ["q_proj", "o_proj"], rank=2)
    assert len(paths) == 2 * 4
    init_weights(adapted, 0)
    ids = torch.arange(16)[None]
    adapted(ids, labels=ids).backward()
    assert all((p.grad is not None) == p.requires_grad for p in adapted.parameters())


@pytest.mark.parametrize("codes", [None, "nf4"])
def test_adapters_of_latent_attention_and_of_both_kinds_of_experts(codes, tmp_path):
    """All projections have some by default; with them merged, an export computes the same."""
    model, ids = model_of("deepseek_v3"), torch.arange(16)[None]
    init_weights(model, 0, std=0.1)
    if codes:
        nn.quantize_model(model, codes)
    paths = nn.add_lora(model, rank=2)
    names = {path.partition(".layers.1.")[2] for path in paths} - {""}
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    inner = ("gate_proj", "up_proj", "down_proj")
    assert names == {
        *(f"self_attn.{name}" for name in attention),
        *(f"mlp.{kind}.{name}" for kind in ("experts", "shared_experts") for name in inner),
    }
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name):
                p.add_(0.1 * torch.randn_like(p))
    model(ids, labels=ids).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    hf.save_weights(model, tmp_path)
    merged = model_of("deepseek_v3")
    hf.load_weights(merged, tmp_path)
    torch.testing.assert_close(merged(ids), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family, fused", [("phi3", ["gate_up_proj", "qkv_proj"]), ("glm4", ["gate_up_proj", "q_proj"])]
)
def test_a_projection_that_is_one_tensor_on_disk_has_one_adapter_as_in_peft(
    family, fused, tmp_path
):
    import peft
    import transformers

    shape = {**SHAPES[family], "pad_token_id": None}
    folder, ids = write_weights(tmp_path / "model", shape), torch.arange(24)[None]
    model = Transformer(ModelConfig.from_hf(shape), ops_for(ModelConfig.from_hf(shape)))
    hf.load_weights(model, folder)
    paths = nn.add_lora(model, rank=2)
    found = {path.rpartition(".")[2] for path in paths}
    assert {*fused} <= found and not found & {"gate_proj", "up_proj"}
    nn.reset_adapters(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name):
                p.add_(0.1 * torch.randn_like(p))
    nn.save_adapter(model, tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    hf.save_weights(model, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    torch.testing.assert_close(merged(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options, said",
    [
        (
            ["--train.tensor_parallel_size=2"],
            "phi3 stores q_proj, k_proj, v_proj as one tensor, .* set model.merge_qkv to true",
        ),
        (
            ["--train.tensor_parallel_size=2", "--lora.use_dora=true", *BEHIND],
            "mlp.gate_up_proj has one adapter, whose magnitudes ranks cannot share",
        ),
    ],
)
def test_adapters_that_ranks_cannot_share_are_refused(options, said, tmp_path):
    shape = SHAPES["phi3"]
    layout = {"model__merge_qkv": False, "train__data_parallel_mode": "fsdp2"}
    config = load(write_config(tmp_path, shape, **layout), [*LORA, *options])
    with pytest.raises(ValueError, match=said):
        planned(config, 2)


def test_an_attention_without_windows_or_sinks_is_refused(tmp_path):
    path = write_config(tmp_path, SHAPES["gpt_oss"], model__attn_implementation="sdpa")
    config = load(path, [])
    shape = ModelConfig.from_hf(SHAPES["gpt_oss"])
    with pytest.raises(ImplementationUnavailable, match=r"attention\[sdpa\]: does not .* window"):
        choose_ops(config.model, shape, Mesh(), torch.float32)
    for name in ("qwen2", "deepseek_v3"):
        plain = ModelConfig.from_hf(SHAPES[name])
        assert choose_ops(config.model, plain, Mesh(), torch.float32).attention == "sdpa"


@pytest.mark.parametrize("family", SHAPES)
def test_operations_are_those_of_the_matrices_and_of_the_keys_that_are_seen(family):
    model = model_of(family, tie_word_embeddings=False)
    c, products = model.config, 0.0
    for name, p in model.named_parameters():
        if p.dim() < 2 or name.endswith("_bias") or "embed_tokens" in name:
            continue
        share = c.num_experts_per_tok / c.num_experts if ".experts." in name else 1.0
        products += share * p.numel()
    assert flops_per_token(model, 0) == pytest.approx(6 * products)
    S, widths = 64, c.head_dim + (c.v_head_dim or c.head_dim)
    seen = 0.0
    for block in model.model.layers:
        window = block.self_attn.window or S
        seen += sum(min(i + 1, window) for i in range(S)) / S
    work = flops_per_token(model, S) - flops_per_token(model, 0)
    assert work == pytest.approx(6 * c.num_attention_heads * widths * seen, rel=0.1)


def test_muon_takes_matrices_without_biases():
    model = model_of("gpt_oss")
    names = {p: name.rpartition(".")[2] for name, p in model.named_parameters()}
    found = matrices.matrices(model)
    assert {"gate_up_proj", "down_proj"} <= {names[p] for p in found}
    assert not any(names[p].endswith("bias") for p in found)
    model = model_of("deepseek_v3")
    narrow = model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight
    assert matrices.matrices(model)[narrow].rows == (20, 8)


def test_layers_of_multi_token_prediction_are_left(tmp_path):
    write_weights(tmp_path, SHAPES["deepseek_v3"])
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    further = {f"model.layers.{i}.eh_proj.weight": torch.ones(2, 2) for i in (4, 5)}
    save_file({**stored, **further}, file)
    model = model_of("deepseek_v3")
    hf.load_weights(model, tmp_path)
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(model.named_parameters())[bias], stored[bias])
    hf.save_weights(model, tmp_path / "half", dtype=torch.bfloat16)
    half = load_file(tmp_path / "half/model.safetensors")
    assert torch.equal(half.pop(bias), stored[bias])  # it decides between near scores
    assert half["model.layers.3.mlp.gate.weight"].dtype == torch.bfloat16
    save_file({**stored, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.3\.eh_proj"):
        hf.load_weights(model, tmp_path)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3", "olmo2", "phi3", "glm4"])
def test_switches_of_numerics_and_whole_graphs_compute_the_same(family, tmp_path):
    """In float32 every switch is the same function, in another order."""
    torch._dynamo.reset()
    two = two_layers(SHAPES[family])
    folder, ids = write_weights(tmp_path, two), torch.arange(24)[None]
    shape, found = ModelConfig.from_hf(two), []
    native = {"rmsnorm_native": True, "activation_native": family != "gpt_oss", "rope_native": True}
    for numerics in ({}, {**native, "lm_head_fp32": False, "router_fp32": False}, None):
        ops = Ops.resolve(
            attention_request=attention_request(shape), numerics=Numerics(**numerics or {})
        )
        model = Transformer(shape, ops)
        hf.load_weights(model, folder)
        if numerics is None:
            for layer in model.model.layers:
                layer.compile(backend="eager", fullgraph=True)
        found.append(model(ids).detach())
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0], rtol=1e-4, atol=1e-4)


BY_TYPE = {
    **{shape["model_type"]: shape for shape in reversed(SHAPES.values())},
    **{kind: {**SMALL, "model_type": kind} for kind in ("llama", "qwen3")},
    "qwen3_moe": QWEN3_MOE,
}


def store_head(folder, head):
    """Another file holds it, and an index says so. head: of the embedding's tensor."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file(
        {"lm_head.weight": head(stored["model.embed_tokens.weight"])}, folder / "2.safetensors"
    )
    files = dict.fromkeys(stored, "model-1.safetensors") | {"lm_head.weight": "2.safetensors"}
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def in_one_file(folder):
    stored = load_file(folder / "model-1.safetensors") | load_file(folder / "2.safetensors")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", FAMILIES.names())
def test_a_head_that_is_not_the_tied_embedding_is_the_one_that_is_used(kind, tmp_path, caplog):
    import transformers

    tied = {**two_layers(BY_TYPE[kind]), "tie_word_embeddings": True}
    config = load(write_config(tmp_path, tied, model__model_path=str(tmp_path / "model")))
    write_weights(tmp_path / "model", tied)
    store_head(tmp_path / "model", lambda embedding: embedding.flip(0).contiguous())
    ids, attention = torch.arange(20)[None], {"attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained
    want = theirs(tmp_path / "model", **attention)(ids).logits
    for one in (False, True):
        if one:
            in_one_file(tmp_path / "model")
        caplog.clear()
        shape = shape_of_run(config.model, "language_model", Mesh())
        assert not shape.tied
        [said] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "lm_head.weight is stored and is not the embedding" in said
        own = parts_of(config, shape, Mesh(), ops_for(shape))
        torch.testing.assert_close(own.model(ids), want, rtol=1e-4, atol=1e-5)
    tied_model = Transformer(hf.load_config(tmp_path / "model"), ops_for(shape))
    with pytest.raises(ValueError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        hf.load_weights(tied_model, tmp_path / "model")
    hf.save_weights(own, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["tie_word_embeddings"] is False
    back = theirs(tmp_path / "saved", **attention)(ids).logits
    torch.testing.assert_close(back, want, rtol=1e-4, atol=1e-5)


def test_a_stored_head_that_is_the_embedding_stays_tied(tmp_path, caplog):
    write_weights(tmp_path / "model", SMALL)
    config = load(write_config(tmp_path, SMALL, model__model_path=str(tmp_path / "model")))
    before = parts_of(config, hf.shape_of(config.model), Mesh(), Ops.resolve()).origin
    for head in (torch.clone, torch.Tensor.double):  # in another dtype, too
        store_head(tmp_path / "model", head)
        caplog.clear()
        shape = shape_of_run(config.model, "language_model", Mesh())
        assert shape.tied and not caplog.records
        # A checkpoint of a run that began before the head was stored is of these weights.
        assert parts_of(config, shape, Mesh(), ops_for(shape)).origin == before
        in_one_file(tmp_path / "model")


def test_a_head_is_not_untied_where_it_cannot_be(tmp_path):
    write_weights(tmp_path / "model", SMALL)
    path = write_config(tmp_path, SMALL, model__model_path=str(tmp_path / "model"))
    store_head(tmp_path / "model", lambda embedding: 2 * embedding)
    tie = ["--model.foundation", '{"tie_word_embeddings": true}']
    with pytest.raises(ValueError, match=r"^model\.foundation: tie_word_embeddings = True, and "):
        shape_of_run(load(path, tie).model, "language_model", Mesh())
    untie = ["--model.foundation", '{"tie_word_embeddings": false}']
    assert not shape_of_run(load(path, untie).model, "language_model", Mesh()).tied
    # Without the folder's weights the configuration alone says so.
    drawn = load(path, ["--model.model_path", "null"]).model
    assert shape_of_run(drawn, "language_model", Mesh()).tied
    # A reward model has a head of its own, and no use for this one.
    reward = ModelConfig.from_hf(
        {**SMALL, "architectures": ["Qwen3ForSequenceClassification"]} | {"num_labels": 1}
    )
    hf.load_weights(
        Transformer(reward, ops_for(reward)), tmp_path / "model", without=["score.weight"]
    )
    # A head of other rows does not fit.
    store_head_again = {"lm_head.weight": torch.ones(3, SMALL["hidden_size"])}
    save_file(store_head_again, tmp_path / "model/2.safetensors")
    shape = shape_of_run(load(path).model, "language_model", Mesh())
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[3, 32\], the model's has"):
        parts_of(load(path), shape, Mesh(), ops_for(shape))


def test_a_reference_keeps_the_head_of_its_folder(tmp_path):
    for name in ("model", "reference"):
        write_weights(tmp_path / name, SMALL)
    store_head(tmp_path / "reference", lambda embedding: 2 * embedding)
    config = load(write_config(tmp_path, SMALL, model__model_path=str(tmp_path / "model")))
    other = config.preference.model_copy(update={"reference_path": str(tmp_path / "reference")})
    shape = shape_of_run(config.model, "language_model", Mesh())
    assert shape.tied
    on = {"data": config.data, "train": config.train, "mesh": Mesh(), "ops": ops_for(shape)}
    made = functools.partial(build_model, **on)
    reference = second_model(config.model, other, config.train, shape, Mesh(), made).model
    assert torch.equal(reference.lm_head.weight, 2 * reference.model.embed_tokens.weight)


def test_all_norms_of_a_layer_are_compiled_where_it_is_in_parts():
    t = Train(
        output_dir="o",
        enable_compile=True,
        enable_gradient_checkpointing=True,
        recompute_modules=["mlp"],
    )
    model = model_of("gemma3")
    compile_layers(model, t, t, [])
    found = compiled_parts(model)
    assert found["RMSNorm.forward"] == found["AddRMSNorm.forward"] == 2 * 4
    assert found["Attention.project"] == found["MLP.forward"] == 4


def test_initial_weights_of_a_family():
    """Norms scale by one, and biases are zero; sinks are drawn."""
    gemma, oss = model_of("gemma3"), model_of("gpt_oss")
    for model in (gemma, oss):
        init_weights(model, 0)
    assert not gemma.model.norm.weight.any() and (oss.model.norm.weight == 1).all()
    assert not gemma.model.layers[0].post_feedforward_layernorm.weight.any()
    layer = oss.model.layers[0]
    assert not layer.self_attn.q_proj.bias.any() and layer.self_attn.sinks.all()
    assert not layer.mlp.experts.gate_up_proj_bias.any()
