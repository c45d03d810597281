"""Runs PTX on the CPU, so that a kernel for a GPU can be tested without one: what it computes, and
that every access to memory is inside a tensor and aligned.

All threads of a cluster run in NumPy arrays, those at the lowest instruction first, so that they
meet again after a branch. It knows the instructions that the CuTe DSL and Triton kernels are
compiled to and raises for any other. fma is computed in float64 and rounded once more; ex2.approx,
lg2.approx, div.full and the like are exact to float32.
"""

from ptx.counts import Counts
from ptx.kernel import Kernel
from ptx.memory import Memory
from ptx.tma import TensorMap

__all__ = ["Counts", "Kernel", "Memory", "TensorMap"]
