"""Shared code of linear_cross_entropy and linear_logprob: the checks of a language model's head,
its logits in plain PyTorch, and their cases.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tilewright.core import checks
from tilewright.core.registry import Case, Cost
from tilewright.ops import cases
from tilewright.ops.loss.losses import Labels, check_labels

ACCUMULATE = ("fp32", "bf16")


def check_chunks(accumulate, chunk_size):
    """Raises ValueError for an option that is invalid for all inputs."""
    checks.choice("accumulate", accumulate, ACCUMULATE)
    if chunk_size is not None and (
        not isinstance(chunk_size, int) or not 1 <= chunk_size <= checks.INT64.max
    ):
        raise ValueError(
            f"chunk_size must be an int >= 1 (and an int64) or None, got {chunk_size!r}"
        )


def check_head(x, weight, bias, labels: Labels, fp32_logits: bool) -> None:
    """Raises TypeError or ValueError for a head and labels that do not fit each other."""
    if not isinstance(fp32_logits, bool):
        raise TypeError(f"fp32_logits must be a bool, got {fp32_logits!r}")
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is None and name == "bias":
            continue
        checks.floating(name, t)
        if t.dtype != x.dtype:
            raise TypeError(
                f"{name} must have x's dtype {x.dtype}, got {t.dtype}; cast one of the two"
            )
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension of at least 1, got shape {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must have shape [V, {x.shape[-1]}] (x's last dimension) with V >= 1, got "
            f"{list(weight.shape)}"
        )
    if bias is not None:
        checks.shape("bias", bias, weight.shape[:1], "rows of weight")
    if isinstance(labels.target, torch.Tensor):
        checks.shape("target", labels.target, tuple(x.shape[:-1]), "x without its last dimension")
    checks.same_device(x=x, weight=weight, bias=bias)
    # The shape, dtype and device of the logits: one element, expanded to V * T.
    check_labels(x.new_empty(1).expand(*x.shape[:-1], weight.shape[0]), labels)


class _Replicated(torch.autograd.Function):
    """x, replicated over the group: its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def replicated(x: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """x, whose gradient is summed over the ranks that shard the vocabulary. Raises ValueError under
    torch.compile.
    """
    if group is None:
        return x
    if torch.compiler.is_compiling():
        raise ValueError(
            "group is refused under torch.compile: a chunk's all-reduce is a step of a loop "
            "that it cannot see; leave the sharded loss outside the compiled region"
        )
    return _Replicated.apply(x, group)


def logits_of(x, weight, bias, fp32_logits):
    """x weight^T + bias, in float32 or wider if `fp32_logits`."""
    if fp32_logits:
        acc = torch.promote_types(x.dtype, torch.float32)
        x, weight, bias = x.to(acc), weight.to(acc), None if bias is None else bias.to(acc)
    return F.linear(x, weight, bias)


# ---- cases


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
    """offset: of the bias. x and weight are then small multiples of 1/4 and 1/2: all sums are exact
    in float32.   options: the op's; and lora, the rank of an adapter.
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
        options = {"softcap": 30.0} if name.startswith("gemma") else {}
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
