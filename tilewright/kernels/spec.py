"""What the compile gate compiles for a kernel: its signature, constexprs and requirements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


def opened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, with a NamedTuple's fields in its place."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= value._asdict() if hasattr(value, "_asdict") else {name: value}
    return out


@dataclass(frozen=True)
class KernelSpec:
    """One compilation of one Triton kernel, as the launcher would launch it.

    kernel: the @triton.jit function.
    label: unique within the op, e.g. "forward bf16 D=4096".
    signature: argument name -> Triton type ("*bf16", "*fp32", "i32", "i64", "fp32"), or a tuple of
        types, for every argument that is not a constexpr. Pointers are assumed to be 16-byte
        aligned, as torch's allocator returns them.
    constexprs: argument name -> value; an element of a tuple is named "strides[2]".
    divisible: integer arguments that are multiples of 16 in every launch; a tuple's name stands for
        all of its elements, "strides[0]" for one.
    min_arch, max_arch: the lowest and highest compute capability with this launch (80, 90, 100,
        ...): sm_120 has less shared memory than sm_90 and sm_100.

    Requirements for its bandwidth and arithmetic rooflines, which the gate checks in PTX and
    machine code:

    load, store: bits of the widest access to global memory; 0 for a kernel that is narrow by
        nature, with the reason in a comment.
    uses: compute capability -> instruction families, keys of `bench.machine_code.FAMILIES`, e.g.
        {90: ("wgmma", "tma"), 100: ("tcgen05", "tma")}.
    elements: elements per program of a streaming kernel; the gate then budgets instructions per
        element.
    undivided: no loop may divide; the gate checks PTX.
    per_sm: blocks per SM that the launch configuration counts on; registers, shared memory and
        warps must allow them.
    stack: compute capability -> bytes of stack that are accepted of a kernel without spills, with
        the reason in a comment.
    serial: whether ptxas may serialize its wgmma, with the reason in a comment.
    """

    kernel: Any
    label: str
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    min_arch: int = 80
    max_arch: int = 999
    options: Mapping[str, Any] = field(default_factory=dict)
    load: int = 128
    store: int = 128
    uses: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    elements: int = 0
    undivided: bool = False
    per_sm: int = 1
    stack: Mapping[int, int] = field(default_factory=dict)
    serial: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """The constexprs by name, those in NamedTuples too."""
        return opened(self.constexprs)

    def changed(self, values: Mapping[str, Any], **fields: Any) -> KernelSpec:
        """The spec with other values of these constexprs, or of these arguments as constexprs, and
        with these fields.
        """
        constexprs = dict(self.constexprs)
        for name, value in values.items():
            holder = next((h for h, c in constexprs.items() if name in opened({h: c})), name)
            if holder == name:
                constexprs[name] = value
            else:
                constexprs[holder] = constexprs[holder]._replace(**{name: value})
        signature = {n: kind for n, kind in self.signature.items() if n not in values}
        return replace(self, signature=signature, constexprs=constexprs, **fields)

    @classmethod
    def of(
        cls,
        kernel: Any,
        label: str,
        pointers: Mapping[str, str | None],
        constexprs: Mapping[str, Any],
        numbers: Mapping[str, Any] = {},
        **needs: Any,
    ) -> KernelSpec:
        """A spec whose signature is that of the kernel's parameters.

        pointers: name without "_ptr" -> type of its elements, of those that the launch has; the
            others are None. "*" is the type of all that are not named, None no pointer.
        constexprs: also of other kernels of this configuration; and num_warps, num_stages and
            maxnreg, as a launch gets them.
        numbers: types of other arguments that are not 32-bit integers, descriptors and tuples too.
        needs: other fields.
        """
        chosen, signature = dict(constexprs), {}
        for name in kernel.arg_names:
            short = name.removesuffix("_ptr")
            if short == name:
                if name not in chosen:
                    signature[name] = numbers.get(name, "i32")
            elif kind := pointers.get(short, pointers.get("*")):
                signature[name] = f"*{kind}"
            else:
                chosen.setdefault(name, None)
        for name in ("num_warps", "num_stages"):
            if name in chosen:
                needs[name] = chosen.pop(name)
        if limit := chosen.pop("maxnreg", None):
            needs["options"] = {"maxnreg": limit}
        given = {name: value for name, value in chosen.items() if name in kernel.arg_names}
        return cls(kernel, label, signature, given, **needs)


@dataclass(frozen=True)
class CuteSpec:
    """One compilation of one CuTe DSL kernel, as the launcher would launch it.

    function: the @cute.jit host function.
    label: unique within the op.
    types: argument types except the last, the stream: "*bf16 16" (pointer to memory aligned to 16
        bytes), "i32", "i64", "fp32", None, or a constant.
    min_arch, max_arch, load, store, uses: as in KernelSpec.
    """

    function: Any
    label: str
    types: tuple
    min_arch: int = 90
    max_arch: int = 999
    load: int = 128
    store: int = 128
    uses: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
