"""Runs of compiled Triton kernels: their PTX for sm_90 and sm_100, emulated on the CPU
(lab/tilewright_lab/emulator), where it must satisfy the numerics contract, stay inside tensors,
write every element once and have no races. No GPU is needed. Kernels that use tensor cores run as
compiled for sm_80 (mma, cp.async), sm_90 (wgmma, TMA) and sm_100 (tcgen05).

Triton's interpreter truncates on a cast to bfloat16 and runs a kernel's Python on whole blocks. So
bfloat16 is tested here, and so is the compiler's output: vectorization, layouts, exchanges through
shared memory, prefetching.

    python -m tests.ptx               # all of it, into tests/ptx/table.jsonl
    python tests/ptx/compiled.py      # runs those in standard input, a line of JSON for each
    python tests/ptx/compiled.py --counts [NAME ...]        # writes the budgets of counts

`make test` runs `fixed()`, in other processes than pytest's (verdicts.py), where Triton's
interpreter may be installed.
"""

import contextlib
import functools
import importlib
import itertools
import json
import pathlib
import re
import sys
import time
import traceback
from unittest import mock

import torch
import triton
from helpers import specialized

from bench.page.files import counts_of
from tilewright.bench import contract
from tilewright.core import platform
from tilewright.core.registry import Op, short
from tilewright.kernels.tuning import gluon_name
from tilewright.ops import (
    BlockFP8,
    adamw_,
    dequantize_block_fp8,
    dequantize_nvfp4,
    permute,
    quantize_block_fp8,
    quantize_nf4,
    quantize_nvfp4,
)
from tilewright.ops.activation.activation import Gate
from tilewright.selection import operations

ROOT = pathlib.Path(__file__).parents[2]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def multiplies(op):
    """Whether its kernels use tensor cores."""
    impl = op.implementation("triton")
    searched = (
        s
        for t in impl.tunables()
        for key in map(t.named, t.keys)
        for s in t.specs(key, t.heuristic(**key))
    )
    return any(
        set(uses) - {"e2m1", "e4m3"}
        for spec in (*impl.gate(), *searched)
        for uses in spec.uses.values()
    )


OPS = [op for op in operations().values() if "triton" in op.names() and not multiplies(op)]
# FP8 products, which tensor cores have from sm_89 on; those that scale as they multiply, sm_100.
LATER = ("fp8_linear", "low_precision_linear", "low_precision_grouped_gemm")
PRODUCTS = [
    op
    for op in operations().values()
    if "triton" in op.names() and multiplies(op) and op.name not in LATER
]

# For sm_100, ops whose cases have other names than those that most products run there.
WITH_TENSOR_MEMORY = {
    "attention": ("gqa", "full", "documents", "sinks", "softcap", "latent"),
    "newton_schulz": ("ragged", "tall aligned", "square"),
}
# For sm_100 and in float32, a subset that covers every kernel and most branches; the first ones in
# float16, too. (Both dtypes are tested in the interpreter with all cases.)
MORE = {
    "rmsnorm": ("gemma", "bias_none_cast", "wide"),
    "add_rmsnorm": ("qk_norm", "fp32_weight"),
    "layernorm": ("no_bias", "ragged", "wide"),
    "silu_mul": ("packed", "by_eight"),
    "gelu_mul": ("ragged", "erf_packed"),
    "rope": ("per_token", "partial", "partial_interleaved"),
    "qk_norm_rope": ("gqa", "partial", "partial_interleaved", "no_norm"),
    "cross_entropy": ("one_class", "everything_wide"),
    "linear_cross_entropy": ("bf16_sums",),
    "linear_logprob": ("everything",),
    "route": ("deepseek", "renormalized"),
    "permute": ("ragged", "sentinels"),
    "unpermute": ("ragged", "sentinels", "unweighted"),
    "quantize_nvfp4": (
        "ragged",
        "square",
        "random",
        "hadamard_signs",
        "transpose",
        "turned_hadamard",
    ),
    "dequantize_nvfp4": ("ragged", "noise"),
    "adamw_": ("ragged", "chunks"),
}
# Cases of ops that share kernels with others, whose cases all run.
SOME = {
    "quantize_mxfp8": ("random", "transpose"),
    "dequantize_mxfp8": ("ragged",),
    "add_rmsnorm_quantize": ("mxfp8",),
    "logprob_entropy": ("temperature", "inplace"),
}


LONG = {
    "grouped_gemm": (3, 370, 144, 272, (300, 0, 60)),
    "moe_mlp": ((104, 3, 2, 272, 80), "sentinels"),
    "quantized_linear": ("nvfp4", 40, 144, 1040, True),
}  # arguments of the ops' own case makers
CASES_OF = {
    "grouped_gemm": ("tilewright.ops.moe.grouped_gemm_cases", "case"),
    "moe_mlp": ("tilewright.ops.moe.moe_cases", "case"),
    "quantized_linear": ("tilewright.ops.quant.quantized_linear", "linear_case"),
}


# Kernels that write a table of states, as many as documents of these lengths may have chunks.
PER_CHUNK = ("_states", "_state_gradients")


# ---- in the other processes


def contract_holds(driver, op, case, dtype, implementation="triton"):
    with contract.poisoned():
        broken = contract.check(op, implementation, case, "cpu", dtype)
    assert not broken, "; ".join(map(str, broken))
    for name, memory in zip(
        driver.names, driver.memories, strict=True
    ):  # every element is written exactly once
        for t, _ in memory.tensors:
            times = memory.times(t, "written")
            if name == "_map_tiles" and times.any():  # a table with room for extra tiles
                count = int(t[-1])
                parts = times[:-1].view(3, -1)
                assert times[-1] == 1 and not parts[:, count:].any(), (t, times)
                times = parts[:, :count]
            elif name == "_backward" and t.dtype in (F32, torch.int32):
                continue  # sums that several programs add to, and whose turn it is
            elif name in PER_CHUNK and t.dim() == 4 and times.any():  # has room for extra chunks
                chunks = times.view(t.shape[0], -1)
                times = chunks[: int(chunks.any(1).sum())]
            assert not times.numel() or times.max() == times.min() <= 1, (name, t.shape, times)


# ---- costs, in counts


def of(*shape, dtype=BF16, seed=0):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .requires_grad_()
    )


def routing(T, E, K):
    g = torch.Generator().manual_seed(0)
    return torch.rand(T, E, generator=g).topk(K, -1).indices, torch.rand(
        T, K, generator=g
    ).requires_grad_()


def quantized(quantize, **options):
    return {"q": quantize(of(16, 4096).detach(), implementation="eager", **options)}


def moved():
    """Rows moved as by a mixture of experts."""
    index, weight = routing(16, 8, 2)
    rows, _, _, position = permute(of(16, 2048).detach(), index, 8, implementation="eager")
    return {"rows": rows.requires_grad_(), "expert_weight": weight, "position": position}


# Aligned inputs, large enough that edges do not matter: op, or op and variant -> keyword arguments.
COUNTED = {
    "rmsnorm": lambda: {"x": of(16, 4096), "weight": of(4096)},
    "add_rmsnorm": lambda: {"x": of(16, 4096), "residual": of(16, 4096), "weight": of(4096)},
    "layernorm": lambda: {"x": of(16, 4096), "weight": of(4096), "bias": of(4096)},
    "silu_mul": lambda: {"gate": of(4, 4096), "up": of(4, 4096)},
    "gelu_mul": lambda: {"gate": of(4, 4096), "up": of(4, 4096)},
    "rope": lambda: {
        "q": of(1, 8, 16, 128),
        "k": of(1, 2, 16, 128),
        "cos": of(16, 64, dtype=F32).detach(),
        "sin": of(16, 64, dtype=F32).detach(),
    },
    "cross_entropy": lambda: {"logits": of(4, 32768), "target": torch.tensor([5, 0, 32767, 9])},
    "permute": lambda: {"x": of(16, 2048), "expert_index": routing(16, 8, 2)[0], "num_experts": 8},
    "unpermute": moved,
    "hadamard": lambda: {"x": of(16, 4096), "size": 32},
    "quantize_nf4": lambda: {"x": of(16, 4096).detach()},
    "dequantize_nf4": lambda: quantized(quantize_nf4),
    "quantize_nvfp4": lambda: {"x": of(16, 4096).detach(), "global_scale": torch.tensor(1e-3)},
    "dequantize_nvfp4": lambda: quantized(quantize_nvfp4),
    "quantize_block_fp8": lambda: {"x": of(16, 4096).detach(), "block": (1, 128)},
    "quantize_block_fp8 128x128": lambda: {"x": of(128, 1024).detach()},
    "dequantize_block_fp8": lambda: quantized(quantize_block_fp8, block=(1, 128)),
    "quantize_mxfp8": lambda: {"x": of(16, 4096).detach()},
    "quantize_mxfp8 transpose": lambda: {"x": of(64, 512).detach(), "transpose": True},
    "silu_mul_quantize": lambda: {"gate": of(4, 4096), "up": of(4, 4096)},
    "rmsnorm_quantize": lambda: {"x": of(16, 4096), "weight": of(4096)},
    "add_rmsnorm_quantize": lambda: {
        "x": of(8, 4096),
        "residual": of(8, 4096),
        "weight": of(4096),
        "format": "mxfp8",
    },
    "grouped_gemm": lambda: {
        "x": of(256, 256),
        "weight": of(2, 256, 256),
        "offsets": torch.tensor([128, 256], dtype=torch.int32),
    },
    "attention": lambda: {"q": of(1, 2, 256, 64), "k": of(1, 1, 256, 64), "v": of(1, 1, 256, 64)},
}
COUNTS = counts_of(triton.__version__)
BUDGETS = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}


