"""The section data, and the entries of its lists of data sets: what is trained and evaluated on."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import model_validator

from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.options import with_options, wrong_options
from tilewright.trainer.parallel.fields import Width
from tilewright.trainer.section import Needs, Resume, RowOf, Section, Stated, field

REPEAT = ("random", "interleave_over")
WEIGHED = ("random", "interleave_under", "interleave_over")
READ = Needs("path", but="dummy", why="dummy data is not read from anywhere")


class Dataset(Section):
    path: str = field(..., Resume.OTHER_CONTENTS, examples=["dummy"])
    """File, folder, Hub id, s3://, gs://, abfs:// or https:// address (which need the extra s3, gs,
    abfs or http), or dummy.
    """
    type: Annotated[str, RowOf(DATASETS)] = field(
        "tokenized",
        Resume.OTHER_CONTENTS,
        Needs("path", but="dummy", why="dummy data is tokenized already"),
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
        Needs("type", lambda: with_options(DATASETS)),
        keyed=True,
        later=True,
    )
    """Options of the type."""
    name: str | None = field(None, Resume.OTHER_CONTENTS, READ, keyed=True)
    """Configuration (subset) of a Hub dataset."""
    split: str | None = field(None, Resume.OTHER_CONTENTS, READ, keyed=True)
    """Split, such as train or train[:10%]; null: the only one. Files are one split, train."""
    revision: str | None = field(None, Resume.OTHER_CONTENTS, READ, keyed=True)
    """Commit or tag of a Hub dataset."""
    trust_remote_code: bool = field(
        False, Resume.THIS_START, refused="the package datasets no longer runs a dataset's own code"
    )
    """Run a dataset's own code."""
    data_files: str | list[str] | None = field(
        None,
        Resume.OTHER_CONTENTS,
        READ,
        Needs("ds_type", but=None, why="data_files needs ds_type"),
        keyed=True,
    )
    """Files or patterns within path (a folder, Hub id or address); needs ds_type."""
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = field(
        None, Resume.OTHER_CONTENTS, READ, keyed=True
    )
    """Format of the files; null: by their suffix. Only such files of a folder are read."""
    max_seq_len: int | None = field(None, Resume.OTHER_CONTENTS, ge=2)
    """Tokens kept of a longer sample (text: of a piece of a document)."""
    shards: int | None = field(None, Resume.OTHER_CONTENTS, ge=1, keyed=True)
    """Take one of this many parts of the dataset."""
    shards_idx: int | None = field(None, Resume.OTHER_CONTENTS, ge=0, keyed=True)
    """Which part, from 0."""
    max_samples: int | None = field(None, Resume.OTHER_CONTENTS, READ, ge=1, keyed=True, later=True)
    """Rows that are taken, from the beginning; null: all."""
    weight: float | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Needs("data.mixing", WEIGHED, "concat takes every sample once"),
        gt=0,
        keyed=True,
        later=True,
    )
    """Its share of the samples is this over the sum of the weights; null: see data.mixing."""
    preprocess_shards: int | None = field(
        None, Resume.COST, Needs("shards", [None], "give one of them"), ge=1
    )
    """Prepare in this many chunks, one after the other."""


def of_dataset(entry: Dataset) -> Iterator[Stated]:
    """Options are those of the type."""
    why = wrong_options(DATASETS[entry.type].options, entry.type_args, f"type {entry.type}")
    yield why, why, "type_args", "type"
    read = entry.path != "dummy"
    here = read and ("://" in entry.path or pathlib.Path(entry.path).exists())
    for name in ("name", "revision"):
        local = getattr(entry, name) is not None and here
        yield local, "only a dataset on the Hub has one", name, "path"
    on_hub, files = read and not here, entry.data_files is not None
    yield entry.name is not None and files and on_hub, "give one of them", "name", "data_files"
    why = "the Hub knows the format, unless data_files are named"
    yield entry.ds_type is not None and not files and on_hub, why, "ds_type", "data_files"
    yield from _parts("shards", entry.shards, "shards_idx", entry.shards_idx)


def _parts(name: str, number: int | None, index_name: str, index: int | None) -> Iterator[Stated]:
    yield (number is None) != (index is None), "give both, or neither", name, index_name
    beyond = number is not None and index is not None and index >= number
    yield beyond, "indices run from 0 to one below the number", index_name, name


def held_out(data: Data, do_test: bool) -> bool:
    """Whether something is evaluated during training."""
    during = [] if do_test else data.test_datasets
    return bool(during) or data.val_set_size is not None


