"""The trainer's parts, of a whole configuration."""

import torch

from tilewright.trainer import build, evaluate, memory_plan, teacher
from tilewright.trainer.data.types.dataset_type import Prompts
from tilewright.trainer.losses.loss import loss_of
from tilewright.trainer.parallel import precision


def loss_of_run(config):
    return loss_of(config.train.loss, dict(config), config.train.loss_args)


def parts_of(config, shape, ranks, ops):
    c, dtypes = config, dtypes_of(config)
    return build.build_model(c.model, c.lora, shape, c.data, c.train, ranks, ops, dtypes)


def dtypes_of(config):
    return precision.resolved(config.precision, config.train, config.train)


def built(config, shape, ranks, ops):
    """An engine."""
    parts = parts_of(config, shape, ranks, ops)
    return build.engine_around(parts, config.train, ranks, config.lora.lora_plus_scale)


def preparing(config, ranks, vocab=97, loss=None):
    """`build.preparing`.   loss: "" where samples are scored alone."""
    d, t, p = config.data, config.train, config.preference
    prompts = Prompts(p.max_prompt_len, p.truncation_mode, t.loss if loss is None else loss)
    return build.preparing(d, config.model, prompts, t.seed, vocab, ranks)


def data_of(config, ranks, vocab=97):
    """Training batches, and the bins of sets to evaluate on."""
    prepared = preparing(config, ranks, vocab)
    return build.build_data(config.data, config.train, loss_of_run(config), ranks, {}, prepared)


def identity_of(config, shape, batches):
    c = config
    return build.identity(c.model, c.lora, c.data, c.train, shape, batches)


def scored(config, ranks, file=None, **options):
    scorer = evaluate.scorer_of(config, ranks)
    return evaluate.evaluate(config.train, scorer, file, **options)


def taught(config, ranks, folder):
    scorer = evaluate.scorer_of(config, ranks, whole=True)
    teacher.write(config.train, config.distillation, scorer, ranks, folder)


def planned(config, size, rank=0, otherwise=False):
    """A rank's plan of memory."""
    return memory_plan.Planner(config, size, torch.device("cpu")).plan(rank, otherwise)
