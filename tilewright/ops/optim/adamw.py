"""AdamW over many tensors, in place (Loshchilov & Hutter, arXiv:1711.05101).

m <- m + (1 - beta1) (g - m)            v <- beta2 v + (1 - beta2) g^2
p <- (1 - lr weight_decay) p - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import Case, Cost, Goal, Judged, Op, in_cpp, in_triton
from tilewright.core.schema import PLAIN
from tilewright.core.takes import FLOAT, takes
from tilewright.kernels.optim.operators import Step, update
from tilewright.ops import cases

STATES = (torch.float32, torch.bfloat16, torch.float64)


# Wide: torch.optim.AdamW's states and options.
@checks.autocast("inputs")
@takes(
    step="float32 | float64 | int32 | int64 [] or int [1, inf)",
    lr="number [0, inf)",
    eps="number (0, inf)",
    weight_decay="number [0, inf)",
)
def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    compensations: Sequence[torch.Tensor] | None = None,
    *,
    step: int | torch.Tensor,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    implementation: str = "auto",
) -> tuple[list[torch.Tensor], ...]:
    """A step of AdamW with decoupled weight decay and bias correction, in place, over all tensors
    in one launch.

    Computed in float32; the new values are rounded once, when they are stored, and the update uses
    the moments before that. Not differentiable.

    Args:
        params: Tensors of any shapes, fp32 | bf16 | fp16 (fp64 with eager), all of one dtype;
            overwritten. Contiguous, as are all other tensors but the gradients. No tensor that is
            overwritten shares memory with another one (not checked in compiled code).
        grads: the gradients, of the shapes of params and all of one floating dtype; any strides.
        exp_avgs, exp_avg_sqs: the moments m and v, of the shapes of params, fp32 or bf16 (fp64 with
            eager), all of one dtype; overwritten. In bfloat16, which rounds to 8 bits, a moment
            that decays by less than 2^-8 in a step (beta > 0.996) may stay where it is.
        compensations: None, or for each parameter a tensor of its shape and dtype, initially zero,
            that holds what rounding has cut off the parameter (Kahan summation); overwritten. It
            lets 16-bit parameters take steps that are smaller than their last place.
        step: the number of this step, from 1; or a tensor [] of it, float32 | float64 | int32 |
            int64, on the device of params, as torch.optim has it with capturable=True. It is read
            on the device, so a CUDA graph can be replayed at every step; its value is not checked.
        lr: learning rate, >= 0.
        betas: decays of m and v, each in [0, 1).
        eps: > 0.
        weight_decay: >= 0.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (params, exp_avgs, exp_avg_sqs), and compensations unless None, as lists of the tensors that
        were passed.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> p, m, v = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
        >>> _ = adamw_([p], [torch.tensor([0.5])], [m], [v], step=1, lr=0.1, weight_decay=0.0)
        >>> p
        tensor([0.9000])

    Source: arXiv:1711.05101, as torch.optim.AdamW; compensation: arXiv:2010.06192.
    """
    tensors = _checked(params, grads, exp_avgs, exp_avg_sqs, compensations)
    if isinstance(step, torch.Tensor) and tensors[0]:
        checks.same_device(**{"params[0]": tensors[0][0], "step": step})
    if len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        checks.number(f"betas[{i}]", beta, 0.0, 1 - 2.0**-24, "at least 0 and below 1")
    p, _, m, v, kahan = tensors
    changed = (p, m, v) if compensations is None else (p, m, v, kahan)
    beta1, beta2 = map(float, betas)
    numbers = Step(float(lr), beta1, beta2, float(eps), float(weight_decay), step)
    if p:
        if type(p[0]) in PLAIN and not torch.compiler.is_compiling():
            _check_apart(tensors)
        run = ADAMW.pick(implementation, p[0])
        with torch.no_grad():
            run(*tensors, numbers)
    return changed


def _checked(params, grads, exp_avgs, exp_avg_sqs, compensations):
    """The lists, with contiguous gradients; [] for no compensations."""
    lists = {
        "params": list(params),
        "grads": list(grads),
        "exp_avgs": list(exp_avgs),
        "exp_avg_sqs": list(exp_avg_sqs),
    }
    if compensations is not None:
        lists["compensations"] = list(compensations)
    params = lists["params"]
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(
                f"{name} must have as many tensors as params, {len(params)}, got {len(tensors)}"
            )
        # One comparison for each tensor, since an optimizer may have thousands.
        for i, (t, p) in enumerate(zip(tensors, params, strict=True)):
            like = p if name == "compensations" else tensors[0]
            fits = (
                isinstance(t, torch.Tensor)
                and t.dtype == getattr(like, "dtype", None)
                and t.shape == p.shape
                and t.device == params[0].device
                and (name == "grads" or t.is_contiguous())
                and t.dtype in FLOAT
                and t.layout is torch.strided
            )
            if not fits:
                _check(name, i, t, like, p, params[0])
    m, v = lists["exp_avgs"], lists["exp_avg_sqs"]
    if m and (m[0].dtype not in STATES or v[0].dtype != m[0].dtype):
        raise TypeError(
            "exp_avgs and exp_avg_sqs must be float32 or bfloat16, both of one dtype, got "
            f"{m[0].dtype} and {v[0].dtype}"
        )
    g = [t.contiguous() for t in lists["grads"]]
    if g and g[0].dtype not in (params[0].dtype, torch.float32, torch.bfloat16):
        g = [t.to(torch.promote_types(params[0].dtype, torch.float32)) for t in g]
    return params, g, m, v, lists.get("compensations", [])


LISTS = "params", "grads", "exp_avgs", "exp_avg_sqs", "compensations"


def _check_apart(lists):
    """Raises ValueError for a tensor that is written and shares memory with another one: one launch
    writes and reads all of them, in any order. Meta tensors, at 0, have no memory.
    """
    places = sorted([(at, t.nbytes) for tensors in lists for t in tensors if (at := t.data_ptr())])
    if all(start + size <= then for (start, size), (then, _) in itertools.pairwise(places)):
        return  # as good as always, and an optimizer may have thousands
    spans = [
        (start := t.data_ptr(), start + t.nbytes, name, i)
        for name, tensors in zip(LISTS, lists, strict=True)
        for i, t in enumerate(tensors)
    ]
    # The last ends so far, of tensors that are written and of gradients, which may be shared.
    last: dict[bool, tuple[int, int, str, int]] = dict.fromkeys((True, False), (0, 0, "", 0))
    for span in sorted(spans):
        start, end, name, i = span
        written = name != "grads"
        for others in (True, False) if written else (True,):
            _, other_end, other, at = last[others]
            if start and start < other_end and start < end:
                raise ValueError(
                    f"{name}[{i}] must not share memory with {other}[{at}]: one launch writes all"
                )
        if end > last[written][1]:
            last[written] = span


def _check(name, i, t, like, p, first):
    """Raises for a tensor of a list that is not as the others are."""
    one = f"{name}[{i}]"
    checks.floating(one, t)
    if t.dtype != like.dtype:
        raise TypeError(f"{one} must be {like.dtype}, as the others are, got {t.dtype}")
    checks.shape(one, t, tuple(p.shape), f"that of params[{i}]")
    checks.same_device(**{"params[0]": first, one: t})
    if name != "grads" and not t.is_contiguous():
        raise ValueError(f"{one} must be contiguous, got strides {list(t.stride())}")


# ---- the definition


def adamw_eager_(params, grads, exp_avgs, exp_avg_sqs, compensations, numbers):
    lr, beta1, beta2, eps, weight_decay, _ = numbers
    size, root = numbers.corrected()
    for i, (p, g, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        acc = torch.promote_types(p.dtype, torch.float32)
        g, a, b, old = g.to(acc), m.to(acc), v.to(acc), p.to(acc)
        # From the nearer end: next to a large difference, the other one would lose its digits.
        a = a + (1 - beta1) * (g - a) if beta1 >= 0.5 else g + beta1 * (a - g)
        b = beta2 * b + (1 - beta2) * g * g
        change = -lr * weight_decay * old - size * a / (b.sqrt() * root + eps)
        if compensations:
            change = change + compensations[i].to(acc)
        new = (old + change).to(p.dtype)
        if compensations:
            compensations[i].copy_(old - new.to(acc) + change)
        for to, value in ((m, a), (v, b), (p, new)):
            to.copy_(value)


# ---- fused implementations


@functools.cache
def _triton():
    from tilewright.kernels.optim import adamw_triton

    written = "params", "exp_avgs", "exp_avg_sqs", "compensations"
    return update.define("adamw_triton_", adamw_triton.update, mutates=written)


@functools.cache
def _cpp():
    return update.adopt("adamw_cpp_")


# ---- cases


def _case(
    name,
    shapes,
    tags=cases.CONTRACT,
    *,
    half=False,
    kahan=False,
    tiny=False,
    counter=None,
    **options,
):
    """half: states in bfloat16; in contract cases only for bfloat16 parameters, because Triton's
    interpreter truncates on a cast to bfloat16.   tiny: gradients far below the first moments.
    counter: the dtype of a step that is a tensor.
    """

    def make(device, dtype, seed):
        gen = cases.generator(device, seed)
        half_here = half and (dtype == torch.bfloat16 or "contract" not in tags)
        states = torch.bfloat16 if half_here else torch.float32

        def draw(dtype, scale, shift=0.0):
            return [
                cases.randn(
                    *(s or (1,)),
                    device=device,
                    dtype=dtype,
                    gen=gen,
                    scale=scale,
                    requires_grad=False,
                ).view(s)
                + shift
                for s in shapes
            ]

        given = {
            "params": draw(dtype, 1.0),
            "grads": draw(dtype, 1e-6 if tiny else 0.1),
            "exp_avgs": draw(states, 0.1),
            "exp_avg_sqs": [t.abs() for t in draw(states, 0.01, 0.01)],
        }
        if kahan:
            given["compensations"] = draw(dtype, 1e-3)
        # A step that is seen in 16 bits; a compensation holds what is far smaller.
        given |= {"step": 3, "lr": 1e-2 if kahan else 0.1, **options}
        if counter is not None:
            given["step"] = torch.tensor(given["step"], device=device, dtype=counter)
        return given

    def cost(itemsize):
        n, wide = sum(math.prod(s) for s in shapes), 2 if half else 4
        traffic = n * (3 * itemsize + 4 * wide + (2 * itemsize if kahan else 0))
        return Cost(traffic, 0, 14 * n, 0)

    return Case(name, make, cost, tags)


def _layers(model: str, layers: int) -> list[tuple[int, ...]]:
    m = cases.MODELS[model]
    heads = m.head_dim * (m.heads + 2 * m.kv_heads)
    layer = [(heads, m.hidden), (m.hidden, m.heads * m.head_dim), (2 * m.inner, m.hidden)]
    return [*layer, (m.hidden, m.inner), (m.hidden,), (m.hidden,)] * layers


def _with_compensations(results, kwargs):
    """A parameter and its compensation are the two parts of one number, and the second is what
    rounding has left of it: it is judged as their sum.
    """
    n = len(kwargs["params"])
    return {
        name: results[f"out {int(name.split()[1]) - 3 * n}"].double() + t.double()
        if _is_compensation(name, kwargs)
        else t
        for name, t in results.items()
    }


def _atol(dtype, kwargs, name):
    """The bound for the sum of a parameter and its compensation has two terms. The first is half an
    eps of the compensation, which is at most half an eps of the parameter. The second is the error
    of the update, 8 eps in float32; the update is about a hundredth of the parameter in these
    cases.
    """
    if _is_compensation(name, kwargs):
        return torch.finfo(dtype).eps ** 2 / 4 + torch.finfo(torch.float32).eps / 12
    return None


def _is_compensation(name, kwargs):
    return "compensations" in kwargs and int(name.split()[1]) >= 3 * len(kwargs["params"])


_RAGGED = [(3, 5), (1,), (37,), (2, 3, 4), (0, 4), ()]

ADAMW = Op(
    "adamw_",
    adamw_,
    adamw_eager_,
    (
        in_triton(_triton, gate=from_kernels("optim.adamw_triton", "gate")),
        in_cpp(_cpp),
    ),
    (
        _case("ragged", _RAGGED),
        _case("bf16_states", _RAGGED, half=True, betas=(0.8, 0.9), weight_decay=0.1),
        _case("kahan", _RAGGED, half=True, kahan=True, betas=(0.9, 0.95)),
        _case("chunks", [(1100,), (5,), (2, 700)], kahan=True, step=1, eps=1e-3),
        _case("small", [(3,), (2, 2)]),
        *(_case(f"beta1_{b}", [(5, 7), (3,)], betas=(b, 0.9), tiny=True) for b in (0.0, 1e-3)),
        # Corrections that cancel, that do not matter, and of a beta without a logarithm.
        _case("counted", [(3, 5), (37,)], counter=torch.float32, step=1),
        _case("counted_long", [(3, 5), (37,)], counter=torch.int64, step=700),
        _case("counted_beta1_0", [(3, 5)], counter=torch.int32, betas=(0.0, 0.99)),
        _case("nothing", [(0,), (2, 0)]),
        *(
            _case(f"{name}{suffix}", _layers("qwen3-30b-a3b", n), tags, **options)
            for name, n, tags in (
                ("qwen3-30b-a3b_6_layers", 6, cases.CUDA),
                ("qwen3-30b-a3b", 1, cases.CPU),
            )
            for suffix, options in (("", {}), ("-bf16-states", {"half": True}))
        ),
        _case("big", [(7,), (2**18 + 1, 8192)], cases.BIG, half=True),
    ),
    atol=_atol,
    judged=Judged(together=_with_compensations),
    goals=(Goal(cases.HOPPER, "forward", "over torch-fused", at_least=1.0),),
)
