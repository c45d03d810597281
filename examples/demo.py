"""The main path on a CPU, end to end: a tokenizer, a 10 M-parameter model trained on real text, a
loss curve, a checkpoint that transformers loads, and a sample from it. `make demo` runs it;
exits with 1 if the loss misses its bound.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = ROOT / "examples/data/shakespeare"
OUT = ROOT / "outputs/demo"
VOCAB = 2048
# Nats per token on the held-out play. Guessing uniformly is ln 2048 = 7.62; unigram frequencies
# alone give about 6.2. A run that does not learn context stays above this.
BOUND = 5.1


def write_model(folder: pathlib.Path) -> None:
    """A byte-level BPE trained on the training plays only, and the model's shape."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    end = "<|endoftext|>"
    bpe.train(
        [str(p) for p in sorted((TEXT / "train").glob("*.txt"))],
        vocab_size=VOCAB,
        min_frequency=2,
        special_tokens=[end],
        show_progress=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=end, eos_token=end, pad_token=end
    ).save_pretrained(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def sample(folder: pathlib.Path) -> str:
    import logging

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    # transformers imports torchao where it is installed, whose import warns of its own binaries.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    prompt = tokenizer("PROSPERO.\n", return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**prompt, max_new_tokens=120, do_sample=True, temperature=0.8, top_k=50)
    return tokenizer.decode(out[0])


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    write_model(OUT / "model")
    started = time.monotonic()
    code = subprocess.run(
        [sys.executable, "-m", "tilewright.trainer.train", "examples/demo.yaml", *sys.argv[1:]],
        cwd=ROOT,
    ).returncode
    if code:
        return code
    minutes = (time.monotonic() - started) / 60
    rows = [json.loads(line) for line in (OUT / "metrics.jsonl").read_text().splitlines()]
    train = [r["loss"] for r in rows if "loss" in r]
    held = [r["eval_loss"] for r in rows if "eval_loss" in r]
    saved = sorted(OUT.glob("checkpoints/global_step_*/hf"))[-1]
    print(f"\ntrained {len(train)} steps in {minutes:.1f} minutes")
    print(
        f"training loss {train[0]:.2f} -> {sum(train[-10:]) / len(train[-10:]):.2f} nats per token "
        "(first step -> mean of the last ten)"
    )
    print(f"held-out loss {held[0]:.2f} -> {held[-1]:.2f} nats per token (bound {BOUND})")
    print(f"loss curve     {(OUT / 'loss.png').relative_to(ROOT)}")
    print(f"checkpoint     {saved.relative_to(ROOT)} (loaded by transformers below)\n")
    print(sample(saved))
    if not held[-1] < BOUND < held[0]:
        print(f"\ndemo: held-out loss must fall from above {BOUND} to below it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
