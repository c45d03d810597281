"""The page docs/trainer/extend.md: each of its files is a row of a table, in a copy of the package
in which nothing else is edited.
"""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

import tilewright

pytest.importorskip("datasets")
pytestmark = pytest.mark.packages
ROOT = pathlib.Path(tilewright.__file__).parents[1]
PAGE = (ROOT / "docs/trainer/extend.md").read_text()
FILES = dict(re.findall(r'```python title="(tilewright/trainer/\S+)"\n(.*?)```', PAGE, re.S))
SHAPE = {
    "model_type": "seed_oss",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from tilewright.trainer import train
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.models.model import Ops, Transformer

assert train.main(["config.yaml"]) == 0
folder = "out/checkpoints/global_step_4/hf"
theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ours = Transformer(hf.load_config(folder), Ops.resolve())
hf.load_weights(ours, folder)
ids = torch.arange(40).view(2, 20)
with torch.no_grad():
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
print("bias", float(ours.model.layers[0].self_attn.qkv_proj.bias.abs().max()) > 0)
"""


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {
        token: i for i, token in enumerate(["<s>", "</s>", "<pad>", *map(chr, range(32, 126))])
    }
    plain = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.save_pretrained(folder)


def run(folder, tree, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )


def prepared(folder, **train):
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(SHAPE))
    write_tokenizer(folder / "model")
    rows = [
        {"instruction": f"What is {n}?", "input": "" if n % 2 else "Think.", "output": f"{n}."}
        for n in range(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tree = {
        "model": {"config_path": "model"},
        "data": {
            "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
            "dataset_prepared_path": "prepared",
            "sample_packing_sequence_len": 64,
            "pad_to_multiple_of": 8,
            "val_set_size": 4,
        },
        "train": {
            "output_dir": "out",
            "data_parallel_mode": "none",
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "max_steps": 4,
            "save_epochs": 0,
            "lr": 1e-2,
            **train,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))


def test_each_file_of_the_page_is_a_row(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT / "tilewright", tree / "tilewright", ignore=shutil.ignore_patterns("__pyc*")
    )
    assert len(FILES) == 6
    for name, code in FILES.items():
        assert not (tree / name).exists()
        (tree / name).write_text(code)
    prepared(
        tmp_path,
        loss="focal",
        optimizer="lion",
        optimizer_args={"beta2": 0.9},
        lr_decay_style="square_root",
        lr_min=0.0,
        callbacks=["best"],
    )
    done = run(tmp_path, tree, "-c", SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "bias True"
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    # (1 - p)^2 of the cross-entropy, with p = 1 / 97 at the start
    first = steps[0]
    assert math.isclose(first["cross_entropy"], math.log(97), rel_tol=0.02)
    assert 0.9 < first["loss"] / first["cross_entropy"] < 1
    assert steps[-1]["cross_entropy"] < first["cross_entropy"]
    want = [1e-2 * (1 - math.sqrt(i / 3)) for i in range(4)]
    assert [row["lr"] for row in steps] == pytest.approx(want)
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(losses, key=losses.get)
    assert json.loads((tmp_path / "out/best.json").read_text()) == {
        "step": best,
        "eval_loss": losses[best],
    }


def test_options_and_names_that_do_not_fit_are_refused(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT / "tilewright", tree / "tilewright", ignore=shutil.ignore_patterns("__pyc*")
    )
    for name in FILES:
        (tree / name).write_text(FILES[name])
    prepared(tmp_path, optimizer="lion", optimizer_args={"beta3": 0.9})
    trainer = "-m", "tilewright.trainer.train", "config.yaml"
    done = run(tmp_path, tree, *trainer)
    assert done.returncode == 2
    assert re.search(r"^train\.optimizer_args = .*: beta3: extra inputs are not", done.stderr)
    done = run(tmp_path, tree, *trainer, "--train.loss", "focl", "--train.optimizer_args", "{}")
    assert done.returncode == 2 and "did you mean focal?" in done.stderr


def test_an_entry_point_is_a_row(tmp_path):
    """Of a package that is installed beside this one; one that does not import is refused by
    name.
    """
    package = tmp_path / "site"
    info = package / "my_losses-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-losses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tilewright.losses]\nfocal = my_losses:FOCAL\nbroken = my_losses:NO\nother = json:dumps\n"
    )
    code = FILES["tilewright/trainer/losses/focal.py"].replace(
        'LOSSES.add("focal", Loss', "FOCAL = Loss"
    )
    code = code.replace('("cross_entropy",)))', '("cross_entropy",))')
    (package / "my_losses.py").write_text(code)
    script = (
        "from tilewright.trainer.tables import LOSSES\n"
        "print(LOSSES.names(), LOSSES['focal'].reports)\n"
        "for name in ('broken', 'other'):\n"
        "    try: LOSSES[name]\n"
        "    except ValueError as error: print(error)\n"
    )
    done = run(tmp_path, f"{package}:{ROOT}", "-c", script)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "['broken', 'focal', 'language_modeling', 'other'] ('cross_entropy',)"
    assert re.match("the entry point my_losses:NO gives no row of losses: AttributeError", said[1])
    assert "other must be a tilewright.trainer.losses.loss:Loss" in said[2]