class Data(Width):
    datasets: list[Dataset] = field(
        ..., Resume.OTHER_CONTENTS, min_length=1, examples=[[{"path": "dummy"}]], certified=False
    )
    """What to train on."""
    test_datasets: list[Dataset] = field([], Resume.EVALUATION, certified=False)
    """What to evaluate on."""
    mixing: Literal["concat", "random", "interleave_under", "interleave_over"] = field(
        "concat", Resume.OTHER_CONTENTS
    )
    """How datasets are merged. concat: every sample once; random: samples_per_epoch samples, each
    of a dataset drawn by its weight (null: its number of samples), in the dataset's order and from
    its beginning again; interleave_under, interleave_over: datasets in turns, or drawn by their
    weights, until the first one or the last one has ended. The same samples in every epoch.
    """
    samples_per_epoch: int | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Needs("mixing", ["random"], "the other ways take what there is"),
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
    sample_packing_group_size: int = field(100000, Resume.OTHER_BINS, ge=1)
    """Samples that multipack packs together."""
    sample_packing_sequentially: bool | None = field(None, Resume.OTHER_BINS)
    """true: sequential whatever the method."""
    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = field(
        None, Resume.COST, certified=False
    )
    """Pack the groups of multipack in processes that are started so; null: in this process."""
    eval_sample_packing: bool | None = field(None, Resume.EVALUATION)
    """false: one document a bin in evaluation."""
    dataloader_num_workers: int = field(0, Resume.COST, ge=0, certified=False)
    """Worker processes that read batches; 0: none."""
    dataloader_prefetch_factor: int | None = field(
        None,
        Resume.COST,
        Needs("dataloader_num_workers", but=0, why="without workers it must be null"),
        ge=1,
        certified=False,
    )
    """Batches read ahead by each worker; null: 2 with workers."""
    dataloader_pin_memory: bool = field(True, Resume.COST, certified=False)
    """Pin batches in memory where there is a CUDA device."""
    dataloader_drop_last: bool = field(True, Resume.NEXT_STEP)
    """Drop the last incomplete global batch of an epoch; false: fill it with empty bins."""
    val_set_size: int | float | None = field(None, Resume.OTHER_CONTENTS, certified=False)
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
        None, Resume.OTHER_CONTENTS, ge=1, certified=False, keyed=True
    )
    """Take one of this many parts of every dataset."""
    dataset_shard_idx: int | None = field(
        None, Resume.OTHER_CONTENTS, ge=0, certified=False, keyed=True
    )
    """Which of those parts, from 0."""
    num_dataset_shards_to_save: int | None = field(None, Resume.OUTPUT, ge=1)
    """Files of a prepared dataset; null: one."""
    skip_prepare_dataset: bool = field(False, Resume.OTHER_CONTENTS, certified=False)
    """Load dataset_prepared_path as it is."""
    push_dataset_to_hub: str | None = field(
        None,
        Resume.OUTPUT,
        Needs("hf_use_auth_token", [True], "pushing needs hf_use_auth_token: true", neutral=("",)),
        Needs(
            "skip_prepare_dataset",
            [False],
            "nothing is prepared, so nothing can be pushed",
            neutral=("",),
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


def of_data(data: Data) -> Iterator[Stated]:
    """Every sample is trained on as often as it says, or held out."""
    weights = [entry.weight is not None for entry in data.datasets]
    some = any(weights) and not all(weights)
    yield some, "give every data set a weight, or none of them", "mixing", "datasets"
    weighed = any(entry.weight is not None for entry in data.test_datasets)
    yield weighed, "what is evaluated on is not mixed", "mixing", "test_datasets"
    held = data.val_set_size is not None
    why = "a sample that is taken twice would be trained on and held out"
    yield held and data.mixing in REPEAT, why, "mixing", "val_set_size"
    size = data.val_set_size or 0
    fits = 0 < size < 1 if isinstance(size, float) else size >= 1
    why = "must be a number of samples (1 or more) or a fraction between 0 and 1"
    yield held and not fits, why, "val_set_size"
    # Whether two data sets are of the same rows, as what names them says.
    names = {"path", "name", "split", "revision", "data_files", "shards", "shards_idx"}
    named = [e.model_dump(include=names) for e in data.datasets if e.path != "dummy"]
    twice = held and any(one in named[:i] for i, one in enumerate(named))
    why = "rows that are given twice would be trained on and held out"
    yield twice, why, "val_set_size", "datasets"
    methods = "sample_packing_method", "sample_packing_sequentially"
    groups = data.sample_packing_method == "multipack" and not data.sample_packing_sequentially
    for name in ("sample_packing_group_size", "sample_packing_mp_start_method"):
        given = getattr(data, name) != Data.model_fields[name].default
        why = "only multipack packs groups, in processes or not"
        yield given and not groups, why, name, *methods
    number, index = data.dataset_shard_num, data.dataset_shard_idx
    yield from _parts("dataset_shard_num", number, "dataset_shard_idx", index)
