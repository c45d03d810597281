"""The plays of examples/data as tokens, for the examples: bytes, or those of a model's tokenizer.

    python examples/shakespeare.py outputs/bytes

writes train.jsonl and heldout.jsonl with `input_ids` of 128 bytes in each line.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import torch

TEXT = pathlib.Path(__file__).resolve().parent / "data/shakespeare"


def windows(part: str, length: int, tokenizer: Any = None) -> torch.Tensor:
    """Tokens [windows, length] of the plays in `part`: train, or heldout (The Tempest)."""
    text = "".join(p.read_text() for p in sorted((TEXT / part).glob("*.txt")))
    ids = tokenizer(text)["input_ids"] if tokenizer else list(text.encode())
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def main(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, every in (("train", 4), ("heldout", 40)):
        rows = windows(part, 128)[::every].tolist()
        (folder / f"{part}.jsonl").write_text(
            "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
        )
        print(f"wrote {folder / part}.jsonl: {len(rows)} documents of 128 bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
