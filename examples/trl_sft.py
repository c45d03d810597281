"""TRL's SFTTrainer with this library's head and layers, on a CPU: see docs/trl.md."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from tilewright.integrations.transformers import accelerated
from tilewright.integrations.trl import accelerate_trainer

rows = {
    "prompt": [f"{n} plus one is" for n in range(16)],
    "completion": [f" {n + 1}" for n in range(16)],
}
arguments = SFTConfig(
    output_dir="outputs/sft",
    max_steps=4,
    per_device_train_batch_size=4,
    logging_steps=2,
    save_strategy="no",
    report_to="none",
    use_cpu=True,  # on a GPU leave this line and the next out
    bf16=False,
)
with accelerated(quiet=True):  # norms, rotary embedding, MLP and attention
    trainer = SFTTrainer(
        "HuggingFaceTB/SmolLM2-135M", args=arguments, train_dataset=Dataset.from_dict(rows)
    )
accelerate_trainer(trainer)  # the head
trainer.train()
