"""Undocumented parts of PyTorch, in one place in case a version changes them
(lab/tilewright_lab/pretend.py, which simulates a GPU, has its own). They exist in torch 2.11.0,
2.13.0, 2.14.1 and 2.15.0, none of which says that one is deprecated.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._compile import _disable_dynamo
from torch._library.autograd import Info, make_autograd_impl
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import ProcessGroup
else:

    class ProcessGroup:
        """Stands in annotations where PyTorch is built without torch.distributed."""


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "Info",
    "OpOverload",
    "ProcessGroup",
    "TorchDispatchMode",
    "make_autograd_impl",
    "pytree",
]

# PyTorch's stubs lack many of these names.
_TORCH: Any = torch
_C: Any = torch._C

# ---- observers of operator calls

torch_dispatch_modes, torch_function_modes = (
    _C._len_torch_dispatch_stack,
    _C._len_torch_function_stack,
)
profiled, traced_by_jit = _C._autograd._profiler_enabled, _C._is_tracing
# Whether torch.func transforms (grad, vjp, vmap) are active.
in_transform = _C._are_functorch_transforms_active
any_requires_grad = _C._any_requires_grad

# Whether torch.autograd.grad(is_grads_batched=True) is vectorizing.
in_legacy_vmap: Callable[[], bool] = functools.partial(
    _C._dispatch_tls_is_dispatch_key_included, _C._parse_dispatch_key("VmapMode")
)


def in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is active."""
    return forward_ad._current_level >= 0


# Read by packages that import only under CUDA builds; a CPU build has none.
RAW_STREAM = _C, "_cuda_getCurrentRawStream"

# ATen's GEMMs from 16-bit operands into, and accumulating onto, a float32 result: CUDA only.
HAS_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads()

# ---- autograd

BelowAutograd = _C._AutoDispatchBelowAutograd
BELOW_AUTOGRAD = _C._after_autograd_keyset
# Beneath what raises version counters.
BelowCounters = _C._AutoDispatchBelowADInplaceOrView
BELOW_COUNTERS = _C._after_ADInplaceOrView_keyset
_CPU_KERNELS = _C.DispatchKeySet(_C.DispatchKey.CPU)
DelayedError = _C._functions.DelayedError
SingleLevelFunction: Any = _SingleLevelFunction  # whose apply is not declared
is_wrapped, unwrapped = _C._functorch.is_functorch_wrapped_tensor, _C._functorch.get_unwrapped
# A level of torch.func.grad or vjp that has ended leaves wrappers. The first returns what such a
# wrapper wraps, and other tensors as they are; the second says whether a tensor is such a wrapper.
unwrapped_if_ended, has_ended = _C._functorch.unwrap_if_dead, _C._functorch.is_dead_tensor_wrapper

