"""Builds a configuration's parts: ops, model, data, and the engine that holds them."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tilewright.nn.sharded import local
from tilewright.nn.weights import base_weights
from tilewright.trainer import precomputed as precompute
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.checkpoint.hf_head import drawn, padding_of, untied, with_head
from tilewright.trainer.checkpoint.made_of import Thing
from tilewright.trainer.columns import TOKENS
from tilewright.trainer.config import Config, Data, Dataset, Lora, Model, Train
from tilewright.trainer.data import packing
from tilewright.trainer.data.batches import PREFIX, Batches, Bins
from tilewright.trainer.data.cache_key import tokenized_by
from tilewright.trainer.data.columns.column import COLUMNS, Column
from tilewright.trainer.data.contents import digest, of_samples, of_tokenizer, tokenizes
from tilewright.trainer.data.encode import Columns
from tilewright.trainer.data.prepared import (
    Agreed,
    check_targets,
    is_saved,
    prepare,
    split_validation,
)
from tilewright.trainer.data.sources import titles
from tilewright.trainer.data.teacher_files import check_temperature
from tilewright.trainer.data.types.dataset_type import Prompts
from tilewright.trainer.data.units import check_pairs
from tilewright.trainer.engine import Engine
from tilewright.trainer.losses.loss import Loss, loss_of
from tilewright.trainer.losses.preference_fields import Preference, kind_of_reference
from tilewright.trainer.models.head import Shaping
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.moe import freeze_router
from tilewright.trainer.models.ops_choice import Numerics, Ops, attention_request
from tilewright.trainer.optim.optim import build_optimizer
from tilewright.trainer.optim.per_step import at_step
from tilewright.trainer.optim.row import OPTIMIZERS
from tilewright.trainer.parallel.apply import apply_layouts
from tilewright.trainer.parallel.fields import Compute
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.plugins import adapters, dropout
from tilewright.trainer.reference import Reference
from tilewright.trainer.section import Resume, Section, kept

log = logging.getLogger("tilewright")


def compute_dtype(train: Compute) -> torch.dtype:
    return torch.bfloat16 if train.enable_mixed_precision else torch.float32


def choose_ops(
    model: Model,
    shape: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    dropout: bool = False,
    prefixes: bool = False,
) -> Ops:
    """Chooses implementations. dtype: of matrix products. dropout: whether attention has it.
    prefixes: whether documents share one. Raises ValueError or ImplementationUnavailable before any
    weight is allocated.
    """
    ring = mesh.context.ring_size > 1 and not model.batch_invariant  # else it exchanges heads
    name = model.attn_implementation
    wanted = attention_request(shape, ring, name, dropout, prefixes)
    layers = [shape.is_moe(layer) for layer in range(shape.num_hidden_layers)]
    if model.activation_native and all(layers):
        raise ValueError(
            "model.activation_native = True: every layer of the model has experts, whose "
            "activation is fused into their products"
        )
    check_experts(model, "model", layers, "moe_implementation", "router_fp32")
    numerics = Numerics(**{f.name: getattr(model, f.name) for f in dataclasses.fields(Numerics)})
    return Ops.resolve(
        name,
        model.moe_implementation,
        device_type=mesh.device.type,
        dtype=dtype,
        attention_request=wanted,
        sharded_head=mesh.layout.tp > 1,
        numerics=numerics,
        experts=any(layers),
    )


def check_experts(of: Section, section: str, layers: list[bool], *names: str) -> None:
    """Raises ValueError for a field that experts alone read, of a model without.

    layers: whether each has experts.
    """
    for name in names if not any(layers) else ():
        if (value := getattr(of, name)) != type(of).model_fields[name].default:
            raise ValueError(f"{section}.{name} = {value}: the model has no experts")


def shape_of_run(model: Model, head: str, mesh: Mesh | None = None) -> ModelConfig:
    """The shape of the model that a run trains.   head: the one that its loss reads.

    mesh: the run's mesh, whose ranks all call it: rank 0 looks at the weights. None: one process.
    """
    shape, padding = hf.shape_of(model), None
    if head == "reward" and shape.pad_token_id is None:
        assert model.config_path is not None and model.tokenizer_path is not None
        ends = ends_of_tokenizer(model.tokenizer_path, model.revision)
        padding = padding_of(hf.local_folder(model.config_path, model.revision), ends)
    return as_stored(model, with_head(shape, head, padding), mesh)


def as_stored(model: Model, shape: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """The shape, without a tie that the weights in the model's folder do not have."""
    path, control = model.model_path, (mesh or Mesh()).control
    if path is None or not shape.tied:
        return shape
    other = problem = None
    if mesh is None or mesh.main:
        try:
            folder = hf.local_folder(path, model.revision)
            other = untied(folder, shape, model.foundation or {})
        except (OSError, ValueError) as error:
            problem = error
    control.agree(problem)
    if not control.broadcast(other):
        return shape
    if mesh is not None and mesh.main:
        log.warning(
            "%s: lm_head.weight is stored and is not the embedding, although config.json has "
            "tie_word_embeddings = true: they are two weights here, as in transformers",
            path,
        )
    return dataclasses.replace(shape, tie_word_embeddings=False)


