"""A step of transformers' Trainer under DDP, for `tilewright check-layout`, and the same where each
process divides by its own tokens.

    tilewright check-layout examples/check_layout_trainer.py:train_step
"""

import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tilewright_lab.check_layout import Step

LENGTHS = (12, 5, 9, 7)
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def train_step(layout, rank, world_size):
    """A rank's step, by the methods of which the Trainer's own loop consists."""
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **SMALL))
    documents = [torch.randint(64, (n,)) for n in LENGTHS]
    labels = pad_sequence(documents[rank::world_size], batch_first=True, padding_value=-100)
    batch = {
        "input_ids": labels.clamp_min(0),
        "attention_mask": (labels >= 0).long(),
        "labels": labels,
    }
    arguments = TrainingArguments(
        tempfile.gettempdir(),
        use_cpu=True,
        report_to=[],
        average_tokens_across_devices=layout != "own tokens",
    )
    trainer = Trainer(model, arguments, train_dataset=[batch])
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)

    def loss():
        batches, tokens = trainer.get_batch_samples(iter([batch]), 1, arguments.device)
        trainer.current_gradient_accumulation_steps = 1
        return trainer.training_step(model, batches[0], tokens)  # runs the backward

    return Step(
        model=model,
        loss=loss,
        tokens=int((labels[:, 1:] >= 0).sum()),
        optimizer=optimizer,
        clip=lambda: trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0),
    )


train_step.layouts = {"ddp": 2, "own tokens": 2}
