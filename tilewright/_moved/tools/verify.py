from tilewright._moved import moved

moved(__name__, "tilewright_lab.verify.verify")
