"""The trainer: torchrun -m tilewright.trainer.train config.yaml [--section.field value ...]

Plain `python -m tilewright.trainer.train` trains in one process.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.platform import require

    require("trainer")   # else the imports below end in a traceback

import contextlib
import dataclasses
import gc
import logging
import math
import os
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist

from tilewright import adapt, platform
from tilewright.ops.attention import Request
from tilewright.registry import ImplementationUnavailable
from tilewright.trainer import adapters, checkpoint, hf
from tilewright.trainer.config import Config, ConfigError, from_command_line, resolved
from tilewright.trainer.data import (
    IGNORE,
    Batches,
    Bins,
    check_sources,
    evaluation_batches,
    padding,
    prepare,
    split_validation,
)
from tilewright.trainer.metrics import Metrics
from tilewright.trainer.model import ModelConfig, Numerics, Ops, Transformer
from tilewright.trainer.optim import build_optimizer, lr_at, set_lr
from tilewright.trainer.parallel import (
    World,
    clip_gradients,
    init_distributed,
    parallelize,
    precision,
    synchronise,
    unwrap,
    wrap_ddp,
)

log = logging.getLogger("tilewright")


def seed_everything(config: Config, world: World) -> None:
    torch.manual_seed(config.train.seed + world.rank)
    if config.train.enable_full_determinism:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def compute_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.train.enable_mixed_precision else torch.float32


def choose_ops(config: Config, shape: ModelConfig, world: World) -> Ops:
    """Raises ValueError or ImplementationUnavailable before any weight is made."""
    wanted = Request(shape.head_dim, packed=True, gradient=True, part=world.cp.ring_size > 1)
    layers = [shape.is_moe(layer) for layer in range(shape.num_hidden_layers)]
    if config.model.activation_native and all(layers):
        raise ValueError("model.activation_native = True: every layer of the model has experts, whose activation is "
                         "fused into their products")
    numerics = Numerics(**{f.name: getattr(config.model, f.name) for f in dataclasses.fields(Numerics)})
    return Ops.resolve(config.model.attn_implementation, config.model.moe_implementation,
                       device_type=world.device.type, dtype=compute_dtype(config), attention_request=wanted,
                       numerics=numerics, experts=any(layers))


def build_model(config: Config, shape: ModelConfig, world: World, ops: Ops) -> torch.nn.Module:
    """The model with its weights and adapters, spread over the ranks."""
    m, t = config.model, config.train
    # Quantised, it is never there in full precision: layers are filled one at a time.
    meta = t.data_parallel_mode == "fsdp2" or config.lora.enable_qlora
    with torch.device("meta" if meta else t.init_device):
        model = Transformer(shape, ops, m.merge_qkv)
    if t.freeze_router:
        model.freeze_router()
    if config.lora.enable_lora:
        adapters.add(model, config)
    if not meta:
        model.to(world.device)
    model = parallelize(model, config, world)
    if meta:
        model.to_empty(device=world.device)
        model.tie()
    if m.model_path is None:
        model.init_weights(t.seed)
    else:
        hf.load_weights(model, hf.local_folder(m.model_path), mode=t.load_weights_mode)
    adapt.reset_adapters(model, adapters.generator(t.seed, 0))
    return wrap_ddp(model, config, world)


def build_data(config: Config, world: World, vocab: int) -> tuple[Batches, Bins | None]:
    """Training batches, and the evaluation bins if there is anything to evaluate on."""
    d = config.data

    def tokenizer():
        from transformers import AutoTokenizer

        folder = pathlib.Path(hf.local_folder(config.model.tokenizer_path))
        if not any((folder / name).is_file() for name in hf.TOKENIZER_FILES):   # transformers would make an empty one
            raise FileNotFoundError(f"model.tokenizer_path = {folder}: holds no tokenizer, "
                                    f"that is none of {', '.join(hf.TOKENIZER_FILES)}")
        return AutoTokenizer.from_pretrained(folder)

    options: dict[str, Any] = {"main": world.main, "barrier": world.barrier}
    training, held = split_validation(prepare(d.datasets, config, tokenizer, vocab, **options), d.val_set_size,
                                      config.train.seed)
    if d.test_datasets:
        import datasets

        test = prepare(d.test_datasets, config, tokenizer, vocab, shuffle=False, **options)
        held = test if held is None else datasets.concatenate_datasets([held, test])
    pin = world.device.type == "cuda"
    batches = Batches(Bins(training, d), config, rank=world.data_rank, world_size=world.data_size, pin=pin, cp=world.cp)
    return batches, None if held is None else Bins(held, d, packed=d.eval_sample_packing is not False)


def to_device(batch: dict[str, torch.Tensor], world: World) -> dict[str, Any]:
    moved: dict[str, Any] = {k: v.to(world.device, non_blocking=True) for k, v in batch.items()}
    moved["ends"] = tuple(batch["cu_seqlens"].tolist())   # read here, or each layer would wait for the device
    return moved


def count_labels(batch: dict[str, torch.Tensor]) -> int:
    """Tokens of a batch that are trained on."""
    return int((batch["labels"] != IGNORE).sum())


@torch.no_grad()
def evaluate(model: torch.nn.Module, bins: Bins, config: Config, world: World) -> float:
    """Mean loss a token over the evaluation data, nats."""
    total, count = torch.zeros((), device=world.device, dtype=torch.float64), 0
    model.eval()
    pin = world.device.type == "cuda"
    for batch in evaluation_batches(bins, config, world.data_rank, world.data_size, pin=pin, cp=world.cp):
        count += count_labels(batch)
        with precision(config, world):
            total += model(**to_device(batch, world), num_tokens=1).double()
    model.train()
    total, count = world.sum(float(total), count)
    return total / max(1, count)


def train_step(model: torch.nn.Module, step: list[dict[str, torch.Tensor]], config: Config,
               world: World) -> tuple[float, int, dict[str, float]]:
    """Gradients of one optimizer step. Returns the mean loss a token, the tokens, and `router_statistics` ({} without
    experts), all of them over all ranks."""
    # The divisor is every label of the step, on all ranks and in all micro-batches: each token weighs the same however
    # the step is cut up. Ranks that share a sequence have labels of their own too. DDP and FSDP2 average over ranks,
    # hence the factor world.size.
    [tokens] = world.sum(sum(map(count_labels, step)))
    divisor = torch.tensor(max(1.0, tokens) / world.size, device=world.device)
    loss, reports = torch.zeros((), device=world.device), []
    for i, batch in enumerate(step):
        with synchronise(model, last=i == len(step) - 1):
            with precision(config, world):
                part = model(**to_device(batch, world), num_tokens=divisor)
            part.backward()
            loss += part.detach()
            if (report := unwrap(model).model.reports) is not None:
                reports.append(report)
    [mean] = world.sum(float(loss) / world.size)
    return mean, int(tokens), router_statistics(reports, world)


def router_statistics(reports: list[torch.Tensor], world: World) -> dict[str, float]:
    """Of the routers' reports of a step's micro-batches (MoE.forward), over all ranks: how many times the mean the
    busiest expert's tokens are, for the mean layer and the worst, and the two losses, which are not trained on.

    Padding counts as tokens here: experts work on it.
    """
    if not reports:
        return {}
    total = world.total(torch.stack(reports).double().sum(0)) / (len(reports) * world.size)
    load = total[:, :-2].amax(1) / total[:, :-2].mean(1)
    balance, z = total[:, -2:].mean(0)
    return dict(zip(("expert_load", "worst_expert_load", "load_balance_loss", "z_loss"),
                    torch.stack((load.mean(), load.max(), balance, z)).tolist(), strict=True))


def profiler(config: Config, world: World):
    t = config.train
    if not t.enable_profiling or (t.profile_rank0_only and not world.main):
        return None
    return torch.profiler.profile(
        # The step before the first one recorded starts the tracer, whose start-up would be in the record otherwise.
        schedule=torch.profiler.schedule(wait=max(0, t.profile_start_step - 1), warmup=min(1, t.profile_start_step),
                                         active=t.profile_end_step - t.profile_start_step, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(t.profile_trace_dir, f"rank{world.rank}"),
        record_shapes=t.profile_record_shapes, profile_memory=t.profile_profile_memory, with_stack=t.profile_with_stack)


@contextlib.contextmanager
def garbage_collection_as_before():
    was_on = gc.isenabled()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@garbage_collection_as_before()
def train(config: Config, world: World) -> None:
    t = config.train
    seed_everything(config, world)
    if world.main:
        pathlib.Path(t.output_dir).mkdir(parents=True, exist_ok=True)   # fails before anything is computed
    checkpoint.recover(t.output_dir, world)
    resume = checkpoint.find(t.output_dir, t.load_checkpoint_path)
    if t.load_checkpoint_path is None and (earlier := checkpoint.complete(t.output_dir)):
        raise ValueError(f"train.output_dir = {t.output_dir}: holds {earlier[-1].name} of an earlier run; set "
                         "train.load_checkpoint_path to auto to go on with it, or choose another folder")
    if not config.data.skip_prepare_dataset:   # before a model is downloaded
        check_sources([*config.data.datasets, *config.data.test_datasets],
                      cached=pathlib.Path(config.data.dataset_prepared_path).is_dir())
    shape = hf.load_config(hf.local_folder(config.model.config_path))
    tokenizer = hf.local_folder(config.model.tokenizer_path) if t.save_hf_weights else None   # not after the last step
    base = config.model.model_path
    exported = hf.stored_dtype(hf.local_folder(base or config.model.config_path), weights=base is not None)
    ops = choose_ops(config, shape, world)
    batches, held = build_data(config, world, shape.vocab_size)
    model = build_model(config, shape, world, ops)
    parameters = list(model.parameters())
    optimizer = build_optimizer(unwrap(model), t)
    total = t.max_steps or t.num_train_epochs * batches.steps_per_epoch
    save_every = max(1, round(t.save_epochs * batches.steps_per_epoch)) if t.save_epochs else 0

    if t.enable_profiling and t.profile_start_step >= total:
        raise ValueError(f"train.profile_start_step = {t.profile_start_step}: the run has {total} steps")
    # What a checkpoint is tied to: its position counts bins of these data, its moments belong to these groups.
    tied = {
        "model": {**dataclasses.asdict(shape), "merge_qkv": config.model.merge_qkv, "lora": adapters.tied(config)},
        "optimizer": {k: getattr(t, k) for k in ("optimizer", "no_decay_modules", "no_decay_params", "freeze_router")},
        "data": {"bins": len(batches.bins), "tokens": batches.bins.tokens, "seed": t.seed,
                 "shuffle": config.data.shuffle_merged_datasets},
    }
    chosen = ops.names() | adapters.operations(unwrap(model), world.device, compute_dtype(config))
    start = 0
    if resume is not None:
        state = checkpoint.restore(resume, unwrap(model), optimizer, world, run=tied, ops=chosen)
        start = state["step"]
        if start > total:
            raise ValueError(f"{resume} is at step {start}, and the run ends at step {total}")
        batches.load_state_dict(state["data"])
    if world.main:
        pathlib.Path(t.output_dir, "resolved_config.yaml").write_text(resolved(config))
    sequence = config.data.sample_packing_sequence_len
    metrics = Metrics(config, world.main, total, start, unwrap(model).flops_per_token(sequence), world.size)
    metrics.say(f"{adapters.size(unwrap(model))} on {world.size} x {world.device.type}, "
                f"{total} steps, {batches.steps_per_epoch} an epoch, {batches.bins.tokens} tokens of data")
    if world.cp.size > 1:
        metrics.say(f"a sequence on {world.cp.ring_size} ring x {world.cp.ulysses_size} Ulysses ranks, padded to a "
                    f"multiple of {padding(config.data, world.cp)} tokens")
    metrics.say("ops: " + " ".join(f"{k}={v}" for k, v in chosen.items()))
    metrics.say("numerics: " + " ".join(f"{k}={v}" for k, v in dataclasses.asdict(ops.numerics).items()))
    saver = checkpoint.Saver(t.output_dir, world, t.save_async)

    def save(step):
        saver.save(step, unwrap(model), optimizer,
                   {"data": batches.state_dict(), "run": tied, "ops": chosen})

    def report(step):
        if held is not None:
            metrics.evaluation(step, evaluate(model, held, config, world))

    if start == 0:
        report(0)
    if t.gc_steps:
        gc.collect()
        gc.disable()   # collected between steps instead, at the same time on all ranks
    profile = profiler(config, world)
    if profile:
        profile.start()
    steps = batches.steps()
    for step in range(start, total):
        adapters.before_step(unwrap(model), config, step)
        loss, tokens, router = train_step(model, next(steps), config, world)
        if not math.isfinite(loss):   # the same on every rank
            raise ValueError(f"step {step + 1}: the loss is {loss}. Training cannot go on from there; lower train.lr "
                             "or look at the data, and resume from the last checkpoint")
        norm = clip_gradients(parameters, t.max_grad_norm)
        lr = lr_at(step, total, t)
        set_lr(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        adapters.after_step(unwrap(model), optimizer, config, done)
        metrics.step(done, tokens, loss=loss, lr=lr, grad_norm=norm, **router)
        if profile:
            profile.step()
        if t.gc_steps and done % t.gc_steps == 0:
            gc.collect()
        if t.empty_cache_steps and done % t.empty_cache_steps == 0 and world.device.type == "cuda":
            torch.cuda.empty_cache()
        due = (t.save_steps and done % t.save_steps == 0) or (save_every and done % save_every == 0)
        if done == total or due or done % batches.steps_per_epoch == 0:
            report(done)
        if due and done < total:
            save(done)
    if profile:
        profile.stop()
    if start < total:
        save(total)
    saver.finish()
    if t.save_hf_weights:
        target = saver.folder(total) / "hf"
        if config.lora.save_lora_only:
            adapt.save_adapter(unwrap(model), target, base_model=config.model.model_path,
                              files=hf.tokenizer_files(tokenizer))
        else:
            hf.save_weights(unwrap(model), target, tokenizer_path=tokenizer, dtype=exported)
    metrics.close()


@platform.command
def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    config = from_command_line(argv)   # exits with 2 and every error, or with 0 after --help
    try:
        world = init_distributed(config.train)
        train(config, world)
    except ConfigError as error:   # sizes that do not fit the number of processes
        print(error, file=sys.stderr)
        return 2
    except (ImplementationUnavailable, OSError, ValueError) as error:
        # What a user can mend is one sentence; anything else keeps its traceback.
        print(f"error: {error}", file=sys.stderr)
        log.debug("", exc_info=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    if code := main():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. Threads of communication and data libraries can outlive the interpreter's end, and the process
    # then aborts ("terminate called without an active exception"): torchrun takes that for a failed run.
    os._exit(0)
