"""The trainer: torchrun -m tilewright.trainer.train config.yaml [--section.field value ...]

Plain `python -m tilewright.trainer.train` trains in one process.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.platform import require

    require("trainer")  # else the imports below end in a traceback

import contextlib
import dataclasses
import gc
import logging
import math
import os
import pathlib
import re
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from tilewright import adapt, platform
from tilewright.ops import checked_targets
from tilewright.ops.attention import Request
from tilewright.registry import ImplementationUnavailable
from tilewright.trainer import adapters, checkpoint, hf
from tilewright.trainer.config import Config, ConfigError, Train, from_command_line, resolved
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
    compiled_parts,
    init_distributed,
    parallelize,
    precision,
    synchronise,
    unwrap,
    wrap_ddp,
)

log = logging.getLogger("tilewright")


@contextlib.contextmanager
def seeded(config: Config, world: World):
    """Seeds this rank, and with enable_full_determinism lets only deterministic algorithms run,
    until the run ends.
    """
    torch.manual_seed(config.train.seed + world.rank)
    if not config.train.enable_full_determinism:
        yield
        return
    was_on, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        torch.backends.cudnn.benchmark = benchmark


def compute_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.train.enable_mixed_precision else torch.float32


def choose_ops(config: Config, shape: ModelConfig, world: World) -> Ops:
    """Raises ValueError or ImplementationUnavailable before any weight is made."""
    wanted = Request(
        head_dim=shape.head_dim, packed=True, gradient=True, part=world.cp.ring_size > 1
    )
    layers = [shape.is_moe(layer) for layer in range(shape.num_hidden_layers)]
    if config.model.activation_native and all(layers):
        raise ValueError(
            "model.activation_native = True: every layer of the model has experts, whose "
            "activation is "
            "fused into their products"
        )
    numerics = Numerics(
        **{f.name: getattr(config.model, f.name) for f in dataclasses.fields(Numerics)}
    )
    return Ops.resolve(
        config.model.attn_implementation,
        config.model.moe_implementation,
        device_type=world.device.type,
        dtype=compute_dtype(config),
        attention_request=wanted,
        numerics=numerics,
        experts=any(layers),
    )


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
        if not any(
            (folder / name).is_file() for name in hf.TOKENIZER_FILES
        ):  # transformers would make an empty one
            raise FileNotFoundError(
                f"model.tokenizer_path = {folder}: holds no tokenizer, "
                f"that is none of {', '.join(hf.TOKENIZER_FILES)}"
            )
        return AutoTokenizer.from_pretrained(folder)

    options: dict[str, Any] = {"main": world.main, "barrier": world.barrier}
    training, held = split_validation(
        prepare(d.datasets, config, tokenizer, vocab, **options), d.val_set_size, config.train.seed
    )
    if d.test_datasets:
        import datasets

        test = prepare(d.test_datasets, config, tokenizer, vocab, shuffle=False, **options)
        held = test if held is None else datasets.concatenate_datasets([held, test])
    pin = world.device.type == "cuda"
    batches = Batches(
        Bins(training, d),
        config,
        rank=world.data_rank,
        world_size=world.data_size,
        pin=pin,
        cp=world.cp,
    )
    return batches, None if held is None else Bins(
        held, d, packed=d.eval_sample_packing is not False
    )


def to_device(batch: dict[str, torch.Tensor], world: World) -> dict[str, Any]:
    moved: dict[str, Any] = {k: v.to(world.device, non_blocking=True) for k, v in batch.items()}
    moved["ends"] = tuple(
        batch["cu_seqlens"].tolist()
    )  # read here, or each layer would wait for the device
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
    for batch in evaluation_batches(
        bins, config, world.data_rank, world.data_size, pin=pin, cp=world.cp
    ):
        count += count_labels(batch)
        with precision(config, world):
            total += model(**to_device(batch, world), num_tokens=1).double()
    model.train()
    total, count = world.sum(float(total), count)
    return total / max(1, count)


def train_step(
    model: torch.nn.Module, step: list[dict[str, torch.Tensor]], config: Config, world: World
) -> tuple[float, int, dict[str, float]]:
    """Gradients of one optimizer step. Returns the mean loss a token, the tokens, and
    `router_statistics` ({} without experts), all of them over all ranks.
    """
    # The divisor is every label of the step, on all ranks and in all micro-batches: each token
    # weighs the same however the step is cut up. Ranks that share a sequence have labels of their
    # own too. DDP and FSDP2 average over ranks, hence the factor world.size.
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
    """Of the routers' reports of a step's micro-batches (MoE.forward), over all ranks: how many
    times the mean the busiest expert's tokens are, for the mean layer and the worst, and the two
    losses, which are not trained on.

    Padding counts as tokens here: experts work on it.
    """
    if not reports:
        return {}
    total = world.total(torch.stack(reports).double().sum(0)) / (len(reports) * world.size)
    load = total[:, :-2].amax(1) / total[:, :-2].mean(1)
    balance, z = total[:, -2:].mean(0)
    return dict(
        zip(
            ("expert_load", "worst_expert_load", "load_balance_loss", "z_loss"),
            torch.stack((load.mean(), load.max(), balance, z)).tolist(),
            strict=True,
        )
    )


def profiler(config: Config, world: World):
    t = config.train
    if not t.enable_profiling or (t.profile_rank0_only and not world.main):
        return None
    return torch.profiler.profile(
        # The step before the first one recorded starts the tracer, whose start-up would be in the
        # record otherwise.
        schedule=torch.profiler.schedule(
            wait=max(0, t.profile_start_step - 1),
            warmup=min(1, t.profile_start_step),
            active=t.profile_end_step - t.profile_start_step,
            repeat=1,
        ),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(
            t.profile_trace_dir, f"rank{world.rank}"
        ),
        record_shapes=t.profile_record_shapes,
        profile_memory=t.profile_profile_memory,
        with_stack=t.profile_with_stack,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which optimizer steps a run takes, and what is due after which.

    Steps are numbered through a run, but what a step takes of the data depends on the ranks and on
    what each accumulates, which may change when a run goes on. Epochs, and with them the learning
    rate of a run that is counted
    in epochs, follow the data: `shift` is how many more steps were taken than of the present size
    would have been.
    """

    train: Train
    steps_per_epoch: int
    shift: int = 0

    @property
    def total(self) -> int:
        """The number of the last step."""
        return (
            self.train.max_steps or self.train.num_train_epochs * self.steps_per_epoch + self.shift
        )

    def lr(self, step: int) -> float:
        """step: from 0."""
        shift = 0 if self.train.max_steps else self.shift
        return lr_at(step - shift, self.total - shift, self.train)

    def saves(self, done: int) -> bool:
        t = self.train
        every = max(1, round(t.save_epochs * self.steps_per_epoch)) if t.save_epochs else 0
        return bool(
            (t.save_steps and done % t.save_steps == 0)
            or (every and (done - self.shift) % every == 0)
        )

    def ends_epoch(self, done: int) -> bool:
        return (done - self.shift) % self.steps_per_epoch == 0


