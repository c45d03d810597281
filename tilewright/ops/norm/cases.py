"""Cases of norms, for tests, benchmarks and tuning."""

from __future__ import annotations

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases
from tilewright.ops.quant import aqn


def norm_case(
    name,
    shape,
    *,
    add=False,
    weight_shape=None,
    bias=False,
    strided=False,
    tags=cases.CONTRACT,
    mixed=False,
    mean=0.0,
    **options,
):
    D, rows = shape[-1], 1
    for n in shape[:-1]:
        rows *= n

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "gen": g}
        kw = {"x": cases.randn(*shape, dtype=dtype, shift=mean, **new)}
        if add:
            kw["residual"] = cases.randn(*shape, dtype=torch.float32 if mixed else dtype, **new)
        w_dtype = torch.float32 if mixed else dtype
        kw["weight"] = cases.randn(
            *(weight_shape or (D,)), dtype=w_dtype, scale=0.2, shift=1.0, **new
        )
        if bias:
            kw["bias"] = cases.randn(D, dtype=w_dtype, scale=0.2, **new)
        if strided:  # every second element of wider parameters
            for p in {"weight", "bias"} & kw.keys():
                kw[p] = kw[p].detach().repeat_interleave(2)[::2].requires_grad_()
        return {**kw, **options}

    def cost(itemsize):
        # Forward: x in, y out (add: + residual in, sum out); backward: x, dy in, dx out.
        n = rows * D * itemsize
        return Cost((4 if add else 2) * n, (4 if add else 3) * n, 4 * rows * D, 8 * rows * D)

    return Case(name, make, cost, tags)


def norm_cases(add):
    small = [
        norm_case("ragged", (3, 7, 100), add=add),
        norm_case("one_row", (1, 5), add=add),
        norm_case("no_rows", (0, 64), add=add),
        norm_case("gemma", (5, 257), add=add, offset=1.0, cast="gemma"),
        norm_case("bias_none_cast", (2, 3, 64), add=add, bias=True, cast="none"),
        norm_case("strided_parameters", (3, 40), add=add, bias=True, strided=True),
        norm_case("qk_norm", (2, 5, 4, 128), add=add, weight_shape=(4, 128)),
        norm_case("fp32_weight", (6, 96), add=add, mixed=True),
        norm_case("wide", (2, 16512), add=add),
        norm_case("noise", (9, 52), add=add, noise=aqn.SOME),
        norm_case("noise_qk_norm", (2, 3, 3, 33), add=add, weight_shape=(3, 33), noise=aqn.SOME),
        norm_case("noise_wide", (2, 16512), add=add, noise=aqn.SOME),
    ]
    timed = []
    for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU)):
        T = cases.TOKENS[device]
        for name in ("qwen3-8b", "qwen3-30b-a3b", "gemma-3-4b", "deepseek-v3"):
            gemma = {"offset": 1.0, "cast": "gemma"} if name.startswith("gemma") else {}
            timed.append(
                norm_case(name, (T, cases.MODELS[name].hidden), add=add, tags=tags, **gemma)
            )
        if not add:
            m = cases.MODELS["qwen3-8b"]
            timed.append(norm_case("qwen3-8b-q-norm", (T, m.heads, m.head_dim), tags=tags))
    if not add:  # the case that other libraries publish
        timed.append(norm_case("8192x4096", (8192, 4096), tags=cases.CUDA))
    return (*small, *timed, norm_case("big", (2**18 + 1, 8192), add=add, tags=cases.BIG))


def layernorm_cases(add):
    small = [
        norm_case("ragged", (3, 7, 100), add=add, bias=True),
        norm_case("one_row", (1, 5), add=add),
        norm_case("no_rows", (0, 64), add=add, bias=True),
        norm_case("no_bias", (5, 257), add=add, eps=1e-6),
        norm_case("strided_parameters", (3, 40), add=add, bias=True, strided=True),
        norm_case("fp32_weight", (6, 96), add=add, bias=True, mixed=True),
        norm_case("wide", (2, 16512), add=add, bias=True),
    ]
    timed = [
        norm_case(name, (cases.TOKENS[device], D), add=add, bias=True, tags=tags)
        for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
        for name, D in (("gpt2-xl", 1600), ("bert-large", 1024), ("opt-6.7b", 4096))
    ]
    return (*small, *timed, norm_case("big", (2**18 + 1, 8192), add=add, tags=cases.BIG))
