"""Imports what ranks run in the process that they are forked from, whose path is not pytest's."""

import pathlib
import sys

LIB = pathlib.Path(__file__).parent
ROOT = LIB.parents[1]
sys.path[:0] = [str(ROOT / "lab"), str(ROOT / "tests"), str(LIB)]

import ranks  # noqa: E402, F401
