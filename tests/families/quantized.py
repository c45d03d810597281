"""Quantized loading, over every language model of transformers that can be built small: what
`check` finds of each format. Each family runs in a process of its own, with a limit: a crash costs
one row.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import pathlib
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tests.families.each import versions
from tests.lib.isolated import Died, isolated
from tests.lib.small_models import build
from tests.lib.sweeps import ROOT
from tilewright import ImplementationUnavailable
from tilewright.integrations.transformers import TilewrightConfig, quantized_config
from tilewright.nn import QuantizedLinear
from tilewright.nn.quantize import linear_layers
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.quantized_linear import dequantize

# Group sizes that divide the widths of small models.
FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"format": "nf4"},
    "nf4 double": {"format": "nf4", "double_quant": True, "group_size": 32},
    "nvfp4": {"format": "nvfp4"},
    "block_fp8": {"format": "block_fp8", "group_size": 16},
    "mxfp8": {"format": "mxfp8"},
}
# The package that a saved folder names, of which each is read by its own loader too.
READERS = {
    "nf4": "bitsandbytes",
    "nvfp4": "compressed-tensors",
    "block_fp8": "fp8",
    "mxfp8": "compressed-tensors",
}
# Largest difference, of the largest value: products in the order of another kernel.
CLOSE = 1e-4
LIMIT = 300  # seconds of a family; none needs a fifth of it


# ---- one family


def check(
    model_type: str,
    model_class: Any,
    config: Any,
    folder: str | pathlib.Path,
    *,
    formats: Iterable[str] = tuple(FORMATS),
    readers: bool = True,
) -> dict[str, str]:
    """Loads a small model of this class quantized, saves it, and reads it again.

    Args:
        model_type: The name of the family, for messages.
        model_class: A class of transformers with `from_pretrained`.
        config: Its configuration, small enough to compute with.
        folder: An empty folder for the files.
        formats: Those to try, of `FORMATS`.
        readers: Load the folders by the packages that they name, too.

    Returns:
        For "dense", if the family does not read its own files. Else for each format, by
        "FORMAT load", "FORMAT again" and "FORMAT READER": "same", "refused: SENTENCE", "left: WHY"
        (the reader does not run the family) or "wrong: WHAT". A load is compared with the dense
        model whose weights were quantized and dequantized by hand: each parameter and buffer, and
        the logits. A second load has the bits of the first, and so have the weights of the format's
        own reader.
    """
    folder = pathlib.Path(folder)
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # Inkling 2's describes its published files
    dense = model_class(config).eval()
    _randomize(dense)
    dense.save_pretrained(folder / "dense")
    read, wrote = (
        _dense_tensors(m) for m in (model_class.from_pretrained(folder / "dense"), dense)
    )
    if lost := [n for n, t in read.items() if n not in wrote or not torch.equal(t, wrote[n])]:
        return {"dense": f"left: the family does not read what it saves, such as {lost[0]}"}
    found: dict[str, str] = {}
    for name in formats:
        try:
            found |= _of_format(model_class, name, FORMATS[name], folder, readers)
        finally:
            shutil.rmtree(folder / name, ignore_errors=True)
    return found


def _randomize(model: torch.nn.Module) -> None:
    """Weights large enough to matter, and biases that no initialization gives."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 and p.is_floating_point() and p.requires_grad:
                p.normal_(std=p.shape[-1] ** -0.5)
        for module in model.modules():
            bias = getattr(module, "bias", None)
            if isinstance(bias, torch.nn.Parameter):
                bias.normal_(std=0.1)


def _of_format(
    model_class: Any, name: str, options: dict[str, Any], folder: pathlib.Path, readers: bool
) -> dict[str, str]:
    format, saved = options["format"], folder / name
    reader = f"{name} {READERS[format]}"
    keys = [f"{name} load", f"{name} save", f"{name} again", reader]

    def load(source: pathlib.Path, **changes: Any) -> Any:
        return model_class.from_pretrained(source, **changes).eval()

    def loaded() -> tuple[str, Any]:
        config = TilewrightConfig(**options)
        model = load(folder / "dense", quantization_config=config)
        twin, paths = by_hand(load(folder / "dense"), config)
        return compare(model, twin, paths), model

    outcome, model = _try(loaded)
    found = {keys[0]: outcome}
    if model is None:
        return found
    if (
        READERS[format] == "compressed-tensors"
    ):  # other dtypes are refused: compressed-tensors computes in this one
        config = TilewrightConfig(**options)
        model = load(folder / "dense", quantization_config=config, dtype=torch.bfloat16)
    outcome, _ = _try(lambda: ("same", model.save_pretrained(saved)))
    found[keys[1]] = outcome
    if outcome != "same":
        return found

    def again() -> tuple[str, Any]:
        back = load(saved, config=quantized_config(saved))
        return same_bits(back, model), back

    found[keys[2]] = _try(again)[0]
    package = READERS[format].replace("-", "_")
    if readers and (package == "fp8" or importlib.util.find_spec(package)):
        found[reader] = _try(lambda: (by_reader(load, saved, format, model), None))[0]
    return found