def ends_of_tokenizer(path: str, revision: str | None) -> tuple[int | None, int | None]:
    """The padding token and the end token of a tokenizer, if there is one."""
    try:
        tokenizer = load_tokenizer(path, revision)
    except FileNotFoundError:
        return None, None
    return tokenizer.pad_token_id, tokenizer.eos_token_id


def build_model(config: Config, shape: ModelConfig, mesh: Mesh, ops: Ops) -> Parts:
    """The model with its weights and adapters, sharded over the mesh."""
    m, t = config.model, config.train
    parts = unfilled(config, shape, mesh, ops, t.init_device)
    if m.model_path is None:
        init_weights(parts.model, t.seed)
    else:
        folder = hf.local_folder(m.model_path, m.revision)
        missing, std = drawn(folder, shape)
        hf.load_weights(parts, folder, mode=t.load_weights_mode, without=missing)
        init_weights(parts.model, t.seed, std, missing)
        mesh.control.agree(_not_finite(parts.model, m.model_path))
    adapters.reset(parts, adapters.generator(t.seed, 0))
    return apply_layouts(parts, dict(config), mesh, filled=True)


@torch.no_grad()
def _not_finite(model: torch.nn.Module, path: str) -> ValueError | None:
    """An error if a weight that was loaded is NaN or infinite: a run would blame its data."""
    named = [(n, local(p)) for n, p in base_weights(model) if isinstance(p, nn.Parameter)]
    finite = torch.stack([p.isfinite().all() for _, p in named]).tolist()
    wrong = [name for (name, _), good in zip(named, finite, strict=True) if not good]
    if not wrong:
        return None
    more = f", and {len(wrong) - 1} more" if wrong[1:] else ""
    return ValueError(
        f"model.model_path = {path}: {wrong[0]}{more} holds NaN or infinity as it is stored"
    )


def unfilled(
    config: Config, shape: ModelConfig, mesh: Mesh, ops: Ops, init_device: str | torch.device
) -> Parts:
    """The model, sharded over the mesh, with memory for its weights and without their values."""
    t = config.train
    # A quantized model is never in full precision: its layers are filled one at a time.
    meta = t.data_parallel_mode == "fsdp2" or config.lora.enable_qlora
    with torch.device("meta" if meta else init_device):
        model = Transformer(shape, ops, config.model.merge_qkv)
    if t.freeze_router:
        freeze_router(model)
    if config.lora.enable_lora:
        adapters.add(model, config.lora, config.model)
    if not meta and torch.device(init_device).type != mesh.device.type:
        model.to(mesh.device)
    parts = apply_layouts(Parts(model), dict(config), mesh, filled=False)
    if meta:
        for root in parts.roots:
            root.to_empty(device=mesh.device)
        model.tie()
    return parts


def build_engine(config: Config, shape: ModelConfig, mesh: Mesh, ops: Ops) -> Engine:
    parts = build_model(config, shape, mesh, ops)
    return engine_around(parts, config.train, mesh, config.lora.lora_plus_scale)


def computing(parts: Parts, train: Compute, mesh: Mesh) -> Parts:
    """Parts that compute as a run's: on its device, in its precision."""
    # FSDP2 casts by itself; the other modes keep float32 weights and run matrix products in
    # bfloat16.
    half = train.enable_mixed_precision and train.data_parallel_mode != "fsdp2"
    parts.autocast, parts.device = torch.bfloat16 if half else None, mesh.device
    return parts