def count(driver, name):
    """kernel -> counts, for a call and its derivative."""
    driver.counts = {}
    op = operations()[name.split()[0]]
    contract.run(op, "triton", COUNTED[name]())
    found = {kernel: counts.facts() for kernel, counts in sorted(driver.counts.items())}
    driver.counts = None
    return found


WIDE = "a thread takes 32 bytes of a row or more, so that it stores 16: two loads for a sector, the second from the L1"
FEW = "numbers of a row or a token, few beside its elements, that all threads of a program read"
# Kernels that request more than 1.05 times the sectors that their programs touch, and why.
UNCOALESCED = {
    "_rotate": "cos and sin, for each head of a token",
    "_backward": FEW,
    "_losses": FEW,
    "_collect": FEW,
    "_spread": FEW,
    "_place": "a table of eight experts",
    "_total": "one number that is given, which all warps of the one program read",
    "_nf4_dequantize": "pairs of numbers, by a byte of codes",
    "_nvfp4_dequantize": "scales, a byte for 16 elements",
    "_block_fp8_dequantize": "a scale for 128 elements",
    **dict.fromkeys(
        (
            "_nvfp4_rows",
            "_block_fp8_quantize",
            "_silu_mul_quantize",
            "_rmsnorm_quantize",
        ),
        WIDE,
    ),
}


def counted(driver, name):
    """No more than the budget, which this file writes when run with `--counts [names]`."""
    found, budgets = count(driver, name), BUDGETS[name]
    assert found.keys() == budgets.keys()
    for kernel, counts in found.items():
        now, old = flat(counts), flat(budgets[kernel])
        more = {what: (n, old.get(what, 0)) for what, n in now.items() if n > old.get(what, 0)}
        assert not more, f"{kernel}: more than the budget (now, budget): {more}"
        for kind, least in (
            counts["least"].items() if name not in ("grouped_gemm", "attention") else ()
        ):
            asked = counts["requested"][kind]
            assert asked <= 1.05 * least or kernel in UNCOALESCED, (
                f"{kernel}: {asked} sectors {kind} for {least}"
            )


def flat(counts):
    return {
        f"{what} {part}": n
        for what, value in counts.items()
        for part, n in (value if isinstance(value, dict) else {"": value}).items()
    }


def long_sums(driver, name, dtype):
    """Sums long enough to reuse pipeline stages, and the large tiles for many rows."""
    contract_holds(driver, operations()[name], long_case(name), dtype)


def long_case(name):
    module, make = CASES_OF[name]
    return getattr(importlib.import_module(module), make)("long_sums", *LONG[name])


# Gates of experts with biases, with tiles of which both halves have columns.
GATES = {
    "halves": {},
    "pairs": {
        "transposed": True,
        "gate": Gate(alpha=1.702, limit=1.06, up_limit=0.94, up_offset=1.0, interleaved=True),
    },
}


def biased(name):
    from tilewright.ops.moe import moe_cases

    sizes = 40, 3, 2, 144, 208
    return moe_cases.case(f"biased {name}", sizes, "sentinels", biases=True, **GATES[name])


# Attention with several blocks of keys: sizes, and options of its own case maker.
ATTENDED = {
    "blocks": ((1, 2, 1, 300, 64), {}),
    "documents": ((1, 1, 1, 330, 64), {"documents": (0, 1, 140, 330)}),
    "window": ((1, 1, 1, 300, 128), {"documents": (0, 3, 300), "window": 130, "sinks": True}),
    "full softcap": ((1, 1, 1, 150, 32), {"causal": False, "softcap": 2.0}),
    "last queries": ((1, 2, 1, 70, 40), {"keys": 300}),
    "wide": ((1, 1, 1, 140, 256), {}),
    "latent": ((1, 2, 1, 150, (192, 128)), {"documents": (0, 20, 150)}),
    # Columns in part of a box, and blocks before the first key.
    "latent window": ((1, 1, 1, 130, (160, 96)), {"window": 70}),
    "latent full": ((1, 1, 1, 70, (136, 72)), {"causal": False}),
}


def attended(name):
    from tilewright.ops.attention import attention

    sizes, options = ATTENDED[name]
    return attention._case(name, *sizes, **options)


def apart(driver, launch, D=64, DV=64):
    """Documents share blocks of keys and of queries, and one is NaN."""
    from tilewright.kernels.attention import attention_triton as kernels
    from tilewright.kernels.attention import specialized as passes

    tunable = {t.name: t for t in passes.TUNABLES}[gluon_name(launch)]
    config, others = specialized(tunable), {tunable.beside: tunable}
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 1, 200, width, generator=g).to(BF16) for width in (D, D, DV, DV)
    )
    bounds, options = torch.tensor([0, 45, 70, 200]), kernels.Variant()

    def results():
        documents = kernels.map_documents(bounds, 200, 128)
        found = kernels.forward(q, k, v, documents, None, options, 0, others)
        if launch == "attention/forward":
            return found[:1]
        return kernels.backward(dout, q, k, v, *found, documents, None, options, 0, others=others)[
            :3
        ]

    with mock.patch.object(tunable, "config", lambda *_: config):
        alone = results()
        for t in (q, k, v, dout):
            t[:, :, 45:70] = float("nan")
        found = results()
    assert driver.launches[-1].kernel.specialized or driver.launches[-2].kernel.specialized
    for one, other in zip(found, alone, strict=True):
        assert one[:, :, 45:70].isnan().any()
        for part in (slice(0, 45), slice(70, 200)):
            assert torch.equal(one[:, :, part], other[:, :, part])


