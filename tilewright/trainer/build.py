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
from tilewright.trainer.checkpoint.made_of import MadeOf, Thing
from tilewright.trainer.columns import TOKENS
from tilewright.trainer.config import Config, Data, Lora, Model, Train
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
from tilewright.trainer.optim.row import OPTIMIZERS, Half
from tilewright.trainer.parallel import low_precision
from tilewright.trainer.parallel.apply import apply_layouts
from tilewright.trainer.parallel.fields import Compute, Width
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.precision import FULL, Dtypes, Precision, halve, resolved
from tilewright.trainer.plugins import adapters, dropout
from tilewright.trainer.plugins.run import Built
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
    check_experts(model, "model", shape, "moe_implementation", "router_fp32")
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


def check_experts(of: Section, section: str, shape: ModelConfig, *names: str) -> None:
    """Raises ValueError for a field that experts alone read, of a model without."""
    experts = any(map(shape.is_moe, range(shape.num_hidden_layers)))
    for name in () if experts else names:
        if (value := getattr(of, name)) != type(of).model_fields[name].default:
            raise ValueError(f"{section}.{name} = {value}: the model has no experts")


def shape_of_run(model: Model, head: str, mesh: Mesh | None = None) -> ModelConfig:
    """The shape of the model that a run trains.   head: the one that its loss reads.

    mesh: the run's mesh, whose ranks all call it: rank 0 looks at the weights. None: one process.
    """
    shape, padding = hf.shape_of(model), None
    if head == "reward" and shape.pad_token_id is None:
        assert model.config_path is not None
        try:
            tokenizer = tokenizer_of(model)
            ends = tokenizer.pad_token_id, tokenizer.eos_token_id
        except FileNotFoundError:
            ends = None, None
        padding = padding_of(hf.local_folder(model.config_path, model.revision), ends)
    return as_stored(model, with_head(shape, head, padding), mesh)


def of_main(mesh: Mesh, made: Callable[[], Any]) -> Any:
    """What a function returns on rank 0. Its OSError or ValueError is raised on every rank."""
    value = None
    with mesh.control.agreeing(OSError, ValueError):
        if mesh.main:
            value = made()
    return mesh.control.broadcast(value)


def as_stored(model: Model, shape: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """The shape, without a tie that the weights in the model's folder do not have."""
    path = model.model_path
    if path is None or not shape.tied:
        return shape

    def other() -> bool:
        return untied(hf.local_folder(path, model.revision), shape, model.foundation or {})

    if not of_main(mesh or Mesh(), other):
        return shape
    if mesh is not None and mesh.main:
        log.warning(
            "%s: lm_head.weight is stored and is not the embedding, although config.json has "
            "tie_word_embeddings = true: they are two weights here, as in transformers",
            path,
        )
    return dataclasses.replace(shape, tie_word_embeddings=False)


def build_model(
    model: Model,
    lora: Lora,
    shape: ModelConfig,
    data: Width,
    train: Train,
    mesh: Mesh,
    ops: Ops,
    dtypes: Dtypes = FULL,
) -> Parts:
    """The model with its weights and adapters, sharded over the mesh."""
    parts = unfilled(model, lora, shape, data, train, mesh, ops, train.init_device, dtypes)
    if model.model_path is None:
        init_weights(parts.model, train.seed)
    else:
        read_weights(parts, model, shape, train)
        mesh.control.agree(_not_finite(parts.model, model.model_path))
    adapters.reset(parts, adapters.generator(train.seed, 0))
    sections = {"model": model, "lora": lora, "data": data, "train": train, "dtypes": dtypes}
    return apply_layouts(parts, sections, mesh, filled=True)


def read_weights(parts: Parts, model: Model, shape: ModelConfig, train: Train) -> None:
    """Fills the parts from model.model_path, and draws what it does not hold."""
    assert model.model_path is not None
    folder = hf.local_folder(model.model_path, model.revision)
    missing, std = drawn(folder, shape)
    hf.load_weights(parts, folder, mode=train.load_weights_mode, without=missing)
    init_weights(parts.model, train.seed, std, missing)


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
    model: Model,
    lora: Lora,
    shape: ModelConfig,
    data: Width,
    train: Train,
    mesh: Mesh,
    ops: Ops,
    init_device: str | torch.device,
    dtypes: Dtypes = FULL,
) -> Parts:
    """The model, sharded over the mesh, with memory for its weights and without their values."""
    # A quantized model is never in full precision: its layers are filled one at a time.
    meta = train.data_parallel_mode == "fsdp2" or lora.enable_qlora
    with torch.device("meta" if meta else init_device):
        made = Transformer(shape, ops, model.merge_qkv)
    if train.freeze_router:
        freeze_router(made)
    if lora.enable_lora:
        adapters.add(made, lora, model)
    if dtypes.half:
        halve(made)
    if not meta and torch.device(init_device).type != mesh.device.type:
        made.to(mesh.device)
    sections = {"model": model, "lora": lora, "data": data, "train": train, "dtypes": dtypes}
    parts = apply_layouts(Parts(made), sections, mesh, filled=False)
    parts.dtypes = dtypes
    if meta:
        for root in parts.roots:
            root.to_empty(device=mesh.device)
        made.tie()
    return parts


