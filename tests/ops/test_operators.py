"""Every op and implementation of the registry under torch.compile, activation checkpointing and
torch.library.opcheck.
"""

import contextlib
import functools
import pathlib
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, OperatorNames, skip_unless_usable
from small_cases import (
    differentiable,
    differentiate,
    inputs,
    small_cases,
    whole_case,
    whole_cases,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tilewright import ImplementationUnavailable
from tilewright.bench import contract
from tilewright.core import checks, dynamic, explain, platform, schema
from tilewright.core import library as _library
from tilewright.core.registry import DispatchOn, Implementation, Op, short
from tilewright.core.takes import NumberOrTensorArgument, ObjectArgument, TensorArgument
from tilewright.kernels.rope.operators import HeadNorm, Heads, Rotation, prepare
from tilewright.ops import OPS
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.rope import qk_norm_rope_fused, rope_fused
from tilewright.selection import use

EVERY_IMPLEMENTATION = pytest.mark.parametrize(
    "op, name",
    [
        pytest.param(op, i.name, id=f"{op.name}-{i.name}")
        for op in OPS.values()
        for i in op.implementations
    ],
)


EVERY_DIFFERENTIABLE = pytest.mark.parametrize(
    "op, name",
    [
        pytest.param(op, i.name, id=f"{op.name}-{i.name}")
        for op in filter(differentiable, OPS.values())
        for i in op.implementations
    ],
)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        if f.dtype == torch.float8_e4m3fn:
            f, e = f.view(torch.uint8), e.view(torch.uint8)
        torch.testing.assert_close(f, e, rtol=0, atol=0, equal_nan=True)


# ---- torch.compile


def has_a_graph(case):
    """The case has elements, and is not unsupported under torch.compile, as in-place losses are."""
    made = inputs(case)
    return not made.get("inplace") and all(t.numel() for t in contract.leaves(made))


@EVERY_IMPLEMENTATION
def test_compiles_as_one_graph_and_gives_the_same(op, name):
    """The graph is traced whole, split into forward and backward, and run uncompiled:
    equal bits.
    """
    skip_unless_usable(op, name, torch.float32)
    fn = functools.partial(op.public, implementation=name)
    # Implementations differ in the operators that the public function calls, and opcheck traces
    # those in each case: on a CPU, together they trace it in two.
    cases = [case for case in small_cases(op) if has_a_graph(case)][:2]
    if DEVICE == "cpu":
        cases = cases[:1] if name in ("eager", "triton") else cases[-1:]
    for case in cases:
        torch._dynamo.reset()
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        assert_same(differentiate(compiled, inputs(case)), differentiate(fn, inputs(case)))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_auto_compiles_through_inductor(op):
    """Inductor may reorder eager arithmetic; it calls an operator unchanged, with its fake's
    strides.
    """
    torch._dynamo.reset()
    case = small_cases(op)[0]
    compiled = torch.compile(op.public, fullgraph=True)
    found, expected = differentiate(compiled, inputs(case)), differentiate(op.public, inputs(case))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(*(t.float() if t.itemsize == 1 else t for t in (f, e)))


NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


class NeutralArithmetic(TorchDispatchMode):
    """found: operators that add zero to one of some tensors or subtract it, or multiply it by one
    or divide it.
    """

    def __init__(self, tensors):
        super().__init__()
        self.of, self.found = {self.place(t) for t in tensors}, []

    @staticmethod
    def place(t):
        return t.data_ptr(), t.shape, t.stride(), t.dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in NEUTRAL and len(args) == 2:
            of = any(isinstance(a, torch.Tensor) and self.place(a) in self.of for a in args)
            if of and any(type(a) in (int, float) and a == NEUTRAL[name] for a in args):
                self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_nothing_neutral_is_added_to_an_input_or_multiplied_with_it(op):
    """Inductor drops such an operator. From torch 2.14 on it then marks the input as one to
    recompute, and fails under activation checkpointing. Triton's kernels are reached by the same
    public functions.
    """
    for name in (i.name for i in op.implementations if i.name != "triton"):
        if op.implementation(name).why_not(DEVICE, torch.float32):
            continue
        for case in filter(has_a_graph, small_cases(op)):
            made = inputs(case)
            mode = NeutralArithmetic(contract.leaves(made))
            with mode, contextlib.suppress(ImplementationUnavailable):  # this case, which it names
                op.public(**made, implementation=name)
            assert not mode.found, (name, case.name)


def test_a_pin_reaches_compiled_code(monkeypatch):
    """Changing the pin recompiles; changing it back does not."""

    def times(name, factor):
        return Implementation(name, lambda: lambda x: x * factor, devices=(DEVICE,))

    op = Op("probe", None, lambda x: x * 1, (times("two", 2), times("three", 3)))
    monkeypatch.setitem(OPS, "probe", op)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: op.pick("auto", x)(x) + 1, fullgraph=True, backend=backend)
    x = torch.ones(3, device=DEVICE)
    assert compiled(x)[0] == 3
    for pin, expected in [("three", 4), ("eager", 2), ("three", 4), ("two", 3)]:
        with use(probe=pin):
            assert compiled(x)[0] == expected, f"pinned to {pin}"
        assert compiled(x)[0] == 3, "the pin outlived its block"
    assert len(graphs) == 4, "unpinned, and one for each pin"


# ---- torch.autocast

