"""Two optimizer steps of TRL's trainers on a tiny model: loss, metrics and gradients of the second,
in one process or in one of several ranks. Importing this module imports TRL.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile

import torch
import torch.nn.functional as F
import trl
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, disable_progress_bars
from helpers import join_group
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from tilewright.integrations import rl
from tilewright.integrations.trl import build_trainer, trainers

disable_progress_bars()
VOCAB = 61
ROWS = 4
KINDS = ("sft", "dpo", "grpo", "kto")
METRICS = (
    "entropy",
    "mean_token_accuracy",
    "logits/chosen",
    "logits/rejected",
    "logps/chosen",
    "clip_ratio/region_mean",
)
LORA = {
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "lm_head"],
    "init_lora_weights": False,
}


def tiny(seed=0, **changes):
    config = AutoConfig.for_model(
        changes.pop("kind", "llama"),
        vocab_size=changes.pop("vocab_size", VOCAB),
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        **changes,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


@functools.cache
def tokenizer():
    words = models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="0", pad_token="0", eos_token="2"
    )


def ids(length, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=g).tolist()


# Lengths differ between rows, so that a sum and a mean differ; and between the ranks' halves where
# TRL's own loss allows it.
PROMPTS, COMPLETIONS = (3, 2, 4, 3), (5, 3, 6, 2)


@functools.cache
def data(kind):
    rows = []
    for n, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        p, c, r = ids(prompt, n), ids(completion, 10 + n), ids(completion + 1, 20 + n)
        rows.append(
            {
                "sft": {"input_ids": p + c, "labels": [-100] * prompt + c},
                "dpo": {"prompt_ids": p, "chosen_ids": c, "rejected_ids": r},
                "kto": {
                    "prompt_ids": p,
                    "completion_ids": c,
                    "KL_completion_ids": r,
                    "label": n % 2 == 0,
                },
                "grpo": {"prompt": "5 7"},
            }[kind]
        )
    return Dataset.from_list(rows)


def rollouts(rank, world):
    """What GRPOTrainer would have generated and scored. Equal numbers of tokens on two ranks: its
    entropy bonus is a mean over each rank's tokens.
    """
    completion_ids = torch.tensor([ids(6, 30 + n) for n in range(ROWS)])
    mask = (torch.arange(6) < torch.tensor([6, 2, 5, 3])[:, None]).long()
    rows = {
        "prompt_ids": torch.tensor([ids(3, 40 + n) for n in range(ROWS)]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]]),
        "completion_ids": completion_ids * mask,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.25, -1.5]),
    }
    part = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return {k: v[part] for k, v in rows.items()} | {"num_items_in_batch": mask.sum()}


class Recorder(TrainerCallback):
    """found: of the last step."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, p in model.named_parameters():
            if p.requires_grad:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                self.found[name] = getattr(grad, "full_tensor", lambda g=grad: g)().detach().clone()


@functools.cache
def trainer_class(kind):
    base = getattr(trl, f"{kind.upper()}Trainer")

    class Fixed(base):
        """Takes tokens and rollouts as they are given; records losses and metrics."""

        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            found = self.recorder.found
            found["loss"] = self.accelerator.reduce(loss.detach().clone(), "mean")
            for name in METRICS:
                for value in self._metrics["train"].get(name, ()):
                    found[f"metric {name}"] = torch.tensor(value, dtype=torch.float64)
            return loss

        if kind == "grpo":

            def _prepare_inputs(self, batch):
                accelerator = self.accelerator
                return rollouts(accelerator.process_index, accelerator.num_processes)

    Fixed.__name__ = base.__name__
    return Fixed


OPTIONS = {
    "sft": {"max_length": None},
    "dpo": {"loss_type": ["sigmoid"], "use_weighting": True},
    "kto": {"max_length": None},
    "grpo": {"temperature": 0.7, "num_generations": 2, "entropy_coef": 0.1, "beta": 0.0},
}


def arguments(kind, folder, world, **changes):
    config = getattr(trl, f"{kind.upper()}Config")
    return config(
        **{
            "output_dir": folder,
            "per_device_train_batch_size": ROWS // world,
            "max_steps": 2,  # what a first step leaves in hooks shows in the second
            "optim": "sgd",
            "learning_rate": 0.1,
            "max_grad_norm": 0.0,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "logging_strategy": "no",
            "gradient_checkpointing": False,
            "ddp_backend": "gloo" if world > 1 else None,
            **OPTIONS[kind],
            **changes,
        }
    )


@contextlib.contextmanager
def fresh():
    """accelerate's state and environment, which it sets once for a process."""
    before = dict(os.environ)
    os.environ["CI"] = "1"  # TRL sends no telemetry
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def build(kind, model, folder, *, world=1, lora=None, ours=True, **changes):
    """A trainer; `ours`: accelerated. TRL's own cannot have adapters on the head."""
    options = {"args": arguments(kind, folder, world, **changes), "train_dataset": data(kind)}
    options["processing_class"] = tokenizer()
    if lora:
        options["peft_config"] = LoraConfig(**lora, task_type="CAUSAL_LM")
    elif kind in ("dpo", "kto") and not hasattr(model, "peft_config"):
        reference = copy.deepcopy(model)
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(1.1)
        options["ref_model"] = reference
    if kind == "grpo":
        options["reward_funcs"] = lambda completions, **kwargs: [0.0] * len(completions)
    torch.manual_seed(7)  # adapters
    cls = trainer_class(kind)
    cls.recorder = recorder = Recorder()
    options["callbacks"] = [recorder]
    if ours:
        return build_trainer(cls, model, **options)
    return cls(model, **options)


