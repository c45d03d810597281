"""A training step's forward and backward on a CPU: the trainer's model compared to transformers'.

Both have the same random weights and the same tokens. transformers' runs with its defaults and sdpa
and computes the loss itself; the trainer's is called as in training, with its default numerics. The
optimizer is left out, being PyTorch's in both.

Times are wall clock, in interleaved rounds of one process. Memory: each model in its own process,
the peak during a step (the kernel's high-water mark) above the level before it, so gradients count
and weights do not. Errors are relative to transformers' model in float64: the loss's, and
|g - truth| / |truth| over all gradients (Frobenius), and for the parameter where that is largest.

With --device, whole optimizer steps of training runs instead (`bench/end_to_end_steps.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bench import commands, end_to_end_steps
from bench.host_memory import peak_mib
from bench.llama import DTYPES, SEED, Shape, of_transformers, tokens_of
from tilewright.bench import timing
from tilewright.bench.options import at_least, chosen, names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tilewright.trainer.models.model import Transformer

PROVIDERS = ("transformers", "trainer")


def of_trainer(like: PreTrainedModel, dtype: torch.dtype) -> Transformer:
    """The trainer's model with the weights of a transformers model."""
    from tilewright.trainer.checkpoint import hf
    from tilewright.trainer.models.model import ModelConfig, Ops, Transformer

    config = ModelConfig.from_hf(like.config.to_dict())
    model, weights = (
        Transformer(config, Ops.resolve(device_type="cpu", dtype=dtype)),
        like.state_dict(),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(hf.fuse(name, [weights[n] for n in hf.sources(name, config)], config))
    return model


def step(model: torch.nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The next-token loss; the parameters get its gradients."""
    for p in model.parameters():
        p.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        if hasattr(model, "generation_config"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.detach()
        # As the engine: a bin of one document, the backward of a sum, and gradients divided once.
        from tilewright.trainer.losses.language_modeling import language_modeling
        from tilewright.trainer.parallel.gradients import scale

        n = ids.shape[1]
        outcome = model(
            ids,
            labels=torch.cat((ids[:, 1:], ids.new_full((1, 1), -100)), 1),
            cu_seqlens=torch.tensor((0, n), dtype=torch.int32),
            ends=(0, n),
            loss=language_modeling,
        )
    outcome.total.backward()
    scale(list(model.parameters()), 1.0 / outcome.denominator.double())
    return outcome.total.detach() / outcome.denominator


def gradients(model: torch.nn.Module, like: Transformer) -> dict[str, torch.Tensor]:
    """Gradients by the trainer's parameter names.   like: the trainer's model."""
    from tilewright.trainer.checkpoint import hf

    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if model is like:
        return {name: own[name] for name, _ in like.named_parameters()}
    config = like.config
    return {
        name: hf.fuse(name, [own[n] for n in hf.sources(name, config)], config)
        for name, _ in like.named_parameters()
    }


def errors(
    loss: torch.Tensor,
    gradients: dict[str, torch.Tensor],
    truth: tuple[torch.Tensor, dict[str, torch.Tensor]],
) -> dict[str, float]:
    """Errors of a loss and gradients relative to float64."""
    exact, grads = truth
    apart = {
        name: ((gradients[name].double() - g).square().sum(), g.square().sum())
        for name, g in grads.items()
    }
    total = [torch.stack(parts).sum() for parts in zip(*apart.values(), strict=True)]
    return {
        "loss_error": float((loss.double() - exact).abs() / exact.abs()),
        "gradient_error": float((total[0] / total[1]).sqrt()),
        "worst_gradient_error": max(float((a / b).sqrt()) for a, b in apart.values()),
    }


# ---- memory


def peak_in_child(provider: str, shape: Shape, dtype: str) -> float | None:
    """`peak_mib` of a step in a process with this model alone. A step of 64 tokens runs first, so
    that the libraries' own memory is not counted.
    """
    asked = json.dumps(
        {
            "provider": provider,
            "shape": dataclasses.asdict(shape),
            "dtype": dtype,
            "threads": torch.get_num_threads(),
        }
    )
    done = subprocess.run(
        [sys.executable, "-m", "bench.end_to_end", asked],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _child(asked: dict[str, Any]) -> float | None:
    torch.set_num_threads(asked["threads"])
    shape, dtype = Shape(**asked["shape"]), DTYPES[asked["dtype"]]
    model: torch.nn.Module = of_transformers(shape)
    if asked["provider"] == "trainer":
        model = of_trainer(model, dtype)
    ids = tokens_of(shape)
    step(model, ids[:, :64], dtype)
    for p in model.parameters():
        p.grad = None
    return peak_mib(lambda: step(model, ids, dtype))


# ---- the whole


def measure(
    shape: Shape,
    dtypes: Sequence[str],
    rounds: int,
    memory: Callable[[str, Shape, str], float | None] = peak_in_child,
) -> list[dict[str, Any]]:
    """One row per dtype and provider."""
    ids, rows = tokens_of(shape), []
    memory_of = {
        (name, dtype): memory(name, shape, dtype) for dtype in dtypes for name in PROVIDERS
    }
    reference = of_transformers(shape)
    like = of_trainer(reference, torch.float32)
    exact = reference.double()
    truth = step(exact, ids, torch.float64), gradients(exact, like)
    del exact, reference
    theirs = of_transformers(shape)
    for dtype in dtypes:
        ours = of_trainer(theirs, DTYPES[dtype])
        models = {"transformers": theirs, "trainer": ours}
        judged = {}
        for name, model in models.items():
            loss = step(model, ids, DTYPES[dtype])
            judged[name] = errors(loss, gradients(model, ours), truth)
        tasks: dict[Hashable, Callable[[], object]] = {
            name: functools.partial(step, model, ids, DTYPES[dtype])
            for name, model in models.items()
        }
        timings, failed = timing.interleave(tasks, timing.CpuClock(0.0), rounds=rounds, seed=SEED)
        if failed:
            raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
        for name in PROVIDERS:
            t = timings[name]
            rows.append(
                {
                    "case": shape.name,
                    "dtype": dtype,
                    "provider": name,
                    "median_ms": t.median * 1e3,
                    "p20_ms": t.p20 * 1e3,
                    "p80_ms": t.p80 * 1e3,
                    "samples_ms": [s * 1e3 for s in t.samples],
                    "peak_mib": memory_of[name, dtype],
                    **judged[name],
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    out = []
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        for r in (theirs, ours):
            peak = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
            out.append(
                f"{r['case']} {r['dtype']:<9} {r['provider']:<12} {r['median_ms']:8.0f} ms "
                f"[{r['p20_ms']:.0f}, {r['p80_ms']:.0f}]  peak {peak} MiB  loss "
                f"{r['loss_error']:.1e}  "
                f"gradients {r['gradient_error']:.1e} (worst {r['worst_gradient_error']:.1e})"
            )
        less = (
            "-"
            if None in (theirs["peak_mib"], ours["peak_mib"])
            else f"{ours['peak_mib'] / theirs['peak_mib']:.2f}"
        )
        out.append(
            f"{ours['case']} {ours['dtype']:<9} {theirs['median_ms'] / ours['median_ms']:.2f} "
            f"times as fast as "
            f"transformers, with {less} of its memory"
        )
    return "\n".join(out)


def main(argv: Sequence[str]) -> int:
    if any(a.partition("=")[0] == "--device" for a in argv):
        return end_to_end_steps.main(argv)
    parser = commands.parser("end-to-end", __doc__)
    parser.add_argument(
        "--dtype", type=names(), metavar="DTYPE,..", help="default: float32,bfloat16 (autocast)"
    )
    parser.add_argument("--threads", type=at_least(1, int), metavar="N", help="default: torch's")
    parser.add_argument("--rounds", type=at_least(1, int), default=9, help="default %(default)s")
    parser.add_argument(
        "--layers", type=at_least(1, int), default=Shape.layers, help="default %(default)s"
    )
    parser.add_argument(
        "--tokens", type=at_least(2, int), default=Shape.tokens, help="default %(default)s"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="write end_to_end.json there"
    )
    args = parser.parse_args(argv)
    dtypes = chosen(parser, "--dtype", args.dtype, list(DTYPES))
    commands.need(parser, ("transformers", "pydantic"))
    if args.threads:
        torch.set_num_threads(args.threads)
    shape = Shape(tokens=args.tokens, layers=args.layers)
    settings = {"rounds": args.rounds, **dataclasses.asdict(shape)}
    meta = commands.metadata("end-to-end", argv, settings)
    rows = measure(shape, dtypes, args.rounds)
    print(table(rows))
    if args.out:
        commands.write(args.out / "end_to_end.json", meta, rows)
    return 0


if __name__ == "__main__":
    print(json.dumps(_child(json.loads(sys.argv[1]))))