@contextlib.contextmanager
def garbage_collection_as_before():
    was_on = gc.isenabled()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def train(config: Config, world: World) -> None:
    """Raises KeyboardInterrupt with a sentence where the run is interrupted."""
    with (
        seeded(config, world),
        garbage_collection_as_before(),
        checkpoint.claim(config.train.output_dir, world),
    ):
        _train(config, world)


def _train(config: Config, world: World) -> None:
    t = config.train
    found = checkpoint.candidates(t.output_dir, t.load_checkpoint_path)
    if t.load_checkpoint_path is None and (earlier := checkpoint.complete(t.output_dir)):
        raise ValueError(
            f"train.output_dir = {t.output_dir}: holds {earlier[-1].name} of an earlier run; set "
            "train.load_checkpoint_path to auto to go on with it, or choose another folder"
        )
    if not config.data.skip_prepare_dataset:  # before a model is downloaded
        check_sources(
            [*config.data.datasets, *config.data.test_datasets],
            cached=pathlib.Path(config.data.dataset_prepared_path).is_dir(),
        )
    shape = hf.load_config(hf.local_folder(config.model.config_path))
    tokenizer = (
        hf.local_folder(config.model.tokenizer_path) if t.save_hf_weights else None
    )  # not after the last step
    base = config.model.model_path
    exported = hf.stored_dtype(
        hf.local_folder(base or config.model.config_path), weights=base is not None
    )
    ops = choose_ops(config, shape, world)
    batches, held = build_data(config, world, shape.vocab_size)
    model = build_model(config, shape, world, ops)
    parameters = list(model.parameters())
    optimizer = build_optimizer(unwrap(model), t)
    # What a checkpoint is tied to: its position counts bins of these data, its moments belong to
    # these groups.
    tied = {
        "model": {
            **dataclasses.asdict(shape),
            "merge_qkv": config.model.merge_qkv,
            "lora": adapters.tied(config),
        },
        "optimizer": {
            k: getattr(t, k)
            for k in ("optimizer", "no_decay_modules", "no_decay_params", "freeze_router")
        },
        "data": {
            "bins": len(batches.bins),
            "tokens": batches.bins.tokens,
            "contents": batches.bins.fingerprint(),
            "seed": t.seed,
            "shuffle": config.data.shuffle_merged_datasets,
        },
    }
    chosen = ops.names() | adapters.operations(unwrap(model), world.device, compute_dtype(config))
    start, resumed = 0, None
    if found:
        resumed, state = checkpoint.resume(
            found, unwrap(model), optimizer, world, run=tied, ops=chosen
        )
        start = state["step"]
        batches.load_state_dict(state["data"])
        batches.tokens = state.get("tokens", 0)
    plan = Plan(t, batches.steps_per_epoch, start - batches.position)
    if start > plan.total:
        raise ValueError(f"{resumed} is at step {start}, and the run ends at step {plan.total}")
    if t.enable_profiling and t.profile_start_step >= plan.total:
        raise ValueError(
            f"train.profile_start_step = {t.profile_start_step}: the run has {plan.total} steps"
        )
    if world.main:
        pathlib.Path(t.output_dir, "resolved_config.yaml").write_text(resolved(config))
    sequence = config.data.sample_packing_sequence_len
    metrics = Metrics(
        config,
        world.main,
        plan.total,
        start,
        batches.tokens,
        unwrap(model).flops_per_token(sequence),
        world.size,
    )
    metrics.say(
        f"{adapters.size(unwrap(model))} on {world.size} x {world.device.type}, "
        f"{plan.total} steps, {batches.steps_per_epoch} an epoch, {batches.bins.tokens} tokens of "
        f"data"
    )
    if world.cp.size > 1:
        metrics.say(
            f"a sequence on {world.cp.ring_size} ring x {world.cp.ulysses_size} Ulysses ranks, "
            f"padded to a "
            f"multiple of {padding(config.data, world.cp)} tokens"
        )
    if t.enable_compile:
        metrics.say(
            "compiled: "
            + ", ".join(f"{n} x {part}" for part, n in compiled_parts(unwrap(model)).items())
        )
    metrics.say("ops: " + " ".join(f"{k}={v}" for k, v in chosen.items()))
    metrics.say(
        "numerics: " + " ".join(f"{k}={v}" for k, v in dataclasses.asdict(ops.numerics).items())
    )
    saver, done = checkpoint.Saver(t.output_dir, world, t.save_async, last=resumed), start

    def report(step):
        if held is not None:
            metrics.evaluation(step, evaluate(model, held, config, world))

    profile = profiler(config, world)
    try:
        if start == 0:
            report(0)
        if t.gc_steps:
            gc.collect()
            gc.disable()  # collected between steps instead, at the same time on all ranks
        if profile:
            profile.start()
        steps = batches.steps()
        for step in range(start, plan.total):
            adapters.before_step(unwrap(model), config, step)
            before, batch = batches.tokens, next(steps)
            # An error that names the target is worth a wait, once: later, one that is out of range
            # makes the loss NaN.
            with checked_targets() if step == start else contextlib.nullcontext():
                loss, _, router = train_step(model, batch, config, world)
            norm = clip_gradients(parameters, t.max_grad_norm)
            if not (math.isfinite(loss) and math.isfinite(norm)):  # the same on every rank
                saver.finish()
                wrong = (
                    f"norm of the gradients is {norm}" if math.isfinite(loss) else f"loss is {loss}"
                )
                raise ValueError(
                    f"step {step + 1}: the {wrong}, so the step was not taken; {saver.go_on()}"
                )
            lr = plan.lr(step)
            set_lr(optimizer, lr)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done = step + 1
            adapters.after_step(unwrap(model), optimizer, config, done)
            saver.poll()
            metrics.step(done, batches.tokens - before, loss=loss, lr=lr, grad_norm=norm, **router)
            if profile:
                profile.step()
            if t.gc_steps and done % t.gc_steps == 0:
                gc.collect()
            if (
                t.empty_cache_steps
                and done % t.empty_cache_steps == 0
                and world.device.type == "cuda"
            ):
                torch.cuda.empty_cache()
            saves = done == plan.total or plan.saves(done)
            if saves or plan.ends_epoch(done):
                report(done)
            if saves:
                saver.save(
                    done,
                    unwrap(model),
                    optimizer,
                    {
                        "data": batches.state_dict(),
                        "tokens": batches.tokens,
                        "run": tied,
                        "ops": chosen,
                    },
                )
                metrics.restart_clock()
        if profile:
            profile.stop()
        saver.finish()
        if t.save_hf_weights:
            target = saver.folder(plan.total) / "hf"
            if config.lora.save_lora_only:
                adapt.save_adapter(
                    unwrap(model),
                    target,
                    base_model=config.model.model_path,
                    files=hf.tokenizer_files(tokenizer),
                )
            else:
                hf.save_weights(unwrap(model), target, tokenizer_path=tokenizer, dtype=exported)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted after step {done}; {saver.interrupted()}") from None
    metrics.close()


