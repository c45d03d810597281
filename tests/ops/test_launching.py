"""Host-side launching of Triton kernels: the number of compilations and the launch time. Needs no
GPU, but a process without Triton's interpreter.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from bench import overhead
from tilewright.core.registry import ImplementationUnavailable
from tilewright.ops import cross_entropy
from tilewright.selection import operations

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).parents[2]
# compilations per kernel and set of constants: Triton specializes integers that are multiples of 16
MOST = 2


def steps(tokens, dtype=torch.bfloat16):
    """One launch of each kernel whose integers depend on a step's number of tokens: packed
    documents, so one sequence. Nothing is launched, so tensors are uninitialized.
    """
    from tilewright.kernels.attention import attention_triton
    from tilewright.kernels.attention.operators import Variant
    from tilewright.kernels.fused_quantize import fused_quantize_triton
    from tilewright.kernels.moe import grouped_gemm_triton, permute_triton, route_triton
    from tilewright.kernels.moe.operators import Router
    from tilewright.kernels.norm import rmsnorm_triton
    from tilewright.kernels.norm.operators import Norm
    from tilewright.kernels.quant import quantize_triton
    from tilewright.kernels.quant.operators import FP8, Noise, NVFP4Options
    from tilewright.kernels.rope import qk_norm_rope_triton, rope_triton
    from tilewright.kernels.rope.operators import HeadNorm, Heads, Rotation

    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype)

    def heads(n):
        return new(1, tokens, n, 64).transpose(1, 2)

    T, H, E, K, f32, i64 = tokens, 128, 8, 2, torch.float32, torch.int64
    x, w, table = new(T, H), new(H), new(8192, 32, dtype=f32)
    llama = Norm(1e-6, 0.0, True)
    y, rstd, _ = rmsnorm_triton.forward(x, None, w, None, llama)
    rmsnorm_triton.forward(x, x, w, None, llama)
    rmsnorm_triton.backward(y, None, x, rstd, w, llama, False)
    q, k, cu = heads(4), heads(2), torch.tensor([0, T // 3, T])
    positions = new(1, T, dtype=i64)
    rope_triton.overwrite(q, k, Rotation(table, table, positions))
    qkv, norm = new(1, T, 8 * 64), new(64)
    prepared = qkv, Heads(4, 2), HeadNorm(norm, norm), Rotation(table, table, positions)
    q, k, rstd = qk_norm_rope_triton.forward(*prepared)
    qk_norm_rope_triton.backward(q, k, k, qkv, rstd, *prepared[1:])
    for window in (0, 4096):
        variant = Variant(window=window, scale=0.125)
        documents = attention_triton.map_documents(cu, T, 128)
        out, lse = attention_triton.forward(q, k, k, documents, None, variant, 0)
        attention_triton.backward(out, q, k, k, out, lse, documents, None, variant, 0)
    loss = cross_entropy(
        new(T, H).requires_grad_(), torch.zeros(T, dtype=i64), implementation="triton"
    )
    loss.backward()
    one, square = torch.ones(()), T // 128 * 128  # rows in whole blocks of 128
    none, plain = Noise(0.0, 0, 0, 0), NVFP4Options(False, None, 0, None, False)
    low = fused_quantize_triton.nvfp4_quantize(x[None], one, plain)
    transformed = NVFP4Options(True, T, 16, None, False)
    fused_quantize_triton.nvfp4_quantize(x[None, :square], one, transformed)
    quantize_triton.nvfp4_dequantize(low.data[0], low.scale[0], one, H, torch.bfloat16, none)
    fused_quantize_triton.nvfp4_quantize(
        x[None, :square], one, plain._replace(seed=T, transpose=True)
    )
    for block in (1, 128, False), (128, 128, False), (1, 32, True):
        fp8 = FP8(*block, None, False)
        low = fused_quantize_triton.fp8_quantize(x[None], fp8)
        quantize_triton.fp8_dequantize(low.data, low.scale, *block[:2], torch.bfloat16, none)
        fused_quantize_triton.fp8_quantize(x[None], fp8._replace(transpose=True))
        if fp8.rows == 1:
            fused_quantize_triton.silu_mul_quantize(x, x, T, fp8)
            fused_quantize_triton.rmsnorm_quantize(x, x, w, None, llama, True, fp8)
    offsets, _, position = order = permute_triton.sort(new(T, K, dtype=i64), E)
    weight = new(T, K, dtype=f32)
    rows = permute_triton.spread(x, position, offsets)
    permute_triton.spread(x, position, None)
    permute_triton.collect(rows, weight, position)
    permute_triton.backward(x, rows, weight, position)
    up, down = new(E, 2 * H, H), new(E, H, H)
    grouped_gemm_triton.backward_weight(
        grouped_gemm_triton.forward(rows, down, offsets), rows, offsets
    )
    grouped_gemm_triton.backward_x(rows, down, offsets)
    pre, _ = grouped_gemm_triton.up_swiglu(x, up, order, True)
    grouped_gemm_triton.down_dswiglu(x, down, pre, weight, order, True)
    logits = new(T, E, dtype=f32)
    router = Router(K, False, True, 1, 1, 1.0)
    _, index, counts, balance, z = route_triton.forward(logits, None, None, router)
    route_triton.backward(weight, balance, z, logits, index, counts, router)


def main():
    """Counts the compilations of each kernel, with one set of constants, for 200 random lengths;
    and prints the other results.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    found, fused = Counter(), {}
    knobs.language.default_fp_fusion = False  # as from Triton 3.10 on

    def compiled(kernel, key, signature, device, constants, options, attributes, warmup):
        absent = [p.name for i, p in enumerate(kernel.params) if constants.get((i,), ...) is None]
        own = {p.name: constants[i,] for i, p in enumerate(kernel.params) if p.is_constexpr}
        found[
            f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__} {own} without {absent}"
        ] += 1
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        fused.setdefault(name, set()).add(options.enable_fp_fusion)
        kernel.device_caches[device][0][key] = stub
        return stub

    stub = SimpleNamespace(
        run=lambda *a: None, launch_metadata=lambda *a: None, function=None, packed_metadata=None
    )
    own, JITFunction._do_compile = JITFunction._do_compile, compiled
    lengths = random.Random(0)
    with overhead.not_launched():
        for _ in range(200):
            steps(lengths.randint(1000, 8192))
        found_rows = overhead.overhead(
            [operations()["rmsnorm"]],
            "cpu",
            torch.float32,
            rounds=1,
            sample_seconds=0.0,
            implementation="triton",
        )
    x = torch.ones(2, 8)
    try:
        operations()["rmsnorm"].public(x, x[0], implementation="triton")
    except ImplementationUnavailable as error:
        after = str(error)
    JITFunction._do_compile = own
    fused = {name: sorted(choices) for name, choices in fused.items()}
    return {
        "compilations": found,
        "fused": fused,
        "rows": found_rows,
        "after": after,
        "kept": kept(),
    }


