"""Emulates PTX on the CPU, to test GPU kernels without a GPU: their results, and that every memory
access is inside a tensor and aligned.

All threads of a cluster run in NumPy arrays, those at the lowest instruction first, so that they
reconverge after a branch. The instructions that the CuTe DSL and Triton kernels compile to are
implemented; any other raises. fma is computed in float64 and rounded once more; ex2.approx,
lg2.approx, div.full and the like are exact to float32.
"""

from tilewright_lab.emulator.counts import Counts
from tilewright_lab.emulator.kernel import Kernel
from tilewright_lab.emulator.memory import Memory
from tilewright_lab.emulator.tma import TensorMap

__all__ = ["Counts", "Kernel", "Memory", "TensorMap"]
