from tilewright._moved import moved

moved(__name__, "tilewright.core.platform")
