"""The cases of `grouped_gemm`."""

from __future__ import annotations

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases


def _ends(shares: list[float], rows: int) -> list[int]:
    """Offsets of experts whose numbers of rows are proportional to these shares."""
    whole, ends, total = sum(shares), [], 0.0
    for share in shares:
        total += share
        ends.append(round(rows * total / whole))
    return ends


def _uniform(experts: int, seed: int) -> list[float]:
    """Shares that differ by a few percent, as those of a balanced router do."""
    return (1 + 0.05 * torch.randn(experts, generator=cases.generator("cpu", seed))).tolist()


def _skewed(experts: int, seed: int) -> list[float]:
    """Zipf's: the first expert has as many rows as the second and the third together, and so on; in
    random order.
    """
    order = torch.randperm(experts, generator=cases.generator("cpu", seed))
    return (1 / (1 + order.double())).tolist()


def case(name, experts, rows, n, k, counts=None, shares=_uniform, tags=cases.CONTRACT):
    """counts: rows of each expert, in place of shares; the rest of `rows` is the tail, which is
    NaN.
    """

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        x = cases.randn(rows, k, device=device, dtype=dtype, gen=g, requires_grad=False)
        weight = cases.randn(
            experts, n, k, device=device, dtype=dtype, gen=g, scale=k**-0.5 if k else 1.0
        )
        if counts is None:
            ends = _ends(shares(experts, seed), rows)
        else:
            ends = torch.tensor(counts).cumsum(0).tolist()
            x[ends[-1] :] = float("nan")
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        return {"x": x.requires_grad_(), "weight": weight, "offsets": offsets}

    def cost(itemsize):
        w = experts * n * k
        return Cost(
            (rows * (n + k) + w) * itemsize,
            (rows * (n + 2 * k) + 2 * w) * itemsize,
            2 * rows * n * k,
            4 * rows * n * k,
        )

    return Case(name, make, cost, tags)


def _timed():
    qwen, hidden, inner = "qwen3-30b-a3b", 2048, 768
    timed = []
    for tokens in (8192, 32768):
        timed += [
            case(f"{qwen}_up_{tokens}", 128, 8 * tokens, 2 * inner, hidden, tags=cases.CUDA),
            case(f"{qwen}_down_{tokens}", 128, 8 * tokens, hidden, inner, tags=cases.CUDA),
        ]
    timed += [
        case(
            f"{qwen}_up_32768_skewed",
            128,
            8 * 32768,
            2 * inner,
            hidden,
            shares=_skewed,
            tags=cases.CUDA,
        ),
        case("mixtral-8x7b_up_8192", 8, 2 * 8192, 2 * 14336, 4096, tags=cases.CUDA),
        case("mixtral-8x7b_down_8192", 8, 2 * 8192, 4096, 14336, tags=cases.CUDA),
        case(
            "mixtral-8x7b_up_8192_skewed",
            8,
            2 * 8192,
            2 * 14336,
            4096,
            shares=_skewed,
            tags=cases.CUDA,
        ),
        # A quarter of the experts: all, with gradients and the float64 reference, need 20 GiB.
        case(f"{qwen}-32e_up_4_rows", 32, 32 * 4, 2 * inner, hidden, tags=cases.CPU),
        case(f"{qwen}-32e_up_32_rows", 32, 32 * 32, 2 * inner, hidden, tags=cases.CPU),
        case(f"{qwen}-32e_down_32_rows", 32, 32 * 32, hidden, inner, tags=cases.CPU),
        case(
            f"{qwen}-32e_up_32_rows_skewed",
            32,
            32 * 32,
            2 * inner,
            hidden,
            shares=_skewed,
            tags=cases.CPU,
        ),
    ]
    return timed


CASES = (
    case("ragged", 4, 37, 21, 19, (5, 20, 0, 12)),
    # Rows and edges that no tile divides, at multiples of 16.
    case("aligned", 3, 150, 144, 80, (129, 0, 21)),
    case("tail", 4, 30, 24, 16, (3, 0, 9, 7)),
    case("tail_odd", 2, 9, 7, 5, (2, 4)),
    case("no_rows", 3, 0, 8, 16, (0, 0, 0)),
    case("only_tail", 2, 6, 5, 8, (0, 0)),
    case("one_expert_has_all", 5, 33, 16, 32, (0, 0, 33, 0, 0)),
    case("one_expert", 1, 20, 12, 8, (20,)),
    case("many_experts", 40, 64, 6, 8, tuple(i % 4 for i in range(40))),
    case("long", 2, 300, 8, 24, (283, 17)),  # more rows than any tile
    *_timed(),
    case("big", 4, 2**19 + 8, 4096, 64, tags=cases.BIG),
    case("big_weight", 33, 33 * 8, 8192, 8192, tags=cases.BIG),
)
