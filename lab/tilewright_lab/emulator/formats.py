"""Bit-level conversions between float32 and narrower formats."""

from __future__ import annotations

import numpy as np
import torch


def f32(bits):
    return bits.view(np.float32)


def widen(bits, kind):
    """16-bit numbers as float32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def narrow(x, kind, truncate=False):
    if truncate:
        assert kind == "bf16"
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    t = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(
        torch.bfloat16 if kind == "bf16" else torch.float16
    )
    return t.view(torch.int16).numpy().view(np.uint16)


# Per code: the sign is its highest bit.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def to_e2m1(x):
    """Codes of the nearest numbers, ties to the even code; NaN becomes 6."""
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7], np.uint8)  # the first of equals is taken
    size = np.minimum(np.abs(x.astype(np.float64)), 6.0)
    code = order[np.abs(size[:, None] - E2M1[order].astype(np.float64)).argmin(1)]
    return np.where(np.isnan(x), 7, code | np.signbit(x).astype(np.uint8) << 3).astype(np.uint8)


def to_e4m3(x):
    """Codes of the nearest numbers, ties to even; saturates; NaN becomes 127."""
    t = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn)
    return np.where(np.isnan(x), 127, t.view(torch.uint8).numpy()).astype(np.uint8)


def from_float8(code, kind):
    """Codes of "e4m3" or "e5m2" as float32."""
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    return torch.from_numpy(np.ascontiguousarray(code)).view(dtype).float().numpy()


def from_e4m3(code):
    return torch.from_numpy(code).view(torch.float8_e4m3fn).to(torch.float16).numpy()
