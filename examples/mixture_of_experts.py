"""A mixture-of-experts layer of two ops: `route` chooses experts, `moe_mlp` computes them.

    python examples/mixture_of_experts.py

Checks the layer against a loop over experts, then trains it on a toy problem, in which each group
of inputs has a linear map of its own, and prints how many tokens each expert gets.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tilewright.ops import moe_mlp, route

HIDDEN, INNER, EXPERTS, TOP_K, GROUPS = 32, 64, 8, 2, 4


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        # Gates before ups, in one tensor, as in transformers.
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5)

    def forward(self, x):  # [tokens, hidden]: flatten batch and sequence before
        routing = route(self.router(x), TOP_K, renormalize=True)
        slots = routing.expert_index, routing.expert_weight  # [tokens, TOP_K]
        return moe_mlp(x, self.gate_up_proj, self.down_proj, *slots), routing

    def by_loop(self, x):
        """The same in plain PyTorch, every expert on every token."""
        weight, index = self.router(x).softmax(-1).topk(TOP_K)
        weight = torch.zeros(len(x), EXPERTS).scatter(1, index, weight / weight.sum(-1, True))
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            gate, up = (x @ self.gate_up_proj[e].T).chunk(2, -1)
            y = y + weight[:, e, None] * ((F.silu(gate) * up) @ self.down_proj[e].T)
        return y


def main() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts()
    x = torch.randn(512, HIDDEN)
    difference = (layer(x)[0] - layer.by_loop(x)).abs().max().item()
    print(f"largest difference from a loop over experts: {difference:.0e}")

    centers = 2 * torch.randn(GROUPS, HIDDEN)
    maps = torch.randn(GROUPS, HIDDEN, HIDDEN) / HIDDEN**0.5
    optimizer = torch.optim.AdamW(layer.parameters(), 5e-3)
    for step in range(301):
        group = torch.randint(GROUPS, (512,))
        x = centers[group] + torch.randn(512, HIDDEN)
        target = torch.einsum("th,tih->ti", x, maps[group])
        y, routing = layer(x)
        loss = F.mse_loss(y, target)
        (loss + 0.1 * routing.load_balance_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            load = routing.tokens_per_expert.tolist()
            print(f"step {step:3}: error {loss.item():.3f}, tokens per expert {load}")
    if not (difference < 1e-5 and loss.item() < 0.5):
        raise SystemExit("the layer differs from the loop, or does not learn")


if __name__ == "__main__":
    main()
