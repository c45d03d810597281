"""`tilewright check-layout`: a training step on several processes, beside one."""

from tilewright_lab.check_layout.step import Refused, Step

__all__ = ["Refused", "Step"]
