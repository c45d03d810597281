"""TRL's trainers (1.16), whose losses are computed by this library's head.

    from tilewright.integrations.trl import accelerate_trainer

    trainer = SFTTrainer(model, args=arguments, train_dataset=dataset)
    accelerate_trainer(trainer)
    trainer.train()

SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer ask their model for log-probability,
entropy and accuracy of each token, and reduce them to a loss. `accelerate_trainer` computes what
they ask for by `ops.linear_logprob`, which never builds the logits; the reduction, the metrics and
the loop stay TRL's. `build_trainer` builds a trainer over adapters on the head, which TRL rejects.
Importing this module does not import TRL.
"""

from __future__ import annotations

from tilewright.integrations.trl.trainers import (
    TrainerReport,
    accelerate_trainer,
    build_trainer,
)

__all__ = ["TrainerReport", "accelerate_trainer", "build_trainer"]
