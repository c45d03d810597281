"""Writes docs/trainer/truth.md: how near the trainer's preference losses and their gradients are to
float64, under each layout.

    python -m bench truth --out DIR [--layout NAME,..] [--loss NAME,..]

One step's pairs of answers, of other weights than the reference's, some of one token, are computed
by the trainer, and by transformers' (with adapters PEFT's) model in float64. A loss holds where its
error, and the largest of its gradients', are at most twice those of transformers' model in the
trainer's dtypes and a rounding, in the units of the numerics contract. A call with the same --out
runs the layouts that have no rows there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bench.page.text import table
from tilewright.bench import bounds, report, run, store
from tilewright.bench.options import chosen, names
from tilewright.bench.tensors import error
from tilewright.core import platform
from tilewright.ops.loss.preference import FORMULAS, Options, Pairs

FILE, ROOT = "truth.json", pathlib.Path(__file__).parents[1]
PAGE = pathlib.Path("docs/trainer/truth.md")
DTYPES = {"float32": False, "bfloat16": True}  # train.enable_mixed_precision
# Bins of two pairs: three do not fit, and a document has at most half of a bin of one.
PAIRS, LEAST, LONGEST, BIN = 12, 22, 32, 64
VOCABULARY = 64
DRAWS = 16  # of weights and pairs: an error of one draw may be small by chance
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
RANKS = {"train.data_parallel_mode": "fsdp2", "model.merge_qkv": False}


@dataclasses.dataclass(frozen=True)
class Layout:
    """options: of the trainer.   frozen: the parameters that do not learn beside those of adapters:
    the ends of their names.
    """

    processes: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @property
    def adapters(self) -> bool:
        return bool(self.options.get("lora.enable_lora"))


LOSSES = {name: formula for name, formula in FORMULAS.items() if formula.paired}
# A step is all pairs.
PACKED = {"data.sample_packing_sequence_len": BIN, "train.micro_batch_size": PAIRS // 2}
LAYOUTS = {
    "a pair a bin": Layout(
        options={"data.sample_packing_sequence_len": LONGEST, "train.micro_batch_size": PAIRS}
    ),
    "packed": Layout(options=PACKED),
    "accumulation 3": Layout(
        options={**PACKED, "train.micro_batch_size": 2, "train.gradient_accumulation_steps": 3}
    ),
    "LoRA": Layout(options={**PACKED, "lora.enable_lora": True, "lora.lora_rank": 4}),
    "frozen head": Layout(options=PACKED, frozen=("lm_head.weight",)),
    "FSDP2 on 2": Layout(2, {**PACKED, **RANKS, "train.micro_batch_size": 3}),
    "Ulysses on 2": Layout(2, {**PACKED, **RANKS, "train.ulysses_parallel_size": 2}),
    "ring on 2": Layout(2, {**PACKED, **RANKS, "train.ringattn_parallel_size": 2}),
}


class Found(dict[str, torch.Tensor]):
    """A loss, and gradients, by name."""


# ---- inputs


def pairs(draw: int) -> list[dict[str, list[int]]]:
    """Every third has an answer of one token."""
    rng = random.Random(draw)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    rows = []
    for i in range(PAIRS):
        prompt, most = (n := rng.randint(5, 6)), LONGEST // 2 - n
        chosen = rng.randint(2, most) if i % 3 else 1
        rejected = rng.randint(max(LEAST - 2 * prompt - chosen, 1), most)
        answers = {"chosen_ids": ids(chosen), "rejected_ids": ids(rejected)}
        if i % 3 == 2:
            answers = dict(zip(answers, reversed(answers.values()), strict=True))
        rows.append({"prompt_ids": ids(prompt), **answers})
    return rows


def write_inputs(folder: pathlib.Path, draw: int) -> None:
    """The pairs; the model, and the reference, whose weights are near its."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(draw)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std() if p.dim() > 1 else 0.0)
    model.save_pretrained(folder / "reference")
    text = "".join(json.dumps(row) + "\n" for row in pairs(draw))
    (folder / "pairs.jsonl").write_text(text)


# ---- the trainer


