"""The NF4 tensor class and its files: 4-bit codes for the quantiles of a normal distribution, with
one scale per block, in bitsandbytes' storage. QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.core import checks
from tilewright.core.registry import short
from tilewright.kernels.quant.nf4_tables import bounds, codes, dynamic_map
from tilewright.ops.quant import quantize, stored_scales

NESTED_BLOCK = 256  # scales in a block of double quantization
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


code_table, bound_table, scale_table = (
    quantize.constant(f"nf4_{name}", make, n)
    for name, make, n in (
        ("codes", codes, 16),
        ("bounds", bounds, 15),
        ("map", dynamic_map, 256),
    )
)


@dataclass(frozen=True)
class NF4(quantize.Quantized):
    """A tensor in NF4. Made by `quantize_nf4` or `NF4.from_safetensors`.

    data: uint8 [ceil(n / 2)] of n elements, the even one in the high nibble.
    absmax: float32 [ceil(n / block_size)], each block's largest magnitude; with double quantization
        its uint8 codes.
    nested_absmax, offset: float32 [ceil(blocks / 256)] and [], of double quantization: a block's
        scale is map[absmax] * nested_absmax + offset. Otherwise None.
    shape, dtype: those of the tensor that was quantized.   block_size: elements per block.
    """

    data: torch.Tensor
    absmax: torch.Tensor
    nested_absmax: torch.Tensor | None
    offset: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int

    def to_safetensors(self, prefix: str = "weight") -> dict[str, torch.Tensor]:
        """The tensors of a bitsandbytes checkpoint: `prefix`, `prefix.absmax`, `prefix.quant_map`,
        those of double quantization, and `prefix.quant_state.bitsandbytes__nf4`, JSON in bytes.
        Reads offset on the host.
        """
        state = {
            "quant_type": "nf4",
            "blocksize": self.block_size,
            "dtype": short(self.dtype),
            "shape": list(self.shape),
        }
        tensors = {
            prefix: self.data[:, None],
            f"{prefix}.absmax": self.absmax,
            f"{prefix}.quant_map": code_table(self.data),
        }
        if self.offset is not None:
            state |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": self.offset.item(),
            }
            tensors |= {
                f"{prefix}.nested_absmax": self.nested_absmax,
                f"{prefix}.nested_quant_map": scale_table(self.data),
            }
        tensors[f"{prefix}.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8, device=self.data.device
        )
        return tensors

    @classmethod
    def from_safetensors(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "weight") -> NF4:
        """The inverse of `to_safetensors`. Raises KeyError for a missing tensor, and TypeError or
        ValueError, naming the tensor, for another code or block size and for inconsistent tensors.
        Reads scales on the host.
        """
        data = quantize.key(tensors, prefix)
        name = f"{prefix}.quant_state.bitsandbytes__nf4"
        state = read_state(name, quantize.key(tensors, name), prefix)
        _same_map(
            f"{prefix}.quant_map", quantize.key(tensors, f"{prefix}.quant_map"), code_table(data)
        )
        n, nested, offset = math.prod(state["shape"]), None, None
        blocks = -(-n // state["blocksize"])
        absmax = quantize.key(tensors, f"{prefix}.absmax")
        # bitsandbytes may store the bytes as another dtype.
        packed = data.reshape(-1).view(torch.uint8)
        quantize.part(prefix, packed, torch.uint8, (-(-n // 2),), data)
        if "nested_offset" in state:
            _same_map(
                f"{prefix}.nested_quant_map",
                quantize.key(tensors, f"{prefix}.nested_quant_map"),
                scale_table(data),
            )
            nested = quantize.key(tensors, f"{prefix}.nested_absmax")
            quantize.part(
                f"{prefix}.nested_absmax",
                nested,
                torch.float32,
                (-(-blocks // NESTED_BLOCK),),
                data,
            )
            offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=data.device)
        quantize.part(
            f"{prefix}.absmax",
            absmax,
            torch.float32 if nested is None else torch.uint8,
            (blocks,),
            data,
        )
        if nested is None:
            size = state["blocksize"]
            stored_scales.check(
                f"{prefix}.absmax", absmax, lambda _: _alike(_codes(packed, n), size)
            )
        else:
            name = f"{prefix}.nested_absmax"
            stored_scales.check(name, nested, lambda _: _alike(absmax, NESTED_BLOCK))
            # The mean of the scales.
            blank = not nested.any() and _alike(_codes(packed, n), state["blocksize"]).all()
            if state["nested_offset"] == 0 and not blank:
                raise ValueError(
                    f"{prefix}.quant_state.bitsandbytes__nf4: nested_offset must be > 0 where the "
                    "codes are not of zeros, got 0"
                )
        return cls(
            packed,
            absmax,
            nested,
            offset,
            tuple(state["shape"]),
            getattr(torch, state["dtype"]),
            state["blocksize"],
        )


def read_state(name: str, packed: torch.Tensor, prefix: str) -> dict:
    """Parses bitsandbytes' quant_state, JSON in bytes. Raises TypeError or ValueError, naming the
    fault.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"{name} must be a uint8 tensor, got {short(packed.dtype)}")
    try:
        state = json.loads(bytes(packed.reshape(-1).tolist()))
    except ValueError as error:
        raise ValueError(f"{name} must be JSON in bytes ({error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{name} must be a JSON object, got {type(state).__name__}")
    nested = ("nested_blocksize",) if "nested_offset" in state else ()
    for key in ("quant_type", "blocksize", "dtype", "shape", *nested):
        if key not in state:
            raise ValueError(f"{name} has no {key}; there are {', '.join(state)}")
    if state["quant_type"] != "nf4":
        raise ValueError(f"{prefix} must be NF4, got {state['quant_type']!r}")
    shape, offset = state["shape"], state.get("nested_offset", 0.0)
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name}: shape must be a list of integers of at least 0, got {shape!r}")
    if type(state["blocksize"]) is not int or state["blocksize"] not in BLOCKS:
        raise ValueError(
            f"{name}: blocksize must be one of {list(BLOCKS)}, got {state['blocksize']!r}"
        )
    checks.choice(f"{name}: dtype", state["dtype"], tuple(map(short, quantize.OUTPUTS)))
    if nested and state["nested_blocksize"] != NESTED_BLOCK:
        raise ValueError(
            f"{name}: nested_blocksize must be {NESTED_BLOCK}, got {state['nested_blocksize']!r}"
        )
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise ValueError(f"{name}: nested_offset must be a finite number, got {offset!r}")
    if offset < 0:  # a mean of magnitudes
        raise ValueError(f"{name}: nested_offset must be at least 0, got {offset!r}")
    return state


