"""What the trainer's tests of data share."""

from tilewright.trainer.data.prepared import prepare


def prepare_of(config, tokenizer, vocab, entries=None, **options):
    """`prepare` with a configuration's values, of its training data if not of other entries."""
    entries = config.data.datasets if entries is None else entries
    model, seed = config.model, config.train.seed
    return prepare(entries, config.data, model, seed, tokenizer, vocab, **options)