def arguments(layout: Layout, dtype: str, folder: pathlib.Path) -> list[str]:
    options: dict[str, Any] = {
        "model.model_path": str(folder / "model"),
        "data.datasets": [{"path": str(folder / "pairs.jsonl"), "type": "preference_tokenized"}],
        "data.dataset_prepared_path": str(folder / "prepared"),
        "data.pad_to_multiple_of": 16,
        "train.output_dir": str(folder / "out"),
        "train.loss": "preference",
        "train.data_parallel_mode": "none",
        "train.enable_gradient_checkpointing": False,
        "train.enable_mixed_precision": DTYPES[dtype],
        "train.save_hf_weights": False,
        "train.optimizer": "sgd",
        **layout.options,
    }
    if not layout.adapters:
        options["preference.reference_path"] = str(folder / "reference")
    return [f"--{name}={json.dumps(value)}" for name, value in options.items()]


def of_trainer(
    layout: Layout, dtype: str, losses: Iterable[str], folder: pathlib.Path, draw: int, mesh: Any
) -> dict[str, Found]:
    """What a step of each loss gives. With adapters writes them."""
    from tilewright.nn import save_adapter
    from tilewright.nn.weights import adapted
    from tilewright.trainer import build
    from tilewright.trainer.config import load
    from tilewright.trainer.config.preference import Preference
    from tilewright.trainer.losses.loss import loss_of

    config = load(None, arguments(layout, dtype, folder))
    engine = (made := build.build(config, mesh)).engine
    reference = engine.reference
    generator = torch.Generator().manual_seed(draw)
    module: Any
    for _, module in adapted(engine.model):  # they begin with zeros
        torch.nn.init.normal_(module.lora_B, std=0.1, generator=generator)
    for name, p in engine.model.named_parameters():
        p.requires_grad_(p.requires_grad and not name.endswith(layout.frozen))
    if layout.adapters:
        save_adapter(engine.model, folder / "adapter", base_model=str(folder / "model"))
    batches, found = next(made.batches.steps()), {}
    for name in losses:
        formula = LOSSES[name]
        engine.reference = reference if formula.reference else None
        scope = "step" if formula.kl else "micro_batch"
        section = Preference(loss=name, kl_scope=scope)
        sums = engine.forward_backward(batches, loss_of("preference", {"preference": section}))
        if round(sums.denominator) != PAIRS:
            raise RuntimeError(f"a step has {sums.denominator} pairs, not {PAIRS}")
        engine.divide()
        loss = torch.tensor(sums.mean, dtype=torch.float64)
        found[name] = Found(loss=loss, **gradients(engine.model, made.shape))
        engine.zero()
    return found


def gradients(model: torch.nn.Module, shape: Any) -> dict[str, torch.Tensor]:
    """By their names in transformers' model, or PEFT's."""
    from tilewright.nn.peft import part_path
    from tilewright.nn.sharded import whole
    from tilewright.nn.weights import adapted
    from tilewright.trainer.checkpoint import hf

    found = {}
    of_adapters: dict[str, Any] = dict(adapted(model))
    for path, module in of_adapters.items():
        A, B, r, at = module.lora_A.grad, module.lora_B.grad, module.rank, 0
        for i, (part, (first, stop)) in enumerate(module.slices.items()):
            key = f"base_model.model.{part_path(path, part)}"
            found[f"{key}.lora_A.default.weight"] = A[i * r : (i + 1) * r]
            found[f"{key}.lora_B.default.weight"] = B[at : at + stop - first]
            at += stop - first
    for name, p in model.named_parameters():
        if p.grad is not None and not of_adapters:
            full = whole(p.grad)
            parts = hf.split(name, full, shape)
            found |= dict(zip(hf.sources(name, shape), parts, strict=True))
    return {name: g.detach().clone() for name, g in found.items()}


def rank(folder: str, name: str, dtype: str, losses: str) -> None:
    """One of torchrun's processes: the first writes what was found."""
    from tilewright.trainer.config import load
    from tilewright.trainer.parallel import mesh

    layout, found, root = LAYOUTS[name], [], pathlib.Path(folder)
    joined = mesh.join(load(None, arguments(layout, dtype, root / "0")).train)
    for draw in range(DRAWS):
        where = root / str(draw)
        found.append(of_trainer(layout, dtype, losses.split(","), where, draw, joined))
    if dist.get_rank() == 0:
        flat = {
            f"{d}/{k}/{n}": t
            for d, of in enumerate(found)
            for k, v in of.items()
            for n, t in v.items()
        }
        save_file({n: t.contiguous() for n, t in flat.items()}, root / "found")
    dist.destroy_process_group()