# Within torch.func transforms, a single-level Function raises unless this is set.
single_level_allowed = _C._functorch.get_single_level_autograd_function_allowed
allow_single_level = _C._functorch.set_single_level_autograd_function_allowed
# Whether the running backward may be repeated; True where PyTorch cannot tell.
keeps_graph: Callable[[], bool] = getattr(
    _C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def cpu_kernel(overload: OpOverload) -> Callable:
    """An operator's kernel for the CPU, called without the keys above it."""
    return functools.partial(overload._handle.redispatch_boxed, _CPU_KERNELS)


# ---- tensors

is_view = torch.Tensor._is_view


def of_view(t: torch.Tensor) -> torch.Tensor:
    """The base of a view."""
    return cast(torch.Tensor, t._base)


def may_be_changed(view: torch.Tensor) -> bool:
    """Whether autograd allows in-place changes of a view; not for views of split, chunk, unbind."""
    return _C._autograd._get_creation_meta(view) == _C._autograd.CreationMeta.DEFAULT


def device_asked_for(*arguments: Any, **options: Any) -> torch.device | None:
    """The device in the arguments of a `Tensor.to`."""
    return _C._nn._parse_to(*arguments, **options)[0]


def group_by_name(name: str) -> torch.distributed.ProcessGroup:
    """The process group of this name, as PyTorch's collectives resolve it under torch.compile."""
    from torch.distributed import distributed_c10d

    names: Any = distributed_c10d
    return names._resolve_process_group(name)


def active_fake_mode() -> FakeTensorMode | None:
    """The innermost FakeTensorMode around this call."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)


def join_pretended_group(rank: int, size: int) -> None:
    """Makes the default process group one whose collectives do nothing, with this process as a
    rank of it.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


@contextmanager
def messages_kept() -> Iterator[None]:
    """Within the block, a message lives as long as the handle of its send, as with NCCL and gloo:
    the handles of a pretended group hold nothing.
    """
    group: Any = torch.distributed.ProcessGroup
    kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    send = group.send

    def keeping(*arguments: Any) -> torch.distributed.Work:
        work = send(*arguments)
        kept[work] = arguments
        return work

    group.send = keeping
    try:
        yield
    finally:
        group.send = send


# ---- Dynamo


def constant(fn: Callable) -> Callable:
    """torch.compiler.assume_constant_result without importing Dynamo and Triton, which would add
    1.5 seconds to every `import tilewright`. Arguments must be constants in torch 2.11, but not in
    2.13.
    """
    fn._dynamo_marked_constant = True
    return fn


def uncompiled(fn: Callable) -> Callable:
    """torch.compiler.disable that imports Dynamo when fn is first called, not before."""
    return _disable_dynamo(fn)


def dynamo() -> ModuleType:
    """torch._dynamo, for maybe_mark_dynamic, config.recompile_limit, and the exceptions
    FailOnRecompileLimitHit and Unsupported.
    """
    import torch._dynamo

    return torch._dynamo


def is_symbolic(value: float) -> bool:
    """Whether a number is a symbol of a graph, not a constant of it."""
    if not torch.compiler.is_dynamo_compiling():
        return isinstance(value, (torch.SymInt, torch.SymFloat))
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which Dynamo has imported

    return not has_static_value(value)


# ---- collectives


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """x of all ranks, concatenated along the first dimension. These operators, unlike
    torch.distributed's functions, can be in a compiled graph.
    """
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum of x over ranks."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, group))


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of x over ranks."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group))


def strided_shard(dim: int, parts: int) -> Placement:
    """The placement of a tensor that consists of parts along a dimension, each sharded."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def parts_of_shard(placement: Placement) -> int:
    """The parts of a `strided_shard`; 1 for other placements."""
    return getattr(placement, "split_factor", 1)


def movable(t: DTensor) -> DTensor:
    """A DTensor in the form that `redistribute` and `full_tensor` take. torch 2.11 reads every
    `strided_shard` as an order of shards, as FSDP2 makes over tensor parallelism, and raises
    ValueError where it is none. Later versions tell them apart.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec = t._spec
    if t.requires_grad and torch.is_grad_enabled():
        return t
    if max(map(parts_of_shard, spec.placements)) == 1:
        return t
    ordered = DTensorSpec._maybe_convert_StridedShard_to_shard_order(spec.placements, spec.mesh)
    if ordered is not None:
        return t
    as_parts = DTensorSpec(
        spec.mesh,
        spec.placements,
        tensor_meta=spec.tensor_meta,
        use_strided_shard_as_shard_order=False,
    )
    return DTensor(t.to_local(), as_parts, requires_grad=False)


def scale_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors in place by a scalar tensor on their device, in few launches."""
    _TORCH._foreach_mul_(tensors, factor)


def on_shards(
    kind: type[torch.optim.Optimizer], shard: Callable[[torch.Tensor], torch.Tensor]
) -> type[Any]:
    """PyTorch's elementwise optimizer `kind`, whose steps compute on shard(t) for each parameter,
    gradient and state t. On DTensors a first step would take seconds, since each tensor's
    placements are compared with those of all others. SGD with momentum, which stores what a step
    has computed on, computes on DTensors.
    """

    class OnShards(cast(Any, kind)):
        def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
            returned = super()._init_group(group, *lists)
            if not group.get("momentum"):
                for tensors in lists:
                    tensors[:] = map(shard, tensors)
            return returned

    OnShards.__name__ = kind.__name__
    return OnShards


# ---- pipelines


def keep_reduced_gradients_in_float32(root: torch.nn.Module) -> None:
    """FSDP2 leaves the gradients of parameters in bfloat16 as it has reduced them, in float32.
    Their `grad_dtype` must be that.   root: materialized.
    """
    state: Any = cast(Any, root)._get_fsdp_state()
    state._lazy_init()
    for module in root.modules():
        if hasattr(module, "_get_fsdp_state"):
            own: Any = cast(Any, module)._get_fsdp_state()
            one = getattr(own, "_fsdp_param_group", None)  # as earlier versions have it
            for group in getattr(own, "_fsdp_param_groups", [one] if one is not None else []):
                group._orig_dtype = torch.float32


def known_stage() -> type:
    """PipelineStage for stages whose shapes are given, not tried out.

    The schedule then has nothing to clean up, and must not: gradients of an earlier schedule may
    still be accumulating in the parameters, and it would drop those of FSDP2's. A message from a
    neighboring stage, which tells whether its shapes are given too, is replaced by the answer: a
    pretended group leaves messages unwritten.
    """
    from torch.distributed.pipelining import PipelineStage

    class KnownStage(PipelineStage):
        def _post_metadata_inference_cleanup(self) -> None:
            pass

        def _warmup_backward_result(self, received_result=None) -> torch.Tensor:
            super()._warmup_backward_result(received_result)
            return torch.ones(1, dtype=torch.int32)

    return KnownStage


def no_zero_bubble() -> str | None:
    """None if PyTorch's zero-bubble schedules are right, else the reason. torch 2.11 gives the sum
    of the gradients of all results of an operator to its first result, which goes unnoticed unless
    their shapes differ.
    """
    if torch.__version__ < "2.13":
        return (
            f"torch {torch.__version__} adds up gradients of different results when it splits "
            "backward passes; use Interleaved1F1B, or torch 2.13 or later"
        )
    return None


def dtensor_of(local, mesh, placements, shape, stride) -> torch.Tensor:
    """`DTensor.from_local`, but the tensor stays on its device: a checkpoint in pinned memory has
    the mesh of a GPU.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)
