"""Tools that examine other people's models, training steps and kernels."""
