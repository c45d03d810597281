"""The section data, and the entries of its lists of data sets: what is trained and evaluated on."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any, Literal

from pydantic import model_validator

from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.options import with_options, wrong_options
from tilewright.trainer.parallel.fields import Width
from tilewright.trainer.section import (
    Accepts,
    Only,
    Refuse,
    Resume,
    RowOf,
    Section,
    field,
)

REPEAT = ("random", "interleave_over")
WEIGHED = ("random", "interleave_under", "interleave_over")
READ = Only("path", but="dummy").because("dummy data is not read from anywhere")
ON_HUB = "only a dataset on the Hub has one"
SHARDS, INDICES = "give both, or neither", "indices run from 0 to one below the number"


def _here(entry: Dataset) -> bool:
    """Whether it is a file, a folder or an address."""
    return entry.path != "dummy" and ("://" in entry.path or pathlib.Path(entry.path).exists())


def _on_hub(entry: Dataset) -> bool:
    return entry.path != "dummy" and not _here(entry)


def _beyond(index: int | None, number: int | None) -> bool:
    return index is not None and number is not None and index >= number


def _same_rows_twice(config: Any) -> bool:
    """Whether two data sets are of the same rows, as what names them says."""
    names = {"path", "name", "split", "revision", "data_files", "shards", "shards_idx"}
    named = [e.model_dump(include=names) for e in config.data.datasets if e.path != "dummy"]
    return any(one in named[:i] for i, one in enumerate(named))


def _wrong_type(entry: Any) -> str | None:
    return wrong_options(DATASETS[entry.type].options, entry.type_args, f"type {entry.type}")


class Dataset(Section):
    path: str = field(..., Resume.OTHER_CONTENTS, examples=["dummy"])
    """File, folder, Hub id, s3://, gs://, abfs:// or https:// address (which need the extra s3, gs,
    abfs or http), or dummy.
    """
    type: Annotated[str, RowOf(DATASETS)] = field(
        "tokenized",
        Resume.OTHER_CONTENTS,
        Only("path", but="dummy").because("dummy data is tokenized already"),
        keyed=True,
    )
    """tokenized: rows with input_ids and, if there, labels; text: rows with text, tokenized; chat:
    rows with messages, rendered by the tokenizer's chat template, loss on the assistant's answers;
    prompt_completion: rows with prompt and completion, loss on the completion; erniekit and alpaca:
    rows of these formats, loss on the answers; preference, preference_tokenized and
    preference_erniekit: pairs of answers, unpaired_preference and unpaired_preference_tokenized:
    answers that are desirable or not, for train.loss = preference.
    """
    type_args: dict[str, Any] = field(
        {},
        Resume.OTHER_CONTENTS,
        Only("type", table=lambda: with_options(DATASETS)),
        Refuse(_wrong_type, "type").when_entry(_wrong_type),
        keyed=True,
        later=True,
    )
    """Options of the type."""
    name: str | None = field(
        None,
        Resume.OTHER_CONTENTS,
        READ,
        Refuse(ON_HUB, "path").when_entry(lambda e: e.name is not None and _here(e)),
        Refuse("give one of them", "data_files").when_entry(
            lambda e: e.name is not None and e.data_files is not None and _on_hub(e)
        ),
        keyed=True,
    )
    """Configuration (subset) of a Hub dataset."""
    split: str | None = field(None, Resume.OTHER_CONTENTS, READ, keyed=True)
    """Split, such as train or train[:10%]; null: the only one. Files are one split, train."""
    revision: str | None = field(
        None,
        Resume.OTHER_CONTENTS,
        READ,
        Refuse(ON_HUB, "path").when_entry(lambda e: e.revision is not None and _here(e)),
        keyed=True,
    )
    """Commit or tag of a Hub dataset."""
    trust_remote_code: bool = field(
        False,
        Resume.THIS_START,
        Accepts().because("the package datasets no longer runs a dataset's own code"),
    )
    """Run a dataset's own code."""
    data_files: str | list[str] | None = field(
        None,
        Resume.OTHER_CONTENTS,
        READ,
        Only("ds_type", but=None).because("data_files needs ds_type"),
        keyed=True,
    )
    """Files or patterns within path (a folder, Hub id or address); needs ds_type."""
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = field(
        None,
        Resume.OTHER_CONTENTS,
        READ,
        Refuse("the Hub knows the format, unless data_files are named", "data_files").when_entry(
            lambda e: e.ds_type is not None and e.data_files is None and _on_hub(e)
        ),
        keyed=True,
    )
    """Format of the files; null: by their suffix. Only such files of a folder are read."""
    max_seq_len: int | None = field(None, Resume.OTHER_CONTENTS, ge=2)
    """Tokens kept of a longer sample (text: of a piece of a document)."""
    shards: int | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Refuse(SHARDS, "shards_idx").when_entry(
            lambda e: (e.shards is None) != (e.shards_idx is None)
        ),
        ge=1,
        keyed=True,
    )
    """Take one of this many parts of the dataset."""
    shards_idx: int | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Refuse(INDICES, "shards").when_entry(lambda e: _beyond(e.shards_idx, e.shards)),
        ge=0,
        keyed=True,
    )
    """Which part, from 0."""
    max_samples: int | None = field(None, Resume.OTHER_CONTENTS, READ, ge=1, keyed=True, later=True)
    """Rows that are taken, from the beginning; null: all."""
    weight: float | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Only("data.mixing", *WEIGHED).because("concat takes every sample once"),
        gt=0,
        keyed=True,
        later=True,
    )
    """Its share of the samples is this over the sum of the weights; null: see data.mixing."""
    preprocess_shards: int | None = field(
        None, Resume.COST, Only("shards", None).because("give one of them"), ge=1
    )
    """Prepare in this many chunks, one after the other."""


