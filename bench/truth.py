"""Writes docs/trainer/truth.md: how near the trainer's losses and their gradients are to float64,
under each layout.

    python -m bench truth --out DIR [--layout NAME,..] [--loss NAME,..]

One step of answers, some of one token, is computed by the trainer, and by transformers' (with
adapters PEFT's) model in float64. A loss holds where its error, and the largest of its gradients',
are at most twice those of transformers' model in the trainer's dtypes and a rounding, in the units
of the numerics contract. A call with the same --out runs what has no rows of today's sources there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bench import commands
from bench.page.text import table
from bench.truth_losses import (
    BIN,
    KINDS,
    LONGEST,
    LOSSES,
    PADDING,
    PAIRS,
    VOCABULARY,
    Ids,
    Kind,
    Step,
)
from tilewright.bench import bounds, report, sources, store
from tilewright.bench.options import chosen, names
from tilewright.bench.tensors import error
from tilewright.ops.loss.preference import FORMULAS

FILE, ROOT = "truth.json", pathlib.Path(__file__).parents[1]
PAGE = pathlib.Path("docs/trainer/truth.md")
DTYPES = {"float32": False, "bfloat16": True}  # train.enable_mixed_precision
DRAWS = 16  # of weights and data: an error of one draw may be small by chance
HEADS = ("lm_head.weight", "score.weight")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
RANK, ALPHA = 4, 8
LORA = {
    "lora.enable_lora": True,
    "lora.lora_rank": RANK,
    "lora.lora_alpha": ALPHA,
    "lora.lora_target_modules": PROJECTIONS,
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


# A step is all data: bins of two pairs, or of four documents.
PACKED = {"data.sample_packing_sequence_len": BIN, "train.micro_batch_size": PAIRS // 2}
LAYOUTS = {
    "a pair a bin": Layout(
        options={"data.sample_packing_sequence_len": LONGEST, "train.micro_batch_size": PAIRS}
    ),
    "packed": Layout(options=PACKED),
    "accumulation 3": Layout(
        options={**PACKED, "train.micro_batch_size": 2, "train.gradient_accumulation_steps": 3}
    ),
    "LoRA": Layout(options={**PACKED, **LORA}),
    "frozen head": Layout(options=PACKED, frozen=HEADS),
    "FSDP2 on 2": Layout(2, {**PACKED, **RANKS, "train.micro_batch_size": 3}),
    "Ulysses on 2": Layout(2, {**PACKED, **RANKS, "train.ulysses_parallel_size": 2}),
    "ring on 2": Layout(2, {**PACKED, **RANKS, "train.ringattn_parallel_size": 2}),
}


class Found(dict[str, torch.Tensor]):
    """A loss, and gradients, by name.   size: the mean magnitude of the terms whose mean it is."""

    size = 1.0


# ---- inputs


def class_of(kind: Kind) -> Any:
    import transformers

    return getattr(
        transformers, "LlamaForSequenceClassification" if kind.scored else "LlamaForCausalLM"
    )


def load_model(kind: Kind, folder: pathlib.Path, dtype: torch.dtype) -> Any:
    return class_of(kind).from_pretrained(folder, dtype=dtype)


def write_inputs(kind: Kind, folder: pathlib.Path, draw: int, adapters: bool) -> None:
    """The model; adapters that add something; a reference whose weights are near the model's; and
    the rows.
    """
    import transformers

    torch.manual_seed(draw)
    of_scores: dict[str, Any] = {"num_labels": 1, "pad_token_id": PADDING}
    made = transformers.LlamaConfig(**SHAPE, **(of_scores if kind.scored else {}))
    model: Any = class_of(kind)(made)
    model.save_pretrained(folder / "model")
    other = load_model(kind, folder / "model", torch.float32)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std() if p.dim() > 1 else 0.0)
    other.save_pretrained(folder / "reference")
    if adapters:
        from peft import LoraConfig, get_peft_model

        task = "SEQ_CLS" if kind.scored else "CAUSAL_LM"
        options: dict[str, Any] = {"task_type": task, "target_modules": PROJECTIONS}
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, **options)
        model = get_peft_model(model, lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
        model.save_pretrained(folder / "adapter")
    model = model.double()
    with torch.no_grad():
        rows = kind.rows(draw, lambda prompt, answer: distributions(model, prompt, answer))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)


def read_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


# ---- the trainer


def arguments(kind: Kind, layout: Layout, dtype: str, folder: pathlib.Path) -> list[str]:
    options: dict[str, Any] = {
        "model.model_path": str(folder / "model"),
        "data.datasets": [{"path": str(folder / "rows.jsonl"), "type": kind.type}],
        "data.dataset_prepared_path": str(folder / "prepared"),
        "data.pad_to_multiple_of": 16,
        # Documents are mismatched in the order of the rows.
        "data.shuffle_before_merging_datasets": False,
        "data.shuffle_merged_datasets": False,
        "data.sample_packing_sequentially": True,
        "train.output_dir": str(folder / "out"),
        "train.loss": kind.loss,
        "train.data_parallel_mode": "none",
        "train.enable_gradient_checkpointing": False,
        "train.enable_mixed_precision": DTYPES[dtype],
        "train.save_hf_weights": False,
        "train.optimizer": "sgd",
        **layout.options,
        **{f"{kind.loss}.{name}": value for name, value in kind.builds.items()},
    }
    if kind.reference and not layout.adapters:
        options["preference.reference_path"] = str(folder / "reference")
    return [f"--{name}={json.dumps(value)}" for name, value in options.items()]


def of_trainer(
    kind: Kind, layout: Layout, dtype: str, losses: Sequence[str], folder: pathlib.Path, mesh: Any
) -> dict[str, Found]:
    """What a step of each loss gives."""
    from tilewright.nn.peft import load_adapter
    from tilewright.trainer import build
    from tilewright.trainer.config import load
    from tilewright.trainer.losses.loss import loss_of

    config = load(None, arguments(kind, layout, dtype, folder))
    engine = (made := build.build(config, mesh)).engine
    reference = engine.reference
    if layout.adapters:
        load_adapter(engine.model, folder / "adapter")
    for name, p in engine.model.named_parameters():
        p.requires_grad_(p.requires_grad and not name.endswith(layout.frozen))
    batches, rows, results = next(made.batches.steps()), read_rows(folder), {}
    for name in losses:
        loss = loss_of(kind.loss, {kind.loss: LOSSES[name].section()})
        engine.reference = reference if kind.reference and needs_reference(name) else None
        sums = engine.forward_backward(batches, loss)
        if round(sums.denominator) != (count := LOSSES[name].count(rows)):
            raise RuntimeError(f"{name}: a mean over {sums.denominator}, not {count}")
        engine.divide()
        value = torch.tensor(sums.mean, dtype=torch.float64)
        results[name] = Found(loss=value, **gradients(engine.model, made.shape))
        engine.zero()
    return results


def needs_reference(name: str) -> bool:
    return FORMULAS[LOSSES[name].fields["loss"]].reference


def gradients(model: torch.nn.Module, shape: Any) -> dict[str, torch.Tensor]:
    """Gradients by their names in transformers' model, or PEFT's."""
    from tilewright.nn.peft import part_path
    from tilewright.nn.sharded import whole
    from tilewright.nn.weights import adapted, is_adapter
    from tilewright.trainer.checkpoint import hf

    grads = {}
    of_adapters: dict[str, Any] = dict(adapted(model))
    for path, module in of_adapters.items():
        A, B, r, at = module.lora_A.grad, module.lora_B.grad, module.rank, 0
        for i, (part, (first, stop)) in enumerate(module.slices.items()):
            key = f"base_model.model.{part_path(path, part)}"
            grads[f"{key}.lora_A.default.weight"] = A[i * r : (i + 1) * r]
            grads[f"{key}.lora_B.default.weight"] = B[at : at + stop - first]
            at += stop - first
    for name, p in model.named_parameters():
        if p.grad is None or is_adapter(name):
            continue
        parts = hf.split(name, whole(p.grad), shape)
        for of_part, part in zip(hf.sources(name, shape), parts, strict=True):
            if of_adapters:  # a new head
                *above, kind = of_part.split(".")
                of_part = ".".join(["base_model.model", *above, "modules_to_save.default", kind])
            grads[of_part] = part
    return {name: g.detach().clone() for name, g in grads.items()}


def rank(folder: str, kind: str, name: str, dtype: str, losses: str) -> None:
    """One of torchrun's processes: the first writes what was found."""
    from tilewright.trainer.config import load
    from tilewright.trainer.parallel import mesh

    of, layout, draws, root = KINDS[kind], LAYOUTS[name], [], pathlib.Path(folder)
    joined = mesh.join(load(None, arguments(of, layout, dtype, root / "0")).train)
    wanted = losses.split(";")
    for draw in range(len([*root.iterdir()])):
        draws.append(of_trainer(of, layout, dtype, wanted, root / str(draw), joined))
    dist.barrier()
    if dist.get_rank() == 0:
        flat = {
            f"{d}/{k}/{n}": t
            for d, of_draw in enumerate(draws)
            for k, v in of_draw.items()
            for n, t in v.items()
        }
        save_file({n: t.contiguous() for n, t in flat.items()}, root / "found")
    dist.destroy_process_group()


