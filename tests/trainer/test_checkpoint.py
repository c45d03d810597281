"""What a checkpoint belongs to, what it holds, and how damage is found."""

import json
import shutil

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from test_trainer import LORA, NF4, QWEN3, rows, run, write_config

from tilewright.trainer import packing

AUTO = "--train.load_checkpoint_path=auto"
UNTIED = {**QWEN3, "tie_word_embeddings": False}


def base(folder, shape=UNTIED, **changes):
    """A folder with weights of a short run."""
    run(write_config(folder, shape, train__max_steps=1, **changes))
    hf = folder / "out/checkpoints/global_step_1/hf"
    (hf / "tokenizer.json").write_text("{}")
    return hf


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Two folders with other weights of the same shapes."""
    root = tmp_path_factory.mktemp("bases")
    return [base(root / str(seed), train__seed=seed) for seed in (0, 1)]


# ---- what a checkpoint belongs to


def test_a_position_is_one_in_the_same_bins(tmp_path):
    """Both methods make four bins of these samples."""
    lengths = [24, 40, 20, 44] * 2
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"input_ids": [i + 1] * n}) + "\n" for i, n in enumerate(lengths))
    )
    options = {
        "data__datasets": [{"path": str(file)}],
        "data__sample_packing_sequence_len": 64,
        "data__shuffle_merged_datasets": False,
        "data__shuffle_before_merging_datasets": False,
    }
    for method in ("sequential", "multipack"):
        assert len(packing.pack(lengths, 64, method)) == 4
    path = write_config(tmp_path, train__max_steps=2, **options)
    run(path)
    with pytest.raises(ValueError, match=r"another data: \{'packing': "):
        run(path, AUTO, "--data.sample_packing_method=multipack", "--train.max_steps=4")
    run(path, AUTO, "--train.max_steps=4")


@pytest.mark.parametrize("kind", ["dense", "lora", "nf4"])
def test_a_run_goes_on_from_the_weights_it_began_from(kind, bases, tmp_path):
    options = {"dense": {}, "lora": LORA, "nf4": NF4}[kind]
    path = write_config(tmp_path, UNTIED, train__max_steps=2, **options)
    began, other = (f"--model.model_path={folder}" for folder in bases)
    run(path, began)
    with pytest.raises(ValueError, match=r"began from other weights .*train\.allow_other_base"):
        run(path, AUTO, other, "--train.max_steps=4")
    moved = tmp_path / "moved"
    shutil.copytree(bases[0], moved)  # the weights count, not their path
    run(path, AUTO, f"--model.model_path={moved}", "--train.max_steps=3")
    run(path, AUTO, other, "--train.max_steps=4", "--train.allow_other_base=true")
    assert [r["step"] for r in rows(tmp_path)] == [1, 2, 3, 4]


def test_another_optimizer_is_said_to_be_one(tmp_path):
    """Although it has a setting that the checkpoint does not record."""
    path = write_config(tmp_path, train__max_steps=2)
    run(path)
    with pytest.raises(ValueError, match=r"with another optimizer: \{'optimizer': \('adamw', 'any"):
        run(path, AUTO, "--train.optimizer=anyprecision_adamw", "--train.max_steps=4")


def test_weights_are_the_same_in_other_files(bases, tmp_path):
    from safetensors.torch import load_file, save_file
    from test_trainer import build

    from tilewright.trainer import hf

    tensors = load_file(bases[0] / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    (split / "config.json").write_text((bases[0] / "config.json").read_text())
    names = sorted(tensors)
    index = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names[i::2]}, split / file)
        index |= dict.fromkeys(names[i::2], file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_text((bases[0] / "config.json").read_text())
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, changed / "model.safetensors")
    _, model = build(write_config(tmp_path, UNTIED))
    found = []
    for folder in (bases[0], split, changed):
        for mode in hf.LOAD_MODES:
            hf.load_weights(model, folder, mode=mode)
            found.append(model.origin)
    assert len({*found[:4]}) == 1 and found[4] == found[5] != found[0]