def by_trainer(
    name: str, dtype: str, losses: Sequence[str], folder: pathlib.Path
) -> list[dict[str, Found]]:
    """Of each draw."""
    layout = LAYOUTS[name]
    if layout.processes == 1:
        from tilewright.trainer.parallel.mesh import Mesh

        return [
            of_trainer(layout, dtype, losses, folder / str(draw), draw, Mesh())
            for draw in range(DRAWS)
        ]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    what = ["-m", "bench.truth", str(folder), name, dtype, ",".join(losses)]
    subprocess.run([*start, str(layout.processes), *what], cwd=ROOT, check=True)
    found: list[dict[str, Found]] = [{} for _ in range(DRAWS)]
    for key, t in load_file(folder / "found").items():
        draw, loss, name_of = key.split("/")
        found[int(draw)].setdefault(loss, Found())[name_of] = t
    return found


# ---- transformers


class Precision(NamedTuple):
    """weights: the dtype of weights, and of what is computed outside of autocast.   half: whether
    products are those of autocast.
    """

    weights: torch.dtype
    half: bool = False


def by_transformers(
    layout: Layout, precision: Precision, losses: Iterable[str], folder: pathlib.Path, draw: int
) -> dict[str, Found]:
    """The same of transformers' model and a formula."""
    from transformers import LlamaForCausalLM

    dtype, half = precision

    def load_model(name: str) -> Any:
        return LlamaForCausalLM.from_pretrained(folder / name, dtype=dtype)

    policy, other = load_model("model"), load_model("reference")
    if layout.adapters:
        from peft import PeftModel

        other = load_model("model")
        policy = PeftModel.from_pretrained(policy, folder / "adapter", is_trainable=True).to(dtype)

    rows = pairs(draw)

    def logprob(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + answer])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
        return logprobs.gather(1, ids[0, len(prompt) :, None]).double().sum()

    def sums(model: Any) -> list[torch.Tensor]:
        return [
            torch.stack([logprob(model, row["prompt_ids"], row[name]) for row in rows])
            for name in ("chosen_ids", "rejected_ids")
        ]

    counts = [
        torch.tensor([len(row[n]) for row in rows]).double() for n in ("chosen_ids", "rejected_ids")
    ]
    own = sums(policy)
    with torch.no_grad():
        theirs = sums(other)
    learns = {
        n: p
        for n, p in policy.named_parameters()
        if p.requires_grad and not n.endswith(layout.frozen)
    }
    found = {}
    for name in losses:
        formula = LOSSES[name]
        against = theirs if formula.reference else [t.detach() for t in own]
        ratios = [(a - b).detach().mean().clamp_min(0) for a, b in zip(own, against, strict=True)]
        numbers = Pairs(*own, *against, *counts)
        numbers = numbers._replace(kl_chosen=ratios[0], kl_rejected=ratios[1])
        loss = formula.function(numbers, Options()).mean()
        grads = torch.autograd.grad(loss, list(learns.values()), retain_graph=True)
        found[name] = Found(loss=loss.detach(), **dict(zip(learns, grads, strict=True)))
    return found


# ---- what is compared


def errors(found: Found, truth: Found) -> tuple[float, float]:
    """Of a loss, and the largest of its gradients'."""
    if found.keys() != truth.keys():
        raise RuntimeError(f"other gradients: {sorted(found.keys() ^ truth.keys())}")
    of = {name: error(found[name].double(), truth[name].double())[0] for name in truth}
    return of.pop("loss"), max(of.values())


def row(compared: Sequence[tuple[Found, Found, Found]], half: bool) -> dict[str, float]:
    """(the trainer's, the twin's, truth) of each draw -> root mean squares of their errors, and the
    trainer's as shares of what is allowed.
    """
    slack = bounds.usual(torch.bfloat16 if half else torch.float32, torch.float32)
    own, twin = (
        torch.tensor([errors(c[i], c[2]) for c in compared]).square().mean(0).sqrt().tolist()
        for i in range(2)
    )
    made = {}
    for kind, a, b in zip(("value", "gradients"), own, twin, strict=True):
        made |= {kind: a, f"{kind}_eager": b, f"{kind}_share": a / (2 * b + slack)}
    return made


