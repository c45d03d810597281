"""A language model's last layer in ten lines of ops: RMSNorm, SwiGLU, and a loss without logits.

    python examples/ops_in_ten_lines.py

Computes it twice, by the best implementations for this machine and by the eager twins that define
the ops, and compares loss and gradients.
"""

from __future__ import annotations

import torch

import tilewright
from tilewright.ops import linear_cross_entropy, rmsnorm, silu_mul

TOKENS, HIDDEN, INNER, VOCABULARY = 1024, 128, 384, 32000
BOUND = 1e-5  # relative: sums in float32 in another order


def loss_of(x, norm, gate_up, down, head, target):
    y = rmsnorm(x, norm)  # [tokens, hidden]
    y = silu_mul(y @ gate_up.T)  # [tokens, inner]: SiLU(gate) * up of a merged projection
    return linear_cross_entropy(x + y @ down.T, head, target)  # no [tokens, vocabulary] logits


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (HIDDEN,), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    x, norm, gate_up, down = (torch.randn(s, device=device) / s[-1] ** 0.5 for s in shapes)
    head = torch.randn(VOCABULARY, HIDDEN, device=device) / HIDDEN**0.5
    tensors = [t.requires_grad_() for t in (x, norm, gate_up, down, head)]
    target = torch.randint(VOCABULARY, (TOKENS,), device=device)

    loss = loss_of(*tensors, target)
    gradients = torch.autograd.grad(loss, tensors)
    with tilewright.use("eager"):  # the definitions, in plain PyTorch
        truth = loss_of(*tensors, target)
    exact = torch.autograd.grad(truth, tensors)

    print(f"loss {loss.item():.4f}, by the definitions {truth.item():.4f}")
    error = max(((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True))
    print(f"largest difference of a gradient, relative to its norm: {error:.0e} (bound {BOUND})")
    print(f"logits that were not built: {TOKENS * VOCABULARY * 4 / 2**20:.0f} MiB")
    if not error < BOUND:
        raise SystemExit("the gradients differ")
    print("next: `tilewright explain` lists what each op runs here")


if __name__ == "__main__":
    main()
