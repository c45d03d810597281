"""Tools that examine models, training steps and kernels, other people's and tilewright's."""