# What backends say of a process that is no longer there; they have no exception for it.
GONE = re.compile("(closed|reset) by peer|likely closed|remote process exited")


@platform.command
def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; 1 and one sentence for what a user can mend; 2 for the configuration;
    130 if interrupted.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    config = from_command_line(argv)  # exits with 2 and every error, or with 0 after --help
    world, interrupted = World(), False
    try:
        world = init_distributed(config.train)
        train(config, world)
    except ConfigError as error:  # sizes that do not fit the number of processes
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        interrupted = True
        if world.main:
            last = checkpoint.find(config.train.output_dir, "auto")
            print(
                str(interrupt)
                or f"interrupted; the last whole checkpoint of this folder is {last}",
                file=sys.stderr,
            )
        return 130
    except Exception as error:
        # What a user can mend is one sentence; anything else keeps its traceback.
        mendable = isinstance(error, ImplementationUnavailable | OSError | ValueError)
        if victim := isinstance(error, RuntimeError) and GONE.search(str(error)) is not None:
            error = f"rank {world.rank}: another process has ended, and says why: {error}"
        platform.report_failure(
            str(error) if mendable or victim else traceback.format_exc(), later=victim
        )
        if not (mendable or victim):
            raise
        print(f"error: {error}", file=sys.stderr)
        log.debug("", exc_info=True)
        return 1
    finally:
        # Not after an interrupt: other processes, and a thread that writes a checkpoint, may be in
        # its midst.
        if dist.is_initialized() and not interrupted:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. Threads of communication and data libraries can outlive the interpreter's end,
    # and the process then aborts ("terminate called without an active exception"): torchrun takes
    # that for a failed run. After an error or an interrupt they may wait for processes that are
    # gone.
    os._exit(code)
