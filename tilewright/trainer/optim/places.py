"""Where the elements of this rank's shard of a parameter are in the model's own matrices: random
bits of `adamw_` are those of a matrix's element, under any layout.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from tilewright.nn import LoRALinear
from tilewright.nn.sharded import shard
from tilewright.trainer.models.layers import Attention
from tilewright.trainer.models.stored import QKV
from tilewright.trainer.optim.matrices import rows_here


class Piece(NamedTuple):
    """Elements of a shard, in order.   begin, end: which.   place: see `StochasticRounding`."""

    begin: int
    end: int
    place: tuple[int, int, int, int]


class Matrix(NamedTuple):
    """A matrix of the model's own.   name: whatever it is merged with.   rows: in a parameter."""

    name: str
    rows: range


def pieces(model: nn.Module) -> dict[nn.Parameter, list[Piece]]:
    """Those of every trainable parameter's shard.

    Projections that the model merges only if it is asked to are matrices of their own. Merged gates
    and stacks of experts are always one tensor, whose elements are numbered as they are.
    """
    parts = _merged(model)
    return {
        p: _joined(_pieces(p, parts.get(p) or [Matrix(name, range(_rows(p)))]))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _merged(model: nn.Module) -> dict[nn.Parameter, list[Matrix]]:
    """The matrices in merged projections of attention, and in their adapters."""
    merged = {}
    for path, module in model.named_modules():
        if isinstance(module, Attention) and module.merge_qkv:
            widths: dict[str, int] = dict(zip(QKV, module.widths, strict=True))
            inner = module.get_submodule("qkv_proj")
            layer = inner.base if isinstance(inner, LoRALinear) else inner
            for name, p in layer.named_parameters(recurse=False):
                merged[p] = _split(f"{path}.{{}}.{name}", widths)
            if isinstance(inner, LoRALinear):
                for name, p in inner.named_parameters(recurse=False):
                    own = {part: stop - start for part, (start, stop) in inner.slices.items()}
                    ranks = dict.fromkeys(own, inner.rank)
                    merged[p] = _split(f"{path}.{{}}.{name}", ranks if name == "lora_A" else own)
    return merged


def _joined(pieces: Iterator[Piece]) -> list[Piece]:
    """Fewer: neighbors, and those of one length at one distance, are rows of one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and (one := _together(joined[-1], piece)) is not None:
            joined[-1] = one
        else:
            joined.append(piece)
    return joined


def _together(a: Piece, b: Piece) -> Piece | None:
    (matrix, first, width, pitch), (other, start, n, _) = a.place, b.place
    length, whole = a.end - a.begin, b.end - b.begin == n
    if matrix != other or not whole:
        return None
    if width == length and start == first + length:
        return Piece(a.begin, b.end, (matrix, first, length + n, length + n))
    distance = start - first if width == length else pitch
    if n == width and distance > n and start == first + length // width * distance:
        return Piece(a.begin, b.end, (matrix, first, width, distance))
    return None


def _split(name: str, rows: dict[str, int]) -> list[Matrix]:
    ends = [*itertools.accumulate(rows.values())]
    starts = [0, *ends[:-1]]
    parts = zip(rows, starts, ends, strict=True)
    return [Matrix(name.format(part), range(start, end)) for part, start, end in parts]


def _rows(p: nn.Parameter) -> int:
    return p.shape[-2] if p.dim() > 1 else p.numel()


def _pieces(p: nn.Parameter, matrices: list[Matrix]) -> Iterator[Piece]:
    """A parameter is [experts, rows, columns]; one of fewer dimensions has one expert, and a vector
    one column.
    """
    deep, flat = p.dim() == 3, p.dim() < 2
    experts = rows_here(p, 0) if deep else [range(1)]
    rows = rows_here(p, p.dim() - 2) if not flat else rows_here(p, 0) if p.dim() else [range(1)]
    columns = [range(1)] if flat else rows_here(p, p.dim() - 1)
    R, C = _rows(p), 1 if flat else p.shape[-1]
    runs = [(m, part) for run in rows for m in matrices if (part := _common(run, m.rows))]
    runs = [run for run in runs if run[1]]
    at = 0
    for e in itertools.chain(*experts):
        for matrix, run in runs:
            number = zlib.crc32(matrix.name.encode())
            start = (e * R + run.start - matrix.rows.start) * C
            # Rows by themselves where this rank has several runs of their columns.
            for row in [run] if len(columns) == 1 else [range(r, r + 1) for r in run]:
                for own in columns:
                    n = len(row) * len(own)
                    first = start + (row.start - run.start) * C + own.start
                    width, pitch = (n, n) if len(own) == C else (len(own), C)
                    yield Piece(at, at + n, (number, first, width, pitch))
                    at += n
    local = shard(p) if isinstance(p, DTensor) else p
    assert at == local.numel(), (at, local.shape)


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