def kept():
    """Compares cached launches with Triton's own, for the same arguments: the number of launches
    and kernels, and those that differ in kernel, grid or arguments.
    """
    from triton.experimental.gluon.nvidia import hopper
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tilewright.bench import launches
    from tilewright.kernels import launch as launch_cache
    from tilewright.kernels.moe import grouped_gemm_triton, specialized

    descriptors = TensorDescriptor, hopper.TensorDescriptor
    ran, other = [], set()
    counts = Counter()

    def compiled(kernel, key, signature, device, constants, options, attributes, warmup):
        def run(x, y, z, stream, function, metadata, entering, enter, leave, *passed):
            passed = [
                str(
                    vars(a)
                    if isinstance(a, descriptors)
                    else a.data_ptr()
                    if isinstance(a, torch.Tensor)
                    else a
                )
                for a in passed
            ]
            ran.append((key, (x, y, z), passed, enter is None))

        kernel.device_caches[device][0][key] = stub = SimpleNamespace(
            run=run, launch_metadata=lambda *a: None, function=None, packed_metadata=None
        )
        return stub

    def checked(kernel, grid, *arguments, **constants):
        ran.clear()
        launch(kernel, grid, *arguments, **constants)
        kernel[grid](*arguments, **launch_cache.COMPILE_OPTIONS, **constants)
        (*first, is_kept), (*second, _) = ran
        described = " with descriptors" * any(isinstance(a, descriptors) for a in arguments)
        counts[f"{kernel.fn.__module__}.{kernel.fn.__name__}{described}"] += is_kept
        if first != second:
            other.add(f"{kernel.fn.__name__}: {first} is not {second}")

    launch, JITFunction._do_compile = launch_cache.launch, compiled
    for module in [m for name, m in sys.modules.items() if name.startswith("tilewright.kernels.")]:
        if getattr(module, "launch", None) is launch and module is not launch_cache:
            module.launch = checked
        for kernel in [k for k in vars(module).values() if isinstance(k, JITFunction)]:
            kernel.device_caches.clear()
    launch_cache.clear_launch_cache()
    grouped_gemm_triton.has_tma = lambda device: True
    with overhead.not_launched():
        for tokens in (1024, 1024, 1040, 1041, 16, 1):
            for dtype in (torch.bfloat16, torch.float16):
                steps(max(tokens, 128), dtype)
        for rows in (256, 256, 300):  # by specialized warps
            x, w = torch.empty(rows, 64, dtype=torch.bfloat16), torch.empty(2, 96, 64).bfloat16()
            ends = torch.tensor([rows // 2, rows], dtype=torch.int32)
            key = 96, 64, 2, 128, True, False, True
            forward = specialized.FORWARD
            roles = forward.compiled(**{**forward.named(key), "large": True})[-1]
            with forward.override(x.device, key, roles):
                specialized.forward(x, w, ends)
        rmsnorm = sys.modules["tilewright.kernels.norm.rmsnorm_triton"]
        norm = sys.modules["tilewright.kernels.norm.operators"]
        for shift in (0, 0, 1, 0):  # the first element after a 16-byte boundary
            x = torch.empty(8 * 64 + shift)[shift:].view(8, 64)
            rmsnorm.forward(x, None, x[0], None, norm.Norm(1e-6, 0.0, True))
        rmsnorm.launch, watched = launch, []
        with launches._launch_hooks(
            lambda *a: None, lambda kernel, *a: watched.append(kernel.fn.__name__)
        ):
            for _ in range(2):
                rmsnorm.forward(x, None, x[0], None, norm.Norm(1e-6, 0.0, True))
    return {"counts": counts, "different": sorted(other), "watched": watched}


@pytest.fixture(scope="module")
def ran(compiling):
    variables = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}"}
    done = subprocess.run(
        [compiling, __file__], env=variables, cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_packed_lengths_ask_for_few_compilations(ran):
    """Each is a stall of a second or more, on some rank of many."""
    found = ran["compilations"]
    assert len(found) >= 30, f"kernels are missing: {sorted(found)}"
    assert max(found.values()) <= MOST, {name: n for name, n in found.items() if n > MOST}


def test_each_launch_chooses_fusion_whatever_tritons_version_would(ran):
    assert len(ran["fused"]) >= 30 and set(map(tuple, ran["fused"].values())) == {(True,)}


def test_a_kept_launch_is_the_one_that_triton_would_make(ran):
    """The same compiled kernel, grid and arguments for any integers, dtypes and alignment."""
    assert ran["kept"]["different"] == []
    kept = {name for name, n in ran["kept"]["counts"].items() if n}
    assert (
        len(kept) >= 20
        and "tilewright.kernels.moe.grouped_gemm_triton._gemm with descriptors" in kept
        and "tilewright.kernels.moe.grouped_gemm_gluon._gemm with descriptors" in kept
    ), kept


def test_a_kept_launch_is_seen_by_the_search_of_constants(ran):
    assert ran["kept"]["watched"] == ["_forward"] * 2


def test_host_time_of_a_launch_is_measured_without_a_gpu(ran):
    assert [r["grad"] for r in ran["rows"]] == [False, True]
    for r in ran["rows"]:
        assert not r["errors"] and all(r["us"][level]["least"] > 0 for level in overhead.LEVELS)
        assert r["least_over_launch_us"] == r["us"]["public"]["least"] - r["us"]["launch"]["least"]
    assert "Triton kernels take CPU tensors only under TRITON_INTERPRET=1" in ran["after"]


if __name__ == "__main__":
    print(json.dumps(main()))
