"""What is written otherwise here than in ERNIEKit's and NxDT's configurations: where a name alone,
which stands on its field, does not say it; and the state of every row of a configuration.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from tilewright.trainer.config.field_tree import leaves
from tilewright.trainer.config.section import Accepts, RowOf, properties

REFUSED, MISSING = "refused: ", "not yet: "
FLAGS = REFUSED + "flags of PaddlePaddle's scheduler; "
EIGHT_BITS = "the ops for it are there, and no field of the trainer"
PRECISION = "a section for dtypes; "

# Library -> name, with the value that is meant, if only one is -> fields with their values, or a
# sentence: what is done, or after REFUSED or MISSING why there is none.
SETTINGS: dict[str, dict[str, dict[str, Any] | str]] = {
    "ERNIEKit": {
        "continue_training: false": {"model.model_path": None, "model.config_path": "x"},
        "weight_quantize_algo": {"lora.enable_qlora": True, "lora.quant_format": "nvfp4"},
        "weight_quantize_algo: weight_only_mix": MISSING + "INT4 and INT8 beside NVFP4, NF4 and "
        "block-scaled FP8 in `lora.quant_format`",
        "weight_quantize_algo: weight_only_int8": MISSING + "INT8 in `lora.quant_format`",
        "weight_quantize_algo: fp8_linear": MISSING + f"training in FP8: {EIGHT_BITS}",
        "do_eval: false": {"train.eval_strategy": "no"},
        "do_train: false": "`python -m tilewright.trainer.evaluate`",
        "disable_tqdm: true": {"train.log_format": "structured"},
        "max_steps: -1": {"train.max_steps": None},
        "max_evaluate_steps: -1": {"train.eval_max_batches": None},
        "train_dataset_prob": {"data.mixing": "random", "data.datasets.0.weight": 0.3},
        "train_dataset_type": {"data.datasets.0.type": "chat"},
        "train_dataset_type: erniekit": {"data.datasets.0.type": "erniekit"},
        "train_dataset_type: alpaca": {"data.datasets.0.type": "alpaca"},
        "eval_dataset_prob": "refused: what is evaluated on is not mixed; 1.0 is what is done",
        "eval_dataset_type": "as train_dataset_type, of the entries of `data.test_datasets`",
        "max_seq_len": {
            "data.sample_packing_sequence_len": 8192,
            "data.datasets.0.max_seq_len": 8192,
        },
        "tensor_parallel_config": FLAGS + "what processes hold alike cannot drift apart here",
        "tensor_parallel_output": "true is what is done: the head and its loss are parallel over "
        "the vocabulary; false is refused",
        "pipeline_parallel_config": FLAGS + "a step's gradients are divided once, and schedules "
        "overlap what they send",
        "pp_seg_method": {
            "train.pipeline_parallel_size": 2,
            "train.gradient_accumulation_steps": 2,
            "train.pipeline_split": [10, 12],
        },
        "add_tail_layers": REFUSED + "stages may hold unequal numbers of layers, so none is added",
        "sharding_parallel_config": FLAGS + "FSDP2 overlaps its collectives, and frees gathered "
        "gradients",
        "sharding": {"train.data_parallel_mode": "fsdp2", "train.enable_full_shard": True},
        "sharding: stage1": MISSING + "sharded states alone, with replicated gradients",
        "sharding: stage2": {"train.enable_full_shard": False},
        "sharding: stage3": {"train.enable_full_shard": True},
        "sequence_parallel": "true is what `train.tensor_parallel_size` does between layers; false "
        "is refused",
        "moe_group": REFUSED + "groups of PaddlePaddle; `train.expert_parallel_size` says how many",
        "release_grads": "true is what is done after each step; false is refused",
        "use_sparse_head_and_loss_fn": MISSING + "a head that computes labeled tokens alone",
        "use_fused_head_and_loss_fn": "true is what is done; false is refused",
        "use_attn_mask_start_row_indices": "true is what is done: packed documents are known by "
        "where they begin; false is refused",
        "recompute_granularity": {"train.recompute_modules": ["self_attn"]},
        "recompute_granularity: full": {"train.recompute_modules": None},
        "recompute_granularity: full_attn": {"train.recompute_modules": ["self_attn"]},
        "recompute_granularity: core_attn": "what is done without recomputation: attention keeps "
        "no probabilities",
        "offload_optim": MISSING + "states in CPU memory",
        "reference_free: true": {"train.loss": "preference", "preference.reference": "none"},
        "ref_model_update_steps: -1": {"preference.reference_update_steps": None},
        "unified_checkpoint": "true is what is done: any number of processes reads a checkpoint; "
        "false is refused",
        "unified_checkpoint_config": {"train.save_async": True},
        "disable_ckpt_quant": "true is what is done: no state is quantized in a checkpoint; false "
        "is refused",
        "use_flash_attention": {"model.attn_implementation": "auto"},
        "use_flash_attention: false": {"model.attn_implementation": "sdpa"},
        "use_sparse_flash_attn": "true is what is done in packed documents; false is refused",
        "fuse_rope: false": {"model.rope_native": True},
        "fuse_linear": {"model.merge_qkv": True},
        "greedy_intokens": {"data.sample_packing_method": "multipack"},
        "greedy_intokens: false": {"data.sample_packing_method": "sequential"},
        "distributed_dataloader": REFUSED + "data are prepared once, and each process maps the "
        "same files and reads its part",
        "moe_multimodal_dispatch_use_allgather": REFUSED + "a kernel of PaddlePaddle's; "
        "`model.ep_dispatch` sends no padding",
        "fp16_opt_level": {"train.enable_mixed_precision": True},
        "scale_loss": REFUSED + "bfloat16 has the exponents of float32, and needs no scale",
        "amp_custom_white_list": REFUSED + "names of PaddlePaddle's operators; `model.*_fp32` and "
        "`model.*_native` say what is computed in float32",
        "amp_custom_black_list": REFUSED + "names of PaddlePaddle's operators; `model.*_fp32` and "
        "`model.*_native` say what is computed in float32",
        "amp_master_grad": "true is what is done: gradients of float32 parameters are summed in "
        "float32; false is refused",
        "lora": {"lora.enable_lora": True},
        "rslora_plus": {
            "lora.enable_lora": True,
            "lora.rslora": True,
            "lora.lora_plus_scale": 4.0,
            "lora.lora_alpha": 4.0,
        },
        "beta": {"train.loss": "preference", "preference.beta": 0.1},
        "apply_hadamard": MISSING + f"training in FP8: {EIGHT_BITS}",
        "use_lowprecision_moment": {
            "train.optimizer": "anyprecision_adamw",
            "train.optimizer_dtype": "bf16",
        },
        "tensorwise_offload_optimizer": MISSING + "states in CPU memory",
        "apply_online_actscale_step": MISSING + f"training in FP8: {EIGHT_BITS}",
        "optim_shard_num": "1 is what is done: each process writes a file of its own; more is "
        "refused",
    },
    "NxDT": {
        "name": {"train.output_dir": "runs/megatron_llama"},
        "model_source": "hf is what is done; of megatron, config.json has the shape",
        "trainer": "its rows",
        "exp_manager": "its rows",
        "distributed_strategy": "its rows",
        "data": "its rows",
        "model": "its rows",
        "precision": "its rows",
        "compiler_flags": REFUSED + "of Neuron's compiler; `train.enable_compile` compiles",
        "compiler_cache_url": REFUSED + "of Neuron's compiler; TORCHINDUCTOR_CACHE_DIR and "
        "TRITON_CACHE_DIR place the caches",
        "aync_exec_max_inflight_requests": REFUSED + "of Neuron's runtime; streams are asynchronous",
        "bucket_size_collectives": MISSING + "the size of DDP's buckets; FSDP2's are its layers",
        "neuron_rt_exec_timeout": MISSING + "a field: a step's collectives wait for half an hour",
        "neuron_experimental_compress_rg": REFUSED + "of Neuron's runtime; NCCL has no such setting",
        "devices": "`torchrun --nproc-per-node`",
        "num_nodes": "`torchrun --nnodes`",
        "max_epochs: -1": "leave `train.num_train_epochs` out; `train.max_steps` says how many",
        "limit_val_batches: 1.0": {"train.eval_max_batches": 1.0},
        "val_check_interval": {"train.eval_strategy": "steps", "train.eval_steps": 100},
        "check_val_every_n_epoch": {"train.eval_strategy": "epoch", "train.eval_epochs": 1},
        "lnc": REFUSED + "logical cores of Neuron's; a GPU is one device",
        "log_local_rank_0_only": "true is what is done; false is refused",
        "exp_dir": {"train.output_dir": "runs"},
        "exp_manager.name": {"train.output_dir": "runs/megatron_llama"},
        "resume_if_exists: true": {"train.load_checkpoint_path": "auto"},
        "resume_ignore_no_checkpoint": "true is what `train.load_checkpoint_path: auto` does; "
        "false is refused",
        "create_checkpoint_callback: false": {"train.save_strategy": "no"},
        "save_top_k: -1": {"train.save_total_limit": None},
        "monitor: step": "what `train.save_total_limit` goes by without `train.best_metric`",
        "mode": {"train.best_metric": "eval_loss", "train.best_mode": "min"},
        "save_last": "false is what is done: the newest is never deleted, and auto finds it; true "
        "is refused",
        "filename": MISSING + "names of checkpoints; they are global_step_N, by which runs find them",
        "enable_recovery_time_instrumentation": MISSING + "the seconds of a resumption's parts",
        "save_xser": REFUSED + "of torch-xla; each process writes its own part already",
        "load_xser": REFUSED + "of torch-xla; each process reads its own part already",
        "zero1": MISSING + "sharded states alone, with replicated gradients",
        "sequence_parallel": "true is what `train.tensor_parallel_size` does between layers; false "
        "is refused",
        "kv_replicator": MISSING + "copies of keys' heads; where processes do not divide the heads, "
        "each computes attention whole",
        "global_batch_size": MISSING + "a field; it is `train.gradient_accumulation_steps` x "
        "`train.micro_batch_size` x processes that read batches of their own",
        "MegatronDataModule": MISSING + "its indexed binary files",
        "ModelAlignmentDataModule": {"data.datasets.0.type": "prompt_completion"},
        "HFDataModule": {"data.datasets.0.path": "organization/name"},
        "CustomDataModule": "a row of the table of data types, which a package of one's own adds",
        "max_position_embeddings": {"model.foundation": {"max_position_embeddings": 4096}},
        "num_layers": {"model.foundation": {"num_hidden_layers": 4}},
        "hidden_size": {"model.foundation": {"hidden_size": 4096}},
        "ffn_hidden_size": {"model.foundation": {"intermediate_size": 11008}},
        "num_attention_heads": {"model.foundation": {"num_attention_heads": 32}},
        "num_kv_heads": {"model.foundation": {"num_key_value_heads": 32}},
        "layernorm_epsilon": {"model.foundation": {"rms_norm_eps": 1e-5}},
        "share_embeddings_and_output_weights": {"model.foundation": {"tie_word_embeddings": True}},
        "qkv_linear": "false is what is done; true is refused: see kv_replicator",
        "use_cpu_initialization": {"train.data_parallel_mode": "none", "train.init_device": "cpu"},
        "activations_checkpoint_granularity: selective": {"train.recompute_modules": ["mlp"]},
        "activations_checkpoint_granularity: full": {"train.recompute_modules": None},
        "activations_checkpoint_granularity: null": {"train.enable_gradient_checkpointing": False},
        "activations_checkpoint_recompute": {"train.recompute_modules": ["self_attn"]},
        "fusions.softmax": "true is what is done; false is refused",
        "fusions.flash_attention": {"model.attn_implementation": "auto"},
        "do_layer_norm_weight_decay: false": {"train.no_decay_modules": ["norm"]},
        "optim.name": {"train.optimizer": "adamw"},
        "optim.name: adamw_fp32OptState": {"train.optimizer": "adamw"},
        "optim.capturable": "true is what is done where steps are counted on the device",
        "optim.betas": {"train.adam_beta1": 0.9, "train.adam_beta2": 0.999},
        "sched.name": {"train.lr_decay_style": "cosine"},
        "sched.max_steps": {"train.lr_decay_style": "cosine", "train.lr_decay_steps": 20_000},
        "sched.name: LinearAnnealingWithWarmUp": {
            "train.lr_decay_style": "linear_annealing",
            "train.lr_min": 0,
        },
        "sched.name: CosineAnnealing": {"train.lr_decay_style": "cosine_annealing"},
        "sched.name: WarmupPolicy": {"train.lr_decay_style": "constant_with_warmup"},
        "sched.name: WarmupHoldPolicy": {"train.lr_decay_style": "constant_with_warmup"},
        "sched.name: SquareAnnealing": {"train.lr_decay_style": "square_annealing"},
        "sched.name: NoamAnnealing": {"train.lr_decay_style": "noam"},
        "sched.name: WarmupAnnealing": {"train.lr_decay_style": "warmup_annealing"},
        "sched.name: StepLR": {
            "train.lr_decay_style": "step",
            "train.lr_step_size": 1000,
            "train.lr_gamma": 0.1,
        },
        "sched.name: ExponentialLR": {
            "train.lr_decay_style": "exponential",
            "train.lr_gamma": 0.9999,
        },
        "sched.name: rprop": "refused: it is an optimizer, `train.optimizer: rprop`",
        "init_method_std": MISSING + "a field; it is 0.02",
        "apply_query_key_layer_scaling": MISSING + "scores divided by the layer's number, for fp16",
        "normalization: rmsnorm": "what is done",
        "normalization: layernorm": MISSING + "a family with it; the op is there",
        "make_vocab_size_divisible_by": MISSING + "a vocabulary with rows that mean nothing",
        "persist_layer_norm": REFUSED + "a choice of kernels, which `tilewright.use` makes by name",
        "position_embedding_type: rope": "what is done",
        "position_embedding_type: learned_absolute": MISSING + "a family with learned positions",
        "rotary_percentage": MISSING + "a part of a head; 1 is what is done",
        "activation: swiglu": "what is done",
        "activation: gelu": MISSING + "an MLP without a gate; Gemma 3 has the gated one",
        "has_bias": MISSING + "biases of all projections; Qwen2 has those of attention's",
        "precision.type: mixed_precision": {"train.enable_mixed_precision": True},
        "precision.type: mixed_precisionSR": MISSING + "weights that are rounded stochastically",
        "precision.type: bf16SR": MISSING + "parameters in bfloat16, rounded stochastically",
        "precision.type: fp32": {"train.enable_mixed_precision": False},
        "precision.type: autocast": {
            "train.data_parallel_mode": "ddp",
            "train.enable_mixed_precision": True,
        },
        "precision.type: manual": MISSING + PRECISION + "parameters, states and sums are float32",
        "master_weights": MISSING + PRECISION + "parameters are float32 themselves",
        "fp32_grad_acc": "true is what is done; false is refused",
        "xla_use_bf16": REFUSED + "of XLA's; `train.enable_mixed_precision` computes in bfloat16",
        "xla_downcast_bf16": REFUSED + "of XLA's; `train.enable_mixed_precision` computes in "
        "bfloat16",
        "neuron_rt_stochastic_rounding_en": REFUSED + "no GPU rounds all its casts so",
        "parallel_layers_reduce_dtype": MISSING + PRECISION + "sums over processes have the dtype "
        "of what is summed",
        "dev_choose_samples": {"data.datasets.0.max_samples": 2250},
        "seq_length": {"data.sample_packing_sequence_len": 4096},
        "precompute_ref_log_probs": {
            "train.loss": "preference",
            "preference.reference": "precomputed",
        },
        "precompute_ref_log_probs: false": {
            "train.loss": "preference",
            "preference.reference": "model",
        },
        "truncation_mode: keep_start": "what is done",
        "truncation_mode: keep_end": MISSING + "a choice of the end that is cut",
        "packing": "true is what is done, and documents do not see each other; false is refused",
    },
}  # fmt: skip


class State(enum.StrEnum):
    """Of a row of another configuration."""

    FIELD = "a field"
    SETTINGS = "other fields"
    SENTENCE = "otherwise"
    REFUSED = "refused"
    MISSING = "not yet"


class Row(NamedTuple):
    """name: with the value that is meant, if only one is.   here: fields, settings or a sentence.

    `here` is a list of paths, settings by path, or a sentence.
    """

    name: str
    state: State
    here: list[str] | dict[str, Any] | str


def named(model: type[BaseModel], who: str, name: str) -> list[str]:
    """The fields with a name, in their own words or those of a library."""
    last, found = name.rpartition(".")[2], []
    for path, field in leaves(model).items():
        names = {path, path.rpartition(".")[2], *properties(field).names.get(who, ())}
        if {name, last} & names and not path.startswith("data.test_datasets."):
            found.append(path)
    return [name] if name in found else found


def _of(given: dict[str, Any] | str) -> tuple[State, dict[str, Any] | str]:
    if isinstance(given, dict):
        return State.SETTINGS, given
    for head, state in ((REFUSED, State.REFUSED), (MISSING, State.MISSING)):
        if given.startswith(head):
            return state, given.removeprefix(head)
    return State.SENTENCE, given


def by_value(model: type[BaseModel], who: str, name: str, value: str) -> Row | None:
    """Of a row of a table that has the name of one there."""
    given = SETTINGS.get(who, {}).get(name, {})
    paths = [*given] if isinstance(given, dict) and given else named(model, who, name)
    rows = [m for path in paths[:1] for m in _field(model, path).metadata if isinstance(m, RowOf)]
    if not rows or value not in rows[0].table.names():
        return None
    return Row(f"{name}: {value}", State.SETTINGS, {paths[0]: value})


def _field(model: type[BaseModel], path: str) -> Any:
    return leaves(model)[".".join(p for p in path.split(".") if not p.isdigit())]


def rows(model: type[BaseModel], who: str, names: Iterable[str]) -> Iterator[Row]:
    """The rows of these names, in order, each after a library's name; values that SETTINGS has of
    them follow. Raises KeyError for a name that has no state.
    """
    own, listed = SETTINGS.get(who, {}), [*names]
    for name in listed:
        key, colon, value = name.partition(": ")
        found = named(model, who, key)
        if name in own:
            yield Row(name, *_of(own[name]))
        elif colon and (row := by_value(model, who, key, value)) is not None:
            yield row
        elif colon or not (found or any(n.startswith(f"{key}: ") for n in own)):
            raise KeyError(f"{who} has {name}, which is nothing here")
        elif found:
            why = [r.why for r in properties(_field(model, found[0])).rules if _refuses(r)]
            yield Row(name, State.REFUSED, str(why[0])) if why else Row(name, State.FIELD, found)
        for n, here in own.items():
            if not colon and n.startswith(f"{key}: ") and n not in listed:
                yield Row(n, *_of(here))


def _refuses(rule: Any) -> bool:
    """Whether only the default is accepted."""
    return isinstance(rule, Accepts) and not rule.values


def said(name: str) -> str:
    """What stands for a name of another configuration, in a sentence, or ""."""
    found = [(who, here[name]) for who, here in SETTINGS.items() if name in here]
    return "; ".join(f"{who}'s {name}: {written(here)}" for who, here in found)


def written(here: list[str] | dict[str, Any] | str) -> str:
    """Settings as they are written, or the sentence that stands for them."""
    if isinstance(here, str):
        return here
    if isinstance(here, list):
        return " or ".join(f"`{path}`" for path in here)
    return ", ".join(f"`{path}: {json.dumps(v).strip(chr(34))}`" for path, v in here.items())