def _grouped(name: str) -> Refuse:
    """A field of the groups that multipack packs."""

    def unread(config: Any) -> bool:
        data = config.data
        given = getattr(data, name) != Data.model_fields[name].default
        groups = data.sample_packing_method == "multipack" and not data.sample_packing_sequentially
        return given and not groups

    return Refuse(
        "only multipack packs groups, in processes or not",
        "sample_packing_method",
        "sample_packing_sequentially",
    ).when(unread)


def held_out(data: Data, do_test: bool) -> bool:
    """Whether something is evaluated during training."""
    during = [] if do_test else data.test_datasets
    return bool(during) or data.val_set_size is not None


def nothing_held_out(config: Any) -> str | None:
    """Why nothing is evaluated during training, if that is so."""
    held = held_out(config.data, config.train.do_test)
    return None if held else "there is nothing to evaluate on"


def nothing_scored(config: Any) -> str | None:
    """Why nothing is evaluated, neither during training nor after it."""
    if config.train.do_test:
        return None
    never = config.train.eval_strategy == "no"
    return "nothing is evaluated" if never else nothing_held_out(config)


def _weighs_some(config: Any) -> bool:
    given = [e.weight is not None for e in config.data.datasets]
    return any(given) and not all(given)


def no_size(size: float | None) -> bool:
    """Whether it is neither a number of 1 or more nor a fraction between 0 and 1."""
    return size is not None and not (0 < size < 1 if isinstance(size, float) else size >= 1)


