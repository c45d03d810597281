"""What is written otherwise here than in ERNIEKit's and NxDT's configurations: where a name alone,
which stands on its field, does not say it.
"""

from __future__ import annotations

from typing import Any

# Library -> name, with the value that is meant, if only one is -> fields with their values, or why
# there are none.
SETTINGS: dict[str, dict[str, dict[str, Any] | str]] = {
    "ERNIEKit": {
        "do_eval: false": {"train.eval_strategy": "no"},
        "do_train: false": "`python -m tilewright.trainer.evaluate`",
        "disable_tqdm: true": {"train.log_format": "structured"},
        "max_steps: -1": {"train.max_steps": None},
        "max_evaluate_steps: -1": {"train.eval_max_batches": None},
        "train_dataset_prob": {"data.mixing": "random", "data.datasets.0.weight": 0.3},
        "eval_dataset_prob": "refused: what is evaluated on is not mixed; 1.0 is what is done",
        "reference_free: true": {"train.loss": "preference", "preference.reference": "none"},
        "ref_model_update_steps: -1": {"preference.reference_update_steps": None},
        "unified_checkpoint": "true is what is done: any number of processes reads a checkpoint; "
        "false is refused",
        "unified_checkpoint_config: async_save": {"train.save_async": True},
        "disable_ckpt_quant": "true is what is done: no state is quantized in a checkpoint; false "
        "is refused",
    },
    "NxDT": {
        "max_epochs: -1": "leave `train.num_train_epochs` out; `train.max_steps` says how many",
        "limit_val_batches: 1.0": {"train.eval_max_batches": 1.0},
        "val_check_interval": {"train.eval_strategy": "steps", "train.eval_steps": 100},
        "check_val_every_n_epoch": {"train.eval_strategy": "epoch", "train.eval_epochs": 1},
        "resume_if_exists: true": {"train.load_checkpoint_path": "auto"},
        "create_checkpoint_callback: false": {"train.save_strategy": "no"},
        "save_top_k: -1": {"train.save_total_limit": None},
        "monitor: step": "what `train.save_total_limit` goes by without `train.best_metric`",
        "mode": {"train.best_metric": "eval_loss", "train.best_mode": "min"},
        "dev_choose_samples": {"data.datasets.0.max_samples": 2250},
        "do_layer_norm_weight_decay: false": {"train.no_decay_modules": ["norm"]},
        "optim.betas": {"train.adam_beta1": 0.9, "train.adam_beta2": 0.999},
        "optim.name: adamw_fp32OptState": {"train.optimizer": "adamw"},
        "sched.max_steps": {"train.lr_decay_style": "cosine", "train.lr_decay_steps": 20_000},
        "sched.name: LinearAnnealingWithWarmUp": {
            "train.lr_decay_style": "linear_annealing",
            "train.lr_min": 0,
        },
        "sched.name: CosineAnnealing": {"train.lr_decay_style": "cosine_annealing"},
        "sched.name: WarmupPolicy": {"train.lr_decay_style": "constant_with_warmup"},
        "sched.name: WarmupHoldPolicy": {"train.lr_decay_style": "constant_with_warmup"},
        "sched.name: SquareAnnealing": {"train.lr_decay_style": "square_annealing"},
        "sched.name: NoamAnnealing": {"train.lr_decay_style": "noam"},
        "sched.name: WarmupAnnealing": {"train.lr_decay_style": "warmup_annealing"},
        "sched.name: StepLR": {
            "train.lr_decay_style": "step",
            "train.lr_step_size": 1000,
            "train.lr_gamma": 0.1,
        },
        "sched.name: ExponentialLR": {
            "train.lr_decay_style": "exponential",
            "train.lr_gamma": 0.9999,
        },
        "sched.name: rprop": "refused: it is an optimizer, `train.optimizer: rprop`",
    },
}
