"""Imports what ranks run in the process that they are forked from, whose path is not pytest's."""

import pathlib
import sys

TESTS = pathlib.Path(__file__).parent
sys.path[:0] = [str(TESTS.parent / "lab"), str(TESTS), str(TESTS / "trainer")]

import ranks  # noqa: E402, F401
