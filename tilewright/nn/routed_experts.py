"""Reads the experts that an inference engine chose, as it returns them with a generation.

Source: RequestOutput of vLLM (`enable_return_routed_experts`) and the response of SGLang
(`return_routed_experts`); both return [tokens, layers, top_k] of all tokens but the last one, which
no forward pass has seen.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

NPY = b"\x93NUMPY"
FEW = 64  # fewer zeros could be a router's choice
DTYPES = ("uint8", "uint16", "int16", "int32", "int64")


def read_routed_experts(
    given: Any,
    *,
    layers: int,
    top_k: int,
    experts: int,
    routed: Sequence[int] | None = None,
    tokens: int | None = None,
    dtype: str = "int32",
) -> torch.Tensor:
    """The recorded choices of one sequence, for `tilewright.ops.route`'s `expert_index`.

    Args:
        given: What the engine returned, [tokens, layers, top_k] experts:
            vLLM: `CompletionOutput.routed_experts`, an array (or a tensor, or nested lists); from
                its server, a .npy file in base64 (a str) or its bytes.
            SGLang: `meta_info["routed_experts"]`, numbers in row-major order in base64; or the
                mapping `meta_info` itself, whose "routed_experts_dtype" is then used.
        layers: Number of the model's decoder layers.
        top_k: Experts per token.
        experts: Number of experts.
        routed: The layers that have experts; None: all. The others are not read. An engine may also
            return these layers alone.
        tokens: Number of tokens of prompt and generation; None: as many as `given` has. If `given`
            has one less, the last is not recorded.
        dtype: The dtype of numbers without their own: uint8, uint16, int16, int32 or int64.

    Returns:
        int32 [layers with experts, tokens, top_k], on the CPU; -1 for a token that is not recorded.

    Raises:
        TypeError: `given` is none of these.
        ValueError: It has other layers, top_k or tokens, an expert that does not exist, or one
            twice for a token; or all of it, 64 numbers or more, is expert 0.

    Example:
        >>> from tilewright.nn import read_routed_experts
        >>> of_two_tokens = [[[1, 0], [2, 3]], [[0, 3], [3, 1]]]
        >>> read_routed_experts(of_two_tokens, layers=2, top_k=2, experts=4, tokens=3)[0]
        tensor([[ 1,  0],
                [ 0,  3],
                [-1, -1]], dtype=torch.int32)
    """
    chosen = range(layers) if routed is None else routed
    counts = list(dict.fromkeys((layers, len(chosen))))
    choices = _shaped(_numbers(given, dtype), counts, top_k, tokens)
    if choices.shape[1] != len(chosen):
        choices = choices[:, list(chosen)]
    if tokens is not None and tokens - len(choices) not in (0, 1):
        raise ValueError(
            f"routed experts are of {len(choices)} tokens; accepted are {tokens - 1} or {tokens}, for "
            f"a sequence of {tokens}"
        )
    check(choices, experts, list(chosen))
    whole = np.full((len(choices) if tokens is None else tokens, *choices.shape[1:]), -1, np.int32)
    whole[: len(choices)] = choices
    return torch.from_numpy(whole.transpose(1, 0, 2).copy())


def _numbers(given: Any, dtype: str) -> np.ndarray:
    """Integers, of one or three dimensions."""
    if isinstance(given, Mapping):
        if "routed_experts" not in given:
            raise TypeError(f"routed experts: a mapping needs routed_experts, has {list(given)}")
        return _numbers(given["routed_experts"], given.get("routed_experts_dtype") or dtype)
    if isinstance(given, str):
        try:
            given = base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"routed experts are a string that is not base64: {error}") from error
    if isinstance(given, bytes | bytearray | memoryview):
        return _decoded(bytes(given), dtype)
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    try:
        numbers = np.asarray(given)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"routed experts have no shape: {error}") from error
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"routed experts must be integers, got {numbers.dtype}")
    return numbers


def _decoded(data: bytes, dtype: str) -> np.ndarray:
    if data.startswith(NPY):
        try:
            numbers = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"routed experts are a damaged .npy file: {error}") from error
        if numbers.dtype.kind not in "iu":
            raise TypeError(f"routed experts must be integers, got {numbers.dtype}")
        return numbers
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise ValueError(
            f"routed experts are {len(data)} bytes, which hold no whole {dtype} numbers"
        )
    return np.frombuffer(data, dtype)


def _shaped(numbers: np.ndarray, counts: list[int], top_k: int, tokens: int | None) -> np.ndarray:
    """[tokens, layers, top_k].   counts: accepted numbers of layers, the likeliest first."""
    if numbers.ndim == 3 and numbers.shape[1] in counts and numbers.shape[2] == top_k:
        return numbers
    if numbers.ndim == 1:
        for count in counts:
            rows, rest = divmod(numbers.size, count * top_k)
            if not rest and (tokens is None or tokens - rows in (0, 1)):
                return numbers.reshape(rows, count, top_k)
    accepted = " or ".join(f"[tokens, {count}, {top_k}]" for count in counts)
    raise ValueError(
        f"routed experts have the shape {list(numbers.shape)}; accepted is {accepted}: layers and "
        "experts per token"
    )


def check(choices: np.ndarray, experts: int, layers: Sequence[int] | None = None) -> None:
    """Raises ValueError, with layer and token, for choices [tokens, layers, top_k] that cannot be
    replayed. A token whose slots are all -1 is not recorded.
    """
    names = range(choices.shape[1]) if layers is None else layers
    missing = (choices == -1).all((1, 2))
    zero = choices == 0
    if experts > 1 and zero.sum() >= FEW and (zero | missing[:, None, None]).all():
        raise ValueError(
            f"routed experts of {(~missing).sum()} tokens are expert 0 in every layer (did the "
            "engine record nothing?)"
        )
    for wrong, why in (
        ((choices < 0) | (choices >= experts), f"accepted are 0 to {experts - 1}"),
        (
            _repeated(choices),
            "an expert is chosen twice for it (did the engine record nothing, or is the layer "
            "dense, and missing in `routed`?)",
        ),
    ):
        wrong[missing] = False
        if wrong.any():
            token, layer, slot = (int(i[0]) for i in wrong.nonzero())
            raise ValueError(
                f"routed experts of token {token} in layer {names[layer]} hold "
                f"{choices[token, layer, slot]}: {why}"
            )


def _repeated(choices: np.ndarray) -> np.ndarray:
    """Where a slot has the expert of an earlier one."""
    wrong = np.zeros(choices.shape, bool)
    for k in range(1, choices.shape[2]):
        wrong[:, :, k] = (choices[:, :, :k] == choices[:, :, k : k + 1]).any(2)
    return wrong
