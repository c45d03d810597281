"""Configurations of small runs: one process, SGD in float32, nothing saved."""

import yaml


def write_run(folder, loss, data, *, model="model", length=64, train=None, **sections):
    """The path of a configuration in a folder that has the model.

    data: (file in the folder, type of data set).   length: of a bin, in tokens.
    train: what differs.   sections: further ones.
    """
    tree = {
        "model": {"model_path": str(folder / model)},
        "data": {
            "datasets": [{"path": str(folder / data[0]), "type": data[1]}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": length,
            "pad_to_multiple_of": 16,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "loss": loss,
            "lr": 1e-2,
            "optimizer": "sgd",
            "lr_decay_style": "constant",
            "max_grad_norm": 0.0,
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "save_hf_weights": False,
            "save_strategy": "no",
            **(train or {}),
        },
        **sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")
