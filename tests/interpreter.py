"""A faster and more exact Triton interpreter for tests.

Triton's own reduces with functions it does not special-case (xor, which tl.flip uses, or a kernel's
own) element by element. Here each step combines neighbors in all rows at once: a tree, as in
compiled kernels. Triton's also patches triton.language again in each call of a device function,
which took a fourth of its time. It derives types and shapes for each value, which equal types share
here. It computes a sum of integers again in 64 bits, from a dozen values, and without TRITON_DEBUG
drops what that finds: here NumPy finds an overflow, and it is an error. Before Triton 3.9 its fma
rounds twice.
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def generic_reduce(self, inputs):
    whole = self.axis is None
    axis, rank = self.axis or 0, inputs[0].handle.data.ndim
    parts = [
        np.ravel(t.handle.data) if whole else np.moveaxis(t.handle.data, axis, 0) for t in inputs
    ]
    while len(parts[0]) > 1:  # a power of two
        pairs = [
            self.to_tensor(p[side::2], t.dtype)
            for side in (0, 1)
            for p, t in zip(parts, inputs, strict=True)
        ]
        combined = self.combine_fn.fn(*pairs)
        combined = combined if isinstance(combined, (tuple, tl.tuple)) else (combined,)
        parts = [c.handle.data for c in combined]
    results = [p[0] for p in parts]
    if self.keep_dims:
        results = [p.reshape((1,) * rank) if whole else np.expand_dims(p, axis) for p in results]
    return [self.to_tensor(p, t.dtype) for p, t in zip(results, inputs, strict=True)]


def create_fma(self, x, y, z):
    # A product of two float32 is exact in float64.
    result = (x.data.astype(np.float64) * y.data + z.data).astype(z.data.dtype)
    return interpreter.TensorHandle(result, z.dtype.scalar)


@functools.cache
def builtins(package):
    """Must be called before the first of them is replaced."""
    return [
        (n, getattr(package, n)) for n in dir(package) if tl.core.is_builtin(getattr(package, n))
    ]


@functools.cache
def interpreted(member):
    inner = getattr(member, "__wrapped__", member)  # without a check of what is given

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return call


def patch_builtin(package, builder, scope):
    for name, member in builtins(package):
        if getattr(package, name) is member:
            scope.set_attr(package, name, interpreted(member))


patch = interpreter._patch_lang
patched = set()  # modules patched during a launch; device functions' scopes are never restored
modules = {}  # by the globals of a function


def patch_lang(fn):
    known = id(fn.__globals__)
    if known not in modules:
        modules[known] = {m for m in (tl, tl.core) if any(v is m for v in fn.__globals__.values())}
    if modules[known] <= patched:
        return interpreter._LangPatchScope()
    scope = patch(fn)
    new, restore = modules[known] - patched, scope.restore
    patched.update(new)

    def restored():
        restore()
        patched.difference_update(new)

    scope.restore = restored
    return scope


# ---- what types and values derive from their shapes

block_init, tensor_init = tl.core.block_type.__init__, tl.core.tensor.__init__
blocks = {}  # by element type and shape: what a block_type has


def init_block(self, element_ty, shape):
    key = element_ty.name, tuple(s.value if type(s) is tl.constexpr else s for s in shape)
    if key not in blocks:
        block_init(self, element_ty, shape)
        blocks[key] = vars(self)
    vars(self).update(blocks[key])
    self.element_ty = element_ty


def init_tensor(self, handle, type):
    known = vars(type).get("of_tensors")
    if known is None:
        tensor_init(self, handle, type)
        type.of_tensors = self.shape, self.numel
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known


np_dtype = interpreter._get_np_dtype
np_dtypes = {}  # by name


def get_np_dtype(type):
    found = np_dtypes.get(type.name)
    if found is None:
        found = np_dtypes[type.name] = np_dtype(type)
    return found


# ---- arithmetic

semantic = interpreter.interpreter_semantic
broadcast, check_types = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl


def broadcast_impl_value(lhs, rhs):
    shapes = [t.type.shape.values if t.type.is_block() else [] for t in (lhs, rhs)]
    if shapes[0] == shapes[1]:
        return lhs, rhs
    if len(shapes[0]) != len(shapes[1]) or any(
        a != b and 1 not in (a, b) for a, b in zip(*shapes, strict=True)
    ):
        return broadcast(lhs, rhs)
    shape = [max(pair) for pair in zip(*shapes, strict=True)]
    return tuple(
        t if own == shape else semantic.broadcast_impl_shape(t, shape)
        for t, own in zip((lhs, rhs), shapes, strict=True)
    )


def binary_op_type_checking_impl(
    lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
):
    kinds = [t.dtype if isinstance(t, tl.tensor) else None for t in (lhs, rhs)]
    if kinds[0] is kinds[1] and type(kinds[0]) is tl.dtype and not div_or_mod:
        return broadcast_impl_value(lhs, rhs)  # nothing is promoted
    return check_types(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def binary_op_sanitize_overflow_impl(lhs, rhs, binary_op):
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        a, b = (t.handle.data.astype(np.int64) for t in (lhs, rhs))
        result = WIDE[binary_op.__name__](a, b)
        assert kind.get_int_min_value() <= result.min(), f"{kind} overflow in {binary_op.__name__}"
        assert result.max() <= kind.get_int_max_value(), f"{kind} overflow in {binary_op.__name__}"


def install():
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang
    interpreter._get_np_dtype = get_np_dtype
    tl.core.block_type.__init__, tl.core.tensor.__init__ = init_block, init_tensor
    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    semantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl
    interpreter.ReduceOps.generic_reduce = generic_reduce
    third = np.array([1 / 3], np.float32)
    x, z = (interpreter.TensorHandle(v, tl.float32) for v in (third, -(third * third)))
    # An exact fma returns the product's rounding error.
    if not interpreter.interpreter_builder.create_fma(x, x, z).data.any():
        interpreter.InterpreterBuilder.create_fma = create_fma