def computing(parts: Parts, train: Compute, mesh: Mesh) -> Parts:
    """Parts that compute as a run's: on its device, in its precision."""
    # FSDP2 casts by itself; the other modes keep float32 weights and run matrix products in
    # bfloat16. Weights in bfloat16 need neither.
    half = train.enable_mixed_precision and train.data_parallel_mode != "fsdp2"
    half = half and not parts.dtypes.half
    parts.autocast, parts.device = torch.bfloat16 if half else None, mesh.device
    parts.sparse_head = train.sparse_head
    return parts


def engine_around(parts: Parts, train: Train, mesh: Mesh, lora_plus_scale: float) -> Engine:
    computing(parts, train, mesh)
    dtypes, half = parts.dtypes, None
    if dtypes.wide_gradients:
        parts.sum_in_float32()
    if dtypes.half:
        half = Half(dtypes.states, dtypes.master, train.seed if dtypes.stochastic else None)
    parts.model.shaping = Shaping(at_step(train.loss_temperature, 0), at_step(train.z_loss, 0))
    optimizer = build_optimizer(parts.model, train, parts.whole, lora_plus_scale, half)
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


Prepared = Callable[..., Any]


def preparing(
    data: Data, model: Model, prompts: Prompts, seed: int, vocab: int, mesh: Mesh
) -> Prepared:
    """`prepare` of entries, columns, and whether to shuffle. Rank 0 prepares. What is scored alone,
    for no loss, is not pushed to data.push_dataset_to_hub.
    """
    if not prompts.loss:
        data = data.model_copy(update={"push_dataset_to_hub": None})
    return functools.partial(
        prepare,
        data=data,
        model=model,
        seed=seed,
        tokenizer=functools.partial(tokenizer_of, model),
        vocab=vocab,
        prompts=prompts,
        agreed=Agreed(mesh.main, mesh.control.broadcast),
    )


def build_data(
    data: Data, train: Train, loss: Loss, mesh: Mesh, columns: Columns, prepared: Prepared
) -> tuple[Batches, dict[str, Bins]]:
    """Training batches, and the bins of each data set to evaluate on during training, by its name.

    columns: further ones that batches have.   prepared: see `preparing`.
    """
    whole = prepared(data.datasets, columns=columns, shuffle=True)
    training, held = split_validation(whole, data.val_set_size, train.seed, columns)
    check_samples(training, "the data sets to train on", loss, columns)
    options = {"mismatched": loss.mismatched, "numbered": "origin" in columns}
    bins = Bins(training, data, columns=columns, **options)
    if mesh.main:
        log.info("packing: %d bins, %.1f %% full", len(bins), 100 * bins.full)
    batches = Batches(
        bins,
        data,
        train,
        rank=mesh.batch_rank,
        world_size=mesh.layout.data,
        pin=mesh.device.type == "cuda",
        cp=mesh.context,
        tp=mesh.layout.tp,
        ends=train.drops,
    )
    sets = {} if held is None else {"held_out": held_bins("held_out", held, data, loss, columns)}
    if not train.do_test:
        sets |= test_sets(data, loss, columns, prepared)
    return batches, sets


