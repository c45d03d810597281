"""The compile gate: kernels compiled for GPUs without one, and what their machine code says."""
