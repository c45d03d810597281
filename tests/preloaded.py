"""Imports what ranks run in the process that they are forked from, whose path is not pytest's."""

import itertools
import pathlib
import sys
import types
from unittest import mock

import torch
from torch.distributed.tensor._ops import utils

TESTS = pathlib.Path(__file__).parent
sys.path[:0] = [str(TESTS.parent / "lab"), str(TESTS), str(TESTS / "trainer")]

import ranks  # noqa: E402, F401

expand = utils.expand_to_full_mesh_op_strategy


def without_moves(mesh, schema, strategies, **options):
    """DTensor's strategies of an operator: the same.

    PyTorch makes every combination of placements on the dimensions of a mesh, hundreds of them on
    three, and then drops those in which an operator in place would move its first argument: a third
    of a rank's time. Here each dimension has only those that stay.
    """
    if options.get("inplace_op"):
        placed = schema.args_strategy[0].strategies[0].output_spec.placements
        first = options["input_index"]
        stay = [[s for s in strategies if s[0] in (None, p) and s[first] == p] for p in placed]
        if len(placed) == mesh.ndim:
            combined = types.SimpleNamespace(product=lambda *_: itertools.product(*stay))
            with mock.patch.object(utils, "itertools", combined):
                found = expand(mesh, schema, strategies, **options)
            if found.strategies:
                return found
    return expand(mesh, schema, strategies, **options)


if torch.__version__.startswith("2.13."):  # others' function may be another
    utils.expand_to_full_mesh_op_strategy = without_moves