def engine_around(parts: Parts, train: Train, mesh: Mesh, lora_plus_scale: float) -> Engine:
    computing(parts, train, mesh)
    parts.model.shaping = Shaping(at_step(train.loss_temperature, 0), at_step(train.z_loss, 0))
    optimizer = build_optimizer(parts.model, train, parts.whole, lora_plus_scale)
    return Engine(parts, optimizer, mesh)


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    folder = pathlib.Path(hf.local_folder(path, revision))
    # Otherwise transformers would make an empty one.
    if not any((folder / name).is_file() for name in hf.TOKENIZER_FILES):
        raise FileNotFoundError(
            f"model.tokenizer_path = {folder}: holds no tokenizer, that is none of "
            f"{', '.join(hf.TOKENIZER_FILES)}"
        )
    return AutoTokenizer.from_pretrained(folder)


def tokenizer_of(model: Model) -> Any:
    assert model.tokenizer_path is not None  # at least config_path is given
    return load_tokenizer(model.tokenizer_path, model.revision)


def prepared(
    entries: list[Dataset],
    config: Config,
    mesh: Mesh,
    vocab: int,
    columns: Columns | None = None,
    *,
    shuffle: bool,
    learns: bool = True,
) -> Any:
    """See `prepare`. Rank 0 prepares.   learns: a run learns from them, or evaluates its loss on
    them; else they are scored, and not pushed to data.push_dataset_to_hub.
    """
    model, data, preference = config.model, config.data, config.preference
    if not learns:
        data = data.model_copy(update={"push_dataset_to_hub": None})
    return prepare(
        entries,
        data,
        model,
        config.train.seed,
        functools.partial(tokenizer_of, model),
        vocab,
        shuffle=shuffle,
        columns=columns,
        prompts=Prompts(
            preference.max_prompt_len,
            preference.truncation_mode,
            config.train.loss if learns else "",
        ),
        agreed=Agreed(mesh.main, mesh.control.broadcast),
    )


def build_data(
    config: Config, mesh: Mesh, vocab: int, columns: Columns | None = None
) -> tuple[Batches, dict[str, Bins]]:
    """Training batches, and the bins of each data set to evaluate on during training, by its name.

    columns: further ones that batches have.
    """
    d, t, loss = config.data, config.train, loss_of_run(config)
    if t.loss == "distillation":
        temperature = config.distillation.temperature
        mesh.control.agree(wrong_teacher(d, temperature) if mesh.main else None)
    whole = prepared(d.datasets, config, mesh, vocab, columns, shuffle=True)
    training, held = split_validation(whole, d.val_set_size, t.seed, columns)
    columns = columns or {}
    check_samples(training, "the data sets to train on", loss, columns)
    options = {"mismatched": loss.mismatched, "numbered": "origin" in columns}
    bins = Bins(training, d, columns=columns, **options)
    if mesh.main:
        log.info("packing: %d bins, %.1f %% full", len(bins), 100 * bins.full)
    batches = Batches(
        bins,
        d,
        t,
        rank=mesh.batch_rank,
        world_size=mesh.layout.data,
        pin=mesh.device.type == "cuda",
        cp=mesh.context,
        tp=mesh.layout.tp,
        ends=t.drops,
    )
    sets = {} if held is None else {"held_out": held_bins("held_out", held, d, loss, columns)}
    if not t.do_test:
        sets |= test_sets(config, mesh, vocab, columns)
    return batches, sets


def wrong_teacher(data: Data, temperature: float) -> Exception | None:
    """An error if a student's rows are at another temperature than its own."""
    if is_saved(data):
        return None
    try:
        check_temperature((*data.datasets, *data.test_datasets), temperature)
    except (OSError, ValueError) as error:
        return error
    return None


def test_sets(config: Config, mesh: Mesh, vocab: int, columns: Columns) -> dict[str, Bins]:
    """The bins of each of data.test_datasets, by its name."""
    entries, loss, found = config.data.test_datasets, loss_of_run(config), {}
    for name, entry in zip(titles(entries), entries, strict=True):
        dataset = prepared([entry], config, mesh, vocab, columns, shuffle=False)
        found[name] = held_bins(name, dataset, config.data, loss, columns)
    return found


