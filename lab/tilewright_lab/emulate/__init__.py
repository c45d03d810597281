"""`tilewright emulate`: Triton kernels on a CPU as compiled for a GPU, each access checked."""
