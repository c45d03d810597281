"""Log-probability, entropy and argmax of rows of logits, in one read of them:

    p       = softmax(z / temperature), z = softcap * tanh(logits / softcap), or the logits
    logprob = log p_y
    entropy = -sum_c p_c log p_c
    argmax  = the first index of the largest logit

T = tokens, V = vocabulary, y = target. The head of policy-gradient and preference losses, where a
model's forward gives the logits; `linear_logprob` computes them too, a chunk at a time. The kernels
are those of the statistics in `softmax_stats.py`.
"""

from __future__ import annotations

import functools
import math

import torch

from tilewright import platform
from tilewright.core import checks
from tilewright.core.library import define, differentiate, from_kernels
from tilewright.core.registry import Case, Cost, Implementation, Op
from tilewright.kernels.launchers import Stats
from tilewright.ops import cases
from tilewright.ops.loss import logprob, softmax_stats
from tilewright.ops.loss.logprob import Scaling
from tilewright.ops.loss.losses import Labels, check_labels, reshaped
from tilewright.ops.loss.softmax_stats import StatsGradients
from tilewright.ops.loss.targets import presence
from tilewright.ops.loss.vocabulary import across, group_of, named, shard


@checks.autocast("float32")
@checks.torch_names(input="logits")
def logprob_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_argmax: bool = False,
    inplace: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Log-probability of each target and the entropy of its distribution, from given logits.

    Statistics are computed in float32, relative to the largest logit of a row; the gradient is
    rounded once, on store. Both results are differentiable once in logits. What backward saves
    beside the logits is [T].

    Args:
        logits: [..., V] fp32 | bf16 | fp16 (fp64 with eager). The stride of rows may be larger than
            V.
        target: [...] int64, each in [0, V) or ignore_index. Others are treated as in
            `cross_entropy`: NaN results on CUDA tensors, an IndexError on a CPU.
        temperature: > 0, divides the (capped) logits.
        softcap: > 0, or None: no softcap. temperature, softcap and softcap / temperature must be
            finite in float32.
        ignore_index: the target that marks ignored tokens.
        return_argmax: also return the index of the largest logit, for token accuracy.
        inplace: lets backward overwrite the logits with the gradient; as in `cross_entropy`.
        group: logits are this rank's shard of the vocabulary, as in `cross_entropy`; costs two
            all-reduces of at most [3, T] (four with return_argmax).
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (logprob [...], entropy [...]), fp32 (fp64 for fp64), in nats; with return_argmax also
        argmax [...] int64, of every token, also ignored ones (the first, on ties; undefined in a
        row with a NaN). logprob is never above 0 and entropy never below 0. Both are 0 where target
        is ignore_index.

    Raises:
        TypeError, ValueError: invalid arguments.
        IndexError: a target out of range, as stated above.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> logprob, entropy = tilewright.ops.logprob_entropy(logits, torch.tensor([0, 3]))
        >>> f"{logprob[0].item():.4f} {entropy[0].item():.4f}"
        '-1.3863 1.3863'

    Source: the quantities that policy-gradient losses with an entropy bonus need (arXiv:1602.01783,
    section 4; arXiv:2402.03300, section 4.1).
    """
    scaling = Scaling.checked(temperature, softcap, ignore_index)
    check_labels(logits, Labels(target, group=group))
    if inplace:
        checks.overwritable("logits", logits)
    world = 1 if group is None else torch.distributed.get_world_size(group)
    valid = presence(target, world * logits.shape[-1], ignore_index).reshape(-1)
    fn = LOGPROB_ENTROPY.pick(implementation, logits)
    rows = logits.reshape(-1, logits.shape[-1])
    found = fn(rows, target.reshape(-1), valid, scaling, return_argmax, inplace, group)
    return tuple(reshaped(t, target.shape) for t in found if t is not None)


# ---- the definition


def logprob_entropy_eager(rows, target, valid, scaling, argmax, inplace=False, group=None):
    return logprob.eager(rows, target, valid, scaling, argmax, group)


# ---- the fused kernels


def _fake(logits, target, softcap, inverse_temperature, argmax, overwrite, group):
    def vector(nonempty=True, dtype=torch.float32):
        return logits.new_empty(logits.shape[0] if nonempty else 0, dtype=dtype)

    return vector(), vector(), vector(), vector(), vector(argmax, torch.int64)


def _setup(ctx, inputs, output):
    logits, target, softcap, inverse_temperature, _, overwrite, group = inputs
    peak, log_sum, _, mean, argmax = output
    ctx.save_for_backward(logits, target, peak, log_sum, mean)
    ctx.options = softcap, inverse_temperature, overwrite, group
    ctx.mark_non_differentiable(peak, argmax)
    ctx.set_materialize_grads(False)


def _backward(ctx, g_peak, g_log_sum, g_target, g_mean, g_argmax):
    none = (None,) * 6
    if g_log_sum is None and g_target is None and g_mean is None:
        return (None, *none)
    logits, target, peak, log_sum, mean = ctx.saved_tensors
    softcap, inverse_temperature, overwrite, group = ctx.options
    _, target, _ = shard(logits.shape[-1], target, None, group_of(group))
    tempered = () if inverse_temperature == 1.0 else (inverse_temperature,)
    dlogits = ctx.backward_op(
        logits,
        target,
        None,
        softcap,
        Stats(peak, log_sum, None, mean=mean),
        StatsGradients(g_log_sum, g_target, None, g_mean),
        peak.new_full((), inverse_temperature) if tempered else None,
        *tempered,
        inplace=overwrite,
    )
    return (dlogits, *none)


class Fused:
    """The operator and the call of one implementation."""

    def __init__(self, name: str):
        self.kernels = softmax_stats.LOADERS[name]()
        self.operator = define(f"logprob_entropy_{name}", self._launch, _fake)
        differentiate(self.operator, _backward, _setup, backward_op=self.kernels.backward)
        self.operators = self.operator, *self.kernels.operators

    def logprob_entropy(self, rows, target, valid, scaling, argmax, inplace, group):
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        peak, log_sum, picked, mean, best = self.operator(
            rows, target.contiguous(), *scaling.of_kernels, argmax, inplace, named(group)
        )
        stats = Stats(peak, log_sum, picked, mean=mean, argmax=best if argmax else None)
        return logprob.results(stats, valid)

    def _launch(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        softcap: float,
        inverse_temperature: float,
        argmax: bool,
        overwrite: bool,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """peak (without a softcap that of the logits before their multiplication), log_sum, target,
        mean and, if requested, argmax of whole rows. overwrite is for the autograd formula.
        """
        process_group = group_of(group)
        _, target, _ = shard(logits.shape[1], target, None, process_group)
        tempered = () if inverse_temperature == 1.0 else (inverse_temperature,)
        stats = self.kernels.forward(logits, target, None, softcap, False, True, argmax, *tempered)
        if process_group is not None:
            unit = 1.0 if softcap else inverse_temperature
            stats = across(stats, logits, target, None, process_group, unit)
        best = logits.new_empty(0, dtype=torch.int64) if stats.argmax is None else stats.argmax
        return stats.peak, stats.log_sum, stats.target, stats.mean, best


@functools.cache
def fused(name: str) -> Fused:
    """The implementation on the kernels of this name."""
    return Fused(name)


# ---- cases


def _case(name, shape, *, tags=cases.CONTRACT, ignored="some", offset=0.0, **options):
    """offset: added to all logits, as far as the dtype represents it."""
    V, T = shape[-1], math.prod(shape[:-1])

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        kw = {
            "logits": cases.randn(*shape, device=device, dtype=dtype, gen=g, scale=2.0),
            "target": torch.randint(V, shape[:-1], device=device, generator=g),
        }
        if offset:
            logits = kw["logits"].detach()
            logits += cases.representable(offset, dtype)
        if ignored == "all":
            kw["target"].fill_(-100)
        elif ignored == "some":
            kw["target"].flatten()[1::3] = -100
        return {**kw, **options}

    def cost(itemsize):
        n = T * V * itemsize  # forward: logits in; backward: logits in, their gradient out
        return Cost(n, 2 * n, 6 * T * V, 8 * T * V)

    return Case(name, make, cost, tags)


def _all_cases():
    listed = [
        _case("ragged", (3, 7, 1003)),
        _case("tiny", (5, 7), temperature=0.5),
        _case("one_class", (3, 1), return_argmax=True),
        _case("all_ignored", (4, 100), ignored="all", return_argmax=True),
        _case("no_rows", (0, 64)),
        _case("temperature", (2, 5, 1003), temperature=0.7, return_argmax=True),
        _case("softcap", (6, 300), softcap=5.0),
        _case("inplace", (6, 100), inplace=True, temperature=1.5),
        _case("offset_1e4", (6, 100), offset=1e4, temperature=0.5),
        _case("everything_wide", (3, 9001), softcap=5.0, temperature=0.7, return_argmax=True),
        # An ulp of the largest z is more than the exponential's range.
        _case("tiny_temperature", (6, 300), temperature=1e-9, return_argmax=True),
        _case("tiny_temperature_softcap", (6, 300), softcap=5.0, temperature=1e-11),
    ]
    for tags, T in ((cases.CUDA, 8192), (cases.CPU, 256)):
        for name in ("qwen3-8b", "llama-3-8b"):
            shape = (T, cases.MODELS[name].vocab)
            listed.append(_case(name, shape, tags=tags, ignored="none", return_argmax=True))
    listed.append(_case("big", (2**13 + 3, 2**18), tags=cases.BIG, ignored="none"))
    return tuple(listed)


LOGPROB_ENTROPY = Op(
    "logprob_entropy",
    logprob_entropy,
    logprob_entropy_eager,
    (
        Implementation(
            "triton",
            lambda: fused("triton").logprob_entropy,
            platform.no_triton,
            batch_invariant=cases.ANYWHERE,
            gate=from_kernels("loss.softmax_stats_triton", "gate_scaled"),
            tunables=from_kernels("loss.softmax_stats_triton", "TUNABLES"),
        ),
        Implementation(
            "cpp",
            lambda: fused("cpp").logprob_entropy,
            platform.no_cpp,
            ("cpu",),
            (torch.float32, torch.bfloat16),
            batch_invariant=("cpu",),
        ),
    ),
    _all_cases(),
    # A sum of exponentials in any order, its logarithm and a difference: where the twin is lucky
    # its double and 2 eps are too little (once in 12 seeds of all cases, by 0.8 eps).
    atol={torch.float32: 4 * torch.finfo(torch.float32).eps},
    goals=cases.near_copy(92, "forward", "forward_backward"),
)