def by_hand(model: Any, config: TilewrightConfig) -> tuple[Any, list[str]]:
    """A dense model with its weights quantized and dequantized, and the paths of these layers."""
    paths, _ = linear_layers(model, config.modules_to_not_convert)
    with torch.no_grad():
        for path in paths:
            weight = model.get_submodule(path).weight
            weight.copy_(dequantize(config.quantize(weight), dtype=weight.dtype))
    return model, paths


def compare(model: Any, twin: Any, paths: list[str]) -> str:
    """Compares a quantized model with its dense twin: layers, tensors, and logits."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    if layers.keys() != set(paths):
        return f"wrong: quantized {sorted(layers.keys() ^ set(paths))[:4]} otherwise"
    for path in paths:
        if not torch.equal(
            layers[path].dense(torch.float32), twin.get_submodule(path).weight.float()
        ):
            return f"wrong: {path}.weight differs"
    if wrong := _tensors_differ(_dense_tensors(model), _dense_tensors(twin), layers):
        return wrong
    return close(logits(model), logits(twin), CLOSE)


def _dense_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _tensors_differ(ours: dict, theirs: dict, layers: Any) -> str | None:
    def kept(tensors: dict) -> dict:
        return {
            n: t
            for n, t in tensors.items()
            if n.rpartition(".")[0] not in layers or n.endswith(".bias")
        }

    ours, theirs = kept(ours), kept(theirs)
    if ours.keys() != theirs.keys():
        return f"wrong: tensors {sorted(ours.keys() ^ theirs.keys())[:4]} are of one model alone"
    for name, t in ours.items():
        if t.dtype != theirs[name].dtype:
            return f"wrong: {name} is {t.dtype}, not {theirs[name].dtype}"
        if not torch.equal(t, theirs[name]) and not (t.isnan() == theirs[name].isnan()).all():
            return f"wrong: {name} differs"
        if not torch.equal(t.nan_to_num(), theirs[name].nan_to_num()):
            return f"wrong: {name} differs"
    return None


def same_bits(back: Any, model: Any) -> str:
    """Compares two quantized models, to the bit."""
    if wrong := _tensors_differ(_dense_tensors(back), _dense_tensors(model), ()):
        return wrong
    try:
        want = logits(model)
    except RuntimeError:  # a model that does not compute in bfloat16, as DeBERTa
        return "same"
    # The products of experts depend on where their tensors lie in memory.
    return close(logits(back), want, CLOSE)


def by_reader(load: Callable, folder: pathlib.Path, format: str, model: Any) -> str:
    """Compares what the package that the folder names loads, by its tensors: bitsandbytes' kernels
    for a CPU are for wider models. compressed-tensors computes too.
    """
    options, left = {}, None
    if READERS[format] == "compressed-tensors":
        try:
            theirs = load(folder)
            logits(theirs)  # in one dtype, or it raises
        except AttributeError as error:  # a model that reads its weights, which are compressed
            if not str(error).startswith("'Linear' object has no attribute 'weight'"):
                raise
        except RuntimeError:  # unless the dense model does not compute in bfloat16 either
            dense = load(folder.parent / "dense", dtype=torch.bfloat16)
            if not _try(lambda: (str(logits(dense)), None))[0].startswith("wrong: RuntimeError"):
                left = _runs_with_buffers_in_bfloat16(theirs)
        known = inspect.signature(transformers.CompressedTensorsConfig).parameters
        if "dequantize" not in known:
            return "same"
        config = transformers.CompressedTensorsConfig(dequantize=True)
        options["quantization_config"] = config
    theirs = load(folder, **options)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    for path, layer in layers.items():
        weight = _dense_of(theirs.get_submodule(path))
        # compressed-tensors dequantizes to bfloat16, whatever the model's dtype.
        exact = layer.dense(torch.float32)
        if not any(_rounded(exact, weight, d) for d in (model.dtype, torch.bfloat16)):
            return f"wrong: {path}.weight differs"

    found = _stored_dense(theirs, layers)
    want = {
        # Readers may round what the model keeps in float32.
        n: t.to(found[n].dtype) if n in found else t
        for n, t in _stored_dense(model, layers).items()
    }
    return _tensors_differ(found, want, ()) or left or "same"


def _rounded(exact: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether values are these in another dtype. Readers divide by a scale where this library
    multiplies by its inverse, which decides where a value is in the middle of two.
    """
    near = [(exact * (1 + e)).to(dtype).float() for e in (-(2**-22), 0, 2**-22)]
    return bool(torch.stack([found == n for n in near]).any(0).all())