def test_sets(data: Data, loss: Loss, columns: Columns, prepared: Prepared) -> dict[str, Bins]:
    """The bins of each of data.test_datasets, by its name."""
    sets = {}
    for name, entry in zip(titles(data.test_datasets), data.test_datasets, strict=True):
        dataset = prepared([entry], columns=columns, shuffle=False)
        sets[name] = held_bins(name, dataset, data, loss, columns)
    return sets


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


def begins_as_policy(model: Model, preference: Preference) -> bool:
    """Whether the reference's weights are those that the policy begins with."""
    path, own = preference.reference_path, model.model_path
    if path is None or own is None:
        return path is None
    return pathlib.Path(path).resolve() == pathlib.Path(own).resolve()


def second_model(
    model: Model,
    preference: Preference,
    train: Compute,
    shape: ModelConfig,
    mesh: Mesh,
    made: Callable[[Model, Lora, ModelConfig], Parts],
) -> Parts:
    """A reference model, whole whatever the policy trains.   shape: the policy's."""
    path, other = preference.reference_path, shape
    if not begins_as_policy(model, preference):
        model = model.model_copy(update={"model_path": path, "config_path": path})
        other = as_stored(model, with_head(hf.shape_of(model), shape.head, None), mesh)
    if other.vocab_size != shape.vocab_size:
        raise ValueError(
            f"preference.reference_path = {path}: it has a vocabulary of {other.vocab_size}, the "
            f"model one of {shape.vocab_size}"
        )
    if preference.reference_update_steps is not None and other != shape:
        raise ValueError(
            f"preference.reference_path = {path}: with preference.reference_update_steps it must "
            "have the model's shape"
        )
    return computing(made(model, Lora(), other), train, mesh)


def described(model: Model, shape: ModelConfig, mesh: Mesh, ops: Ops, dtypes: Dtypes) -> Parts:
    """A model whose weights stay in their files, which say its origin."""
    with torch.device("meta"):
        parts = Parts(Transformer(shape, ops, model.merge_qkv))
    parts.dtypes = dtypes

    def origin() -> str | None:
        assert model.model_path is not None  # of a reference that is no policy
        return hf.origin(parts.whole, hf.local_folder(model.model_path, model.revision))

    parts.origin = of_main(mesh, origin)
    return parts


def reference(
    kind: str, model: Model, preference: Preference, policy: Parts, second: Callable[[], Parts]
) -> Reference | None:
    """What a run's loss compares with, unless it is read.   kind: see `kind_of_reference`.
    second: makes a second model.
    """
    match kind:
        case "adapters_off":
            made = Reference()
        case "model":
            made = Reference(second(), begins_as_policy(model, preference))
        case _:
            return None
    if preference.reference_update_steps is not None:
        made.begin(policy)
    return made