def any_row_of_logits(driver, V, stride, offset, dtype):
    """Rows of infinities and NaN, ignored and bad targets, in all widths, strides and
    alignments.
    """
    from tilewright.kernels.loss import softmax_stats_triton as kernels
    from tilewright.kernels.loss.operators import Scaling, Softmax, StatsGradients, Wanted
    from tilewright.ops.loss import softmax_stats

    g = torch.Generator().manual_seed(0)
    memory = torch.randn(8 * stride + offset, generator=g).to(dtype) * 3
    x = torch.as_strided(memory, (8, V), (stride, 1), offset)
    inf = float("inf")
    x[1], x[2, V // 2], x[3, 5], x[4, : V // 2] = -inf, inf, float("nan"), -inf
    target = torch.tensor([0, 1, 2, 3, V - 1, -100, V, 7])
    options = Scaling(), Wanted(True, True, True)
    found = kernels.forward(x, target, None, *options)
    truth = softmax_stats.stats_eager(x.double(), target, None, *options)
    for name, a, t in zip(truth._fields, found, truth, strict=True):
        # A row with a NaN may report any number as its peak.
        for i in {
            "log_sum": range(8),
            "peak": [0, 1, 2, 4, 5, 6, 7],
            "picked": [0, 1, 2, 4, 5, 6, 7],
        }.get(name, [0, 4, 5, 6, 7]):
            assert contract.error(a[i : i + 1], t[i : i + 1])[0] < 2e-5, (name, i, a[i], t[i])
    inside = (target >= 0) & (target < V)
    g_lse, g_target = torch.randn(8, generator=g), torch.randn(8, generator=g)
    g_lse[[1, 2, 3, 5]] = 0  # rows 1 to 3 have a target, row 5 has none
    g_target[[1, 2, 3]] = 0
    peak, log_sum = found[:2]
    expected = (
        torch.exp(x.double() - (peak.double() + log_sum.double())[:, None])
        * g_lse.double()[:, None]
    )
    expected[inside.nonzero()[:, 0], target[inside]] += g_target.double()[inside]
    expected[[1, 2, 3, 5]] = 0
    of_loss = Softmax(peak, log_sum), StatsGradients(g_lse, g_target)
    args = x, target, None, Scaling(), *of_loss, None
    out = kernels.backward(*args)
    assert (
        not driver.memories[-1].times(x, "read")[[1, 2, 3, 5]].any()
    )  # rows without gradients are not read
    before = memory.clone()
    kernels.backward_(*args)
    for result in (out, x):
        assert contract.error(result, expected)[0] < 8 * torch.finfo(dtype).eps
    torch.as_strided(before, (8, V), (stride, 1), offset).copy_(x)
    assert torch.equal(before, memory)  # memory between rows is unchanged


def capped_rows(driver, dtype):
    """Infinities, and a NaN at any place of a block, under a softcap that needs no maximum: NaN
    shows although a compiled polynomial does not have it.
    """
    from tilewright.kernels.loss import softmax_stats_triton as kernels
    from tilewright.kernels.loss.operators import Scaling, Wanted
    from tilewright.ops.loss import softmax_stats

    inf = float("inf")
    x = torch.randn(7, 9000, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0], x[1, 5], x[2, 4500] = -inf, inf, 100
    for i in range(4):
        x[3 + i, 4200 + i] = float("nan")
    args = x, torch.full((7,), 4500), None, Scaling(30.0), Wanted()
    found, truth = kernels.forward(*args), softmax_stats.stats_eager(x.double(), *args[1:])
    assert found.log_sum[3:].isnan().all()
    for a, t in zip(found[:3], truth, strict=False):
        torch.testing.assert_close(a[:3].double(), t[:3], rtol=1e-6, atol=1e-5)


def losses_of_rows(driver):
    """In parts of more and fewer rows than a block of the kernel, of more targets than it counts at
    a time, with all options."""
    from tilewright.kernels.loss import softmax_stats_triton as kernels
    from tilewright.kernels.loss.operators import LossInputs, LossOutputs, Stats

    cross_entropy = importlib.import_module("tilewright.ops.loss.cross_entropy")

    g = torch.Generator().manual_seed(0)
    T, V = 16_500, 37
    y = torch.randint(V, (T,), generator=g)
    y[::3], y[[1, 4201]] = -100, torch.tensor([V, -1])
    stats = Stats(*(torch.randn(T, generator=g) for _ in range(4)))
    weight = torch.rand(V, generator=g)
    asked = LossInputs(
        y,
        V,
        -100,
        weight,
        weight.sum(),
        torch.randn(T, generator=g).bfloat16(),
        None,
        0.1,
        0.01,
        True,
    )
    results = []
    for losses, ends in ((cross_entropy.losses_in_torch, (T,)), (kernels.losses, (4200, 4203, T))):
        found, parts, start, total = LossOutputs(torch.empty(T), torch.empty(())), [], 0, None
        for end in ends:
            rows = slice(start, end)
            total, *part = losses(
                Stats(*(None if t is None else t[rows] for t in stats)), rows, asked, found, total
            )
            parts.append(part)
            start = end
        results.append((total, *found, *map(torch.cat, zip(*parts, strict=True))))
    assert driver.names == ["_losses"] * 3
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def scales(driver, dtype):
    """A gradient times an upstream one: whole blocks and a remainder; no access at all for 1."""
    from tilewright.kernels.loss import softmax_stats_triton as kernels

    for n in (5, 3 * 4096 + 6):
        x = torch.randn(n).to(dtype)
        before = x.clone()
        kernels.scale_(x, torch.ones(()))
        assert torch.equal(x, before)
        assert (
            not driver.memories[-1].times(x, "read").any()
            and not driver.memories[-1].times(x, "written").any()
        )
        kernels.scale_(x, torch.tensor(0.3))
        assert torch.equal(x, (before.float() * torch.tensor(0.3)).to(dtype))
        assert (driver.memories[-1].times(x, "written") == 1).all()


def states_in_bfloat16(driver):
    """Beside parameters in float32, which no contract case has; and tensors off 16 bytes."""
    case = next(c for c in operations()["adamw_"].cases if c.name == "chunks")
    for offset in (0, 1):
        results = []
        for name in ("triton", "eager"):
            given = case.make("cpu", F32, 0)
            for state in ("exp_avgs", "exp_avg_sqs"):
                held = [torch.zeros(t.numel() + offset, dtype=BF16) for t in given[state]]
                given[state] = [
                    h[offset:].view(t.shape).copy_(t)
                    for h, t in zip(held, given[state], strict=True)
                ]
            results.append(contract.leaves(adamw_(**given, implementation=name)))
        for a, b in zip(*results, strict=True):
            tolerance = 1e-2 if a.dtype == BF16 else 2e-6  # a tie falls to the other side
            torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-6)
            if a.dtype == BF16:
                assert (a == b).double().mean() > 0.98


def narrow_rows_on_four_warps(driver):
    """Two threads exchange partial sums over rows and both write the result, which must have the
    same bits in both.
    """
    from tilewright.kernels.norm import layernorm_triton, rmsnorm_triton

    for name, kernels, case, width in (
        ("rmsnorm", rmsnorm_triton, "bias_none_cast", 64),
        ("layernorm", layernorm_triton, "fp32_weight", 96),
        ("layernorm", layernorm_triton, "ragged", 100),
    ):
        op, tunable = operations()[name], kernels.BACKWARD
        constants = {**tunable.heuristic(width, 2), "num_warps": 4}
        with tunable.override(torch.device("cpu"), (width, 2), constants):
            contract_holds(driver, op, next(c for c in op.cases if c.name == case), BF16)


# Candidates of a launch that are other code than the heuristic's: launch, what changes (ROLES:
# the implementation, to gluon with its kernel in this launch), and cases of the op.
_WIDE = {"BLOCK_M": 128, "BLOCK_N": 256, "num_warps": 8, "num_stages": 4, "per_sm": 1}
CHANGES = {
    "BLOCK_N": {**_WIDE, "maxnreg": None},
    "SPLIT": {**_WIDE, "SPLIT": 0},
    "GATHER": {"GATHER": True},
}
ALTERNATIVES = (
    ("moe_mlp", "moe_mlp/up_swiglu", "BLOCK_N", ("aligned",)),
    ("moe_mlp", "moe_mlp/up_swiglu", "ROLES", ("aligned", "gpt_oss_aligned")),
    ("moe_mlp", "moe_mlp/down_dswiglu", "ROLES", ("aligned", "gpt_oss_aligned")),
    ("grouped_gemm", "grouped_gemm/forward", "ROLES", ("aligned",)),
    ("grouped_gemm", "grouped_gemm/backward_x", "ROLES", ("aligned",)),
    ("grouped_gemm", "grouped_gemm/backward_weight", "ROLES", ("aligned",)),
    ("moe_mlp", "grouped_gemm/backward_weight", "ROLES", ("aligned",)),
    ("moe_mlp", "moe_mlp/down_dswiglu", "SPLIT", ("aligned", "sentinels", "gpt_oss_aligned")),
    ("newton_schulz", "newton_schulz/symmetric", "ROLES", ("square", "tall aligned", "tiles")),
    ("fp8_linear", "fp8_linear/fp8", "ROLES", ("block_fp8 aligned", "block_fp8 two_scales")),
    (
        "low_precision_linear",
        "low_precision_linear/by_rows",
        "ROLES",
        ("block_fp8 aligned",),
    ),
    (
        "low_precision_grouped_gemm",
        "low_precision_grouped_gemm/rows",
        "ROLES",
        ("block_fp8 aligned",),
    ),
    (
        "low_precision_grouped_gemm",
        "low_precision_grouped_gemm/weights",
        "ROLES",
        ("block_fp8 aligned",),
    ),
    (
        "attention",
        "attention/forward",
        "ROLES",
        ("gqa", "full", "documents", "cache"),
    ),
    ("attention", "attention/backward_kv", "ROLES", ("gqa", "full", "sinks", "cache")),
    ("dequantize_nf4", "dequantize_nf4/dequantize", "GATHER", ("ragged", "matrix nested")),
)