def _runs_with_buffers_in_bfloat16(model: Any) -> str:
    """Raises what the forward raises for another reason than a buffer that it converts itself, as
    CTRL's of positions, and whose dtype compressed-tensors keeps.
    """
    buffers = {n: b for n, b in model.named_buffers() if b.dtype == torch.float32}
    for name in buffers:
        path, _, own = name.rpartition(".")
        del model.get_submodule(path)._buffers[own]
        setattr(model.get_submodule(path), own, buffers[name].to(torch.bfloat16))
    logits(model)
    return f"left: its forward converts {', '.join(buffers)}, of which compressed-tensors keeps the dtype"


def _stored_dense(model: Any, layers: Any) -> dict[str, torch.Tensor]:
    """The tensors that a folder has, without the quantized weights."""
    tensors = dict(model.named_parameters()) | {
        n: t for n, t in model.named_buffers() if n in model.state_dict()
    }
    return {
        n: t
        for n, t in tensors.items()
        if n.rpartition(".")[0] not in layers or n.endswith(".bias")
    }


def _dense_of(layer: Any) -> torch.Tensor:
    """The weight of a layer of another package, in float32."""
    if type(layer).__name__ == "Linear4bit":
        # Not by its own kernel, which on a CPU takes each row to begin a block.
        state = layer.weight.quant_state.as_dict(packed=True)
        tensors = {"weight": layer.weight.data, **{f"weight.{n}": t for n, t in state.items()}}
        return dequantize(NF4.from_safetensors(tensors), dtype=torch.float32)
    return layer.weight.detach().float()


def logits(model: Any) -> torch.Tensor:
    """The logits of two short rows."""
    tokens = torch.tensor([[7, 12, 9, 33, 21, 40, 18, 25, 11], [3, 12, 5, 30, 21, 41, 18, 20, 14]])
    inputs: dict[str, Any] = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens.flip(0)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    torch.manual_seed(0)  # a few families draw numbers in their forward
    with torch.no_grad():
        found = model(**inputs)
    return getattr(found, "logits", found[0])


def close(ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> str:
    if not theirs.isfinite().all():
        return "wrong: the dense model's logits are not finite"
    error = ((ours.float() - theirs.float()).abs().max() / theirs.abs().max()).item()
    return "same" if error <= limit else f"wrong: logits differ by {error:.1e} of the largest"


def _try(run: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    """A run's outcome, or that of its exception: a sentence of this library's is a refusal."""
    try:
        return run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = f"{os.sep}tilewright{os.sep}" in where.removeprefix(str(ROOT))
        said = " ".join(str(error).split())
        if ours and isinstance(error, (ValueError, ImplementationUnavailable)):
            return f"refused: {said}", None
        return f"wrong: {type(error).__name__}: {said[-600:]}", None


# ---- all families


def _family(head: str, kind: str) -> dict[str, str]:
    """`check` of a small model of a family."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            try:
                model = build(kind, head)
                logits(model)
            except Exception as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
                return {"build": f"refused: it cannot be built small ({said[:200]})"}
            return check(kind, type(model), model.config, folder)
    except Exception as error:
        return {"check": f"wrong: {type(error).__name__}: {' '.join(str(error).split())}"}


def row_of(unit: str) -> dict:
    """`check` of a family, in a process of its own."""
    try:
        found = isolated(_family, *unit.split(), limit=LIMIT)
    except Died as error:
        found = {"build": f"wrong: {error}"}
    wrong = [name for name, said in found.items() if said.startswith("wrong")]
    return {"found": found, "versions": versions("quantized"), "wrong": wrong}
