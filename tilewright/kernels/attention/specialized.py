"""The passes of `gluon`: the configurations of attention_gluon.py and attention_backward_gluon.py,
and the launchers of attention_triton.py with them.
"""

from __future__ import annotations

import functools

import torch

from tilewright.kernels.attention import attention_backward_gluon, attention_gluon
from tilewright.kernels.attention import attention_triton as triton
from tilewright.kernels.attention.logits_triton import Fixed
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ROLES, Config, Specialized

# 160 KiB of queries, keys and values in rows of 128.
_FORWARD: Config = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, ROLES: True}
# One kernel for all gradients: tiles of 128 keys (64 in two parts) and 64 queries, in two stages.
_BACKWARD: Config = {"BLOCK_N": 128, "BLOCK_M": 64, "num_warps": 4, "num_stages": 2, ROLES: True}


def _by_tma(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether TMA reads these tensors [B, H, positions, D]: they must have 16 bits, not be empty,
    and have rows at multiples of 16 bytes.
    """
    return all(
        t.element_size() == 2
        and t.numel() > 0
        and t.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in t.stride()[:3])
        for t in tensors
    )


def _computes(fixed: Fixed, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether specialized warps compute this: blocks of values as wide as those of keys, no
    dropout, what fits into the registers, and operands that TMA reads.
    """
    as_wide = fixed.WIDTH == fixed.WIDTH_V
    return as_wide and not fixed.DROPOUT and _in_registers(fixed) and _by_tma(tensors)


def _in_registers(fixed: Fixed) -> bool:
    """Whether the forward fits into the registers: not a softcap of keys in two parts, nor windows
    of packed documents with rows of 256.
    """
    packed_window = fixed.PACKED and fixed.WINDOW
    return not ((fixed.REST and fixed.SOFTCAP) or (fixed.WIDTH > 128 and packed_window))


def _fits_forward(fixed: Fixed, tensors: tuple[torch.Tensor, ...]) -> bool:
    # With windows, rows of 64 have too few products for warps to wait for each other: an H100
    # takes 283 us, and 253 us with one loop (64 heads, a window of 128).
    few = fixed.WIDTH <= 64 and fixed.WINDOW
    return not few and _computes(fixed, tensors)


def _fits_backward(fixed: Fixed, tensors: tuple[torch.Tensor, ...]) -> bool:
    return _computes(fixed, tensors) and attention_backward_gluon.fits(fixed)


def _forward_roles(width: int, itemsize: int, large: bool, capped: bool) -> list[Config]:
    fits = not (width == 192 and capped)
    return [_FORWARD] if itemsize == 2 and large and fits else []


def forward_usual(width: int, itemsize: int, large: bool, capped: bool) -> Config | None:
    """Measured on an H100: 37 % faster than one loop in rows of 128, 8 % in rows of 64."""
    fits = width <= 128 or (width == 192 and not capped)
    return _FORWARD if itemsize == 2 and large and fits else None


def _backward_roles(width: int, itemsize: int, large: bool, capped: bool) -> list[Config]:
    # Wider rows in one part, or the slope of a cap, exceed the registers.
    fits = width <= (64 if capped else 192)
    return [_BACKWARD] if itemsize == 2 and large and fits else []


def _backward_usual(width: int, itemsize: int, large: bool, capped: bool) -> Config | None:
    """The usual one, by times on an H100: 2.55 ms in rows of 128, where two kernels take 6.29 ms,
    and 1.74 ms in rows of 64, where two kernels take 3.64 ms.
    """
    fits = width <= 128 and not capped
    return _BACKWARD if itemsize == 2 and large and fits else None


def _forward_spec(label: str, types: dict, fixed: Fixed, config: Config) -> list[KernelSpec]:
    fits = _in_registers(fixed)
    return [attention_gluon.spec(f"roles {label}", types, fixed, config)] if fits else []


def _backward_spec(label: str, types: dict, fixed: Fixed, config: Config) -> list[KernelSpec]:
    fits = attention_backward_gluon.fits(fixed)
    return [attention_backward_gluon.spec(label, types, fixed)] if fits else []


FORWARD = Specialized(
    triton.FORWARD,
    attention_gluon.forward,
    _fits_forward,
    forward_usual,
    _forward_roles,
    triton.specs_of(None, "forward", specialized=_forward_spec),
)
BACKWARD = Specialized(
    triton.BACKWARD_KV,
    attention_backward_gluon.backward,
    _fits_backward,
    _backward_usual,
    _backward_roles,
    triton.specs_of(None, "backward roles", specialized=_backward_spec),
)
TUNABLES = FORWARD, BACKWARD, *triton.TUNABLES
_OTHERS = {FORWARD.beside: FORWARD, BACKWARD.beside: BACKWARD}
forward = functools.partial(triton.forward, others=_OTHERS)
backward = functools.partial(triton.backward, others=_OTHERS)


def gate() -> list[KernelSpec]:
    """Specialized warps with every kind of mask that they have, and the kernels around their
    backward.
    """
    kinds = [(width, capped) for width in (64, 128, 192, 256) for capped in (False, True)]
    specs = []
    for launch, config in ((FORWARD, _FORWARD), (BACKWARD, _BACKWARD)):
        for width, capped in kinds:
            key = launch.named((width, 2, True, capped))
            if config in launch.compiled(**key):
                specs += launch.specs(key, config)
    return specs + triton.gate_of_one()
