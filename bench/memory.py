"""The peak memory that `--plan` predicts, beside what PyTorch's CPU allocator counts in runs of the
same pipelines between gloo processes: every schedule with every other kind of parallelism.

Each run is two optimizer steps of four micro-batches of full bins. Tokens
are random. Routers are given routes that send every expert the same number of tokens, as the plan
takes them to be. A call with the same --out runs what has no row there.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import json
import multiprocessing
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from bench import commands
from tilewright.bench import report, store
from tilewright.bench.options import chosen, names

FILE, ROOT = "memory.json", pathlib.Path(__file__).parents[1]
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
TURNS = {"virtual_pipeline_size": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1F1B": {},
    "GPipe": {},
    "Interleaved1F1B": TURNS,
    "InterleavedZeroBubble": TURNS,
    "ZBVZeroBubble": TURNS,
}
# Processes, the model, and fields of the section train.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pp": (2, SHAPE, {}),
    "pp of experts": (2, EXPERTS, {}),
    "pp x shard": (4, SHAPE, {}),
    "pp x replicate": (4, SHAPE, {"data_parallel_shard_size": 1}),
    "pp x tp": (4, SHAPE, {"tensor_parallel_size": 2}),
    "pp x tp of experts": (4, EXPERTS, {"tensor_parallel_size": 2}),
    "pp x ep": (4, EXPERTS, {"expert_parallel_size": 2}),
    "pp x ulysses": (4, SHAPE, {"ulysses_parallel_size": 2}),
    "pp x ring": (4, SHAPE, {"ringattn_parallel_size": 2}),
}


def configuration(layout: str, schedule: str, folder: pathlib.Path) -> str:
    """The path of the trainer's, which is written there."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    _, shape, options = LAYOUTS[layout]
    (folder / "model/config.json").write_text(json.dumps(shape))
    train = {
        "data_parallel_mode": "fsdp2",
        "pipeline_parallel_size": 2,
        "pipeline_parallel_schedule": schedule,
        "gradient_accumulation_steps": 4,
        "enable_gradient_checkpointing": False,
        "enable_mixed_precision": False,
        **SCHEDULES[schedule],
        **options,
    }
    tree = {
        "model": {"config_path": str(folder / "model"), "merge_qkv": False},
        "data": {"datasets": [{"path": "dummy"}], "sample_packing_sequence_len": 768},
        "train": {"output_dir": str(folder / "out"), **train},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return str(path)


# ---- one rank


def most_allocated(config: Any, ranks: Any) -> int:
    """The most bytes of tensors at one time while a model is built and takes two steps."""
    from tilewright.trainer import memory_plan
    from tilewright.trainer.build import (
        build_model,
        choose_ops,
        columns_of,
        compute_dtype,
        engine_around,
    )
    from tilewright.trainer.checkpoint import hf
    from tilewright.trainer.losses.language_modeling import language_modeling
    from tilewright.trainer.losses.loss import loss_of
    from tilewright.trainer.parallel.precision import resolved

    draw = torch.Generator().manual_seed(0)
    _count_all_threads()
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        model, lora, t = config.model, config.lora, config.train
        shape = hf.shape_of(model)
        ops = choose_ops(model, shape, ranks, compute_dtype(t))
        dtypes = resolved(config.precision, t, t)
        parts = build_model(model, lora, shape, config.data, t, ranks, ops, dtypes)
        engine = engine_around(parts, t, ranks, lora.lora_plus_scale)
        loss = loss_of(t.loss, dict(config), t.loss_args)
        columns = columns_of(t, loss, shape, share_prefix=False)
        batch = memory_plan.full_batch(config.data, t.micro_batch_size, columns, ranks, False)
        n = t.gradient_accumulation_steps
        size = batch["input_ids"].shape
        batch["input_ids"] = torch.randint(shape.vocab_size, size, generator=draw)
        if ranks.layout.expert > 1:
            batch["routed_experts"] = even_routes(shape, size[1])
        for _ in range(2):
            for batches in [[batch] * n] if ranks.layout.pp > 1 else [[batch]] * n:
                engine.forward_backward(batches, language_modeling)
            # Alone, a stage that is not the last sees no denominator.
            engine.optim_step(max_norm=config.train.max_grad_norm, denominator=1.0)
    results: Any = profile.profiler
    events, changes = results.kineto_results.experimental_event_tree(), []
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            what = event.extra_fields
            changes.append((event.start_time_ns, what.alloc_size, what.total_allocated))
    _, size, total = min(changes)
    return max(change[2] for change in changes) - (total - size)


def _count_all_threads() -> None:
    """Has PyTorch's allocator count what every thread frees. Without it a block whose last owner is
    a thread of gloo, of which the profiler knows nothing, counts until the end.
    """
    c10 = ctypes.CDLL(str(pathlib.Path(torch.__file__).with_name("lib") / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def even_routes(shape: Any, tokens: int) -> torch.Tensor:
    """Routes to replay, [1, tokens, layers with experts x K] int16, in which all sets of K experts
    are equally frequent. A router with random weights sends one rank more than another.
    """
    layers = sum(map(shape.is_moe, range(shape.num_hidden_layers)))
    sets = list(itertools.combinations(range(shape.num_experts), shape.num_experts_per_tok))
    routes = torch.tensor(sets, dtype=torch.int16).repeat(tokens // len(sets) + 1, layers)
    return routes[None, :tokens]


def rank(paths: Sequence[str]) -> None:
    """Runs these configurations, and writes what each needs beside it."""
    from tilewright.trainer.config import load
    from tilewright.trainer.parallel import mesh

    ranks = None
    for path in paths:
        train = (config := load(path)).train
        if ranks is None:
            ranks = mesh.join(train)
        else:
            ranks = mesh.build(train, ranks.rank, ranks.size, ranks.device)
        counted = pathlib.Path(path).with_name(f"counted_{ranks.rank}")
        counted.write_text(str(most_allocated(config, ranks)))
    dist.destroy_process_group()


# ---- all layouts


def measure(
    layout: str, schedules: Sequence[str], folder: pathlib.Path
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each schedule, and a row for each pipeline rank: bytes planned for its first process, and
    counted in each.
    """
    from tilewright.trainer.config import load

    size = LAYOUTS[layout][0]
    paths = [configuration(layout, name, folder / name) for name in schedules]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    subprocess.run(
        [*start, str(size), "-m", "bench.memory", *paths],
        cwd=ROOT,
        check=True,
    )
    for schedule, path in zip(schedules, paths, strict=True):
        rows = []
        for first in range(0, size, size // 2):
            planned = _of_rank(size, first).submit(_planned, load(path), size, first).result()
            files = [pathlib.Path(path).with_name(f"counted_{first + i}") for i in range(size // 2)]
            counted = [int(file.read_text()) for file in files]
            rows.append({"rank": first, "planned": planned, "counted": counted})
        yield schedule, rows


def _planned(config: Any, size: int, rank: int) -> int:
    from tilewright.trainer import memory_plan

    return memory_plan.Planner(config, size, torch.device("cpu")).plan(rank).total


@functools.cache
def _of_rank(size: int, rank: int) -> ProcessPoolExecutor:
    """A process for the plans of one rank: see `memory_plan.Planner.apart`."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; a line for each schedule of a layout."""
    out = [
        "| layout | schedule | planned, MiB | counted, MiB | planned / counted |",
        "|---|---|---|---|---|",
    ]
    for (layout, schedule), group in itertools.groupby(
        rows, key=lambda r: (r["layout"], r["schedule"])
    ):
        lines = list(group)
        planned = ", ".join(f"{r['planned'] / 2**20:.2f}" for r in lines)
        counted = ", ".join(f"{n / 2**20:.2f}" for r in lines for n in r["counted"])
        shares = [r["planned"] / n for r in lines for n in r["counted"]]
        span = f"{min(shares):.3f} to {max(shares):.3f}"
        out.append(f"| {layout} | {schedule} | {planned} | {counted} | {span} |")
    return "\n".join(out)


def page(document: dict[str, Any]) -> str:
    rows, meta = document["rows"], document["meta"]
    commits = ", ".join(dict.fromkeys(r["commit"] for r in rows))
    return (
        "# Planned and counted memory of pipelines\n\n"
        f"`python -m bench memory`, commit {commits}, {meta['date'][:10]}, torch "
        f"{meta['versions']['torch']}, {meta['device']}; gloo between processes of one machine. "
        "Planned: for each of two pipeline ranks. Counted: by PyTorch's allocator in each process. "
        "Every expert gets equally many tokens.\n\n"
        f"{table(rows)}\n"
    )


def main(argv: Sequence[str]) -> int:
    parser = commands.parser("memory", __doc__)
    for option, known in (("layout", LAYOUTS), ("schedule", SCHEDULES)):
        text = f"default: {','.join(known)}"
        parser.add_argument(f"--{option}", type=names(), metavar=f"{option.upper()},..", help=text)
    text = "writes memory.json and README.md there"
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", required=True, help=text)
    args = parser.parse_args(argv)
    layouts = chosen(parser, "--layout", args.layout, LAYOUTS)
    schedules = chosen(parser, "--schedule", args.schedule, SCHEDULES)
    commands.need(parser, ["pydantic"])
    meta = commands.metadata("memory", argv, {**vars(args), "out": None})
    path = args.out / FILE
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for layout in layouts:
        there = {r["schedule"] for r in rows if r["layout"] == layout}
        if not (left := [name for name in schedules if name not in there]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for schedule, measured in measure(layout, left, pathlib.Path(folder)):
                about = {"layout": layout, "schedule": schedule, "commit": report.commit(meta)}
                rows += [{**about, **row} for row in measured]
        rows.sort(key=_place)
        document = {"schema": report.SCHEMA, "meta": meta, "rows": rows}
        store.write_json(path, document)
        store.write_text(args.out / "README.md", page(document))
    print(table(rows))
    return 0


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    layouts, schedules = list(LAYOUTS), list(SCHEDULES)
    return layouts.index(row["layout"]), schedules.index(row["schedule"]), row["rank"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank(sys.argv[1:])
