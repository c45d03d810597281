from tilewright._moved import moved

moved(__name__, "tilewright.ops.attention.context_parallel")
