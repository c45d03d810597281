"""Gates of experts: how `moe_mlp` combines gate and up projections, with derivatives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tilewright.core import checks
from tilewright.core.takes import LARGEST, SMALLEST

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "softcapped")  # the index is that in kernels


@dataclass(frozen=True)
class Gate:
    """Describes how `moe_mlp`'s experts combine gate g and up u: a(g) * (u + up_offset).

    gpt-oss, arXiv:2508.10925: Gate(alpha=1.702, limit=7.0, up_limit=7.0, up_offset=1.0,
    interleaved=True).

    Args:
        activation: a. "silu": g sigmoid(alpha g); "gelu_tanh", "gelu": as `gelu_mul`'s "tanh" and
            "none"; "softcapped": limit tanh(g / limit) sigmoid(alpha g).
        alpha: a finite number; must be 1 unless the activation has a sigmoid.
        limit: > 0, an upper bound to which gates are clamped; None: no bound.
        up_limit: > 0; ups are clamped to [-up_limit, up_limit]. Gradients beyond the limits are 0.
            "softcapped" needs both limits, and u becomes up_limit tanh(u / up_limit).
        up_offset: a finite number.
        interleaved: gate_up_proj's rows, and its bias's elements, are gate, up, gate, up, ...;
            False: all gates, then all ups.

    Raises:
        TypeError, ValueError: invalid values.

    Example:
        >>> gates, ups = tilewright.ops.Gate(interleaved=True).split(torch.tensor([1.0, 2.0]))
        >>> gates.tolist(), ups.tolist()
        ([1.0], [2.0])
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self):
        checks.choice("activation", self.activation, ACTIVATIONS)
        for name in ("alpha", "up_offset"):
            checks.number(name, getattr(self, name), -LARGEST, LARGEST, "a finite number")
        for name in ("limit", "up_limit"):
            if getattr(self, name) is not None:
                checks.number(
                    name,
                    getattr(self, name),
                    SMALLEST,
                    LARGEST,
                    "None or a positive finite number",
                )
        if not isinstance(self.interleaved, bool):
            raise TypeError(f"interleaved must be True or False, got {self.interleaved!r}")
        if self.alpha != 1 and self.activation.startswith("gelu"):
            raise ValueError(
                f"alpha must be 1 for {self.activation!r}, which has no sigmoid, got {self.alpha!r}"
            )
        if self.activation == "softcapped" and None in (self.limit, self.up_limit):
            raise ValueError(
                "'softcapped' needs a limit and an up_limit, got "
                f"limit={self.limit!r} and up_limit={self.up_limit!r}"
            )

    @property
    def is_swiglu(self) -> bool:
        """Whether it is silu(g) * u, gates first. Numbers may be symbolic under
        torch.compile(dynamic=True), where Gates cannot be compared as a whole.
        """
        return (
            self.activation == "silu"
            and self.alpha == 1
            and self.limit is None
            and self.up_limit is None
            and self.up_offset == 0
            and not self.interleaved
        )

    @property
    def caps(self) -> tuple[float, float]:
        """limit and up_limit of "softcapped", which has both."""
        assert self.limit is not None and self.up_limit is not None
        return self.limit, self.up_limit

    def split(self, pre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the gates and the ups of pre [..., 2 I]."""
        if self.interleaved:
            return pre[..., ::2], pre[..., 1::2]
        g, u = pre.chunk(2, -1)
        return g, u


def gelu_tanh(g: torch.Tensor) -> torch.Tensor:
    """F.gelu(g, approximate="tanh"), whose derivative is NaN where g^3 overflows. For finite g
    beyond 30 it is g or 0, in float64, too.
    """
    beyond = (g.abs() > 30) & g.isfinite()
    return torch.where(beyond, g.relu(), F.gelu(g.masked_fill(beyond, 0), approximate="tanh"))


def gate_eager(pre: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Maps [..., 2 I] to [..., I]; rounded once."""
    g, u = (t.to(torch.promote_types(pre.dtype, torch.float32)) for t in gate.split(pre))
    if gate.activation == "softcapped":
        cap, up_cap = gate.caps
        a = cap * torch.tanh(g / cap) * torch.sigmoid(gate.alpha * g)
        u = up_cap * torch.tanh(u / up_cap)
    else:
        g = g if gate.limit is None else g.clamp(max=gate.limit)
        u = u if gate.up_limit is None else u.clamp(-gate.up_limit, gate.up_limit)
        if gate.activation == "silu":
            a = F.silu(g) if gate.alpha == 1 else g * torch.sigmoid(gate.alpha * g)
        else:
            a = gelu_tanh(g) if gate.activation == "gelu_tanh" else F.gelu(g)
    return (a * (u + gate.up_offset)).to(pre.dtype)


def gate_parts(
    pre: torch.Tensor, gate: Gate
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, da/dg, v = u + up_offset and dv/du, in float32: `gate_eager` is a * v, and its
    gradients dh v da and dh a dv.
    """
    g, u = (t.float() for t in gate.split(pre))
    above, du = None, torch.ones((), device=pre.device)
    if gate.activation == "softcapped":
        _, up_cap = gate.caps
        u = torch.tanh(u / up_cap)
        u, du = up_cap * u, 1 - u.square()
    else:
        if gate.limit is not None:
            above, g = g > gate.limit, g.clamp(max=gate.limit)
        if gate.up_limit is not None:
            du = (u.abs() <= gate.up_limit).float()
            u = u.clamp(-gate.up_limit, gate.up_limit)
    if gate.activation == "gelu":
        s = 0.5 * torch.erfc(g * -math.sqrt(0.5))
        a, da = g * s, s + g * torch.exp(-0.5 * g.square()) * (1 / math.sqrt(2 * math.pi))
    elif gate.activation == "gelu_tanh":  # (1 + tanh z) / 2 is sigmoid(2 z)
        # Beyond 20, s or 1 - s is 0, and the cube could overflow.
        c, z = math.sqrt(8 / math.pi), g.clamp(-20, 20)
        s = torch.sigmoid(c * (z + 0.044715 * z * z * z))
        a = g * s
        da = s + a * (1 - s) * (c * (1 + 0.134145 * z * z))
    else:
        s = torch.sigmoid(g if gate.alpha == 1 else gate.alpha * g)
        da = 1 - s
        if gate.activation == "softcapped":
            cap, _ = gate.caps
            soft = torch.tanh(g / cap)
            a = cap * soft * s
            s.mul_(1 - soft.square())
        else:
            a = g * s
        da.mul_(a).mul_(gate.alpha).add_(s)
    if above is not None:
        da.masked_fill_(above, 0)
    return a, da, u + gate.up_offset if gate.up_offset else u, du
