"""Cross-entropy of a language model's logits, with everything that training asks of it in one pass:

    z      = softcap * tanh(logits / softcap)     (or logits)
    lse    = log sum_c exp z_c
    loss_t = u_t * ((1 - e) w_y (lse - z_y) + e / V * sum_c w_c (lse - z_c) + z_loss * lse^2),  0 for ignored
    targets

V = vocabulary, T = tokens, y = target, e = label_smoothing, w = class weights, u = token weights. The eager
twin is `stats_eager` and `combine` of `_softmax_stats.py`, whose statistics all other implementations compute
in one kernel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tilewright import platform
from tilewright.ops import _checks, _softmax_stats, cases
from tilewright.ops._softmax_stats import (
    across,
    capped,
    combine,
    entropy,
    presence,
    shard_stats_eager,
    stats_eager,
    without_gradient,
)
from tilewright.registry import Case, Cost, Implementation, Op

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """loss, and per token what was asked for (else None): lse, entropy in nats, argmax. Only loss is
    differentiable."""

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


@_checks.autocast("float32")
def cross_entropy(logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100,
                  label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
                  class_weight: torch.Tensor | None = None, token_weight: torch.Tensor | None = None,
                  reduction: str = "mean", num_tokens: int | torch.Tensor | None = None,
                  return_lse: bool = False, return_entropy: bool = False, return_argmax: bool = False,
                  inplace: bool = False, group: torch.distributed.ProcessGroup | None = None,
                  implementation: str = "auto") -> torch.Tensor | CrossEntropyOutput:
    """Cross-entropy between logits and target, per token or reduced; natural logarithm. The module has the
    formula.

    logits: [..., V] fp32 | bf16 | fp16 (fp64 with eager and torch). Rows may lie further apart than V.
    target: [...] int64, each in [0, V) or ignore_index, whose tokens have loss and gradient 0 whatever their
        logits hold.
    label_smoothing: e in [0, 1].   z_loss: factor of lse^2, >= 0.   softcap: > 0, or None for none.
        All are finite in float32.
    class_weight: [V] float, or None.   token_weight: [...] float, multiplies each token's loss, or None.
    reduction: "none": [...]; "sum"; or "mean", the sum divided by num_tokens if given, else by the sum of w_y
        over tokens that are not ignored (PyTorch's rule). token_weight is not in that divisor: weights may
        have any sign, and a batch's scale should not hang on them. A divisor of 0 (all tokens ignored) counts
        as 1: loss 0 and gradients 0, where PyTorch gives NaN.
    num_tokens: number >= 0 or 0-d tensor, real; with gradient accumulation or data parallelism, the count over
        all of them. Not differentiable. A tensor's value is not looked at.
    return_lse, return_entropy, return_argmax: return a CrossEntropyOutput that holds, for every token (also
        ignored ones), lse, the entropy of softmax z, and the index of the largest logit (the first, on ties;
        undefined in a row with a NaN). Detached.
    inplace: lets backward write the gradient over the logits' memory, T * V * itemsize bytes less at the
        peak. The logits, and all that shares their memory, then hold the gradient afterwards (where they had
        to be copied because their last dimension is strided, they do not); a second backward through them,
        and backward of another op that saved them, raise RuntimeError. The eager and torch implementations
        take no notice. It is refused for logits whose elements share memory, as expanded ones do, and under
        torch.compile, which reuses memory by its own plan.
    group: logits are [..., V / world], this rank's shard of the vocabulary in rank order, all of one size;
        target and class_weight are of the whole vocabulary and the same on every rank. Every rank returns the
        same loss, and its backward gives the gradient of its own shard, without communication. Costs two
        all-reduces of at most [4, T] (four with return_argmax).
    Returns loss in fp32 (fp64 for fp64), or a CrossEntropyOutput. Computed in fp32, relative to the largest
    logit of a row, so that a constant added to all of them costs no precision, and rounded once, on storing
    the gradient. Differentiable in logits and token_weight, once.
    Raises TypeError or ValueError for arguments that do not fit; IndexError for a target that is out of
    range, on every backend (on CUDA the check costs one synchronisation; while a CUDA graph is recorded there
    is no check, and such a target makes the loss NaN); ImplementationUnavailable for a named implementation
    that cannot run here.
    Source: options as in torch.nn.functional.cross_entropy; z-loss as in PaLM (arXiv:2204.02311, section 5);
    softcap as in Gemma 2 (arXiv:2408.00118, section 2); sharded vocabulary as in Megatron-LM
    (arXiv:1909.08053, section 3).
    """
    softcap = _validate(logits, target, ignore_index, label_smoothing, z_loss, softcap, class_weight, token_weight,
                        reduction, num_tokens, inplace, group)
    V = logits.shape[-1] * (1 if group is None else torch.distributed.get_world_size(group))
    acc = torch.promote_types(logits.dtype, torch.float32)
    here = presence(target, V, ignore_index).reshape(-1)
    rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    y_weight = None
    if class_weight is not None:
        class_weight = class_weight.to(acc)
        y_weight = class_weight[flat.clamp(0, V - 1)]
    losses, *extra = CROSS_ENTROPY.pick(implementation, logits)(
        rows, flat, here, class_weight, y_weight, softcap, float(label_smoothing), float(z_loss), return_lse,
        return_entropy, return_argmax, inplace, group)
    loss = _reduce(losses, here, y_weight, token_weight, reduction, num_tokens, target.shape)
    if not (return_lse or return_entropy or return_argmax):
        return loss
    return CrossEntropyOutput(loss, *(None if t is None else t.detach().reshape(target.shape) for t in extra))


def _reduce(losses, here, y_weight, token_weight, reduction, num_tokens, shape):
    if token_weight is not None:
        losses = losses * token_weight.reshape(-1).to(losses.dtype)
    if reduction == "none":
        return reshaped(losses, shape)
    total = losses.sum()
    if reduction == "sum":
        return total
    count = num_tokens
    if count is None:
        count = (here if y_weight is None else here * y_weight).sum()
    if isinstance(count, torch.Tensor):
        count = count.detach()
        return total / torch.where(count == 0, 1, count).to(losses.dtype)
    return total / (count or 1)


def reshaped(losses: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """In that shape, and not as a view, which FSDP2 warns of where a module returns one."""
    return losses if losses.shape == shape else losses.reshape(shape).clone()


def check_options(ignore_index, label_smoothing, z_loss, softcap, reduction):
    """Raises TypeError or ValueError for an option that no logits could make right."""
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not _checks.INT64.min <= ignore_index <= _checks.INT64.max:
        raise ValueError(f"ignore_index must fit in int64, as targets do, got {ignore_index!r}")
    _checks.number("label_smoothing", label_smoothing, 0, 1, "in [0, 1]")
    _checks.number("z_loss", z_loss, 0, _checks.LARGEST, "a finite number >= 0 (in float32)")
    if softcap is not None:
        _checks.number("softcap", softcap, _checks.SMALLEST, _checks.LARGEST,
                       "a finite number > 0 (in float32), or None for no cap")
    _checks.choice("reduction", reduction, REDUCTIONS)


def _validate(logits, target, ignore_index, label_smoothing, z_loss, softcap, class_weight, token_weight, reduction,
              num_tokens, inplace, group):
    _checks.floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have a last dimension of at least 1, got shape {list(logits.shape)}")
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64 (class indices), got {target.dtype}")
    _checks.dense("target", target)
    _checks.shape("target", target, tuple(logits.shape[:-1]), "logits without its last dimension")
    check_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    world = 1
    if group is not None:
        if not torch.distributed.is_available() or not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError("group must be a torch.distributed.ProcessGroup or None, got "
                            f"{type(group).__name__}")
        world = torch.distributed.get_world_size(group)
    if class_weight is not None:
        _checks.floating("class_weight", class_weight)
        _checks.shape("class_weight", class_weight, (world * logits.shape[-1],), "the vocabulary")
        if class_weight.requires_grad and torch.is_grad_enabled():
            raise ValueError("class_weight must not require a gradient (it gets none), got one that does; "
                             "pass class_weight.detach()")
    if token_weight is not None:
        _checks.floating("token_weight", token_weight)
        _checks.shape("token_weight", token_weight, tuple(target.shape), "that of target")
    if isinstance(num_tokens, torch.Tensor):
        _checks.shape("num_tokens", num_tokens, (), "a 0-d tensor, or a number")
        if num_tokens.is_complex() or num_tokens.dtype == torch.bool:
            raise TypeError(f"num_tokens must be of a real dtype, got {num_tokens.dtype}")
        _checks.dense("num_tokens", num_tokens)
    elif num_tokens is not None:   # 0, where every token everywhere is ignored, counts as 1
        _checks.number("num_tokens", num_tokens, 0, _checks.LARGEST, "a finite number >= 0, a 0-d tensor or None")
    if inplace and torch.compiler.is_compiling():
        raise ValueError("inplace must be False under torch.compile, which plans memory itself, got True; or "
                         "keep the loss outside the compiled region")
    if inplace and _checks.overlaps_itself(logits):   # gradients would overwrite logits that are still to be read
        raise ValueError("inplace=True cannot overwrite logits whose elements share memory, got shape "
                         f"{list(logits.shape)} with strides {list(logits.stride())}; pass logits.contiguous() or "
                         "inplace=False")
    _checks.same_device(logits=logits, target=target, class_weight=class_weight, token_weight=token_weight)
    return 0.0 if softcap is None else float(softcap)


# ---- implementations: they differ in how they compute the statistics

def _losses(statistics, rows, target, here, class_weight, y_weight, softcap, label_smoothing, z_loss,
            return_lse, return_entropy, return_argmax, group):
    """[T] losses before token weights, and lse, entropy and argmax, each None if not asked for."""
    columns = rows.shape[-1]
    V, shard_weight = columns, class_weight
    if group is not None:
        first = torch.distributed.get_rank(group) * columns
        V = torch.distributed.get_world_size(group) * columns
        target = target - first
        shard_weight = None if class_weight is None else class_weight[first:first + columns]
    stats = statistics(rows, target, shard_weight, softcap, label_smoothing != 0, return_entropy,
                       return_argmax)
    if group is not None:
        stats = across(stats, rows, target, shard_weight, group)
    losses = combine(stats, here, y_weight, V=V, label_smoothing=label_smoothing, z_loss=z_loss,
                     weight_sum=None if class_weight is None else class_weight.sum())
    return losses, stats.lse if return_lse else None, entropy(stats) if return_entropy else None, stats.argmax


def cross_entropy_eager(rows, target, here, *arguments):
    *arguments, _, group = arguments
    return _losses(stats_eager if group is None else shard_stats_eager, without_gradient(rows, here == 0), target, here,
                   *arguments, group)


def _fused(load):
    differentiable = load().differentiable

    def cross_entropy_fused(*arguments):
        *arguments, inplace, group = arguments

        def statistics(*wanted):
            return differentiable(*wanted, inplace)

        return _losses(statistics, *arguments, group)

    return cross_entropy_fused


def _torch():
    """F.cross_entropy on float32 logits (in bf16 it would round its log-probabilities), with what it lacks
    around it:
    softcap before, z-loss after, lse and entropy beside it. It has no form for a sharded vocabulary."""

    def cross_entropy_torch(rows, target, here, class_weight, y_weight, softcap, label_smoothing, z_loss,
                            return_lse, return_entropy, return_argmax, inplace, group):
        if group is not None:
            raise ValueError("cross_entropy[torch]: group must be None: F.cross_entropy takes whole rows "
                             f"of logits only, got {group!r}; the other implementations accept one")
        # A pass over the logits, left out where there is nothing to ignore if that may be looked at.
        look = not torch.compiler.is_compiling() and not (here.is_cuda and torch.cuda.is_current_stream_capturing())
        if not look or not here.all():
            rows = without_gradient(rows, here == 0)
        z = capped(rows.to(torch.promote_types(rows.dtype, torch.float32)), softcap)
        kept = torch.where(here == 1, target, -100)
        losses = torch.nn.functional.cross_entropy(z, kept, class_weight, ignore_index=-100, reduction="none",
                                                   label_smoothing=label_smoothing)
        lse = z.logsumexp(-1) if z_loss or return_lse else None
        if z_loss:
            losses = losses + z_loss * lse.square()
        losses = torch.where(here == 0, 0.0, losses * here)
        log_p = z.detach().log_softmax(-1) if return_entropy else None
        # A masked-out class has p = 0 and log p = -inf, and counts 0.
        H = None if log_p is None else -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0)).sum(-1)
        return losses, lse if return_lse else None, H, rows.detach().argmax(-1) if return_argmax else None

    return cross_entropy_torch


# ---- cases

def _case(name, shape, *, tags=cases.CONTRACT, ignored="some", token_weight=False, class_weight=False, offset=0.0,
          saturated=False, **options):
    """offset: added to all logits, as far as the dtype holds it.   saturated: logits of 3.5 to 5 softcaps."""
    V, T = shape[-1], math.prod(shape[:-1])

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        kw = {"logits": cases.randn(*shape, device=device, dtype=dtype, gen=g, scale=2.0),
              "target": torch.randint(V, shape[:-1], device=device, generator=g)}
        logits = kw["logits"].detach()
        if offset:
            logits += cases.held(offset, dtype)
        if saturated:
            logits.copy_(options["softcap"] * (3.5 + logits.abs() / 4).clamp_max(5.0).copysign(logits))
        index = options.get("ignore_index", -100)
        if ignored == "all":
            kw["target"].fill_(index)
        elif ignored == "some":
            kw["target"].flatten()[1::3] = index
        if token_weight:
            kw["token_weight"] = cases.randn(*shape[:-1], device=device, dtype=torch.float32, gen=g,
                                             scale=0.5, shift=1.0, requires_grad=False)
        if class_weight:
            kw["class_weight"] = torch.rand(V, device=device, generator=g) + 0.5
        return {**kw, **options}

    def cost(itemsize):
        n = T * V * itemsize   # forward: logits in; backward: logits in, their gradient out
        return Cost(n, 2 * n, 4 * T * V, 5 * T * V)

    return Case(name, make, cost, tags)


def _all_cases():
    returns = {"return_lse": True, "return_entropy": True, "return_argmax": True}
    everything = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "token_weight": True,
                  "class_weight": True}
    small = [
        _case("ragged", (3, 7, 1003)),
        _case("tiny", (5, 7)),
        _case("by_eight", (3, 4408)),   # rows aligned to 16 bytes and no more
        _case("none_ignored", (6, 100), ignored="none"),
        _case("all_ignored", (4, 100), ignored="all", **returns),
        _case("no_rows", (0, 64)),
        _case("one_class", (3, 1), label_smoothing=0.1, z_loss=0.1, **returns),
        _case("ignore_index_inside", (6, 100), ignore_index=7, label_smoothing=0.1),
        _case("label_smoothing", (6, 100), label_smoothing=0.1),
        _case("z_loss", (6, 100), z_loss=1e-2),
        _case("softcap", (6, 300), softcap=5.0),
        _case("softcap_saturated", (6, 300), softcap=5.0, saturated=True),
        _case("class_weight", (6, 100), class_weight=True),
        _case("class_weight_smoothing", (6, 100), class_weight=True, label_smoothing=0.2),
        _case("token_weight", (2, 3, 100), token_weight=True),
        _case("sum", (6, 100), reduction="sum"),
        _case("none", (2, 5, 100), reduction="none"),
        _case("num_tokens", (6, 100), num_tokens=17),
        _case("returns", (2, 5, 1003), **returns),
        _case("offset_1e3", (6, 100), offset=1e3),
        _case("offset_1e4", (6, 100), offset=1e4, class_weight=True, label_smoothing=0.2),
        _case("offset_1e6", (2, 5, 1003), offset=1e6, **returns),
        _case("inplace", (6, 100), inplace=True, label_smoothing=0.1),
        _case("everything", (2, 5, 1000), reduction="none", **everything, **returns),
        _case("everything_wide", (3, 9001), num_tokens=3, inplace=True, **everything, **returns),
    ]
    timed = []
    for tags, T in ((cases.CUDA, 8192), (cases.CPU, 256)):
        for name in ("qwen3-8b", "llama-3-8b", "gemma-3-4b", "deepseek-v3"):
            options = {"softcap": 30.0} if name.startswith("gemma") else {}
            timed.append(_case(name, (T, cases.MODELS[name].vocab), tags=tags, ignored="none", **options))
    timed.append(_case("llama-3-8b-inplace", (8192, cases.MODELS["llama-3-8b"].vocab), tags=cases.CUDA,
                       ignored="none", inplace=True))
    big = _case("big", (2**13 + 3, 2**18), tags=cases.BIG, reduction="none", ignored="none")
    return (*small, *timed, big)


CROSS_ENTROPY = Op(
    "cross_entropy", cross_entropy, cross_entropy_eager,
    (
        Implementation("triton", lambda: _fused(_softmax_stats.triton), platform.no_triton,
                       batch_invariant=cases.ANYWHERE, tunables=_softmax_stats.tunables),
        # Never the choice of `auto` until it has been measured to beat Triton on a GPU.
        Implementation("cute", lambda: _fused(_softmax_stats.cute), platform.no_cute, devices=(),
                       gate=_softmax_stats.cute_specs),
        Implementation("cpp", lambda: _fused(_softmax_stats.cpp), platform.no_cpp, ("cpu",),
                       (torch.float32, torch.bfloat16),
                       batch_invariant=("cpu",)),
        Implementation("torch", _torch, devices=("cuda", "cpu"),
                       dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    ),
    _all_cases(),
    goals=cases.near_copy(92, "forward", "forward_backward"),
)