def by_trainer(
    kind: str, name: str, dtype: str, losses: Sequence[str], folder: pathlib.Path
) -> list[dict[str, Found]]:
    """The trainer's losses and gradients of each draw, by the name of the loss."""
    layout = LAYOUTS[name]
    if layout.processes == 1:
        from tilewright.trainer.parallel.mesh import Mesh

        return [
            of_trainer(KINDS[kind], layout, dtype, losses, folder / str(draw), Mesh())
            for draw in range(DRAWS)
        ]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    what = ["-m", "bench.truth", str(folder), kind, name, dtype, ";".join(losses)]
    subprocess.run([*start, str(layout.processes), *what], cwd=ROOT, check=True)
    draws: list[dict[str, Found]] = [{} for _ in range(DRAWS)]
    for key, t in load_file(folder / "found").items():
        draw, loss, name_of = key.split("/")
        draws[int(draw)].setdefault(loss, Found())[name_of] = t
    return draws


# ---- transformers


class Precision(NamedTuple):
    """weights: the dtype of weights, and of what is computed outside of autocast.   half: whether
    products are those of autocast.
    """

    weights: torch.dtype
    half: bool = False


def distributions(model: Any, prompt: Ids, answer: Ids, half: bool = False) -> torch.Tensor:
    """Log-probabilities of all tokens at each place of an answer, float64.   half: by autocast."""
    ids = torch.tensor([prompt + answer])
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    wide = torch.promote_types(model.dtype, torch.float32)
    return logits.to(wide).log_softmax(-1).double()


