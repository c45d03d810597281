"""Rules between the fields of tensor and pipeline parallelism, and of recorded routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilewright.core.torch_names import no_zero_bubble
from tilewright.trainer.config.field_tree import default_of

if TYPE_CHECKING:
    from tilewright.trainer.config import Config


def too_few(schedule: str, micro_batches: int, ranks: int) -> str | None:
    """Why a schedule cannot run so many micro-batches."""
    if schedule == "1F1B" and micro_batches < ranks:
        return f"1F1B needs at least as many micro-batches as the {ranks} stages; GPipe takes any"
    rounds = max(1, micro_batches // ranks)
    if schedule.startswith("Interleaved") and micro_batches % rounds:
        return (
            f"{schedule} runs them in {rounds} rounds of equal size, so their number must divide "
            f"by {rounds}"
        )
    return None


def replay_relations(config: Config) -> Iterator[tuple[bool, str, str]]:
    """(whether it is violated, the fields, the sentence) of every rule about recorded routes."""
    data, replays = config.data, config.train.router_replay
    entries = [] if data.skip_prepare_dataset else [*data.datasets, *data.test_datasets]
    yield (
        replays and any(entry.type != "tokenized" for entry in entries),
        "train.router_replay",
        "an engine's records are of its tokens, so every data set must be of type tokenized",
    )
    yield (
        replays and any(entry.path == "dummy" for entry in entries),
        "train.router_replay",
        "dummy data have no recorded routes",
    )
    yield (
        config.train.router_replay_compare_steps > 0 and not replays,
        "train.router_replay_compare_steps train.router_replay",
        "nothing is replayed",
    )


def tensor_relations(config: Config) -> Iterator[tuple[bool, str, str]]:
    """(whether it is violated, the fields, the sentence) of every rule about tensor parallelism."""
    many = config.train.tensor_parallel_size > 1
    yield (
        many and config.train.data_parallel_mode != "fsdp2",
        "train.tensor_parallel_size train.data_parallel_mode",
        "of these only fsdp2 takes parameters that are sharded already; with it, "
        "data_parallel_shard_size: 1 makes replicas of tensor-parallel groups",
    )
    yield (
        many and config.lora.enable_qlora,
        "train.tensor_parallel_size lora.enable_qlora",
        "every process has all of a quantized matrix, whose scales are those of blocks that a "
        "shard would cut, so it would save neither memory nor time",
    )
    yield (
        many and config.model.merge_qkv,
        "train.tensor_parallel_size model.merge_qkv",
        "each rank needs rows of queries, of keys and of values, which are not one shard of a "
        "merged matrix; set merge_qkv: false",
    )
    yield (
        many and config.model.batch_invariant,
        "train.tensor_parallel_size model.batch_invariant",
        "in which order the ranks' sums are added depends on where in the batch a token is",
    )


def pipeline_relations(config: Config) -> Iterator[tuple[bool, str, str]]:
    """(whether it is violated, the fields, the sentence) of every rule about pipelines."""
    t = config.train
    size, name, virtual = (
        t.pipeline_parallel_size,
        t.pipeline_parallel_schedule,
        t.virtual_pipeline_size,
    )
    for field in (
        "pipeline_parallel_schedule",
        "virtual_pipeline_size",
        "pipeline_split",
        "pp_variable_seq_lengths",
    ):
        yield (
            size == 1 and getattr(t, field) != default_of(type(config), f"train.{field}"),
            f"train.{field} train.pipeline_parallel_size",
            "there is one stage",
        )
    yield (
        size > 1 and t.data_parallel_mode != "fsdp2",
        "train.data_parallel_mode train.pipeline_parallel_size",
        "the schedules accumulate gradients of fsdp2's parameters; with it, "
        "data_parallel_shard_size: 1 makes replicas of pipelines",
    )
    schedule = "train.pipeline_parallel_schedule"
    single = name in ("1F1B", "GPipe")
    yield (
        single and virtual > 1,
        f"train.virtual_pipeline_size {schedule}",
        "1F1B and GPipe run one stage on each process",
    )
    yield (
        size > 1 and name.startswith("Interleaved") and virtual == 1,
        f"train.virtual_pipeline_size {schedule}",
        "an interleaved schedule needs two or more stages on each process",
    )
    yield (
        size > 1 and name == "ZBVZeroBubble" and virtual != 2,
        f"train.virtual_pipeline_size {schedule}",
        "ZBVZeroBubble needs two stages on each process",
    )
    yield (
        t.pipeline_split is not None and len(t.pipeline_split) != size * virtual,
        "train.pipeline_split train.pipeline_parallel_size train.virtual_pipeline_size",
        "needs a number for each stage, of which there are pipeline_parallel_size x "
        "virtual_pipeline_size",
    )
    yield (
        t.pipeline_split is not None and min(t.pipeline_split) < 1,
        "train.pipeline_split",
        "a stage has one layer or more",
    )
    few = too_few(name, t.gradient_accumulation_steps, size)
    yield (
        size > 1 and few is not None,
        f"train.gradient_accumulation_steps {schedule} train.pipeline_parallel_size",
        str(few),
    )
    zero, wrong = name.endswith("ZeroBubble"), no_zero_bubble()
    yield (size > 1 and zero and wrong is not None, schedule, str(wrong))
    yield (
        zero and t.enable_compile,
        f"{schedule} train.enable_compile",
        "compiled code computes the gradients of inputs and weights at once, and cannot be split",
    )
    yield (
        zero and t.enable_reentrant,
        f"{schedule} train.enable_reentrant",
        "reentrant recomputation cannot compute the gradients of inputs and weights apart",
    )
