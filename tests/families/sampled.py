"""The sampler, over every causal language model of transformers that can be built small: its greedy
samples beside transformers' generate. Each family runs in a process of its own, with a limit.
"""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tests.families.each import versions
from tests.lib.isolated import Died, isolated
from tests.lib.small_models import build
from tilewright.sampler.asked import Asked
from tilewright.sampler.engine import BASE, Drawing, Engine, generate_alone, unsupported

PROMPTS = [[1, 2, 3], [5, 4, 3, 2, 1, 0, 7, 9, 8], [3] * 14]
COUNT, LIMIT = 6, 120
TIE = 1e-4  # of log-probabilities: two tokens that may change places


def check(kind: str) -> dict[str, str]:
    """How a family is sampled, and whether samples are those of generate."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    asked = [Asked(prompt, COUNT, temperature=0.0) for prompt in PROMPTS]
    try:
        model = build(kind, "causal").eval()
        # Larger differences between tokens than those of new weights.
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        wanted = [Drawing(BASE, one, None) for one in asked]
        for one in wanted:
            generate_alone(model, one)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"sampled": f"refused: generate has none of it ({said[:160]})"}
    engine = Engine(model, "none", tokens=512)
    try:
        futures = engine.submit(BASE, asked)
        given = [future.result(LIMIT) for future in futures]
    finally:
        engine.close()
    how = "by continuous batching" if engine.continuous else f"by generate: {unsupported(model)}"
    for one, other in zip(wanted, given, strict=True):
        for here, there, token, found in zip(
            one.logprobs, other.logprobs, one.tokens, other.tokens, strict=True
        ):
            if abs(here - there) > TIE:
                return {"sampled": f"wrong: {how}, log-probabilities {here} and {there}"}
            if token != found:
                break  # as probable
    return {"sampled": how[:200]}


def row_of(unit: str) -> dict:
    """`check` of a family, in a process of its own."""
    kind = unit.split()[1]
    try:
        found = isolated(check, kind, limit=LIMIT)
    except Died as error:
        found = {"sampled": f"wrong: {error}"}
    wrong = [name for name, said in found.items() if said.startswith("wrong")]
    return {"found": found, "versions": versions("sampled"), "wrong": wrong}