quantize.register(NF4, ("data", "absmax", "nested_absmax", "offset"))


def _same_map(name, table, expected):
    if table.shape != expected.shape or not torch.allclose(
        table.float(), expected, rtol=0, atol=1e-6
    ):
        raise ValueError(f"{name} must be bitsandbytes' own table, got other values")


def _codes(packed: torch.Tensor, n: int) -> torch.Tensor:
    return torch.stack((packed >> 4, packed & 15), -1).view(-1)[:n]


def _alike(codes: torch.Tensor, block: int) -> torch.Tensor:
    """Which blocks have one code alone, as those whose elements are all 0 have: writers differ in
    which code it is.
    """
    lack = -codes.shape[0] % block
    blocks = torch.cat([codes, codes[-1:].expand(lack)]).view(-1, block)
    return (blocks == blocks[:, :1]).all(1)


def check_parts(
    data: torch.Tensor, scales: Sequence[torch.Tensor], elements: int, block_size: int
) -> None:
    """Raises TypeError or ValueError for tensors that do not fit that number of elements.

    scales: absmax; with double quantization also nested_absmax and offset.
    """
    blocks, nested = -(-elements // block_size), len(scales) == 3
    quantize.part("q.data", data, torch.uint8, (-(-elements // 2),), data)
    absmax = torch.uint8 if nested else torch.float32
    quantize.part("q.absmax", scales[0], absmax, (blocks,), data)
    if nested:
        of_codes = (-(-blocks // NESTED_BLOCK),)
        quantize.part("q.nested_absmax", scales[1], torch.float32, of_codes, data)
        quantize.part("q.offset", scales[2], torch.float32, (), data)
