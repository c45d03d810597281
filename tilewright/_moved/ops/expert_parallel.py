from tilewright._moved import moved

moved(__name__, "tilewright.ops.moe.expert_parallel")