# PyTorch's equivalent, on the inputs of the op's smallest case; for a quantized or fused op, its
# products.
COUNTERPARTS = {
    "rmsnorm": lambda x, weight, **_: F.rms_norm(x, x.shape[-1:], weight),
    "add_rmsnorm": lambda x, residual, weight, **_: F.rms_norm(x + residual, x.shape[-1:], weight),
    "layernorm": lambda x, weight, **_: F.layer_norm(x, x.shape[-1:], weight),
    "add_layernorm": lambda x, residual, weight, **_: F.layer_norm(
        x + residual, x.shape[-1:], weight
    ),
    "rmsnorm_quantize": lambda x, weight, **_: F.rms_norm(x, x.shape[-1:], weight),
    "add_rmsnorm_quantize": lambda x, residual, weight, **_: F.rms_norm(
        x + residual, x.shape[-1:], weight
    ),
    "silu_mul": lambda gate, up, **_: F.silu(gate) * up,
    "gelu_mul": lambda gate, up, **_: F.gelu(gate) * up,
    "attention": lambda q, k, v, **_: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "cross_entropy": lambda logits, target, **_: F.cross_entropy(logits, target),
    "linear_cross_entropy": lambda x, weight, target, **_: F.linear_cross_entropy(
        x, weight, target
    ),
    "grouped_gemm": lambda x, weight, **_: F.linear(x, weight[0]),
    "moe_mlp": lambda x, gate_up_proj, **_: F.linear(x, gate_up_proj[0]),
    "moe_lora": lambda x, gate_up_proj, **_: F.linear(x, gate_up_proj[0]),
    "quantized_linear": lambda x, q, **_: F.linear(x, x.new_ones(q.shape)),
    "fp8_linear": lambda x, q, **_: F.linear(x, x.new_ones(q.shape)),
    "low_precision_linear": lambda x, w, bias, **_: F.linear(x, w, bias),
    "low_precision_grouped_gemm": lambda x, weight, **_: F.linear(x, weight[0]),
}


@contextlib.contextmanager
def autocast(device):
    """torch.autocast(device, torch.bfloat16), also where there is no such device."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def cast_by_hand(op, kwargs, device=DEVICE):
    """Casts arguments by the op's convention under bfloat16 autocast."""
    convention, arguments = op.autocast
    dtype = {"products": torch.bfloat16, "norm": None if device == "cpu" else torch.float32}.get(
        convention
    )
    return {
        n: v.to(dtype) if n in arguments and dtype and isinstance(v, torch.Tensor) else v
        for n, v in kwargs.items()
    }


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_op_declares_what_autocast_does_to_it(op):
    assert op.autocast is not None, f"{op.name}'s public function has no @checks.autocast"
    assert op.autocast.convention in checks.CONVENTIONS
    assert bool(op.autocast.arguments) == (op.autocast.convention in ("products", "norm"))
    said = explain.contract(op)
    assert checks.CONVENTIONS[op.autocast.convention] in said
    assert not op.autocast.arguments or f"casts {', '.join(op.autocast.arguments)}" in said


def test_explain_says_what_an_implementation_gets():
    assert "\nan implementation gets: (x, size, seed, inverse)\n" in explain.contract(
        OPS["hadamard"]
    )


def test_the_page_has_every_convention_of_autocast():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    for convention, meaning in checks.CONVENTIONS.items():
        assert f"| {convention} | {meaning} |" in page


@EVERY_IMPLEMENTATION
def test_autocast_does_what_the_op_declares(op, name):
    """Bitwise equal to inputs cast by hand; gradients have the dtypes of the leaves."""
    skip_unless_usable(
        op, name, torch.bfloat16 if op.autocast.convention == "products" else torch.float32
    )
    if name == "triton" and DEVICE == "cpu":
        pytest.skip("casts come before any implementation is chosen")

    def under(**kwargs):
        with autocast(DEVICE):
            return op.public(**kwargs, implementation=name)

    kwargs = inputs(whole_case(op))
    found = differentiate(under, kwargs)
    assert_same(
        found,
        differentiate(lambda **kw: op.public(**cast_by_hand(op, kw), implementation=name), kwargs),
    )
    leaves = [t for t in contract.leaves(kwargs) if t.requires_grad]
    grads = found[len(found) - len(leaves) :] if leaves else []
    assert all(g is None or g.dtype == t.dtype for g, t in zip(grads, leaves, strict=True))


@pytest.mark.parametrize(
    "name, device",
    [
        *((name, "cpu") for name in COUNTERPARTS),
        # Ops that can be traced without a device, where the device types' lists differ.
        *(
            (name, "cuda")
            for name in ("rmsnorm", "add_rmsnorm", "layernorm", "silu_mul", "gelu_mul")
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=short)
def test_autocast_gives_the_dtype_that_pytorch_gives(name, device, dtype):
    if name == "linear_cross_entropy" and not hasattr(F, name):
        pytest.skip(f"torch {torch.__version__} has no F.linear_cross_entropy")
    if "rmsnorm" in name and device == "cuda" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 does not autocast F.rms_norm on CUDA to float32, 2.13 does")
    op = OPS[name]
    made = contract.convert(whole_case(op).make("cpu", torch.float32, 0), dtype)
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(FakeTensorMode())
            made = {
                n: torch.empty(v.shape, dtype=v.dtype, device="cuda")
                if isinstance(v, torch.Tensor)
                else v
                for n, v in made.items()
            }
        stack.enter_context(autocast(device))
        out = op.public(**made, implementation="eager")
        first = out[0] if isinstance(out, tuple) else out
        out = first if isinstance(first, Quantized) else contract.leaves(out)[0]
        assert out.dtype == COUNTERPARTS[name](**made).dtype


@pytest.mark.parametrize(
    "op",
    [op for op in OPS.values() if op.autocast.convention == "products"],
    ids=lambda op: op.name,
)
def test_autocast_compiles_as_one_graph(op):
    torch._dynamo.reset()
    kwargs = inputs(whole_case(op))

    def under(fn):
        def call(**kwargs):
            with autocast(DEVICE):
                return fn(**kwargs)

        return call

    compiled = torch.compile(op.public, fullgraph=True, backend="aot_eager")
    found, expected = (differentiate(under(fn), kwargs) for fn in (compiled, op.public))
    if op.name == "gated_delta_rule" and op.choose(DEVICE, torch.float32) == "eager":
        # AOTAutograd traces the backward of PyTorch's own products under the caller's autocast.
        found, expected = found[:2], expected[:2]
    assert_same(found, expected)


def test_without_autocast_a_call_costs_one_question(monkeypatch):
    asked, ask = [], torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *a: (asked.append(a), ask(*a))[1])
    monkeypatch.setattr(
        torch, "get_autocast_dtype", lambda *a: pytest.fail("a dtype was asked for")
    )
    q = torch.randn(1, 1, 2, 8, device=DEVICE)
    assert OPS["attention"].public(q, q, q).dtype == torch.float32 and asked == [(DEVICE,)]
    OPS["silu_mul"].public(q, q)
    assert asked == [(DEVICE,)]


def test_autocast_makes_one_dtype_of_several():
    """Mixed dtypes as from FSDP2, LoRA and Hugging Face; without autocast the error names what to
    cast.
    """
    x, weight = torch.randn(4, 8, device=DEVICE).bfloat16(), torch.randn(6, 8, device=DEVICE)
    target = torch.arange(4, device=DEVICE)
    loss = OPS["linear_cross_entropy"].public
    with autocast(DEVICE):
        found = loss(x, weight, target=target)
        with pytest.raises(TypeError, match=r"takes \d+ positional"):  # no argument is lost
            loss(x, weight, target, *range(30))
    assert found.dtype == torch.float32 and torch.equal(found, loss(x, weight.bfloat16(), target))
    with pytest.raises(TypeError, match="weight must be x's dtype bfloat16, got float32"):
        loss(x, weight, target)
    q = torch.randn(1, 2, 4, 8, device=DEVICE)
    with autocast(DEVICE):
        assert OPS["attention"].public(q, q, v=q.bfloat16()).dtype == torch.bfloat16
        assert OPS["attention"].public(q.double(), q.double(), q.double()).dtype == torch.float64
    with pytest.raises(TypeError, match="v must be q's dtype"):
        OPS["attention"].public(q, q, q.bfloat16())


# ---- several devices


class OfDevice(torch.Tensor):
    """A stand-in for a tensor on a CUDA device that need not exist. Operators see it as a tensor of
    that device.
    """

    @staticmethod
    def __new__(cls, data, index):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, device=f"cuda:{index}"
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args)


