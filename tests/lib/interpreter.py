"""A faster and more exact Triton interpreter for tests.

Triton's own reduces with functions it does not special-case (xor, which tl.flip uses, or a kernel's
own) element by element. Here each step combines neighbors in all rows at once: a tree, as in
compiled kernels. Triton's also patches triton.language again in each call of a device function,
which took a fourth of its time. It derives types and shapes for each value, which equal types share
here, and makes a block of each number beside a block, which equal numbers share. It computes a sum
of integers again in 64 bits, from a dozen values, and without TRITON_DEBUG drops what that finds:
here NumPy finds an overflow, and it is an error. Before Triton 3.9 its fma rounds twice.
"""

import functools
import math

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
of_elements = {}  # by element type and shape: a block_type


def init_block(self, element_ty, shape):
    key = element_ty.name, tuple(s.value if type(s) is tl.constexpr else s for s in shape)
    if key not in blocks:
        block_init(self, element_ty, shape)
        self.sizes = key[1]
        blocks[key] = vars(self)
    vars(self).update(blocks[key])
    self.element_ty = element_ty


def with_element_ty(self, scalar_ty):
    key = scalar_ty.name, self.sizes
    found = of_elements.get(key)
    if found is None or found.element_ty is not scalar_ty:
        found = of_elements[key] = tl.block_type(scalar_ty, self.shape)
    return found


def init_tensor(self, handle, type):
    known = vars(type).get("of_tensors")
    if known is None:
        tensor_init(self, handle, type)
        type.of_tensors = self.shape, self.numel
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known


check_handle = interpreter.TensorHandle.__post_init__
widest = {}  # bytes that an element of a type may have, by the type's name


def init_handle(self, data, dtype, attr=None):
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    most = widest.get(dtype.name)
    if most is None:
        most = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
        widest[dtype.name] = most
    if data.itemsize > most:
        check_handle(self)


np_dtype = interpreter._get_np_dtype
np_dtypes = {}  # by name


def get_np_dtype(type):
    found = np_dtypes.get(type.name)
    if found is None:
        found = np_dtypes[type.name] = np_dtype(type)
    return found


unwrap_if_constexpr, dtype_eq = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
PLAIN = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}


def unwrap(o):
    return o if type(o) in PLAIN else unwrap_if_constexpr(o)


def equal(self, other):
    return self is other or dtype_eq(self, other)


# ---- arithmetic

semantic = interpreter.interpreter_semantic
broadcast, check_types = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl


def broadcast_impl_value(lhs, rhs):
    shapes = lhs.type.sizes, rhs.type.sizes
    if shapes[0] == shapes[1]:
        return lhs, rhs
    if len(shapes[0]) != len(shapes[1]) or any(
        a != b and 1 not in (a, b) for a, b in zip(*shapes, strict=True)
    ):
        return broadcast(lhs, rhs)
    shape = tuple(max(pair) for pair in zip(*shapes, strict=True))
    return tuple(
        t if own == shape else semantic.broadcast_impl_shape(t, list(shape))
        for t, own in zip((lhs, rhs), shapes, strict=True)
    )


@functools.lru_cache(4096, typed=True)
def constant(number, sign, dtype, sizes):
    """What a number becomes beside a tensor, or None if the tensor changes too. The sign tells
    zeros apart.
    """
    zeros = interpreter.TensorHandle(np.zeros(sizes, get_np_dtype(dtype)), dtype)
    beside = tl.tensor(zeros, tl.block_type(dtype, list(sizes)) if sizes else dtype)
    promoted, found = check_types(beside, number)
    found.handle.data.flags.writeable = False  # shared
    return found if promoted is beside else None


NUMBERS = int, float, bool


def binary_op_type_checking_impl(
    lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
):
    kinds = [type(t.dtype) if type(t) is tl.tensor else type(t) for t in (lhs, rhs)]
    if div_or_mod or not arithmetic_check:
        pass
    elif kinds == [tl.dtype, tl.dtype]:
        if lhs.dtype is rhs.dtype:
            return broadcast_impl_value(lhs, rhs)  # nothing is promoted
    elif kinds == [tl.pointer_type, tl.dtype]:
        if allow_lhs_ptr and rhs.dtype.is_int():
            return broadcast_impl_value(lhs, rhs)
    elif kinds[0] is tl.dtype and kinds[1] in NUMBERS:
        number = constant(rhs, math.copysign(1, rhs), lhs.dtype, lhs.type.sizes)
        if number is not None:
            return lhs, number
    elif kinds[1] is tl.dtype and kinds[0] in NUMBERS:
        number = constant(lhs, math.copysign(1, lhs), rhs.dtype, rhs.type.sizes)
        if number is not None:
            return number, rhs
    return check_types(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def binary_op(self, lhs, rhs, op):
    a, b = lhs.data, rhs.data
    if a.dtype.char == b.dtype.char == "?":
        return any_binary_op(self, lhs, rhs, op)
    result, kind = op(a, b), lhs.dtype.scalar
    if result.itemsize > widest[kind.name]:
        result = result.astype(get_np_dtype(kind))
    return interpreter.TensorHandle(result, kind)


any_binary_op = interpreter.InterpreterBuilder.binary_op
WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def binary_op_sanitize_overflow_impl(lhs, rhs, binary_op):
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        result = WIDE[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        least, most = (f.reduce(result, axis=None) for f in (np.minimum, np.maximum))
        assert kind.get_int_min_value() <= least, f"{kind} overflow in {binary_op.__name__}"
        assert most <= kind.get_int_max_value(), f"{kind} overflow in {binary_op.__name__}"


def install():
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang
    interpreter._get_np_dtype = get_np_dtype
    tl.core.block_type.__init__, tl.core.tensor.__init__ = init_block, init_tensor
    tl.core.block_type.with_element_ty, tl.core._unwrap_if_constexpr = with_element_ty, unwrap
    tl.dtype.sizes, tl.dtype.__eq__ = (), equal
    interpreter.TensorHandle.__init__ = init_handle
    interpreter.InterpreterBuilder.binary_op = binary_op
    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    semantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl
    interpreter.ReduceOps.generic_reduce = generic_reduce
    third = np.array([1 / 3], np.float32)
    x, z = (interpreter.TensorHandle(v, tl.float32) for v in (third, -(third * third)))
    # An exact fma returns the product's rounding error.
    if not interpreter.interpreter_builder.create_fma(x, x, z).data.any():
        interpreter.InterpreterBuilder.create_fma = create_fma