class Data(Width):
    datasets: list[Dataset] = field(
        ..., Resume.OTHER_CONTENTS, min_length=1, examples=[[{"path": "dummy"}]], certified=False
    )
    """What to train on."""
    test_datasets: list[Dataset] = field([], Resume.EVALUATION, certified=False)
    """What to evaluate on."""
    mixing: Literal["concat", "random", "interleave_under", "interleave_over"] = field(
        "concat",
        Resume.OTHER_CONTENTS,
        Refuse("give every data set a weight, or none of them", "datasets").when(_weighs_some),
        Refuse("what is evaluated on is not mixed", "test_datasets").when(
            lambda c: any(e.weight is not None for e in c.data.test_datasets)
        ),
        Refuse(
            "a sample that is taken twice would be trained on and held out", "val_set_size"
        ).when(lambda c: c.data.mixing in REPEAT and c.data.val_set_size is not None),
    )
    """How datasets are merged. concat: every sample once; random: samples_per_epoch samples, each
    of a dataset drawn by its weight (null: its number of samples), in the dataset's order and from
    its beginning again; interleave_under, interleave_over: datasets in turns, or drawn by their
    weights, until the first one or the last one has ended. The same samples in every epoch.
    """
    samples_per_epoch: int | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Only("mixing", "random").because("the other ways take what there is"),
        ge=1,
    )
    """Samples that random draws; null: as many as there are."""
    on_bad_row: Literal["error", "skip"] = field("error", Resume.OTHER_CONTENTS)
    """What a row that its type cannot use does: it ends the run, or it is skipped, with a count and
    the first ten in the log. A file that cannot be read ends the run.
    """
    dataset_prepared_path: str = field("last_prepared_dataset", Resume.PLACE)
    """Folder for prepared datasets."""
    select_columns: list[str] | None = field(
        None, Resume.OTHER_CONTENTS, certified=False, keyed=True
    )
    """Columns to read; null: those that type names."""
    sample_packing_method: Literal["sequential", "multipack"] = field(
        "sequential", Resume.OTHER_BINS
    )
    """sequential: in order; multipack: first-fit decreasing within a group."""
    sample_packing_group_size: int = field(
        100000, Resume.OTHER_BINS, _grouped("sample_packing_group_size"), ge=1
    )
    """Samples that multipack packs together."""
    sample_packing_sequentially: bool | None = field(None, Resume.OTHER_BINS)
    """true: sequential whatever the method."""
    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = field(
        None, Resume.COST, _grouped("sample_packing_mp_start_method"), certified=False
    )
    """Pack the groups of multipack in processes that are started so; null: in this process."""
    eval_sample_packing: bool | None = field(
        None,
        Resume.EVALUATION,
        Refuse(
            nothing_scored, "train.eval_strategy", "train.do_test", "test_datasets", "val_set_size"
        ).in_training(),
    )
    """false: one document a bin in evaluation."""
    dataloader_num_workers: int = field(0, Resume.COST, ge=0, certified=False)
    """Worker processes that read batches; 0: none."""
    dataloader_prefetch_factor: int | None = field(
        None,
        Resume.COST,
        Only("dataloader_num_workers", but=0).because("without workers it must be null"),
        ge=1,
        certified=False,
    )
    """Batches read ahead by each worker; null: 2 with workers."""
    dataloader_pin_memory: bool = field(True, Resume.COST, certified=False)
    """Pin batches in memory where there is a CUDA device."""
    dataloader_drop_last: bool = field(True, Resume.NEXT_STEP)
    """Drop the last incomplete global batch of an epoch; false: fill it with empty bins."""
    val_set_size: int | float | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Refuse("must be a number of samples (1 or more) or a fraction between 0 and 1").when(
            lambda c: no_size(c.data.val_set_size)
        ),
        Refuse("give one of them, or set train.do_test", "test_datasets").when(
            lambda c: (
                c.data.val_set_size is not None and c.data.test_datasets and not c.train.do_test
            )
        ),
        Refuse("rows that are given twice would be trained on and held out", "datasets").when(
            lambda c: c.data.val_set_size is not None and _same_rows_twice(c)
        ),
        certified=False,
    )
    """Held out of datasets for evaluation, with all their samples: a number of rows, or a fraction
    below 1.
    """
    shuffle_merged_datasets: bool = field(True, Resume.OTHER_ORDER, stored="shuffle", keyed=True)
    """Shuffle all samples, and the bins in every epoch."""
    shuffle_before_merging_datasets: bool = field(True, Resume.OTHER_CONTENTS, keyed=True)
    """Shuffle each dataset before merging."""
    dataset_num_proc: int | None = field(None, Resume.COST, ge=1, certified=False)
    """Processes for preparation; null: TILEWRIGHT_DATASET_NUM_PROC or the number of CPUs for a
    dataset of more than 64 MiB, this process alone for a smaller one.
    """
    dataset_shard_num: int | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Refuse(SHARDS, "dataset_shard_idx").when(
            lambda c: (c.data.dataset_shard_num is None) != (c.data.dataset_shard_idx is None)
        ),
        ge=1,
        certified=False,
        keyed=True,
    )
    """Take one of this many parts of every dataset."""
    dataset_shard_idx: int | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Refuse(INDICES, "dataset_shard_num").when(
            lambda c: _beyond(c.data.dataset_shard_idx, c.data.dataset_shard_num)
        ),
        ge=0,
        certified=False,
        keyed=True,
    )
    """Which of those parts, from 0."""
    num_dataset_shards_to_save: int | None = field(None, Resume.OUTPUT, ge=1)
    """Files of a prepared dataset; null: one."""
    skip_prepare_dataset: bool = field(False, Resume.OTHER_CONTENTS, certified=False)
    """Load dataset_prepared_path as it is."""
    push_dataset_to_hub: str | None = field(
        None,
        Resume.OUTPUT,
        Only("hf_use_auth_token", True, neutral=("",)).because(
            "pushing needs hf_use_auth_token: true"
        ),
        Only("skip_prepare_dataset", False, neutral=("",)).because(
            "nothing is prepared, so nothing can be pushed"
        ),
    )
    """Push what was prepared to this Hub repository, privately."""
    hf_use_auth_token: bool | None = field(None, Resume.THIS_START)
    """Send the Hub token; null: if there is one."""

    @property
    def prepared(self) -> list[Dataset]:
        """The data sets that are prepared."""
        return [] if self.skip_prepare_dataset else [*self.datasets, *self.test_datasets]

    @model_validator(mode="after")
    def _prefetch(self) -> Data:
        if self.dataloader_num_workers and self.dataloader_prefetch_factor is None:
            self._fill(dataloader_prefetch_factor=2)
        return self