def precomputed(
    model: Model,
    lora: Lora,
    data: Data,
    train: Train,
    preference: Preference,
    mesh: Mesh,
    ops: Ops,
    sets: list[Bins],
    parts: Parts,
    filled: Callable[[], Parts] | None = None,
) -> precompute.Precomputed:
    """What a run compares with, computed by a model's parts, in its precision, where it is not
    there yet.   filled: makes them, where `parts` only describe the model.
    """
    dtype, own = compute_dtype(train), begins_as_policy(model, preference)
    format = lora.quant_format, lora.quant_group_size, lora.exclude_modules
    fingerprint = {
        "weights": parts.origin,
        "model": parts.model.config.recorded(),
        "numerics": dataclasses.asdict(ops.numerics),
        "ops": ops.names() | adapters.operations(parts.whole, mesh.device, dtype),
        "dtype": str(dtype),
        "cast_by": "fsdp2" if train.data_parallel_mode == "fsdp2" else "autocast",
        "merge_qkv": model.merge_qkv,
        "quantized": format if lora.enable_qlora and own else None,
        **({} if parts.dtypes.recipe is None else {"recipe": parts.dtypes.recipe}),
    }
    root = data.dataset_prepared_path
    folder = precompute.folder_of(root, preference.reference_cache, fingerprint)
    tokenizer = of_main(mesh, lambda: tokenized_by(data.datasets, model, root))
    with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else []):
        logprobs = precompute.computed(
            filled or (lambda: parts),
            mesh,
            sets,
            folder,
            fingerprint,
            train.micro_batch_size,
            tokenizer,
        )
    bound = 0.0 if ops.numerics.batch_invariant else precompute.BOUNDS[dtype]
    return precompute.Precomputed(logprobs, mesh, own, bound)


def columns_of(
    train: Train, loss: Loss, shape: ModelConfig, share_prefix: bool, referenced: bool = False
) -> dict[str, Column]:
    """The columns that a run reads beside tokens and labels.   referenced: with a
    reference.
    """
    asked = {c: f"train.loss = {train.loss}" for c in loss.columns if c not in TOKENS}
    asked |= loss.asked
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
    model: Model,
    lora: Lora,
    data: Data,
    train: Train,
    shape: ModelConfig,
    batches: Batches,
    origin: str | None = None,
    dtypes: Dtypes = FULL,
) -> dict[str, dict[str, Any]]:
    """A checkpoint's compatibility keys, by kind: its position counts bins of these data, its
    moments are of these parameter groups, its adapters of these weights.

    origin: `Parts.origin`; None for weights that were drawn.
    """
    version = OPTIMIZERS[train.optimizer].version
    return {
        "model": model_identity(model, lora, shape),
        "optimizer": {
            **kept(train, Resume.OTHER_STATES, unread=False),
            **kept(lora, Resume.OTHER_STATES, unread=False),
            "precision": dtypes.recorded(),
            **({"states": version} if version > 1 else {}),
        },
        "data": {
            **batches.bins.identity(),
            "packing": packing.fingerprint(batches.bins.bins),
            **kept(train, Resume.OTHER_ORDER),
            **kept(data, Resume.OTHER_ORDER),
        },
        "base": {"weights": origin},
    }


Things = dict[str, Thing]


def things_read(data: Data, model: Model, mesh: Mesh, bins: Bins, exported: bool) -> Things:
    """What a run reads beside weights (`MadeOf`), as rank 0 sees it. The tokenizer is there where
    samples are made with it, or it is exported.
    """

    def read() -> dict[str, Any]:
        return of_samples(data, bins) | (of_tokenizer(model) if exported or tokenizes(data) else {})

    return {n: Thing(*thing) for n, thing in of_main(mesh, read).items()}


def weights_read(
    path: str | None, other: str | None, compares: bool, policy: Parts, reference: Parts | None
) -> Things:
    """The weights that a run began from, and those that it compares with. Drawn weights have no
    content: the seed is in the identity.

    path: the model's.   other: a separate reference's.   compares: whether there is a reference
    that no column holds.   reference: its model; None: the policy's.
    """
    things: Things = {}
    if policy.origin is not None and path is not None:
        things["base"] = Thing(policy.origin, [path])
    compared = policy if reference is None else reference
    if not compares:
        return things
    # Weights mean nothing without the shape, which a folder of its own may have changed.
    known = digest([compared.origin, compared.model.config.recorded()])
    return {**things, "reference": Thing(known, [other or path or "weights drawn by train.seed"])}


