"""AdamW over many tensors, in place (Loshchilov & Hutter, arXiv:1711.05101).

m <- m + (1 - beta1) (g - m)            v <- beta2 v + (1 - beta2) g^2
p <- (1 - lr weight_decay) p - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)

Stored in bfloat16, p, m and v may be rounded stochastically, by random bits of a counter.
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
from tilewright.ops.quant import quantize

STATES = (torch.float32, torch.bfloat16, torch.float64)
# In the counter's second word, above the bits of a block: apart from aqn_noise, dropout and the
# quantizers, which may have the same seed and have 0 there.
STREAM = 1 << 28
# Multiplied by an odd number modulo 2^16 bits are as uniform, and pairs of them are spread: over
# all 2^16, the share in any corner of the square is its area to 1.3e-4.
FACTORS = {"parameter": 1, "exp_avg": 0x9E37, "exp_avg_sq": 0x58F1}


class StochasticRounding:
    """How `adamw_` rounds what it stores in bfloat16: x to one of its two neighbors there, to the
    one of larger magnitude with the probability of x's distance from the other, in steps of 2^-16.
    On average, over seeds or steps, nothing is lost.

    An element's 16 bits u depend on (seed, step, matrix, element) alone: half element % 8 of the
    four words (lower halves first) of Philox4x32-10 (Salmon et al., SC 2011) with key seed and
    counter words (b, (b >> 32) + 2^28, matrix, step), b = element // 8. To the bits of p, and of
    its copy, u is added, as a float32, whose lower 16 bits are then cut; to those of m 0x9E37 u, to
    those of v 0x58F1 u, modulo 2^16. What bfloat16 has stays, as do infinity and NaN; nothing
    finite becomes infinity.

    Args:
        seed: 0 to 2^63 - 1.
        places: for each tensor of a call the matrix that it is, or is a part of, as int64
            [tensors, 4] on the tensors' device: matrix (0 to 2^32 - 1), first, width, pitch.
            Element i is element first + i // width * pitch + i % width of the matrix: one that is
            sharded or merged with others gets the bits that it would get whole. None: tensor i is
            matrix i. The values are not checked.
    """

    def __init__(self, seed: int, places: torch.Tensor | None = None):
        self.seed, self.places = seed, places


# Wide: torch.optim.AdamW's states and options.
@checks.autocast("inputs")
@takes(
    step="float32 | float64 | int32 | int64 [] or int [1, inf)",
    lr="number [0, inf)",
    eps="number (0, inf)",
    weight_decay="number [0, inf)",
    clip_factor="float32 | float64 []",
    rounding="a StochasticRounding",
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
    clip_factor: torch.Tensor | None = None,
    copies: Sequence[torch.Tensor] | None = None,
    rounding: StochasticRounding | None = None,
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
            that decays by less than 2^-8 in a step (beta > 0.996) may stay where it is, unless it
            is rounded stochastically.
        compensations: None, or for each parameter a tensor of its shape and dtype, initially zero,
            that holds what rounding has cut off the parameter (Kahan summation); overwritten. It
            lets 16-bit parameters take steps that are smaller than their last place. Not with
            rounding.
        step: the number of this step, from 1; or a tensor [] of it, float32 | float64 | int32 |
            int64, on the device of params, as torch.optim has it with capturable=True. It is read
            on the device, so a CUDA graph can be replayed at every step; its value is not checked.
        lr: learning rate, >= 0.
        betas: decays of m and v, each in [0, 1).
        eps: > 0.
        weight_decay: >= 0.
        clip_factor: None, or a tensor [] on the device of params, read there, that gradients are
            multiplied by.
        copies: None, or for each parameter, in fp32, a bf16 tensor of its shape that it is written
            to as well: params are then the master of weights in bfloat16.
        rounding: None: to nearest; or a StochasticRounding of params, exp_avgs, exp_avg_sqs and
            copies, those in bfloat16.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (params, exp_avgs, exp_avg_sqs), then compensations and copies unless None, as lists of the
        tensors that were passed.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> p, m, v = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
        >>> _ = adamw_([p], [torch.tensor([0.5])], [m], [v], step=1, lr=0.1, weight_decay=0.0)
        >>> p
        tensor([0.9000])

    Source: arXiv:1711.05101, as torch.optim.AdamW; compensation and stochastic rounding:
    arXiv:2010.06192.
    """
    tensors = _checked(params, grads, exp_avgs, exp_avg_sqs, compensations, copies)
    for name, number in (("step", step), ("clip_factor", clip_factor)):
        if isinstance(number, torch.Tensor) and tensors[0]:
            checks.same_device(**{"params[0]": tensors[0][0], name: number})
    if len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        checks.number(f"betas[{i}]", beta, 0.0, 1 - 2.0**-24, "at least 0 and below 1")
    if rounding is not None and compensations is not None:
        raise ValueError(
            "compensations must be None with rounding: what stochastic rounding cuts off is not "
            "lost on average"
        )
    p, _, m, v, kahan, copied = tensors
    given = (compensations, kahan), (copies, copied)
    changed = p, m, v, *(tensors for passed, tensors in given if passed is not None)
    beta1, beta2 = map(float, betas)
    numbers = Step(float(lr), beta1, beta2, float(eps), float(weight_decay), step, clip_factor)
    if p:
        if type(p[0]) in PLAIN and not torch.compiler.is_compiling():
            _check_apart(tensors)
        run = ADAMW.pick(implementation, p[0])
        with torch.no_grad():
            run(*tensors, *_placed(rounding, p), numbers)
    return changed


