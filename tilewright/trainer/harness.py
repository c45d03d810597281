"""The trainer's models for EleutherAI's lm-evaluation-harness (the extra `harness`).

from lm_eval import simple_evaluate
from tilewright.trainer.harness import LanguageModel

model = LanguageModel.of("config.yaml", ["--train.load_checkpoint_path", "auto"])
print(simple_evaluate(model, tasks=["lambada_openai"])["results"])
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import datasets
import numpy as np

from tilewright.core.registry import ImplementationUnavailable
from tilewright.trainer import build
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import Data, load
from tilewright.trainer.data.batches import Bins
from tilewright.trainer.engine import Engine
from tilewright.trainer.evaluate import filled_engine
from tilewright.trainer.parallel.mesh import Mesh, join
from tilewright.trainer.parallel.precision import resolved
from tilewright.trainer.scoring import Score, batches_of, scores

# An optional package, which the type checker does not know.
Base: Any = importlib.import_module("lm_eval.api.model").TemplateLM
utils: Any = importlib.import_module("lm_eval.utils")


class LanguageModel(Base):
    """A model whose log-probabilities the harness asks for, computed as by `evaluate`: packed, and
    spread over ranks as configured. Every rank must make the same requests.

    Contexts are cut at their beginning to the model's positions, and to what a bin holds. Requests
    to generate text raise ImplementationUnavailable.

    Args:
        engine: with the weights.
        data: how requests are packed.
        micro_batch_size: how many bins are in a batch.
        tokenizer: transformers'.
    """

    def __init__(self, engine: Engine, data: Data, micro_batch_size: int, tokenizer: Any):
        super().__init__()
        self.engine, self.data, self.tokenizer = engine, data, tokenizer
        self.micro_batch_size = micro_batch_size
        held = data.sample_packing_sequence_len - 1  # a bin also has the last label's token
        self.max_length = min(engine.model.config.max_position_embeddings, held)

    @classmethod
    def of(cls, path: str, overrides: list[str] | None = None) -> LanguageModel:
        """The model of a configuration, in the processes of this launch. The weights are those of
        model.model_path, or of the checkpoint that train.load_checkpoint_path names.

        Raises ConfigError for the configuration, and what `evaluate` raises.
        """
        config = load(path, overrides, training=False)
        model, data, train = config.model, config.data, config.train
        mesh: Mesh = join(train)
        shape = build.shape_of_run(model, "language_model", mesh)
        dtypes = resolved(config.precision, train, train)
        engine = filled_engine(model, config.lora, shape, data, train, mesh, dtypes)
        size = train.eval_micro_batch_size or train.micro_batch_size
        return cls(engine, data, size, build.tokenizer_of(model))

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scored = self._scores((context, answer) for _, context, answer in requests)
        return [(s.logprob, s.hits == s.tokens) for s in scored]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        windows = [
            [
                utils.make_disjoint_window(window)
                for window in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scored = iter(self._scores(window for own in windows for window in own))
        return [sum(next(scored).logprob for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        raise ImplementationUnavailable(
            "the trainer's models do not generate text: choose tasks that score given answers, or "
            "export the model, and load it with the harness's own hf model"
        )

    def _scores(self, pairs: Iterable[tuple[list[int], list[int]]]) -> list[Score]:
        """The score of each answer, after its context, in order."""
        rows: dict[str, list[np.ndarray]] = {"input_ids": [], "labels": []}
        for context, answer in pairs:
            if len(answer) > self.max_length:
                raise ValueError(
                    f"an answer has {len(answer)} tokens, and at most {self.max_length} fit: raise "
                    "data.sample_packing_sequence_len"
                )
            ids = np.array([*context, *answer][-self.max_length - 1 :], np.int64)
            labels = ids.copy()
            labels[: len(ids) - len(answer)] = IGNORE
            rows["input_ids"].append(ids)
            rows["labels"].append(labels)
        if not rows["input_ids"]:
            return []
        bins = Bins(datasets.Dataset.from_dict(rows), self.data, numbered=True)
        batches = batches_of(bins, self.micro_batch_size, self.engine.mesh)
        return sorted(s for some in scores(self.engine, batches) for s in some)
