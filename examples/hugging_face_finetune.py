"""A Hugging Face Trainer's fine-tune, accelerated by one line.

    python examples/hugging_face_finetune.py                            # a tiny model, seconds
    python examples/hugging_face_finetune.py --model .cache/smollm2     # SmolLM2-135M-Instruct
    python examples/hugging_face_finetune.py --model .cache/smollm2 --plain   # without Tilewright

Trains on seven plays, and evaluates on The Tempest before and after. The tiny model reads bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time

import torch
from shakespeare import windows
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from tilewright.integrations.transformers import accelerated, restore

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


def build(name: str | None):
    if name is None:
        return AutoModelForCausalLM.from_config(TINY)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hub id; default: a tiny random Llama")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--plain", action="store_true", help="transformers alone, to compare")
    args = parser.parse_args()
    torch.manual_seed(0)

    with contextlib.nullcontext() if args.plain else accelerated():  # the one line
        model = build(args.model)

    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
    rows = {part: windows(part, 128, tokenizer) for part in ("train", "heldout")}
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir="outputs/hugging_face_finetune",
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=5e-5 if args.model else 1e-2,
            bf16=args.bf16,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows["train"]],
        eval_dataset=[{"input_ids": row, "labels": row} for row in rows["heldout"][::50]],
    )
    trainer.remove_callback(PrinterCallback)
    before = trainer.evaluate()["eval_loss"]
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    after = trainer.evaluate()["eval_loss"]
    print(f"{args.steps} steps in {seconds:.1f} s; held-out loss {before:.4f} -> {after:.4f}")
    restore(model)  # transformers' own code again, to the bit
    again = trainer.evaluate()["eval_loss"]
    print(f"held-out loss by transformers alone: {again:.4f}")
    if not (after < before and math.isclose(after, again, rel_tol=0.02 if args.bf16 else 1e-4)):
        raise SystemExit("the loss did not fall, or transformers computes another")


if __name__ == "__main__":
    main()