def _placed(rounding, params):
    """The operator's arguments: a place for each tensor, and the seed."""
    if rounding is None:
        return None, 0
    checks.number("rounding.seed", rounding.seed, 0, 2**63 - 1, "an int from 0 to 2^63 - 1")
    places = rounding.places
    if places is None:
        make = _whole.__wrapped__ if torch.compiler.is_compiling() else _whole
        places = make(params[0].device, tuple(t.numel() for t in params))
    if places.dtype != torch.int64 or tuple(places.shape) != (len(params), 4):
        raise ValueError(
            f"rounding.places must be int64 [{len(params)}, 4], a row for each of params, got "
            f"{places.dtype} {list(places.shape)}"
        )
    checks.same_device(**{"params[0]": params[0], "rounding.places": places})
    return places.contiguous(), rounding.seed


@functools.lru_cache(maxsize=64)
def _whole(device: torch.device, sizes: tuple[int, ...]) -> torch.Tensor:
    """The places of matrices that are whole. Cached: a CUDA graph may not copy from the host."""
    rows = [[i, 0, max(n, 1), max(n, 1)] for i, n in enumerate(sizes)]
    return torch.tensor(rows, dtype=torch.int64).to(device)


def _checked(params, grads, exp_avgs, exp_avg_sqs, compensations, copies):
    """The lists, with contiguous gradients; [] for no compensations, and for no copies."""
    lists = {
        "params": list(params),
        "grads": list(grads),
        "exp_avgs": list(exp_avgs),
        "exp_avg_sqs": list(exp_avg_sqs),
    }
    if compensations is not None:
        lists["compensations"] = list(compensations)
    if copies is not None:
        lists["copies"] = list(copies)
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
    copied = lists.get("copies", [])
    kinds = {(t.dtype, p.dtype) for t, p in zip(copied, params, strict=False)}
    if not kinds <= {(torch.bfloat16, torch.float32), (torch.float64, torch.float64)}:
        raise TypeError(
            f"copies must be those in bfloat16 of params in float32, got {copied[0].dtype} of "
            f"{params[0].dtype}"
        )
    g = [t.contiguous() for t in lists["grads"]]
    if g and g[0].dtype not in (params[0].dtype, torch.float32, torch.bfloat16):
        g = [t.to(torch.promote_types(params[0].dtype, torch.float32)) for t in g]
    return params, g, m, v, lists.get("compensations", []), copied


LISTS = "params", "grads", "exp_avgs", "exp_avg_sqs", "compensations", "copies"


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