def alternative(driver, op, case, launch, changes):
    """As the suite would time it, with this case's sizes."""
    by, name = ("gluon", gluon_name(launch)) if changes == "ROLES" else ("triton", launch)
    [tunable] = [t for t in op.implementation(by).tunables() if t.name == name]
    other = specialized(tunable) if changes == "ROLES" else CHANGES[changes]

    def config(device, *key):
        return {**tunable.heuristic(**tunable.named(key)), **other}

    before = len(driver.launches)
    with mock.patch.object(tunable, "config", config):
        contract_holds(driver, op, case, BF16, by)
    if changes == "ROLES":
        assert any(each.kernel.specialized for each in driver.launches[before:])


def fp8_codes(rows, columns, g):
    """Bytes of finite e4m3, and a scale for 128 columns."""
    data = torch.randn(rows, columns, generator=g).mul(30).to(torch.float8_e4m3fn)
    scale = torch.rand(rows, -(-columns // 128), generator=g) + 0.5
    return data.view(torch.uint8), scale


def same_bits(driver, tunable, run, key=None):
    """Specialized warps sum in the same order as the other kernel. Returns what it found."""
    key = tunable.named(key or tunable.keys[-1])
    roles, found = tunable.compiled(**key), []
    for config in ({**tunable.beside.heuristic(**key), "ROLES": False}, *roles):
        with mock.patch.object(tunable, "config", lambda *_, config=config: config):
            found.append(run())
        assert driver.launches[-1].kernel.specialized == config["ROLES"]
    assert roles and all(torch.equal(found[0], other) for other in found[1:])
    return found[0]


def fp8_linear(driver, T, N, K):
    from tilewright.kernels.quant import specialized as kernels

    g = torch.Generator().manual_seed(0)
    (x, x_scale), (w, w_scale) = fp8_codes(T, K, g), fp8_codes(N, K, g)
    w_scale, bias = w_scale[: -(-N // 128)].contiguous(), torch.randn(N, generator=g).to(BF16)
    x, w = (t.view(torch.float8_e4m3fn) for t in (x, w))
    same_bits(driver, kernels.FP8, lambda: kernels.fp8(x, x_scale, w, w_scale, bias, BF16))


def fp8_dweight(driver, M, N, columns, dtype):
    from tilewright.kernels.quant import specialized as kernels

    g = torch.Generator().manual_seed(0)
    factors = (*fp8_codes(M, columns, g), *fp8_codes(N, columns, g))
    same_bits(driver, kernels.BY_ROWS, lambda: kernels.dense.by_rows(*factors, dtype))


def scaled_factor(recipe, rows, K, g):
    """Codes of MXFP8 or NVFP4, of which there is no whole number of scales in MXFP8."""
    from tilewright.ops.quant.low_precision_linear import Factor

    if recipe == "mxfp8":
        codes, _ = fp8_codes(rows, K, g)
        scale = torch.randint(120, 133, (rows, -(-K // 32)), generator=g, dtype=torch.uint8)
        return Factor(codes, scale, None, 1, K)
    codes = torch.randint(0, 256, (rows, K // 2), generator=g, dtype=torch.uint8)
    scale = (torch.rand(rows, K // 16, generator=g) + 0.5).to(torch.float8_e4m3fn)
    return Factor(codes, scale.view(torch.uint8), torch.rand((), generator=g) + 0.5, 1, K)


def block_scaled(driver, recipe, M, N, K, dtype):
    """MXFP8 with a bias, or NVFP4: beside the other kernel, float64."""
    from tilewright.kernels.quant import specialized as kernels
    from tilewright.ops.quant.low_precision_linear import values

    g, e2m1 = torch.Generator().manual_seed(0), recipe == "nvfp4"
    a, b = (scaled_factor(recipe, rows, K, g) for rows in (M, N))
    bias = None if e2m1 else torch.randn(N, generator=g).to(dtype)
    found = same_bits(
        driver,
        kernels.SCALED,
        lambda: kernels.dense.scaled(*a[:3], *b[:3], bias, dtype),
        (e2m1, N, a.data.shape[1], M, True),
    )
    a, b = (values(t, recipe, "eager", torch.float64) for t in (a, b))
    truth = a @ b.mT if bias is None else a @ b.mT + bias.double()
    assert (found - truth).norm() <= torch.finfo(dtype).eps * truth.norm()


def scaled_experts(driver, launch, recipe, N, K, counts, tail, dtype):
    """Rows of each expert, and of the tail: forward or gradients of weights. What is at places
    between them is not 0.
    """
    from tilewright.kernels.quant import specialized as kernels
    from tilewright.ops.moe.low_precision_grouped_gemm import Placed, places

    g = torch.Generator().manual_seed(0)
    E, R = len(counts), sum(counts) + tail
    placed, P = Placed.of(torch.tensor(counts).cumsum(0), R), places(R, E)
    key = recipe == "nvfp4", N, K, P, True
    if launch == "scaled_weights":
        dy, x = (scaled_factor(recipe, rows, P, g)[:3] for rows in (N, K))
        factors = *dy, *x, placed.ends.int(), dtype
        run = functools.partial(kernels.experts.scaled_weights, *factors)
        return same_bits(driver, kernels.SCALED_WEIGHTS, run, key)
    x, w = (scaled_factor(recipe, rows, K, g)[:3] for rows in (P, E * N))
    of_experts = (w[0].view(E, N, -1), w[1].view(E, N, -1), w[2])

    def rows():
        out = torch.full((R, N), float("nan"), dtype=dtype)
        kernels.experts.scaled_rows(*x, *of_experts, placed.expert.int(), placed.row.int(), out)
        return out

    return same_bits(driver, kernels.SCALED_ROWS, rows, key)


def placed_rows(driver, R, columns, stride, offsets, dtype):
    """As the op's definition places them, each place once."""
    from tilewright.kernels.quant import low_precision_grouped_triton as kernels
    from tilewright.ops.moe.low_precision_grouped_gemm import Placed, places

    g, ends = torch.Generator().manual_seed(0), torch.tensor(offsets, dtype=torch.int32)
    x = torch.randn(R, stride, generator=g).to(dtype)[:, :columns]
    expected = Placed.of(ends, R)
    x[expected.place < 0] = float("nan")
    placed, found = kernels.place(x, ends, places(R, len(offsets)))
    assert torch.equal(placed, expected.spread(x))
    for name in ("ends", "expert", "row"):
        assert torch.equal(getattr(found, name).long(), getattr(expected, name)), name
    assert all(driver.memories[-1].times(t, "written").eq(1).all() for t in (placed, *found[1:]))


def scaled_case(recipe, *sizes):
    from tilewright.ops.quant import low_precision_linear as of_op

    return of_op._case(recipe, "specialized", *sizes, bias=True, seed=3 * (recipe == "nvfp4"))


def fp8_experts(driver, launch, N, K, counts, tail, dtype):
    """Rows of each expert, and of the tail: forward or gradients of weights."""
    from tilewright.kernels.quant import specialized as kernels
    from tilewright.ops.moe.low_precision_grouped_gemm import Placed, places

    g = torch.Generator().manual_seed(0)
    E, R = len(counts), sum(counts) + tail
    placed, P = Placed.of(torch.tensor(counts).cumsum(0), R), places(R, E)
    if launch == "weights":
        factors = (*fp8_codes(N, P, g), *fp8_codes(K, P, g), placed.ends.int(), dtype)
        return same_bits(driver, kernels.WEIGHTS, lambda: kernels.experts.weights(*factors))
    w, scale = fp8_codes(E * N, K, g)
    scale = scale.view(E, N, -1)[:, : -(-N // 128)].contiguous()
    factors = (*fp8_codes(P, K, g), w.view(E, N, K), scale)

    def run():
        out = torch.full((R, N), float("nan"), dtype=dtype)
        kernels.experts.rows(*factors, placed.expert.int(), placed.row.int(), out)
        return out

    return same_bits(driver, kernels.ROWS, run)


def rounds_to_nearest(driver):
    """The contract's tolerance would allow a truncation."""
    rmsnorm, silu_mul = (operations()[name].public for name in ("rmsnorm", "silu_mul"))
    for dtype in (BF16, F16):
        g = torch.Generator().manual_seed(0)
        a, b = (
            torch.randn(8, 512, generator=g).to(dtype),
            torch.randn(8, 512, generator=g).to(dtype),
        )
        w = b[0].contiguous()
        for found, truth in (
            (
                silu_mul(a, b, implementation="triton"),
                torch.nn.functional.silu(a.double()) * b.double(),
            ),
            (
                rmsnorm(a, w, cast="none", implementation="triton"),
                rmsnorm(a.double(), w.double(), cast="none"),
            ),
        ):
            assert (
                found == truth.to(dtype)
            ).double().mean() > 0.99  # float32 may fall on the other side of a tie


def converts(driver, hardware, run, instruction="e2m1x2"):
    """The result of run(), with or without a hardware instruction in every kernel that converts."""
    texts, change = [], driver.change
    driver.change = lambda text: texts.append(text) or (change(text) if change else text)
    found = run()
    driver.change = change
    texts = [text for text in texts if not re.search(r"\.entry (_largest|_total)\b", text)]
    assert texts and all((instruction in text) == hardware for text in texts)
    return found


def to_e2m1(driver, hardware):
    """Ties, their neighbors and those of representable numbers, and the extremes, of both signs and
    in both halves of a byte: the codes of the twin and C++.
    """
    from tilewright.ops.quant import nvfp4

    even = torch.tensor(nvfp4.VALUES)
    marks = torch.cat([even, (even[1:] + even[:-1]) / 2])
    inf, g = torch.tensor(float("inf")), torch.Generator().manual_seed(0)
    v = torch.cat(
        [
            marks,
            marks.nextafter(inf),
            marks.nextafter(-inf),
            torch.rand(64, generator=g) * 6,
            torch.tensor([1e-45, 1e-40, 2.0**-126, 1e-30, 0.1, 6.1, 6.25, 6.374]),
        ]
    )
    v = torch.cat([v, -v])
    v = torch.nn.functional.pad(v, (0, -len(v) % 15)).view(-1, 15)
    # 6.375 / 6, each block's largest, is a tie of e4m3: the scale is 1, and v itself is rounded.
    v = torch.nn.functional.pad(v, (0, 1), value=6.375)
    v = torch.cat([v, v.flip(1)])
    one = torch.ones(())
    for x in (v.flatten(), v):  # one row, and rows of one block
        found = converts(
            driver,
            hardware,
            lambda x=x: quantize_nvfp4(x, global_scale=one, implementation="triton"),
        )
        for name in ("eager", "cpp"):
            expected = quantize_nvfp4(x, global_scale=one, implementation=name)
            assert (expected.scale.float() == 1).all() and torch.equal(found.data, expected.data), (
                name
            )
    # Stochastic rounding never uses the GPU's instruction.
    found = converts(
        driver, False, lambda: quantize_nvfp4(v, global_scale=one, seed=3, implementation="triton")
    )
    assert torch.equal(
        found.data, quantize_nvfp4(v, global_scale=one, seed=3, implementation="eager").data
    )


def from_e2m1(driver, hardware):
    """All bytes, in products whose last bits matter: the bits of the twin, including
    signed zeros.
    """
    from tilewright.ops import NVFP4

    data = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale = (
        torch.tensor([[1.0, 1.125, 1.75, 448, -1, 2.0**-9, 0.0, 7 * 2.0**-9]])
        .repeat(4, 1)
        .to(torch.float8_e4m3fn)
    )
    for total in (torch.ones(()), torch.tensor(0.1)):
        q = NVFP4(data, scale, total, (4, 128), F32)
        found = converts(driver, hardware, lambda q=q: dequantize_nvfp4(q, implementation="triton"))
        assert torch.equal(
            found.view(torch.int32), dequantize_nvfp4(q, implementation="eager").view(torch.int32)
        )


def to_e4m3(driver, hardware):
    """Representable numbers, ties, the neighbors of both, and the extremes, of both signs: codes of
    the twin and C++.
    """
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    marks = torch.cat([every, (every[1:] + every[:-1]) / 2])
    inf = torch.tensor(float("inf"))
    v = torch.cat(
        [
            marks,
            marks.nextafter(inf),
            marks.nextafter(-inf),
            torch.tensor([1e-45, 2.0**-126, 1e-10]),
        ]
    )
    v = torch.cat([v, -v]).clamp(-448, 448)
    v = torch.nn.functional.pad(v, (0, -len(v) % 127)).view(-1, 127)
    v = torch.nn.functional.pad(v, (0, 1), value=448.0)  # the scale is 1
    found = converts(
        driver,
        hardware,
        lambda: quantize_block_fp8(v, block=(1, 128), implementation="triton"),
        "e4m3x2",
    )
    for name in ("eager", "cpp"):
        expected = quantize_block_fp8(v, block=(1, 128), implementation=name)
        assert (expected.scale_inv == 1).all()
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8)), name


def from_e4m3(driver, hardware):
    """All bytes, in products whose last bits matter."""
    data = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(torch.float8_e4m3fn)
    q = BlockFP8(data, torch.tensor([[1.0, 0.1], [3e-30, 1e30], [-0.7, 0.3]]), (1, 128), F32)
    found = converts(
        driver, hardware, lambda: dequantize_block_fp8(q, implementation="triton"), "e4m3x2"
    )
    expected = dequantize_block_fp8(q, implementation="eager")
    assert expected.isnan().sum() == 6 and torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(
        found.nan_to_num(7.0).view(torch.int32), expected.nan_to_num(7.0).view(torch.int32)
    )


def nf4_codes(driver):
    """Codes of every 16th float16 in [-1, 1], of the bounds between codes, and of their neighbors
    in float32. A NaN, which the op refuses, has code 0.
    """
    from tilewright.kernels.quant.nf4_tables import bounds
    from tilewright.kernels.quant.quantize_triton import nf4_quantize

    halves = torch.arange(-(2**15), 2**15, 16).to(torch.int16).view(F16).float()
    ends = torch.full((15,), torch.inf)
    near = (torch.nextafter(bounds(), -ends), bounds(), torch.nextafter(bounds(), ends))
    v = torch.cat((halves[halves.abs() <= 1], *near))
    x = torch.ones(-(-v.numel() // 63), 64)  # a 1 in each block: its scale
    x[:, :63] = torch.cat((v, v.new_zeros(-v.numel() % 63))).view(-1, 63)
    found, wanted = (quantize_nf4(x, implementation=name) for name in ("triton", "eager"))
    assert torch.equal(found.data, wanted.data) and torch.equal(found.absmax, wanted.absmax)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    nan, inf = nf4_quantize(x[:2].view(-1), 64)[0].view(2, 32)
    assert (nan == 0).all() and inf.tolist() == [0x77] * 3 + [0x07] + [0x77] * 28


def planted(driver, old, new, test, *arguments):
    """A fault in the compiled kernels must be found."""
    changed = 0

    def change(text):
        nonlocal changed
        text, n = re.subn(old, new, text)
        changed += n
        return text

    driver.change = change
    try:
        test(driver, *arguments)
    except (AssertionError, RuntimeError):
        assert changed
        return
    raise AssertionError(f"not found, with {changed} changes")


def runs():
    """Name of a test -> architecture and function."""
    found = {}
    for op in OPS:
        for case in op.cases:
            if "contract" in case.tags and case.name in SOME.get(op.name, (case.name,)):
                more = MORE.get(op.name) or [c.name for c in op.cases if "contract" in c.tags][:2]
                for arch, dtype in (
                    (90, BF16),
                    *(((100, BF16), (90, F32)) if case.name in more else ()),
                    *(((90, F16),) if case.name == more[0] else ()),
                ):
                    found[f"sm_{arch}-{op.name}-{case.name}-{short(dtype)}"] = (
                        arch,
                        contract_holds,
                        op,
                        case,
                        dtype,
                    )
    for op in PRODUCTS:
        for case in op.cases:
            if "contract" in case.tags:
                more = case.name.split()[-1] in (
                    "ragged",
                    "aligned",
                    "tail",
                    "sentinels",
                    "two_scales",
                )
                half = (
                    case.name.endswith("aligned")
                    and not op.name.startswith("moe_")  # composed of grouped_gemm's tiles
                    and F16 in op.implementation("triton").dtypes
                )
                newest = case.name in WITH_TENSOR_MEMORY.get(op.name, (case.name,) * more)
                for arch, dtype in (
                    (80, BF16),
                    *(((90, BF16),) if more else ()),
                    *(((100, BF16),) if newest else ()),
                    *(((80, F16),) if half else ()),
                ):
                    found[f"sm_{arch}-{op.name}-{case.name}-{short(dtype)}"] = (
                        arch,
                        contract_holds,
                        op,
                        case,
                        dtype,
                    )
        for arch in (80, 90, 100) if op.name in LONG else ():
            found[f"sm_{arch}-{op.name}-long_sums"] = arch, long_sums, op.name, BF16
    for op in map(operations().get, LATER):
        for case in op.cases:
            if "contract" in case.tags and case.name.startswith("block_fp8"):
                for arch in (90, 100, 120):  # wgmma, tcgen05, mma
                    name = f"sm_{arch}-{op.name}-{case.name}-bfloat16"
                    found[name] = arch, contract_holds, op, case, BF16
    for op in map(operations().get, ("low_precision_linear", "low_precision_grouped_gemm")):
        for case in op.cases:
            if "contract" in case.tags and case.name.startswith(("mxfp8", "nvfp4")):
                run = 100, contract_holds, op, case, BF16
                found[f"sm_100-{op.name}-{case.name}-bfloat16"] = run
    for arch, dtype, V, stride, offset in (
        (
            90,
            BF16,
            9001,
            9001,
            0,
        ),  # odd: rows are walked from the multiple of 16 bytes below, in three blocks
        (90, BF16, 12300, 12312, 0),  # a stride that is a multiple of 8 elements and not of 16
        (90, BF16, 8712, 8728, 0),  # and so is the width
        (90, BF16, 4099, 4104, 3),  # memory that is off 16 bytes
        (90, F16, 16, 24, 1),
        (90, F32, 5003, 5003, 0),
        (90, F32, 4100, 4108, 0),
        (100, BF16, 9001, 9001, 0),
    ):
        found[f"sm_{arch}-cross_entropy-rows-{V}-{stride}-{offset}-{short(dtype)}"] = (
            arch,
            any_row_of_logits,
            V,
            stride,
            offset,
            dtype,
        )
    found["sm_90-nearest"] = 90, rounds_to_nearest
    found["sm_90-adamw_-states_in_bfloat16"] = 90, states_in_bfloat16
    found["sm_90-rmsnorm-narrow_rows_on_four_warps"] = 90, narrow_rows_on_four_warps
    for op_name, launch, changes, names in ALTERNATIVES:
        op = operations()[op_name]
        for case in (c for c in op.cases if "contract" in c.tags and c.name in names):
            whose = "" if launch.startswith(f"{op_name}/") else f"{op_name} of "
            name = f"sm_90-{whose}{launch} {changes}-{case.name}-bfloat16"
            found[name] = 90, alternative, op, case, launch, changes
    # Specialized warps, which use each stage several times.
    for op_name, launch in (
        ("grouped_gemm", "grouped_gemm/forward"),
        ("grouped_gemm", "grouped_gemm/backward_x"),
        ("grouped_gemm", "grouped_gemm/backward_weight"),
        ("moe_mlp", "moe_mlp/up_swiglu"),
        ("moe_mlp", "moe_mlp/down_dswiglu"),
    ):
        run = 90, alternative, operations()[op_name], long_case(op_name), launch, "ROLES"
        found[f"sm_90-{launch} ROLES-long_sums"] = run
    # Several tiles a block, and steps past a turn of the ring; a tile that is cut.
    for M, N, columns, dtype in ((272, 400, 1040, BF16), (144, 136, 2048, F32)):
        name = f"sm_90-low_precision_linear/by_rows ROLES-bits-{M}-{N}-{columns}-{short(dtype)}"
        found[name] = 90, fp8_dweight, M, N, columns, dtype
    # The last scale of 32 columns has 16. One of the steps of 128 is past a turn of the ring.
    for recipe, K, dtype in (("mxfp8", 1008, BF16), ("nvfp4", 1792, F32)):
        run = 100, block_scaled, recipe, 144, 520, K, dtype
        found[f"sm_100-low_precision_linear/scaled ROLES-bits-{recipe}"] = run
    # Forward and both gradients of a layer, whose sizes are those that TMA loads scales of.
    for recipe, sizes in (("mxfp8", (496, 512, 496)), ("nvfp4", (256, 256, 256))):
        case, launch = scaled_case(recipe, *sizes), "low_precision_linear/scaled"
        run = 100, alternative, operations()["low_precision_linear"], case, launch, "ROLES"
        found[f"sm_100-{launch} ROLES-{recipe}"] = run
    op = operations()["low_precision_grouped_gemm"]
    for case in (c for c in op.cases if c.name in ("mxfp8 aligned", "nvfp4 aligned")):
        launch = f"{op.name}/scaled_{'rows' if case.name.startswith('mx') else 'weights'}"
        found[f"sm_100-{launch} ROLES-{case.name}"] = 100, alternative, op, case, launch, "ROLES"
    # Experts: scales that TMA does not read as they are; an expert of no rows, of one step, of a
    # round and a step, and of an odd number of steps of 128; rows of a weight that end in a tile.
    for launch, recipe, N, K, counts, tail, dtype in (
        ("rows", "mxfp8", 328, 1040, (130, 0, 1), 130, BF16),
        ("rows", "nvfp4", 328, 1056, (130, 0, 1), 130, F32),
        ("weights", "mxfp8", 144, 136, (300, 0, 600, 1), 130, BF16),
        ("weights", "nvfp4", 144, 136, (300, 0, 600, 1), 130, F32),
    ):
        run = 100, scaled_experts, f"scaled_{launch}", recipe, N, K, counts, tail, dtype
        found[f"sm_100-low_precision_grouped_gemm/scaled_{launch} ROLES-bits-{recipe}"] = run
    # Many experts, which several threads share; rows of odd strides.
    for columns, stride, offsets, dtype in (
        (1040, 1040, (130, 130, 131, 400), BF16),
        (70, 71, tuple(range(0, 300, 2)), BF16),
        (70, 71, (300,), F32),
    ):
        run = 90, placed_rows, 420, columns, stride, offsets, dtype
        found[f"sm_90-low_precision_grouped_gemm-places-{len(offsets)}-{short(dtype)}"] = run
    found["sm_90-fp8_linear/fp8 ROLES-bits"] = 90, fp8_linear, 300, 648, 1040
    for launch, N, K, counts, tail, dtype in (
        ("rows", 328, 1040, (300, 0, 1, 128), 130, BF16),
        ("weights", 272, 136, (1100, 0, 1, 128), 130, BF16),
        ("weights", 144, 136, (300, 20), 0, F32),
    ):
        name = f"sm_90-low_precision_grouped_gemm/{launch} ROLES-bits-{short(dtype)}"
        found[name] = 90, fp8_experts, launch, N, K, counts, tail, dtype
    for launch in ("moe_mlp/up_swiglu", "grouped_gemm/forward"):
        for gate in GATES:
            run = 90, alternative, operations()["moe_mlp"], biased(gate), launch, "ROLES"
            found[f"sm_90-moe_mlp of {launch} ROLES-biased {gate}"] = run
    for launch in ("attention/forward", "attention/backward_kv"):
        for name in ATTENDED:
            run = alternative, operations()["attention"], attended(name), launch, "ROLES"
            if launch == "attention/forward" or name not in ("wide", "window"):
                found[f"sm_90-{launch} ROLES-{name}"] = 90, *run
        found[f"sm_90-{launch} ROLES-apart"] = 90, apart, launch
        found[f"sm_90-{launch} ROLES-apart latent"] = 90, apart, launch, 192, 128
    for dtype in (F32, BF16):
        found[f"sm_90-cross_entropy-capped_rows-{short(dtype)}"] = 90, capped_rows, dtype
    found["sm_90-cross_entropy-losses"] = 90, losses_of_rows
    found["sm_90-cross_entropy-scale"] = 90, scales, BF16
    if BUDGETS:  # of this version of Triton
        found |= {f"sm_90-counts-{name}": (90, counted, name) for name in COUNTED}
    for arch in (90, 100, 120):
        found[f"sm_{arch}-to_e2m1"] = arch, to_e2m1, arch >= 100
        found[f"sm_{arch}-from_e2m1"] = arch, from_e2m1, arch >= 100
    found["sm_90-nf4_codes"] = 90, nf4_codes
    found["planted-nf4-tie"] = (
        90,
        planted,
        r"setp\.gt\.f32 p, (\S+), b1",
        r"setp.ge.f32 p, \1, b1",
        nf4_codes,
    )
    for arch in (80, 90, 100):
        found[f"sm_{arch}-to_e4m3"] = arch, to_e4m3, arch >= 90
        found[f"sm_{arch}-from_e4m3"] = arch, from_e4m3, arch >= 90
    # Without tensor cores, and with those of sm_120, which equal sm_80's.
    nvfp4_linear = {
        c.name: c for c in operations()["quantized_linear"].cases if "contract" in c.tags
    }
    for name in ("aligned", "two_scales", "three_dimensions"):
        for arch, dtype in ((100, F32), (120, BF16)):
            found[f"sm_{arch}-quantized_linear-nvfp4 {name}-{short(dtype)}"] = (
                arch,
                contract_holds,
                operations()["quantized_linear"],
                nvfp4_linear[f"nvfp4 {name}"],
                dtype,
            )
    wide = found["sm_90-cross_entropy-everything_wide-bfloat16"][1:]
    for name, old, new, test in (
        ("barrier", r"bar\.sync\s+0;", "", wide),
        ("wait", r"(cp\.async\.wait_group)\s+\d+;", r"\1 9;", wide),
        ("bounds", r"setp\.lt\.s32", "setp.le.s32", wide),
        ("rounding", r"cvt\.rn\.bf16", "cvt.rz.bf16", (rounds_to_nearest,)),
    ):
        found[f"planted-{name}"] = 90, planted, old, new, *test
    for name, old, new, test in (
        ("halves", r"(e2m1x2\.f32 \w+, )(%\w+), (%\w+);", r"\1\3, \2;", to_e2m1),
        ("bytes", r"(mov\.b32 %\w+, \{e2m1_a, )(\w+), (\w+)", r"\1\3, \2", to_e2m1),
        ("from_halves", r"(mov\.b32 \{)half_a, half_b", r"\1half_b, half_a", from_e2m1),
        ("from_bytes", r"(mov\.b32 \{)e2m1_a, e2m1_b", r"\1e2m1_b, e2m1_a", from_e2m1),
    ):
        found[f"planted-e2m1-{name}"] = 100, planted, old, new, test, True
    for name, old, new, test in (
        ("halves", r"(e4m3x2\.f32\s+\S+, )(%\w+), (%\w+);", r"\1\3, \2;", to_e4m3),
        ("from_halves", r"(cvt\.rn\.f16x2\.e4m3x2\s+%\w+, )%\w+;", r"\g<1>0;", from_e4m3),
        ("by_e4m3", r"0x1c1c1c1c", "0x0c0c0c0c", from_e2m1),
    ):
        found[f"planted-e4m3-{name}"] = 90, planted, old, new, test, test is not from_e2m1
    # In a product, most in every instruction of a kind. product: only in the first of a kernel.
    for arch, name, old, new in (
        (80, "product", r"(?s)\A(.*?)mma\.sync[^;]*;", r"\1"),
        (80, "rows", r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"),
        (80, "columns", r"(mma\.sync\S+ \{[^}]*\}, \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"),
        (80, "turned", r"(ldmatrix\S+)\.trans", r"\1"),
        (80, "not_turned", r"(ldmatrix\S+x4)\.shared", r"\1.trans.shared"),
        (80, "wait", r"(cp\.async\.wait_group\s+)([1-8]);", lambda m: f"{m[1]}{int(m[2]) + 1};"),
        (80, "barrier", r"(cp\.async\.wait_group\s+\d;\s*)bar\.sync\s+0;", r"\1"),
        (90, "product", r"(?s)\A(.*?)wgmma\.mma_async[^;]*;", r"\1"),
        (90, "turned", r"(wgmma\.mma_async[^;]*1, 1, \d, )1;", r"\g<1>0;"),
        (90, "not_turned", r"(wgmma\.mma_async[^;]*1, 1, \d, )0;", r"\g<1>1;"),
        (90, "wait", r"(wgmma\.wait_group\S+\s+)\d;", r"\g<1>9;"),
        (90, "fence", r"fence\.proxy\.async\S*;", ""),
        (90, "arrival", r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", ""),
        (90, "bytes", r"(mbarrier\.arrive\.expect_tx[^;]*, )(\d+);", r"\g<1>1\2;"),
        (90, "corner", r"(bulk\.tensor\.2d[^{]*\{)(%r\d+), (%r\d+)", r"\1\3, \2"),
        (
            90,
            "barrier",
            r"(?s)wgmma\.wait_group\S+\s+1;.*?bulk\.tensor",
            lambda m: m[0].replace("bar.sync", "//"),
        ),
        (100, "product", r"(?s)\A(.*?)@\S+ tcgen05\.mma[^;]*;", r"\1"),
        (100, "wait", r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", ""),
        (100, "fence", r"fence\.proxy\.async\S*;", ""),
        (100, "loaded", r"tcgen05\.wait::ld\S*;", ""),
        (100, "committed", r"@\S+ tcgen05\.commit[^;]*;", ""),
        (100, "freed", r"@\S+ tcgen05\.dealloc[^;]*;", ""),
    ):
        long = name in ("wait", "barrier") and arch < 100
        test = "long_sums" if long else "aligned-bfloat16"
        found[f"planted-sm_{arch}-grouped_gemm-{name}"] = (
            arch,
            planted,
            old,
            new,
            *found[f"sm_{arch}-grouped_gemm-{test}"][1:],
        )
    # In a product that scales.
    scaled = found["sm_100-low_precision_linear-nvfp4 two_scales-bfloat16"][1:]
    for name, old, new in (
        ("stored", r"tcgen05\.wait::st\S*;", ""),
        ("whose", r"(block_scale[^;]*), (\[ %r\d+ \+ \d+ \]), (\[ [^;]*\]),", r"\1, \3, \2,"),
        ("read", r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", ""),
    ):
        found[f"planted-sm_100-scaled-{name}"] = 100, planted, old, new, *scaled
    # What specialized warps say to each other.   gathering: where threads load, too.
    product = found["sm_90-grouped_gemm/forward ROLES-long_sums"][1:]
    summed = found["sm_90-grouped_gemm/backward_weight ROLES-long_sums"][1:]
    gathering = found["sm_90-moe_mlp/up_swiglu ROLES-long_sums"][1:]
    blocks, in_turn = (
        found[f"sm_90-attention/{launch} ROLES-blocks"][1:] for launch in ("forward", "backward_kv")
    )
    latent = found["sm_90-attention/backward_kv ROLES-latent"][1:]
    dweight, rows = (
        found[f"sm_90-low_precision_grouped_gemm/{launch} ROLES-bits-bfloat16"][1:]
        for launch in ("weights", "rows")
    )
    waits = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, \[(%r\d+)\], (%r\d+);"
    for name, old, new, test in (
        ("free", r"@\S+ mbarrier\.arrive\.shared::cta\.b64[^;]*;", "", product),
        ("phase", waits, r"mbarrier.try_wait.parity.shared::cta.b64 complete, [\1], 1;", product),
        ("stored", r"cp\.async\.bulk\.wait_group\.read\s+0;", "", product),
        ("committed", r"cp\.async\.bulk\.commit_group;", "", product),
        ("fence", r"fence\.proxy\.async\S*;", "", product),
        ("together", r"bar\.sync\s+0, 256;", "", product),
        ("product", r"(wgmma\.wait_group\S+\s+)1;", r"\g<1>2;", product),
        ("registers", r"(setmaxnreg\.inc\.sync\.aligned\.u32\s+)240;", r"\g<1>248;", product),
        ("gathered-fence", r"fence\.proxy\.async\S*;", "", gathering),
        ("rows", r"setp\.lt\.s32", "setp.le.s32", summed),
        ("gathered-wait", r"(cp\.async\.wait_group\s+)2;", r"\g<1>3;", gathering),
        ("fp8-free", r"@\S+ mbarrier\.arrive\.shared::cta\.b64[^;]*;", "", dweight),
        ("fp8-sums", r"(wgmma\.wait_group\S+\s+)0;", r"\g<1>1;", dweight),
        ("fp8-stored", r"bar\.sync\s+\d+, 128;", "", dweight),
        ("fp8-rows", r"setp\.gt\.s32", "setp.ge.s32", rows),
        ("attention-free", r"@\S+ mbarrier\.arrive\.shared::cta\.b64[^;]*;", "", blocks),
        ("attention-logits", r"(wgmma\.wait_group\S+\s+)1;", r"\g<1>2;", blocks),
        ("attention-sums", r"(wgmma\.wait_group\S+\s+)0;", r"\g<1>1;", blocks),
        ("attention-stored", r"bar\.sync\s+\d+, 128;", "", blocks),
        ("attention-cleared", r"fence\.proxy\.async\S*;", "", (apart, "attention/forward")),
        ("attention-announced", r"red\.global\.gpu\.release", "red.global.gpu.relaxed", in_turn),
        ("attention-seen", r"ld\.global\.gpu\.acquire", "ld.global.relaxed.gpu", in_turn),
        ("attention-gradients", r"fence\.proxy\.async\S*;", "", in_turn),
        ("attention-columns", r"(wgmma\.mma_async[^;]*1, 1, )1, 1;", r"\g<1>0, 1;", in_turn),
        ("attention-latent-written", r"bar\.sync\s+\d+, 256;", "", latent),
        ("attention-latent-sums", r"(wgmma\.wait_group\S+\s+)2;", r"\g<1>4;", latent),
        ("attention-latent-free", r"@\S+ mbarrier\.arrive\.shared::cta\.b64[^;]*;", "", latent),
    ):
        found[f"planted-roles-{name}"] = 90, planted, old, new, *test
    # In patterns that the other kernel, which runs first, does not have.
    scaled = found["sm_100-low_precision_linear/scaled ROLES-bits-mxfp8"][1:]
    for name, old, new in (
        ("written", r"tcgen05\.wait::st\.sync\.aligned;(\s*bar\.sync\s+[1-9])", r"\1"),
        ("read", r"tcgen05\.wait::ld\.sync\.aligned;(\s*bar\.sync\s+0, )", r"\1"),
        ("together", r"bar\.sync\s+[1-9], 128;", ""),
        ("slot", r"(tcgen05\.st\S+x16\.b32 \[%r\d+ \+ )0\]", r"\g<1>4]"),
        ("freed", r"(?s)(setmaxnreg.*?tcgen05\.commit.*?)@\S+ tcgen05\.commit[^;]*;", r"\1"),
        (
            "phase",
            r"(?s)\A.*setmaxnreg.*\Z",
            lambda m: re.sub(
                waits, r"mbarrier.try_wait.parity.shared::cta.b64 complete, [\1], 1;", m[0]
            ),
        ),
    ):
        found[f"planted-roles-scaled-{name}"] = 100, planted, old, new, *scaled
    # Experts: another's weight; steps past the end, and half of one; sums before they are there.
    for name, old, new, launch in (
        ("expert", r"(tensor\.3d\.shared[^{]*\{%r\d+, (%r\d+)), %r\d+\}", r"\1, \2}", "rows-mxfp8"),
        ("steps", r"min\.u32(\s+%r\d+), %r\d+, 4;", r"mov.b32\1, 4;", "weights-mxfp8"),
        (
            "half",
            r"(tcgen05\.st\S+x16\.b32 [^{]*\{)((?:%r\d+, ){8})(%r\d+)(?:, \3){7}\}",
            lambda m: f"{m[1]}{m[2]}{m[2].removesuffix(', ')}}}",
            "weights-nvfp4",
        ),
        (
            "wait",
            r"(?s)(setmaxnreg.*?)mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;(.*)",
            r"\1\2",
            "weights-mxfp8",
        ),
    ):
        kind, recipe = launch.split("-")
        other = found[f"sm_100-low_precision_grouped_gemm/scaled_{kind} ROLES-bits-{recipe}"][1:]
        found[f"planted-roles-experts-{name}"] = 100, planted, old, new, *other
    found["planted-few_rows-counted"] = (
        90,
        planted,
        r"atom\.global\.gpu\.acq_rel",
        "atom.global.gpu.relaxed",
        *found["sm_90-quantized_linear-long_sums"][1:],
    )
    fp8 = found["sm_90-fp8_linear-block_fp8 aligned-bfloat16"][1:]
    found["planted-fp8-product"] = 90, planted, r"wgmma\.mma_async[^;]*;", "", *fp8
    return found


def op_of(name, arguments):
    """The op whose kernels a run compiles: among its arguments, or a part of its name."""
    parts = re.split("[- /]", name)
    named = (o.name for o in arguments if isinstance(o, Op))
    return next(itertools.chain(named, (p for p in parts if p in operations())), "several")


def base(name, known):
    """The run in which a fault is planted."""
    arch, _, _, _, *same = known[name]
    return next(other for other, (a, *rest) in known.items() if (a, rest) == (arch, same))


def fixed():
    """What `make test` runs: the first run of each op; of the faults, every sixth, with the run in
    which it is planted; and of the other faults' runs, the first of each op and architecture.
    """
    known = runs()
    first = {op_of(name, run[2:]): name for name, run in reversed(known.items())}
    faults = [name for name, run in known.items() if run[1] is planted]
    chosen = dict.fromkeys((*first.values(), *(base(name, known) for name in faults[::6])))

    def whose(name):
        op = op_of(name, known[name][2:])
        return name if op == "several" else (known[name][0], op)

    taken = {whose(name) for name in chosen}
    for name in (base(name, known) for name in faults):
        if whose(name) not in taken:
            taken.add(whose(name))
            chosen[name] = None
    return dict.fromkeys((*chosen, *faults[::6]))


def started():
    """Installs the emulator's driver in place of Triton's own."""
    from triton import knobs

    from tilewright.kernels.fused_quantize import fused_quantize_triton
    from tilewright.kernels.moe import grouped_gemm_triton
    from tilewright.kernels.optim import adamw_triton, newton_schulz_triton
    from tilewright.kernels.quant import (
        low_precision_grouped_triton,
        low_precision_triton,
        quantize_triton,
        quantized_linear_triton,
    )
    from tilewright_lab.emulator.driver import Driver, installed

    knobs.compilation.disable_line_info = (
        True  # without debug information, a fifth less compile time
    )
    platform.interpreting = lambda: (
        True
    )  # Triton accepts CPU tensors, and this is not the interpreter
    platform.no_gluon = lambda device_type, capabilities=(9,): None
    stack = contextlib.ExitStack()
    driver = stack.enter_context(installed(Driver()))
    driver.kept = stack  # until the process ends
    real_table = adamw_triton.table

    def table(device, sizes, lists):
        found = real_table(device, sizes, lists)
        driver.pointed = {found.data_ptr(): [t for tensors in lists for t in tensors]}
        return found

    adamw_triton.table = table
    # Tensors are on the CPU, so the launchers get the device's properties here.
    grouped_gemm_triton.has_tma = lambda device: driver.arch >= 90
    grouped_gemm_triton.large_shared_memory = lambda device: driver.arch // 10 in (9, 10)
    for module in (low_precision_grouped_triton, low_precision_triton, quantized_linear_triton):
        module.large_shared_memory = grouped_gemm_triton.large_shared_memory
    newton_schulz_triton.hopper = lambda device: driver.arch // 10 == 9
    for module in (
        quantize_triton,
        fused_quantize_triton,
        low_precision_grouped_triton,
        low_precision_triton,
        quantized_linear_triton,
    ):  # those that name it
        module.conversions = lambda device: (driver.arch >= 90) + (driver.arch >= 100)
    return driver


def main(names):
    driver = started()
    known = runs()
    for name in names:
        began = time.monotonic()
        driver.arch, test, *arguments = known[name]
        driver.memories, driver.names = [], []
        driver.change = None
        try:
            test(driver, *arguments)
            wrong = ""
        except Exception:  # any exception is a verdict
            wrong = traceback.format_exc()
        took = time.monotonic() - began
        print(json.dumps({"name": name, "wrong": wrong, "seconds": round(took, 1)}), flush=True)


if __name__ == "__main__" and sys.argv[1:2] == ["--counts"]:  # of all, or of those that are named
    driver, old = started(), json.loads(COUNTS.read_text())
    found = {
        name: count(driver, name) if name in (sys.argv[2:] or COUNTED) else old[name]
        for name in COUNTED
    }
    COUNTS.write_text(json.dumps(found, indent=1) + "\n")
elif __name__ == "__main__":
    main(json.load(sys.stdin))