def check_samples(dataset: Any, what: str, loss: Loss, columns: Columns) -> None:
    """Raises ValueError for samples that the run cannot learn from."""
    check_targets(dataset, what)
    if loss.pairs:
        check_pairs(dataset, columns)


def held_bins(
    name: str, dataset: Any, data: Data, loss: Loss, columns: Columns, **options: Any
) -> Bins:
    """The bins of a data set to evaluate on. options: of `Bins`."""
    check_samples(dataset, f"the data set to evaluate on, {name}", loss, columns)
    packed = data.eval_sample_packing is not False
    options |= {"mismatched": loss.mismatched}
    return Bins(dataset, data, packed=packed, columns=columns, **options)


def loss_of_run(config: Config) -> Loss:
    """What a run minimizes."""
    return loss_of(config.train.loss, dict(config), config.train.loss_args)


def same_place(path: str, other: str | None) -> bool:
    return other is not None and pathlib.Path(path).resolve() == pathlib.Path(other).resolve()


Made = Callable[[Config, ModelConfig, Mesh, Ops], Parts]


def begins_as_policy(model: Model, preference: Preference) -> bool:
    """Whether the reference's weights are those that the policy begins with."""
    path = preference.reference_path
    return path is None or same_place(path, model.model_path)


def second_model(
    config: Config, shape: ModelConfig, mesh: Mesh, ops: Ops, made: Made = build_model
) -> Parts:
    """A reference model, whole whatever the policy trains."""
    m, path, other = config.model, config.preference.reference_path, shape
    if not begins_as_policy(m, config.preference):
        m = m.model_copy(update={"model_path": path, "config_path": path})
        other = as_stored(m, with_head(hf.shape_of(m), shape.head, None), mesh)
    if other.vocab_size != shape.vocab_size:
        raise ValueError(
            f"preference.reference_path = {path}: it has a vocabulary of {other.vocab_size}, the "
            f"model one of {shape.vocab_size}"
        )
    if config.preference.reference_update_steps is not None and other != shape:
        raise ValueError(
            f"preference.reference_path = {path}: with preference.reference_update_steps it must "
            "have the model's shape"
        )
    plain = config.model_copy(update={"model": m, "lora": Lora()})
    return computing(made(plain, other, mesh, ops), config.train, mesh)


def described(model: Model, shape: ModelConfig, mesh: Mesh, ops: Ops) -> Parts:
    """A model whose weights stay in their files, which say its origin."""
    with torch.device("meta"):
        parts = Parts(Transformer(shape, ops, model.merge_qkv))
    found = problem = None
    if mesh.main:
        try:
            assert model.model_path is not None  # of a reference that is no policy
            found = hf.origin(parts.whole, hf.local_folder(model.model_path, model.revision))
        except (OSError, ValueError) as error:
            problem = error
    mesh.control.agree(problem)
    parts.origin = mesh.control.broadcast(found)
    return parts


def reference(
    config: Config,
    shape: ModelConfig,
    mesh: Mesh,
    ops: Ops,
    policy: Parts,
    made: Made = build_model,
) -> Reference | None:
    """What a run's loss compares with, unless it is read.   made: makes a second model."""
    match kind_of_reference(config):
        case "adapters_off":
            found = Reference()
        case "model":
            parts = second_model(config, shape, mesh, ops, made)
            found = Reference(parts, begins_as_policy(config.model, config.preference))
        case _:
            return None
    if config.preference.reference_update_steps is not None:
        found.begin(policy)
    return found


