"""Cases shared by formats with scales for blocks of rows or columns."""

from __future__ import annotations

import math

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases
from tilewright.ops.quant import quantize


def draw(device, dtype, seed, shape):
    """Normal values, with zeros at the start of the first row where there are more elements, and
    some columns so much smaller than others that scales of their blocks are subnormal or nearly
    zero.
    """
    x = cases.randn(
        *shape,
        device=device,
        dtype=torch.float32,
        gen=cases.generator(device, seed),
        requires_grad=False,
    )
    x[..., : shape[-1] // 3] *= 3e-5
    if x.dim() > 1:
        x[1:2, ..., : shape[-1] // 3] *= 1e-4
    if x.numel() > 40:
        x.view(-1, shape[-1])[0, :40] = 0
    return x.to(dtype)


def plain(device, dtype, seed, shape):
    """Normally distributed values, for timed cases: torchao has no subnormal scales."""
    return cases.randn(
        *shape, device=device, dtype=dtype, gen=cases.generator(device, seed), requires_grad=False
    )


SMALL = {
    "ragged": (5, 33),
    "odd_rows": (19, 40),
    "matrix": (32, 128),
    "vector": (70,),
    "experts": (3, 17, 18),
    "one": (1, 1),
    "no_rows": (0, 32),
    "no_columns": (3, 0),
}


def shapes(small):
    """(name, shape, tags) of small and of timed cases."""
    return [(name, shape, cases.CONTRACT) for name, shape in small.items()] + [
        (name, shape, tags)
        for tags in (cases.CUDA, cases.CPU)
        for name, shape in quantize.SHAPES.items()
        if tags is cases.CUDA or name == "llama-3-8b-down"
    ]


def quantize_case(name, shape, **options):
    def make(device, dtype, seed):
        return {"x": draw(device, dtype, seed, shape), **options}

    return Case(name, make)


def dequantize_case(quantized, name, shape, noise=None, **options):
    """quantized: the format's function that quantizes, called with the options."""

    def make(device, dtype, seed):
        return {"q": quantized(draw(device, dtype, seed, shape), **options), "noise": noise}

    return Case(name, make)


def all_cases(make, bits):
    def case(name, shape, tags):
        n = math.prod(shape)
        drawn = draw if tags is cases.CONTRACT else plain
        return Case(
            name,
            lambda device, dtype, seed: make(drawn(device, dtype, seed, shape)),
            lambda itemsize: Cost(n * itemsize + int(n * bits / 8), 0, 0, 0),
            tags,
        )

    return [case(*s) for s in shapes(SMALL)]


def timed_cases(name, bits, *, passes=1, results=1, **options):
    """Activations, with this number of passes over memory and of results, each of these bits."""

    def case(device, tags):
        shape = (cases.TOKENS[device], cases.MODELS["qwen3-8b"].hidden)
        n = shape[0] * shape[1]
        return Case(
            f"qwen3-8b-{name}",
            lambda device, dtype, seed: {"x": draw(device, dtype, seed, shape), **options},
            lambda itemsize: Cost(passes * n * itemsize + int(results * n * bits / 8)),
            tags,
        )

    return [case("cuda", cases.CUDA), case("cpu", cases.CPU)]