def by_transformers(
    kind: Kind, layout: Layout, precision: Precision, losses: Sequence[str], folder: pathlib.Path
) -> dict[str, Found]:
    """The same of transformers' model and a formula."""
    dtype, half = precision
    policy = load_model(kind, folder / "model", dtype)
    other = load_model(kind, folder / ("model" if layout.adapters else "reference"), dtype)
    if layout.adapters:
        from peft import PeftModel

        policy = PeftModel.from_pretrained(policy, folder / "adapter", is_trainable=True).to(dtype)

    def reward(ids: Ids) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return policy(torch.tensor([ids])).logits[0, 0].double()

    @torch.no_grad()
    def reference(prompt: Ids, answer: Ids) -> torch.Tensor:
        return distributions(other, prompt, answer, half)

    def own(prompt: Ids, answer: Ids) -> torch.Tensor:
        return distributions(policy, prompt, answer, half)

    step = Step(read_rows(folder), own, reference, reward)
    learns = {
        n: p
        for n, p in policy.named_parameters()
        if p.requires_grad and not n.endswith(layout.frozen)
    }
    results = {}
    for name, terms in kind.expected(step, {name: LOSSES[name] for name in losses}).items():
        loss = terms.mean()
        grads = torch.autograd.grad(loss, list(learns.values()), retain_graph=True)
        results[name] = Found(loss=loss.detach(), **dict(zip(learns, grads, strict=True)))
        results[name].size = float(terms.detach().abs().mean())
    return results


# ---- what is compared


