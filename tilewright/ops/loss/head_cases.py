"""Cases of the losses on a language model's head, and their tolerances."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases


def atol(dtype, kwargs, name):
    """The contract's default, except in two cases.

    fp32_logits: the twin then rounds nothing between its inputs and its gradients, while a GEMM of
    16-bit operands needs the gradient of the logits in 16 bits. That is half an eps of each of a
    row's terms, of which the largest weigh most.

    float32: products with another order of sums than ATen's are as precise (dW of eleven rows,
    AVX-512, 60 seeds: errors of 9.5e-7, the twin's 8.8e-7), but where the twin is lucky, twice its
    error is not enough (once in 60, by half an eps).
    """
    if dtype in (torch.float32, torch.float64):
        return 4 * torch.finfo(dtype).eps if dtype == torch.float32 else 1e-12
    return (2 if kwargs.get("fp32_logits") else 0.5) * torch.finfo(dtype).eps


# Long: a table, a case of each option.
def case(
    name,
    sizes,
    *,
    tags=cases.CONTRACT,
    logprob=False,
    bias=False,
    ignored="some",
    token_weight=False,
    class_weight=False,
    frozen=False,
    offset=0.0,
    **options,
):
    """offset: added to the bias. x and weight are then small multiples of 1/4 and 1/2: all sums are
    exact in float32.   options: the op's; and lora, the rank of an adapter.
    """
    lora = options.pop("lora", 0)
    T, H, V = sizes
    shape = T if isinstance(T, tuple) else (T,)
    rows = math.prod(shape)

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "dtype": dtype, "gen": g}
        kw = {
            "x": cases.randn(*shape, H, **new),
            "weight": cases.randn(V, H, scale=2 / math.sqrt(H), requires_grad=not frozen, **new),
            "target": torch.randint(V, shape, device=device, generator=g),
        }
        if ignored == "all":
            kw["target"].fill_(-100)
        elif ignored == "some":
            kw["target"].flatten()[1::3] = -100
        if offset:
            for t, steps in ((kw["x"], 4), (kw["weight"], 2)):
                t.detach().mul_(steps).round_().div_(steps)
            kw["bias"] = torch.full(
                (V,),
                cases.representable(offset, dtype),
                device=device,
                dtype=dtype,
                requires_grad=True,
            )
        if bias:
            kw["bias"] = cases.randn(V, requires_grad=not frozen, **new)
        if token_weight:
            kw["token_weight"] = cases.randn(
                *shape, device=device, dtype=torch.float32, gen=g, scale=0.5, shift=1.0
            )
        if class_weight:
            kw["class_weight"] = torch.rand(V, device=device, generator=g) + 0.5
        if lora:
            kw["lora_A"] = cases.randn(lora, H, scale=1 / math.sqrt(H), **new)
            kw["lora_B"] = cases.randn(V, lora, scale=1 / math.sqrt(lora), **new)
        return {**kw, **options}

    def cost(itemsize):
        # x and weight in; in backward the same, and their gradients. A GEMM is 2 T H V: one, then
        # two.
        n, flops = (rows + V) * H * itemsize, 2 * rows * H * V
        return Cost(n, 2 * n, flops, (3 if logprob else 2) * flops)

    return Case(name, make, cost, tags)


def timed(logprob=False):
    listed = []
    for name in ("llama-3-8b", "qwen3-8b", "gemma-3-4b", "deepseek-v3"):
        m = cases.MODELS[name]
        options: dict[str, Any] = {"softcap": 30.0} if name.startswith("gemma") else {}
        listed.append(
            case(
                name,
                (8192, m.hidden, m.vocab),
                tags=cases.CUDA,
                ignored="none",
                logprob=logprob,
                **options,
            )
        )
    for name, H in (
        ("cpu-small", 512),
        ("qwen3-30b-a3b-32k", cases.MODELS["qwen3-30b-a3b"].hidden),
    ):
        listed.append(case(name, (256, H, 32768), tags=cases.CPU, ignored="none", logprob=logprob))
    return listed


def offsets(**options):
    """In float32, whatever x's dtype: rounded to 16 bits, such logits would differ from the
    reference by whole numbers.
    """
    return [
        case(
            f"offset_{offset:.0e}".replace("+0", ""),
            (11, 8, 100),
            offset=offset,
            fp32_logits=True,
            **options,
        )
        for offset in (1e3, 1e4, 1e6)
    ]
