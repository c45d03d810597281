"""What the trainer's tests of data share."""

from tilewright.trainer.data.prepared import Agreed, prepare
from tilewright.trainer.data.types.dataset_type import Prompts


def prepare_of(config, tokenizer, vocab, entries=None, agreed=(), **options):
    """`prepare` with a configuration's values, of its training data if not of other entries."""
    entries = config.data.datasets if entries is None else entries
    model, seed, preference = config.model, config.train.seed, config.preference
    prompts = Prompts(preference.max_prompt_len, preference.truncation_mode)
    return prepare(
        entries,
        config.data,
        model,
        seed,
        tokenizer,
        vocab,
        prompts=prompts,
        agreed=Agreed(*agreed),
        **options,
    )