def step(kind, *, world=1, lora=None, ours=True, dtype=torch.float32, prepare=None, **changes):
    """{"loss", "metric ...", parameter: gradient} of the second step."""
    with fresh(), tempfile.TemporaryDirectory() as folder:
        model = tiny().to(dtype)
        trainer = build(kind, model, folder, world=world, lora=lora, ours=ours, **changes)
        trainer.recorder.trainer = trainer
        if prepare is not None:
            prepare(trainer)
        trainer.train()
        return trainer.recorder.found


# ---- the definition


def eager_statistics(head, x, labels, scaling, outputs, expected=None):
    """`trainers.token_statistics` in plain PyTorch, from the logits of the head's own forward."""
    mask = labels != -100
    x, target = x[mask], labels[mask]
    z = head(x) * scaling.scale
    z = z if scaling.softcap is None else scaling.softcap * torch.tanh(z / scaling.softcap)
    z = z / scaling.temperature
    logp = F.log_softmax(z, -1)
    found = {
        "log_probs": logp.gather(-1, target[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1).detach(),
        "mean_logits": z.mean(-1).detach(),
        "is_top1": z.argmax(-1) == target,
    }
    return {
        name: t.new_zeros(mask.shape).masked_scatter(mask, t)
        for name, t in found.items()
        if name in outputs
    }


@contextlib.contextmanager
def planted(module, name, value):
    """A fault: another value of a module's name."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield own
    finally:
        setattr(module, name, own)


def eager_step(kind, **options):
    with planted(trainers, "token_statistics", eager_statistics):
        return step(kind, **options)


# ---- two ranks

# The head is in accelerate's unit of the last norm and the head; then a unit of its own; then the
# factors of its adapter are units of their own, too.
LAYOUTS = {
    "ddp": {},
    "fsdp2": {"units": ["LlamaDecoderLayer"], "gradient_checkpointing": True},
    "fsdp2 own unit": {"units": ["LlamaDecoderLayer", "Linear"]},
    "fsdp2 lora": {"units": ["LlamaDecoderLayer"], "lora": LORA},
}
# In which the head's forward computes the gradient of a policy loss.
POLICY_LAYOUTS = ("ddp", "fsdp2 own unit")


def fsdp2(units, trainer):
    """What fsdp=True does on GPUs: accelerate has no FSDP for a CPU, but this switch alone."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=units,
        cpu_ram_efficient_loading=False,
    )
    trainer.is_fsdp_enabled = True
    head = trainer.model.get_output_embeddings()
    for factor in ("lora_A", "lora_B"):
        if hasattr(head, factor):
            fully_shard(getattr(head, factor)["default"])


def two_ranks(rank, world, folder):
    """All rows of two ranks, in one launch. Rank 0 writes what it found."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1"
    )
    os.environ["MASTER_PORT"] = "29500"  # not used: the group is joined here
    join_group(rank, world, folder)
    found = {}
    for layout, options in LAYOUTS.items():
        options, units = dict(options), options.get("units")
        if units is not None:
            del options["units"]
            options["prepare"] = functools.partial(fsdp2, units)
        for kind in KINDS[:3] if layout != "fsdp2" else KINDS[:1]:
            found[kind, layout] = step(kind, world=world, **options)
        if layout in POLICY_LAYOUTS:
            found["policy", layout] = step("grpo", world=world, entropy_coef=0.0, **options)
    found["rl"] = of_rl(rank, world)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    torch.distributed.barrier()


def of_rl(rank, world):
    """Results and gradients of the functions for actors, of this rank's shard of the vocabulary in
    a group, put together.
    """
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 8, generator=g), torch.randn(62, 8, generator=g)
    labels = torch.randint(62, (2, 5), generator=g)
    part = slice(rank * 62 // world, (rank + 1) * 62 // world)
    group = torch.distributed.group.WORLD if world > 1 else None
    coefficient = torch.arange(10.0).view(2, 5)
    logits = (x @ weight[part].T).requires_grad_()
    logprobs = rl.logprobs_from_logits(logits, labels, False, temperature=0.7, group=group)
    entropy = rl.entropy_from_logits(logits, temperature=0.7, group=group)
    (logprobs * coefficient + entropy).sum().backward()
    hidden, own = x.clone().requires_grad_(), weight[part].clone().requires_grad_()
    both = rl.logprobs_and_entropy(hidden, own, labels, 0.7, group=group)
    (both[0] * coefficient + both[1]).sum().backward()
    found = {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "linear logprobs": both[0].detach(),
        "linear entropy": both[1].detach(),
        "hidden gradient": hidden.grad,
    }
    for name, grad, dim in (("logits", logits.grad, -1), ("weight", own.grad, 0)):
        parts = [torch.empty_like(grad) for _ in range(world)]
        if world > 1:
            torch.distributed.all_gather(parts, grad)
        found[f"{name} gradient"] = torch.cat(parts, dim) if world > 1 else grad
    return found