def precomputed(
    config: Config,
    mesh: Mesh,
    ops: Ops,
    parts: Parts,
    sets: list[Bins],
    filled: Callable[[], Parts] | None = None,
) -> precompute.Precomputed:
    """What a run compares with, computed by a model's parts, in its precision, where it is not
    there yet.   filled: makes them, where `parts` only describe the model.
    """
    t, lora, dtype = config.train, config.lora, compute_dtype(config.train)
    own = begins_as_policy(config.model, config.preference)
    format = lora.quant_format, lora.quant_group_size, lora.exclude_modules
    fingerprint = {
        "weights": parts.origin,
        "model": parts.model.config.recorded(),
        "numerics": dataclasses.asdict(ops.numerics),
        "ops": ops.names() | adapters.operations(parts.whole, mesh.device, dtype),
        "dtype": str(dtype),
        "cast_by": "fsdp2" if t.data_parallel_mode == "fsdp2" else "autocast",
        "merge_qkv": config.model.merge_qkv,
        "quantized": format if lora.enable_qlora and own else None,
    }
    root, given = config.data.dataset_prepared_path, config.preference.reference_cache
    folder = precompute.folder_of(root, given, fingerprint)
    tokenizer = ""
    if mesh.main:
        tokenizer = tokenized_by(config.data.datasets, config.model, root)
    tokenizer = mesh.control.broadcast(tokenizer)
    with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else []):
        found = precompute.computed(
            filled or (lambda: parts),
            mesh,
            sets,
            folder,
            fingerprint,
            t.micro_batch_size,
            tokenizer,
        )
    bound = 0.0 if ops.numerics.batch_invariant else precompute.BOUNDS[dtype]
    return precompute.Precomputed(found, mesh, own, bound)


def columns_of(
    train: Train, loss: Loss, shape: ModelConfig, share_prefix: bool, referenced: bool = False
) -> dict[str, Column]:
    """The columns that a run reads beside tokens and labels.   referenced: with a
    reference.
    """
    named = {c: f"train.loss = {train.loss}" for c in loss.columns if c not in TOKENS}
    asked = {**named, **loss.asked}
    if share_prefix:
        asked[PREFIX] = "preference.share_prefix = True"
    if referenced:
        asked["origin"] = "preference.reference"
    if train.router_replay:
        asked["routed_experts"] = "train.router_replay = True"
    return {
        name: COLUMNS[name].of(shape, asked_by, loss.widths.get(name))
        for name, asked_by in asked.items()
    }


def model_identity(model: Model, lora: Lora, shape: ModelConfig) -> dict[str, Any]:
    """A checkpoint's compatibility keys of kind `model`."""
    return {
        **shape.recorded(),
        **kept(model, Resume.OTHER_WEIGHTS),
        "lora": adapters.identity(lora),
    }


def identity(
    config: Config, shape: ModelConfig, batches: Batches, origin: str | None = None
) -> dict[str, dict[str, Any]]:
    """A checkpoint's compatibility keys, by kind: its position counts bins of these data, its
    moments are of these parameter groups, its adapters of these weights.

    origin: `Parts.origin`; None for weights that were drawn.
    """
    version = OPTIMIZERS[config.train.optimizer].version
    return {
        "model": model_identity(config.model, config.lora, shape),
        "optimizer": {
            **kept(config.train, Resume.OTHER_STATES, unread=False),
            **kept(config.lora, Resume.OTHER_STATES, unread=False),
            **({"states": version} if version > 1 else {}),
        },
        "data": {
            **batches.bins.identity(),
            "packing": packing.fingerprint(batches.bins.bins),
            **kept(config.train, Resume.OTHER_ORDER),
            **kept(config.data, Resume.OTHER_ORDER),
        },
        "base": {"weights": origin},
    }


Things = dict[str, Thing]


def things_read(data: Data, model: Model, mesh: Mesh, bins: Bins, exported: bool) -> Things:
    """What a run reads beside weights (`MadeOf`), as rank 0 sees it. The tokenizer is there where
    samples are made with it, or it is exported.
    """
    found: Things = {}
    if mesh.main:
        found |= of_samples(data, bins)
        if exported or tokenizes(data):
            found |= of_tokenizer(model)
    return {n: Thing(*thing) for n, thing in mesh.control.broadcast(found).items()}


def weights_read(
    path: str | None, other: str | None, compares: bool, policy: Parts, reference: Parts | None
) -> Things:
    """The weights that a run began from, and those that it compares with. Drawn weights have no
    content: the seed is in the identity.

    path: the model's.   other: a separate reference's.   compares: whether there is a reference
    that no column holds.   reference: its model; None: the policy's.
    """
    found: Things = {}
    if policy.origin is not None and path is not None:
        found["base"] = Thing(policy.origin, [path])
    compared = policy if reference is None else reference
    if not compares:
        return found
    # Weights mean nothing without the shape, which a folder of its own may have changed.
    known = digest([compared.origin, compared.model.config.recorded()])
    return {**found, "reference": Thing(known, [other or path or "weights drawn by train.seed"])}