def adamw_eager_(
    params, grads, exp_avgs, exp_avg_sqs, compensations, copies, places, seed, numbers
):
    lr, beta1, beta2, eps, weight_decay, step, clip = numbers
    size, root = numbers.corrected()
    for i, (p, g, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        acc = torch.promote_types(p.dtype, torch.float32)
        g, a, b, old = g.to(acc), m.to(acc), v.to(acc), p.to(acc)
        g = g if clip is None else g * clip.to(acc)
        # From the nearer end: next to a large difference, the other one would lose its digits.
        a = a + (1 - beta1) * (g - a) if beta1 >= 0.5 else g + beta1 * (a - g)
        b = beta2 * b + (1 - beta2) * g * g
        change = -lr * weight_decay * old - size * a / (b.sqrt() * root + eps)
        if compensations:
            change = change + compensations[i].to(acc)
        new = old + change
        if compensations:
            compensations[i].copy_(old - new.to(p.dtype).to(acc) + change)
        written = [(m, a, "exp_avg"), (v, b, "exp_avg_sq"), (p, new, "parameter")]
        written += [(copy, new, "parameter") for copy in copies[i : i + 1]]
        random = None if places is None else random_bits(p, places[i], seed, step)
        for to, value, what in written:
            if random is not None and to.dtype == torch.bfloat16:
                value = rounded(value, random * FACTORS[what] & 0xFFFF)
            to.copy_(value)


def rounded(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """x in float32 with a value of bfloat16, the one that 16 random bits [x] choose."""
    bits = x.float().view(torch.int32)
    up = bits + random.to(torch.int32) & -0x10000
    infinite = 0x7F800000
    up = torch.where(up & infinite == infinite, bits & -0x10000, up)
    return torch.where(x.isnan(), bits | 0x400000, up).view(torch.float32)


def random_bits(
    like: torch.Tensor, place: torch.Tensor, seed: int, step: int | float | torch.Tensor
) -> torch.Tensor:
    """u, int64, for each element of a tensor in this place; see `StochasticRounding`."""
    matrix, first, width, pitch = place.unbind()
    at = torch.arange(like.numel(), device=like.device)
    at = first + at // width * pitch + at % width
    block = at >> 3
    step = torch.as_tensor(step, device=like.device).to(torch.int64)
    counter = block & 0xFFFFFFFF, (block >> 32) + STREAM, matrix, step
    words = torch.stack(quantize.philox_words(seed, counter), -1)
    word = words.gather(-1, (at >> 1 & 3)[:, None]).squeeze(-1)
    return (word >> (at & 1) * 16 & 0xFFFF).view(like.shape)


# ---- fused implementations


@functools.cache
def _triton():
    from tilewright.kernels.optim import adamw_triton

    written = "params", "exp_avgs", "exp_avg_sqs", "compensations", "copies"
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
    clip=None,
    copied=False,
    **options,
):
    """half: states in bfloat16; in contract cases only for bfloat16 parameters, because Triton's
    interpreter truncates on a cast to bfloat16.   tiny: gradients far below the first moments.
    counter: the dtype of a step that is a tensor.   clip: the clip factor.   copied: whether there
    are copies in bfloat16.
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
        if clip is not None:
            given["clip_factor"] = torch.tensor(clip, device=device)
        if copied and dtype == torch.float32:
            given["copies"] = draw(torch.bfloat16, 1.0)
        return given

    def cost(itemsize):
        n, wide = sum(math.prod(s) for s in shapes), 2 if half else 4
        traffic = n * (3 * itemsize + 4 * wide + (2 * itemsize if kahan else 0) + 2 * copied)
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
        _case("stochastic", _RAGGED, half=True, clip=0.3, rounding=StochasticRounding(3)),
        _case(
            "copied", [(37,), (8, 24)], clip=0.3, copied=True, rounding=StochasticRounding(2**40)
        ),
        *(
            _case(f"{name}{suffix}", shapes, tags, **options)
            for name, shapes, tags in (
                ("qwen3-30b-a3b_6_layers", _layers("qwen3-30b-a3b", 6), cases.CUDA),
                ("qwen3-30b-a3b", _layers("qwen3-30b-a3b", 1), cases.CPU),
            )
            for suffix, options in (
                ("", {}),
                ("-bf16-states", {"half": True}),
                ("-stochastic", {"half": True, "rounding": StochasticRounding(5)}),
            )
        ),
        _case("big", [(7,), (2**18 + 1, 8192)], cases.BIG, half=True),
    ),
    atol=_atol,
    # Rounded stochastically, a result is either neighbor.
    judged=Judged(
        together=_with_compensations,
        detects={
            torch.float32: {"out 3": 0.025},
            torch.bfloat16: {"out 0": 0.025, "out 1": 0.025, "out 2": 0.025},
        },
    ),
    goals=(Goal(cases.HOPPER, "forward", "over torch-fused", at_least=1.0),),
)
