"""The eager twins of `permute`, `unpermute` and `sort_by_expert`."""

from __future__ import annotations

import torch


def sort_eager(expert_index, num_experts):
    E = num_experts
    expert = expert_index.flatten().long()
    expert = torch.where((expert < 0) | (expert > E), E, expert)
    slots = expert.argsort(stable=True)
    counts = torch.zeros(E + 1, dtype=torch.int64, device=expert.device)
    offsets = counts.scatter_add(0, expert, torch.ones_like(expert))[:E].cumsum(0)
    row = torch.empty_like(slots).scatter(
        0, slots, torch.arange(slots.shape[0], device=slots.device)
    )
    position = torch.where(expert < E, row, -1).view(expert_index.shape)
    return offsets.int(), slots.int(), position.int()


def permute_eager(x, expert_index, num_experts):
    offsets, slots, position = sort_eager(expert_index, num_experts)
    if x is None:
        return None, offsets, slots, position
    # For the backward: a sum over each token's rows.
    acc = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(acc).index_select(0, slots // expert_index.shape[1])
    used = torch.arange(slots.shape[0], device=x.device) < offsets[-1]
    return torch.where(used[:, None], rows, 0).to(x.dtype), offsets, slots, position


def unpermute_eager(rows, expert_weight, position):
    (T, K), H = position.shape, rows.shape[1]
    acc = torch.promote_types(rows.dtype, torch.float32)
    present = position >= 0
    picked = rows.to(acc).index_select(0, position.flatten().clamp_min(0)).view(T, K, H)
    picked = torch.where(present[..., None], picked, 0)  # before the product: 0 times NaN is NaN
    if expert_weight is not None:
        picked = picked * torch.where(present, expert_weight.to(acc), 0)[..., None]
    return picked.sum(1).to(rows.dtype)