def free(mesh: Mesh) -> None:
    """Frees what nothing holds any longer."""
    gc.collect()
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()


@dataclasses.dataclass
class Built:
    """What a run is made of.

    held: the data sets that it is evaluated on, by name.   last: once, after the last step.
    identity: see `identity`.
    made_of: what it reads (`MadeOf`).
    ops: the implementation of each op.
    export_as: the arguments of `Engine.export`.
    """

    shape: ModelConfig
    engine: Engine
    batches: Batches
    held: dict[str, Bins]
    last: dict[str, Bins]
    identity: dict[str, dict[str, Any]]
    made_of: Things
    ops: dict[str, str]
    export_as: dict[str, Any]


def build(
    config: Config, mesh: Mesh, agreed: Callable[[Things], None] = lambda things: None
) -> Built:
    """The parts of a configuration. Steps that can fail by a user's mistake come first.

    agreed: refuses what a run is made of, on every rank, before a pass over all data.
    """
    t, loss, prefixes = config.train, loss_of_run(config), config.preference.share_prefix
    shape = shape_of_run(config.model, loss.head, mesh)
    # Checked now, not after the last step: a missing tokenizer or an unsupported dtype.
    export_as = exported(config.model, t.save_hf_weights, config.lora.save_lora_only)
    dropped = t.attention_dropout > 0
    ops = choose_ops(config.model, shape, mesh, compute_dtype(t), dropped, prefixes)
    layers = [shape.is_moe(layer) for layer in range(shape.num_hidden_layers)]
    check_experts(t, "train", layers, "moe_checkpoint_method")
    referenced = kind_of_reference(config) != "none"
    columns = columns_of(t, loss, shape, prefixes, referenced)
    batches, held = build_data(config, mesh, shape.vocab_size, columns)
    last = test_sets(config, mesh, shape.vocab_size, columns) if t.do_test else {}
    dropout.check(t, t, shape, batches.per_step)
    read = kind_of_reference(config) == "precomputed"
    sets, compared = [batches.bins, *held.values(), *last.values()], None
    d, m, known = config.data, config.model, None
    things = things_read(d, m, mesh, batches.bins, t.save_hf_weights)
    compares = kind_of_reference(config) not in ("none", "column")
    weights = functools.partial(
        weights_read, m.model_path, config.preference.reference_path, compares
    )
    if read and not begins_as_policy(config.model, config.preference):
        # A model for what is not there yet alone, before there is a policy, and gone before it: two
        # are never in memory.
        second = functools.partial(second_model, config, shape, mesh, ops)
        known = second(lambda plain, other, *_: described(plain.model, other, mesh, ops))
        agreed(things | weights(known, known))
        compared = precomputed(config, mesh, ops, known, sets, second)
        free(mesh)
    engine = build_engine(config, shape, mesh, ops)
    if read and compared is None:
        agreed(things | weights(engine.parts, None))
        compared = precomputed(config, mesh, ops, engine.parts, sets)
    engine.reference = compared or reference(config, shape, mesh, ops, engine.parts)
    parts = known or getattr(engine.reference, "parts", None)
    return Built(
        shape,
        engine,
        batches,
        held,
        last,
        identity(config, shape, batches, engine.parts.origin),
        things | weights(engine.parts, parts),
        names_of_ops(ops, engine, t),
        export_as,
    )


def names_of_ops(ops: Ops, engine: Engine, train: Train) -> dict[str, str]:
    """The implementation of each op of a run."""
    device, dtype = engine.mesh.device, compute_dtype(train)
    return (
        ops.names()
        | adapters.operations(engine.parts.whole, device, dtype)
        | dropout.operations(train, device.type, dtype)
    )


def exported(model: Model, save: bool, adapters_alone: bool) -> dict[str, Any]:
    """How to export the last checkpoint: the arguments of `Engine.export`.   save: whether it
    will be.
    """
    base, tokenizer = model.model_path, model.tokenizer_path
    described = base or model.config_path
    assert described is not None and tokenizer is not None  # at least config_path is given
    folder = hf.local_folder(described, model.revision)
    dtype = hf.stored_dtype(folder, weights=base is not None)
    return {
        "tokenizer": hf.local_folder(tokenizer, model.revision) if save else None,
        "dtype": dtype,
        "adapter_of": base if adapters_alone else None,
    }