@pytest.fixture
def devices(monkeypatch):
    """Two CUDA devices: the first, an H100, is current, the second is an A100. entered: the devices
    that were made current.
    """
    state = SimpleNamespace(current=0, entered=[])

    @contextlib.contextmanager
    def enter(device):
        index = getattr(device, "index", device)
        before, state.current = state.current, index
        state.entered.append(index)
        yield
        state.current = before

    def capability(device=None):
        return ((9, 0), (8, 0))[state.current if device is None else torch.device(device).index]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    return state


@pytest.fixture
def own_library(monkeypatch):
    """Operators that a test defines are removed after it."""
    with torch.library._scoped_library("tilewright", "FRAGMENT") as library:
        monkeypatch.setattr(_library, "_LIBRARY", library)
        yield


@pytest.mark.parametrize("past", [False, True], ids=["dispatched", "past_the_dispatcher"])
def test_launchers_run_with_their_tensors_device_current(devices, own_library, monkeypatch, past):
    """Every operator is defined by `define`. The first argument may be absent."""
    ran = []
    if past:
        monkeypatch.setattr(schema, "PLAIN", (OfDevice, torch.Tensor))
        monkeypatch.setattr(OfDevice, "__torch_dispatch__", None)

    def launcher(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        ran.append(devices.current)
        return torch.empty(0)

    op = _library.define("on_a_device", launcher, lambda bias, x: x.new_empty(0))
    for index in (0, 1, 0):
        op(None, OfDevice(torch.ones(3), index))
    assert ran == [0, 1, 0] and devices.current == 0
    assert devices.entered == [1], "a device that was current already was entered"
    op(None, torch.ones(3))  # a CPU has no current device
    assert ran.pop() == 0 and devices.entered == [1]


def test_what_writes_in_place_runs_with_its_tensors_device_current(
    devices, own_library, monkeypatch
):
    """It is called without an operator around it."""
    ran = []

    def launcher(*args):
        ran.append(devices.current)

    x, table = OfDevice(torch.ones(1, 2, 4), 1), torch.ones(2, 2)
    rope_fused.Fused(None, launcher).overwrite(x, None, Rotation(table, table))
    qk = qk_norm_rope_fused.Fused(prepare.define("probe", launcher), None, launcher)
    qk.overwrite(x, Heads(1, 1), HeadNorm(), Rotation(table, table))
    assert ran == [1, 1] and devices.current == 0


def test_an_implementation_is_chosen_by_what_the_tensors_device_can_do(devices):
    found = []
    op = Op(
        "probe",
        None,
        lambda x: x,
        (
            Implementation("hopper", lambda: "hopper", lambda kind: platform.no_cuda(90)),
            Implementation("ampere", lambda: "ampere", lambda kind: platform.no_cuda(80)),
        ),
    )
    for index in (0, 1, 0, 1):
        found.append(op.pick("auto", DispatchOn(torch.device("cuda", index))))
    assert found == ["hopper", "ampere"] * 2
    assert [op.unpinned(DispatchOn(torch.device("cuda", index))) for index in (1, 0)] == [
        "ampere",
        "hopper",
    ]
    assert devices.entered.count(1) == 2, "an answer that was kept was looked for again"


# ---- an implementation's parts


def recorded(fn, kwargs):
    """Names of the operators that ran for results and gradients. The profiler sees inside an
    operator, unlike a dispatch mode.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        differentiate(fn, kwargs)
    return [e.name for e in profile.events() if "::" in e.name]


def cases_of_every_kind(op):
    """The smallest case of each set of argument types: tensors, and each quantized format."""
    found = {}
    for case in small_cases(op):
        kwargs = inputs(case)
        if all(t.numel() for t in contract.leaves(kwargs)):
            found.setdefault(tuple(map(type, kwargs.values())), (case, kwargs))
    return list(found.values())


@EVERY_IMPLEMENTATION
def test_a_named_implementation_runs_the_same_operators_whatever_is_pinned(op, name, monkeypatch):
    """Including its parts, forward and backward, also in compiled code."""
    skip_unless_usable(op, name, torch.float32)
    if name == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter takes minutes, and the parts are those of the others")
    fn = functools.partial(op.public, implementation=name)
    made, picked = [], set()
    pick = Op.pick
    monkeypatch.setattr(Op, "pick", lambda self, *a: (picked.add(self.name), pick(self, *a))[1])
    for case, kwargs in cases_of_every_kind(op):
        with contextlib.suppress(ImplementationUnavailable):  # an unsupported variant
            differentiate(fn, kwargs)  # also fills cached tables
            made.append((case, kwargs))
    monkeypatch.undo()
    if picked == {op.name}:
        return  # it has no parts from the registry
    for case, kwargs in made:
        calls = [fn]
        if name != "eager":  # a twin is no operator: its graph contains its trace
            torch._dynamo.reset()
            calls.append(torch.compile(fn, fullgraph=True, backend="aot_eager"))
            differentiate(calls[1], kwargs)
        for call in calls:
            alone = recorded(call, kwargs)
            with use("eager"):
                assert recorded(call, kwargs) == alone, case.name


# ---- activation checkpointing


@EVERY_IMPLEMENTATION
def test_recomputes_the_same_under_checkpointing(op, name):
    skip_unless_usable(op, name, torch.float32)

    def twice(**kwargs):
        scaled = {
            n: v * 0.5 if isinstance(v, torch.Tensor) and v.requires_grad else v
            for n, v in kwargs.items()
        }
        first = contract.leaves(op.public(**kwargs, implementation=name))
        second = contract.leaves(op.public(**scaled, implementation=name))
        return tuple(a + b if a.requires_grad else a for a, b in zip(first, second, strict=True))

    def checkpointed(**kwargs):
        return checkpoint(twice, use_reentrant=False, **kwargs)

    for case in small_cases(op)[: 1 if name == "triton" else 2]:  # the interpreter is slow
        assert_same(differentiate(checkpointed, inputs(case)), differentiate(twice, inputs(case)))


# ---- derivatives without kernels


def right_or_refused(derivative, name, refusal):
    """PyTorch's own fused kernels have their own error messages."""
    expected = derivative("eager")
    try:
        found = derivative(name)
    except (RuntimeError, NotImplementedError) as error:
        theirs = "not implemented|does not support it|double backward are not supported"
        assert re.search(
            f"{refusal}|{theirs}" if name in ("torch", "sdpa") else refusal, str(error)
        ), error
        return False
    for f, e in zip(found, expected, strict=True):
        if f is not None and e is not None:
            torch.testing.assert_close(f, e, rtol=1e-3, atol=1e-3 * float(e.abs().max()))
        else:
            assert all(t is None or not t.any() for t in (f, e))
    return True


@EVERY_DIFFERENTIABLE
@pytest.mark.parametrize(
    "power", [1, 3]
)  # whether the gradient reaching the op's backward depends on its inputs
def test_a_second_derivative_is_right_or_refused(op, name, power):
    skip_unless_usable(op, name, torch.float32)

    def second(name):
        kwargs = inputs(whole_case(op))
        outs = contract.leaves(op.public(**kwargs, implementation=name))
        leaves = [t for t in contract.leaves(kwargs) if t.requires_grad]
        loss = sum(o.pow(power).sum() for o in outs if o.requires_grad)
        grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        return torch.autograd.grad(
            loss + sum(g.pow(3).sum() for g in grads if g is not None), leaves, allow_unused=True
        )

    right = right_or_refused(
        second,
        name,
        r"tilewright::\w+ is differentiable once; use implementation='eager' for "
        "higher derivatives",
    )
    assert right or op.name != "rope", "a rotation's backward is a rotation"


@EVERY_DIFFERENTIABLE
def test_a_forward_mode_derivative_is_right_or_refused(op, name):
    skip_unless_usable(op, name, torch.float32)

    def tangents(name):
        kwargs = {
            n: v.detach() if isinstance(v, torch.Tensor) else v
            for n, v in inputs(whole_case(op)).items()
        }
        first = next(n for n, v in kwargs.items() if isinstance(v, torch.Tensor))

        def call(t):
            outs = contract.leaves(op.public(**{**kwargs, first: t}, implementation=name))
            return tuple(o for o in outs if o.is_floating_point())

        return torch.func.jvp(
            call, (kwargs[first],), (torch.ones_like(kwargs[first]) * kwargs[first].cos(),)
        )[1]

    right_or_refused(
        tangents,
        name,
        r"(tilewright::\w+|linear_cross_entropy\[torch\]) has no forward-mode derivative; "
        "use implementation='eager'",
    )


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # vmap calls operators once per element
@EVERY_DIFFERENTIABLE
def test_derivatives_by_torch_func_are_right_or_refused(op, name):
    """vmap, grad, vmap of grad, grad of grad, and grad below autograd. vjp, whose backward runs
    when its level has ended: once, again, without a graph, for a batch and as jacrev has it.
    """
    skip_unless_usable(op, name, torch.float32)
    if name == "triton" and DEVICE == "cpu":
        pytest.skip("the operators' formulas are made as those of the others")
    kwargs = inputs(whole_case(op))
    first = next(n for n, v in kwargs.items() if isinstance(v, torch.Tensor) and v.requires_grad)
    fixed = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    x = fixed[first]

    def loss(implementation):
        def call(t):
            outs = contract.leaves(op.public(**{**fixed, first: t}, implementation=implementation))
            return sum(o.sin().sum() for o in outs if o.is_floating_point())

        return call

    def every(t):
        return torch.func.vmap(t)(torch.stack((x, x)))[1]

    def of_grad(f):
        return lambda t: torch.func.grad(f)(t).sin().sum()

    def below_autograd(f):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(of_grad(f)(leaf), leaf)

    def result(implementation):
        def call(t):
            outs = contract.leaves(op.public(**{**fixed, first: t}, implementation=implementation))
            return next(o for o in outs if o.is_floating_point())

        return call

    def of_vjp(use):
        def derivative(implementation):
            y, back = torch.func.vjp(result(implementation), x)
            return use(back, y.cos(), y.sin())

        return derivative

    def rows(implementation):
        return (torch.func.jacrev(lambda t: result(implementation)(t).flatten()[:3])(x),)

    def in_no_graph(back, u, v):
        with torch.no_grad():
            return back(u)

    refusal = (
        r"tilewright::\w+ (is differentiable once; use implementation='eager' for higher "
        r"derivatives|"
        "has no derivative within torch.func; use implementation='eager')"
    )
    of = {
        "grad": lambda f: (torch.func.grad(f)(x),),
        "vmap": lambda f: (every(f),),
        "vmap of grad": lambda f: (every(torch.func.grad(f)),),
        "grad of grad": lambda f: (torch.func.grad(of_grad(f))(x),),
        "grad below autograd": below_autograd,
    }
    right = {
        how: right_or_refused(lambda n, f=f: f(loss(n)), name, refusal) for how, f in of.items()
    }
    for f in (
        of_vjp(lambda back, u, v: (*back(u), *back(v), *back(u))),
        of_vjp(in_no_graph),
        of_vjp(lambda back, u, v: torch.func.vmap(back)(torch.stack((u, v)))),
        rows,
    ):
        assert right_or_refused(f, name, refusal)
    made_in_forward = op.name in ("linear_cross_entropy", "linear_policy_loss")
    saves_no_leaf = op.name in ("permute", "low_precision_grouped_gemm") or (
        op.name == "qk_norm_rope" and kwargs.get("q_weight") is None
    )
    of_torch = name in ("eager", "torch", "sdpa")  # made of PyTorch's operators
    assert right["vmap"]
    for how in ("grad", "vmap of grad"):
        assert right[how] or ((made_in_forward or saves_no_leaf) and not of_torch), how


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("op", list(filter(differentiable, OPS.values())), ids=lambda op: op.name)
def test_batched_gradients_are_those_of_each_or_refused(op):
    """torch.autograd.grad(is_grads_batched=True) calls a formula with tensors that have a hidden
    dimension, and look like any other.
    """
    if (name := op.choose(DEVICE, torch.float32)) == "eager":
        pytest.skip("made of PyTorch's own operators")
    kwargs = inputs(whole_case(op))
    outs = contract.leaves(op.public(**kwargs, implementation=name))
    out = next(o for o in outs if o.requires_grad)
    leaves = [t for t in contract.leaves(kwargs) if t.requires_grad]
    batch = torch.stack([torch.ones_like(out), torch.rand_like(out)])
    options = {"allow_unused": True, "retain_graph": True}
    try:
        both = torch.autograd.grad(out, leaves, batch, is_grads_batched=True, **options)
    except RuntimeError as error:
        theirs = "Batching rule not implemented|not implemented for|doesn't work with in-place"
        assert re.search(theirs, str(error)), error
        assert "cross_entropy" not in op.name
        return
    for i, g in enumerate(batch):
        for found, expected in zip(
            both, torch.autograd.grad(out, leaves, g, **options), strict=True
        ):
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found[i], expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", OPS["fp8_linear"].names())
def test_a_straight_through_gradient_by_torch_func_is_that_of_autograd(name):
    """Cases of the contract do not differentiate fp8_linear in x."""
    if name == "eager" and torch.__version__ < "2.13":
        pytest.skip(f"torch {torch.__version__} has no batching rule for a view of another dtype")
    op = OPS["fp8_linear"]
    skip_unless_usable(op, name, torch.float32)
    kwargs = inputs(whole_case(op))
    x = kwargs.pop("x").detach()

    def loss(t):
        return op.public(t, **kwargs, implementation=name).sin().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    both = torch.func.vmap(torch.func.grad(loss))(torch.stack((x, x)))
    torch.testing.assert_close(both, torch.stack((expected, expected)))
    torch.testing.assert_close(torch.func.vmap(loss)(torch.stack((x, x)))[1], loss(x))
    if name == "eager":
        tangent = torch.func.jvp(loss, (x,), (x.cos(),))[1]
        torch.testing.assert_close(tangent, (expected * x.cos()).sum())
    else:
        with pytest.raises(RuntimeError, match=r"no forward-mode derivative; use implementation="):
            torch.func.jvp(loss, (x,), (x.cos(),))


@pytest.mark.parametrize("name", OPS["newton_schulz"].names())
def test_a_tangent_of_an_op_without_a_derivative_is_not_dropped(name):
    op = OPS["newton_schulz"]
    skip_unless_usable(op, name, torch.float32)
    x = torch.randn(4, 6, device=DEVICE)
    right_or_refused(
        lambda name: torch.func.jvp(lambda t: op.public(t, implementation=name), (x,), (x.cos(),))[
            1
        ][None],
        name,
        r"newton_schulz\[\w+\] has no forward-mode derivative; use implementation='eager'",
    )


@pytest.mark.parametrize("name", ["triton", "cpp"])
def test_a_loss_that_makes_its_gradients_in_forward_refuses_too(name):
    """Its saved gradients are constants to autograd, so a second derivative could not depend on its
    inputs.
    """
    op = OPS["linear_cross_entropy"]
    skip_unless_usable(op, name, torch.float32)
    x, w = (torch.randn(n, 8, device=DEVICE, requires_grad=True) for n in (4, 6))
    loss = op.public(x, w, torch.arange(4, device=DEVICE), implementation=name)
    with pytest.raises(RuntimeError, match="is differentiable once"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_tangent_elsewhere_is_not_refused():
    x, w = torch.randn(4, 8), torch.ones(8)
    fused = OPS["rmsnorm"].choose(DEVICE, torch.float32)
    y = OPS["rmsnorm"].public(x, w, implementation=fused)
    found = torch.func.jvp(
        lambda t: OPS["rmsnorm"].public(x, w, implementation=fused) * t, (x,), (x,)
    )[1]
    assert torch.equal(found, y * x)


def test_create_graph_under_checkpointing_gives_the_same_first_derivative():
    """A checkpoint's saved tensors can be unpacked only once."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    fn = OPS["rmsnorm"].public
    expected = torch.autograd.grad(fn(x, w).pow(2).sum(), (x, w))
    found = torch.autograd.grad(
        checkpoint(fn, x, w, use_reentrant=False).pow(2).sum(), (x, w), create_graph=True
    )
    assert_same([f.detach() for f in found], expected)


# ---- gradients that are asked for


def floating(value):
    """Whether a value has what a gradient may be asked of."""
    return isinstance(value, Quantized) or (
        isinstance(value, torch.Tensor) and value.is_floating_point()
    )


def learning(value):
    """A copy that requires a gradient."""

    def leaf(t):
        real = isinstance(t, torch.Tensor) and t.is_floating_point() and t.itemsize > 1
        return t.detach().clone().requires_grad_(real) if isinstance(t, torch.Tensor) else t

    return pytree.tree_map(leaf, value)


def frozen(kwargs):
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}


def asked_of(op):
    """(argument, the inputs of a small case, with a gradient asked of it alone) for each argument
    of which one can be. One that is a number in all cases is a tensor here.
    """
    made = {}
    for case in [*whole_cases(op), *small_cases(op)]:
        kwargs = frozen(inputs(case))
        for n, value in kwargs.items():
            if floating(value):
                made.setdefault((n, type(value)), (n, {**kwargs, n: learning(value)}))
        for a in op.takes.arguments:
            if isinstance(a, NumberOrTensorArgument) and "float" in a.tensor.dtypes:
                number = torch.ones((), device=DEVICE, requires_grad=True)
                made.setdefault((a.name, torch.Tensor), (a.name, {**kwargs, a.name: number}))
    return made.values()


@EVERY_IMPLEMENTATION
def test_a_gradient_that_is_asked_for_comes_or_the_call_is_refused(op, name):
    """That of each argument alone, held to the twin's in float64; an op that says it is not
    differentiable gives results that require none. Without a graph nothing is refused.
    """
    skip_unless_usable(op, name, torch.float32)
    slow = name == "triton" and DEVICE == "cpu"
    for argument, kwargs in asked_of(op):
        if slow and sum(t.numel() for t in contract.leaves(kwargs)) > 600:
            continue  # the interpreter; refusals come before any implementation is chosen
        try:
            outs = contract.leaves(op.public(**kwargs, implementation=name))
        except ImplementationUnavailable:
            continue
        except ValueError as error:
            assert re.match(rf"{argument} (must not require|requires) a gradient", str(error))
            with torch.no_grad():
                if not isinstance(kwargs[argument], torch.Tensor) or kwargs[argument].dim():
                    op.public(**kwargs, implementation=name)
            continue
        if not says_it_is_differentiable(op):
            assert not any(t.requires_grad for t in outs), argument
            continue
        found = gradients(op, name, kwargs, argument)
        expected = gradients(op, "eager", contract.convert(kwargs, torch.float64), argument)
        for f, e in zip(found, expected, strict=True):
            assert e is not None and f is not None, f"{argument} gets no gradient"
            # 1e-2: whether it is this gradient; the contract says how precise it is.
            assert contract.error(f, e)[0] < 1e-2, argument


def says_it_is_differentiable(op):
    about, _, _ = op.public.__doc__.partition("Args:")
    return not re.search(r"\bNot\s+differentiable", about)


def gradients(op, name, kwargs, argument):
    """The gradients of the sum of all results times some numbers, with respect to the tensors of an
    argument.
    """
    outs = contract.leaves(op.public(**kwargs, implementation=name))
    real = [t for t in outs if t.is_floating_point() and t.itemsize > 1]
    numbers = contract.upstream([t.detach() for t in real], "contiguous", 1)
    pairs = [(t, n.to(t.dtype)) for t, n in zip(real, numbers, strict=True) if t.requires_grad]
    leaves = [t for t in contract.leaves(kwargs[argument]) if t.requires_grad]
    outs, numbers = zip(*pairs, strict=True) if pairs else ((), ())
    return torch.autograd.grad(outs, leaves, numbers, allow_unused=True)


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_gradient_is_asked_of_every_argument_that_takes_a_floating_point_tensor(op):
    asked = {argument for argument, _ in asked_of(op)}
    for a in op.takes.arguments:
        takes_floats = isinstance(a, TensorArgument) and not isinstance(a, ObjectArgument)
        takes_floats = takes_floats and any(d not in INTEGERS for d in a.dtypes)
        if takes_floats and says_it_is_differentiable(op):
            assert a.name in asked, f"no small case gives {a.name}"


INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


# ---- NaN and infinity


def _attended(at, bad, name, ends):
    q, k, v = (torch.randn(1, 2, at[-1], 8, device=DEVICE) for _ in range(3))
    given = {"q": q, "k": k, "v": v}
    given[at[0]][0, at[1], at[2], 0] = bad
    out = OPS["attention"].public(**given, cu_seqlens=ends, implementation=name)
    return out[0].transpose(0, 1)


def _by_the_rule(at, bad, name, ends):
    S = at[-1]
    q, k, v = (torch.randn(1, S, 2, 8, device=DEVICE) * 0.3 for _ in range(3))
    g, beta = -torch.rand(1, S, 2, device=DEVICE), torch.rand(1, S, 2, device=DEVICE)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    given[at[0]][0, at[2], at[1]] = bad
    op = OPS["gated_delta_rule"]
    return op.public(**given, cu_seqlens=ends, implementation=name)[0][0]


def _convolved(at, bad, name, ends):
    x, weight = torch.randn(1, at[-1], 2, device=DEVICE), torch.randn(2, 4, device=DEVICE)
    x[0, at[2], at[1]] = bad
    found = OPS["causal_conv1d"].public(x, weight, cu_seqlens=ends, implementation=name)
    return found[0].unsqueeze(-1)


# An op that mixes tokens -> (what it gives [S, heads, D], argument -> the first token and the one
# behind the last that NaN of token 100 of a document from 20 to 180 may reach).
DOCUMENT = (20, 180)
MIXING = {
    "attention": (_attended, {"q": (100, 101), "k": DOCUMENT, "v": DOCUMENT}),
    "gated_delta_rule": (
        _by_the_rule,
        {"q": (100, 101), **dict.fromkeys(("k", "v", "g", "beta"), (84, 180))},
    ),
    "causal_conv1d": (_convolved, {"x": (100, 104)}),
}


@pytest.mark.parametrize(
    "name, implementation",
    [(n, i) for n in MIXING for i in ("eager", "cpp", "sdpa") if i in OPS[n].names()],
)
def test_nan_and_infinity_reach_what_the_docstring_says(name, implementation):
    skip_unless_usable(OPS[name], implementation, torch.float32)
    run, arguments = MIXING[name]
    ends = torch.tensor([0, 20, 180, 190], device=DEVICE)
    for argument, (first, last) in arguments.items():
        for bad in (float("nan"), float("inf")):
            found = run((argument, 1, 100, 190), bad, implementation, ends)
            hit = ~found.isfinite()
            assert hit.any() or bad == float("inf")
            assert not hit[:, 0].any(), "another head"
            tokens = hit.flatten(1).any(1).nonzero().flatten()
            assert not len(tokens) or first <= int(tokens[0]) <= int(tokens[-1]) < last, argument


def test_every_op_that_mixes_tokens_says_what_nan_reaches():
    """Tables of positions are read by each token, and losses of documents sum over them."""
    of_each = {"rope", "qk_norm_rope", "linear_policy_loss", "linear_preference_loss"}
    mixing = {n for n, op in OPS.items() if any(a.name == "cu_seqlens" for a in op.takes.arguments)}
    assert mixing - of_each == set(MIXING)
    for name in MIXING:
        about, _, _ = OPS[name].public.__doc__.partition("Args:")
        assert re.search("NaN (and|or) infinity", " ".join(about.split()))


# ---- tensors without elements


@EVERY_IMPLEMENTATION
def test_a_tensor_without_elements_may_have_any_strides(op, name):
    """`contiguous()` does not change them."""
    skip_unless_usable(op, name, torch.float32)

    def strided(t):
        if not isinstance(t, torch.Tensor) or t.numel() or t.dim() < 2:
            return t
        wide = t.new_empty([2 * n for n in t.shape])
        return wide[(slice(None, None, 2),) * t.dim()].detach().requires_grad_(t.requires_grad)

    fn = functools.partial(op.public, implementation=name)
    for case in small_cases(op):
        kwargs = inputs(case)
        odd = {n: strided(v) for n, v in kwargs.items()}
        if any(odd[n] is not v for n, v in kwargs.items()):
            assert_same(differentiate(fn, odd), differentiate(fn, kwargs))


# ---- calls without the dispatcher


@pytest.fixture
def probe(own_library):
    """y = x * factor. ran: the arguments of each launch.   overload: counts its calls."""

    def launcher(x, factor, bias, dtype, sizes):
        ran.append((factor, sizes))
        return x * factor

    def allocate(
        x: torch.Tensor,
        factor: float,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        sizes: list[int],
    ) -> torch.Tensor:
        return torch.empty_like(x)

    ran = []
    declared = _library.declare(allocate)
    declared.formula()(lambda op, dy, factor, x: {"x": dy * factor})
    op = declared.define("past_the_dispatcher", launcher)
    op.ran, op.overload = ran, mock.Mock(wraps=op.overload, _schema=op.overload._schema)
    return op


class Subclass(torch.Tensor):
    pass


def test_an_operator_is_called_past_the_dispatcher_where_nothing_needs_it(probe):
    x = torch.ones(3)
    rest = 2.0, None, torch.float32, [1]
    for given in (x, torch.nn.Parameter(x), x.clone().requires_grad_()):
        y = probe(given, *rest)
        assert y.requires_grad == given.requires_grad
        if y.requires_grad:
            assert type(y.grad_fn).__name__ == "tilewright_past_the_dispatcherBackward"
            assert torch.autograd.grad(y.sum(), given)[0].tolist() == [2.0] * 3
            with torch.no_grad():
                assert not probe(given, *rest).requires_grad
    assert probe.ran == [(2.0, [1])] * 5 and not probe.overload.called


def test_what_looks_at_operators_sees_them(probe):
    """Modes, transforms, subclasses, fakes, tangents, the profiler, torch.jit.trace; and arguments
    that need conversion.
    """
    x, rest = torch.ones(3, requires_grad=True), (2.0, None, torch.float32, [1])

    def through(run):
        del probe.ran[:]
        probe.overload.reset_mock()
        run()
        assert probe.overload.called
        return probe.ran

    with OperatorNames() as mode:
        assert through(lambda: probe(x, *rest))
    assert "tilewright::past_the_dispatcher" in mode.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert through(lambda: probe(x, *rest))
    assert "tilewright::past_the_dispatcher" in {e.name for e in profile.events()}
    assert through(lambda: probe(x.as_subclass(Subclass), *rest))
    through(lambda: torch.func.grad(lambda t: probe(t, *rest).sum())(x.detach()))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert not through(lambda: probe(mode.from_tensor(x), *rest)), (
            "a launcher ran on a fake tensor"
        )
    assert not through(lambda: probe(x.to("meta"), *rest))
    assert "tilewright::past_the_dispatcher" in str(
        torch.jit.trace(lambda t: probe(t, *rest), x.detach(), check_trace=False).graph
    )
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: probe(t, *rest), (x.detach(),), (x.detach(),))
    # An int for a float, and a tuple for a list: a kernel would be specialized for these.
    ((factor, sizes),) = through(lambda: probe(x, 2, None, torch.float32, (1,)))
    assert type(factor) is float and type(sizes) is list


def test_an_operator_without_a_derivative_says_so(own_library):
    def launcher(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op = _library.define("without_a_derivative", launcher, torch.empty_like)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        op(torch.ones(3, requires_grad=True)).sum().backward()


# ---- torch.library.opcheck


class Calls(dict):
    """One call of each of this package's operators per set of options."""

    def keep(self, func, args, kwargs):
        if getattr(func, "namespace", None) == "tilewright":
            options = tuple(
                tuple(map(self.option, a)) if isinstance(a, list) else self.option(a) for a in args
            )
            self.setdefault((func, options), (pytree.tree_map(self.copy, args), dict(kwargs or {})))

    @staticmethod
    def option(value):
        """What a schema or a fake can depend on: not on how large a floating-point number is."""
        if isinstance(value, float):
            return (value > 0) - (value < 0)
        return value.dtype if isinstance(value, torch.Tensor) else value

    @staticmethod
    def copy(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)


class AboveAutograd(TorchFunctionMode):
    """Records which arguments of a forward operator require a gradient, so that opcheck checks its
    formula.
    """

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.keep(func, args, kwargs)
        return func(*args, **(kwargs or {}))


class BelowAutograd(TorchDispatchMode):
    """Also records backward operators, which a formula calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.keep(
            func,
            pytree.tree_map(lambda a: a.detach() if isinstance(a, torch.Tensor) else a, args),
            kwargs,
        )
        return func(*args, **(kwargs or {}))


def different_cases(op):
    """Inputs of the smallest case of each set of options."""
    made = {}
    for case in small_cases(op):
        kwargs = inputs(case)
        leaves, tree = pytree.tree_flatten(kwargs)
        options = [
            (a.dtype, a.requires_grad, a.dim()) if torch.is_tensor(a) else Calls.option(a)
            for a in leaves
        ]
        made.setdefault(repr((tree, options)), kwargs)
    return made.values()


NAMES = {}  # of the operators that an op's implementation calls, once it has been recorded


def record(op, name):
    calls = Calls()
    made = different_cases(op)  # before recording: some inputs are quantized, by another op
    with BelowAutograd(calls), AboveAutograd(calls):
        for kwargs in made:
            with contextlib.suppress(ImplementationUnavailable):  # an unsupported variant
                differentiate(functools.partial(op.public, implementation=name), kwargs)
    NAMES[op.name, name] = {func.name().split(".")[0] for func, _ in calls}
    return calls


def kind(value):
    """What a schema, a fake or a formula can depend on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return tuple(map(kind, value))
    return Calls.option(value)


def outline(value):
    """What tracing can depend on: not on how large a size is. Integers below 4 may name a choice,
    or a size that is special.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(outline, value))
    return min(value, 4) if type(value) is int else kind(value)


def needs_gradient(args):
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def of_formula(func, args):
    """Calls in the derivative that opcheck takes: of the sum of all results."""
    calls = Calls()
    args = pytree.tree_map(Calls.copy, args)
    with BelowAutograd(calls):
        loss = sum(t.sum() for t in contract.leaves(func(*args)) if t.requires_grad)
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        torch.autograd.grad(loss, leaves, allow_unused=True)
    return calls


CHECKED = set()  # calls that have passed: implementations have parts, and checks, in common
TRACED = set()  # outlines of arguments that AOTAutograd has traced, in a call or in a formula


def outlines(func, args):
    """The outline of each argument, beside whether the call needs a formula."""
    formula = needs_gradient(args)
    return {(func, formula, i, outline(a)) for i, a in enumerate(args)} or {(func,)}


@EVERY_IMPLEMENTATION
def test_operators_pass_opcheck(op, name):
    """AOTAutograd traces each outline of each argument in some call; their combinations have the
    other checks. It traces a backward operator in the formula of its forward operator.
    """
    skip_unless_usable(op, name, torch.float32)
    calls = record(op, name)
    if not calls:
        pytest.skip("made of PyTorch's own operators")
    given = [a for args, _ in calls.values() for a in args if isinstance(a, torch.Tensor)]
    # An operator of integers only, such as the check of targets, needs no formula. Implementations
    # made of PyTorch's operators use others only for constants: codes, noise.
    needed = (
        name not in ("eager", "torch")
        and differentiable(op)
        and any(a.is_floating_point() for a in given)
    )
    assert not needed or any(a.requires_grad for a in given), "no formula would be checked"
    # The interpreter is slow: one call of each outline is checked, and none is traced, since
    # test_compiles_as_one_graph_and_gives_the_same compiles these.
    slow = name == "triton" and DEVICE == "cpu"
    for (func, _), (args, kwargs) in sorted(
        calls.items(), key=lambda call: not needs_gradient(call[1][0])
    ):
        call = (func, outline(args) if slow else kind(args))
        traced = outlines(func, args)
        if call in CHECKED:
            continue
        with SchemaCheckMode():  # one launch for both checks
            torch.library.opcheck(func, args, kwargs, test_utils="test_faketensor")
        torch.library.opcheck(func, args, kwargs, test_utils="test_autograd_registration")
        if not slow and not traced <= TRACED:
            torch.library.opcheck(func, args, kwargs, test_utils="test_aot_dispatch_dynamic")
            TRACED.update(traced)
            if needs_gradient(args):
                for (f, _), (a, _) in of_formula(func, args).items():
                    TRACED.update(outlines(f, a))
        CHECKED.add(call)


def test_no_operator_escapes_opcheck():
    """Some case calls every operator that can be in a graph (it has a fake)."""
    called = set()
    # Except those of layers (test_products.py), of shards of a vocabulary (test_cross_entropy.py),
    # within another operator (products of few rows), of a twin's compiled code
    # (test_low_precision_grouped_gemm.py), and of implementations that cannot run here but may have
    # been loaded by another test.
    elsewhere = {"product_cpp", "softmax_stats_cpp_forward", "quantized_linear_cpp_few_rows"}
    elsewhere |= {"low_precision_rows_of_experts", "low_precision_sums_of_experts"}
    for op in OPS.values():
        for impl in op.implementations:
            if impl.why_not(DEVICE) is not None:
                elsewhere.add(f"_{impl.name}")
            if impl.why_not(DEVICE, torch.float32) is None:
                if (op.name, impl.name) not in NAMES:
                    record(op, impl.name)
                called |= NAMES[op.name, impl.name]
    # An overload for numbers of compiled code (test_dynamic.py) calls its operator.
    there = {
        name.removesuffix(f".{dynamic.OVERLOAD}")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("tilewright::")
    }
    fakes = {n for n in there if torch._C._dispatch_has_kernel_for_dispatch_key(n, "Meta")}
    assert fakes, "no operator was found: the test looks in the wrong place"
    fakes = {n for n in fakes if not any(name in n for name in elsewhere)}
    assert fakes <= called, f"no small contract case calls {sorted(fakes - called)}"