def build(
    config: Config, mesh: Mesh, agreed: Callable[[Things], None] = lambda things: None
) -> Built:
    """The parts of a configuration. Steps that can fail by a user's mistake come first.

    agreed: refuses what a run is made of, on every rank, before a pass over all data.
    """
    m, lora, d, t, p = config.model, config.lora, config.data, config.train, config.preference
    loss, kind = loss_of(t.loss, dict(config), t.loss_args), kind_of_reference(config)
    shape = shape_of_run(m, loss.head, mesh)
    # Checked now, not after the last step: a missing tokenizer or an unsupported dtype.
    export_as = exported(m, t.save_hf_weights, lora.save_lora_only)
    dropped = t.attention_dropout > 0
    ops = choose_ops(m, shape, mesh, compute_dtype(t), dropped, p.share_prefix)
    check_experts(t, "train", shape, "moe_checkpoint_method")
    columns = columns_of(t, loss, shape, p.share_prefix, kind != "none")
    if t.loss == "distillation":
        entries, temperature = (*d.datasets, *d.test_datasets), config.distillation.temperature
        of_main(mesh, lambda: is_saved(d) or check_temperature(entries, temperature))
    prompts = Prompts(p.max_prompt_len, p.truncation_mode, t.loss)
    made = preparing(d, m, prompts, t.seed, shape.vocab_size, mesh)
    batches, held = build_data(d, t, loss, mesh, columns, made)
    last = test_sets(d, loss, columns, made) if t.do_test else {}
    dropout.check(t, t, shape, batches.per_step)
    things = things_read(d, m, mesh, batches.bins, t.save_hf_weights)
    weights = functools.partial(
        weights_read, m.model_path, p.reference_path, kind not in ("none", "column")
    )
    dtypes = resolved(config.precision, t, t)
    rounding = low_precision_ops(config.precision, t, dtypes, shape, mesh)
    model = functools.partial(build_model, data=d, train=t, mesh=mesh, ops=ops, dtypes=dtypes)
    second = functools.partial(second_model, m, p, t, shape, mesh)
    sets, read = [batches.bins, *held.values(), *last.values()], kind == "precomputed"
    computed = functools.partial(precomputed, m, lora, d, t, p, mesh, ops, sets)
    compared = known = None
    if read and not begins_as_policy(m, p):
        # A model for what is not there yet alone, before there is a policy, and gone before it: two
        # are never in memory.
        known = second(lambda its, _, shape: described(its, shape, mesh, ops, dtypes))
        agreed(things | weights(known, known))
        compared = computed(known, functools.partial(second, model))
        gc.collect()
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()
    engine = engine_around(model(m, lora, shape), t, mesh, lora.lora_plus_scale)
    if read and compared is None:
        agreed(things | weights(engine.parts, None))
        compared = computed(engine.parts)
    other = reference(kind, m, p, engine.parts, functools.partial(second, model))
    engine.reference = compared or other
    parts = known or (other.parts if other is not None else None)
    return Built(
        shape,
        loss,
        engine,
        batches,
        held,
        last,
        identity(m, lora, d, t, shape, batches, engine.parts.origin, dtypes),
        MadeOf(things | weights(engine.parts, parts)),
        names_of_ops(ops, engine, t) | rounding,
        export_as,
    )


def low_precision_ops(
    precision: Precision, train: Compute, dtypes: Dtypes, shape: ModelConfig, mesh: Mesh
) -> dict[str, str]:
    """The implementation of each op of a recipe. The run tells its precision.

    Raises ValueError for an implementation that cannot run here.
    """
    check_experts(precision, "precision", shape, "experts")
    experts = any(map(shape.is_moe, range(shape.num_hidden_layers)))
    dtype = compute_dtype(train)
    names = low_precision.operations(dtypes.recipe, mesh.device, dtype, experts)
    if mesh.main:
        by = f" ({', '.join(sorted({*names.values()}))})" if names else ""
        log.info("precision: %s%s", dtypes.told(), by)
    return names


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