def errors(computed: Found, truth: Found) -> tuple[float, float]:
    """A loss's error, relative to its terms' mean magnitude, and the largest of its gradients'."""
    if computed.keys() != truth.keys():
        raise RuntimeError(f"other gradients: {sorted(computed.keys() ^ truth.keys())}")
    of = {name: error(computed[name].double(), truth[name].double())[0] for name in truth}
    of.pop("loss")
    return abs(float(computed["loss"] - truth["loss"])) / truth.size, max(of.values())


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
    of_kind = [(k, [n for n in losses if LOSSES[n].kind == k]) for k in KINDS]
    for (kind, some), dtype in itertools.product(of_kind, DTYPES):
        if some:
            yield from _measure(kind, name, dtype, some)


def _measure(kind: str, name: str, dtype: str, losses: Sequence[str]) -> Iterator[dict[str, Any]]:
    layout, half = LAYOUTS[name], DTYPES[dtype]
    # FSDP2 casts the weights; the other modes run under autocast.
    cast = half and layout.processes > 1
    eager = Precision(torch.bfloat16 if cast else torch.float32, half and not cast)
    with tempfile.TemporaryDirectory() as made:
        folders = [pathlib.Path(made, str(draw)) for draw in range(DRAWS)]
        for draw, folder in enumerate(folders):
            folder.mkdir()
            write_inputs(KINDS[kind], folder, draw, layout.adapters)
        ours = by_trainer(kind, name, dtype, losses, pathlib.Path(made))
        twin, truth = (
            [by_transformers(KINDS[kind], layout, p, losses, f) for f in folders]
            for p in (eager, Precision(torch.float64))
        )
    for loss in losses:
        compared = [(ours[d][loss], twin[d][loss], truth[d][loss]) for d in range(DRAWS)]
        yield {"loss": loss, "layout": name, "dtype": dtype, **row(compared, half)}


@functools.cache
def code() -> str:
    """The digest of what computes a row."""
    # The trainer imports the rows of its tables by their folders.
    paths = {*sources.files(["bench.truth"]), *(ROOT / "tilewright/trainer").rglob("*.py")}
    return sources.of_files(paths)


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
        "# Losses against float64\n\n"
        f"Generated by `python -m bench truth` (commit {commits}, {meta['date'][:10]}, torch "
        f"{meta['versions']['torch']}, {meta['device']}): do not edit this page.\n\n"
        f"{DRAWS} steps, of {PAIRS} pairs or twice as many documents, by the trainer, beside "
        "transformers' model in float64: the larger of the error of the loss, in units of its "
        "terms' mean magnitude, and that of its gradients, as a share of what is allowed, which is "
        "twice that of transformers' model in the trainer's dtypes, and a rounding ([the "
        "contract](../numerics.md#the-contract)). 1 is the limit. Of gradients the tensor with "
        "the largest error counts; errors are root mean squares over the steps.\n\n"
        + "\n\n".join(tables)
        + "\n"
    )


def main(argv: Sequence[str]) -> int:
    parser = commands.parser("truth", __doc__)
    for option, known in (("layout", LAYOUTS), ("loss", LOSSES)):
        text = f"default: {', '.join(known)}"
        parser.add_argument(f"--{option}", type=names(), metavar=f"{option.upper()},..", help=text)
    text = f"writes {FILE} there, and {PAGE}"
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", required=True, help=text)
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, metavar="FILE")
    args = parser.parse_args(argv)
    layouts = chosen(parser, "--layout", args.layout, LAYOUTS)
    losses = chosen(parser, "--loss", args.loss, LOSSES)
    commands.need(parser, ("pydantic", "transformers", "peft"))
    meta = commands.metadata("truth", argv, {**vars(args), "out": None, "page": None})
    path = args.out / FILE
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for layout in layouts:
        there = {r["loss"] for r in rows if r["layout"] == layout and r.get("code") == code()}
        if not (left := [name for name in losses if name not in there]):
            continue
        stamp = {"commit": report.commit(meta), "code": code()}
        rows = [r for r in rows if r["layout"] != layout or r["loss"] not in left]
        rows += [row | stamp for row in measure(layout, left)]
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