def measure(name: str, losses: Sequence[str]) -> Iterator[dict[str, Any]]:
    layout = LAYOUTS[name]
    for dtype, half in DTYPES.items():
        # FSDP2 casts the weights; the other modes run under autocast.
        cast = half and layout.processes > 1
        eager = Precision(torch.bfloat16 if cast else torch.float32, half and not cast)
        with tempfile.TemporaryDirectory() as made:
            folders = [pathlib.Path(made, str(draw)) for draw in range(DRAWS)]
            for draw, folder in enumerate(folders):
                folder.mkdir()
                write_inputs(folder, draw)
            found = by_trainer(name, dtype, losses, pathlib.Path(made))
            twin, truth = (
                [by_transformers(layout, p, losses, f, draw) for draw, f in enumerate(folders)]
                for p in (eager, Precision(torch.float64))
            )
        for loss in losses:
            compared = [(found[d][loss], twin[d][loss], truth[d][loss]) for d in range(DRAWS)]
            yield {"loss": loss, "layout": name, "dtype": dtype, **row(compared, half)}


def share(row: Mapping[str, Any]) -> float:
    return max(row["value_share"], row["gradients_share"])


def page(document: Mapping[str, Any]) -> str:
    rows, meta = document["rows"], document["meta"]
    commits = ", ".join(dict.fromkeys(r["commit"] for r in rows))
    cells = {(r["loss"], r["layout"], r["dtype"]): share(r) for r in rows}
    layouts, losses = [n for n in LAYOUTS if any(r["layout"] == n for r in rows)], [*LOSSES]
    tables = []
    for dtype in DTYPES:
        body = [
            [f"`{loss}`", *(f"{cells[loss, n, dtype]:.2f}" for n in layouts)]
            for loss in losses
            if all((loss, n, dtype) in cells for n in layouts)
        ]
        made = table(["loss", *layouts], [(line, ()) for line in body])
        tables.append("\n".join([f"## {dtype}", "", *made]).rstrip())
    return (
        "# Preference losses against float64\n\n"
        f"Generated by `python -m bench truth` (commit {commits}, {meta['date'][:10]}, torch "
        f"{meta['versions']['torch']}, {meta['device']}): do not edit this page.\n\n"
        f"{DRAWS} steps of {PAIRS} pairs by the trainer, beside transformers' model in float64: the larger "
        "of the error of the loss and that of its gradients, as a share of what is allowed, which "
        "is twice that of transformers' model in the trainer's dtypes, and a rounding "
        "([the contract](../numerics.md#the-contract)). 1 is the limit. Of gradients the tensor with "
        "the largest error counts; errors are root mean squares over the steps.\n\n"
        + "\n\n".join(tables)
        + "\n"
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench truth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, known in (("layout", LAYOUTS), ("loss", LOSSES)):
        text = f"default: {', '.join(known)}"
        parser.add_argument(f"--{option}", type=names(), metavar=f"{option.upper()},..", help=text)
    text = f"writes {FILE} there, and {PAGE}"
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", required=True, help=text)
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, metavar="FILE")
    args = parser.parse_args(argv)
    layouts = chosen(parser, "--layout", args.layout, LAYOUTS)
    losses = chosen(parser, "--loss", args.loss, LOSSES)
    for module in ("pydantic", "transformers", "peft"):
        if reason := platform.no_module(module):
            parser.error(reason)
    # `run.metadata` records the fields of any object.
    settings: Any = SimpleNamespace(**{**vars(args), "out": None, "page": None})
    meta, path = run.metadata("cpu", settings, ["truth", *argv], trainer=True), args.out / FILE
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for layout in layouts:
        there = {r["loss"] for r in rows if r["layout"] == layout}
        if not (left := [name for name in losses if name not in there]):
            continue
        rows += [{**found, "commit": report.commit(meta)} for found in measure(layout, left)]
        document = {"schema": report.SCHEMA, "meta": meta, "rows": rows}
        store.write_json(path, document)
        store.write_text(args.page, page(document))
    worst = max(rows, key=share)
    print(f"{len(rows)} cells; the worst: {worst['loss']}, {worst['layout']}, {worst['dtype']}: "
          f"{share(worst):.2f}")  # fmt: skip
    return int(share(worst) > 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank(*sys.argv[1:])
