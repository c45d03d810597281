"""Truth by pieces equals the whole, within the memory bound, for every case timed on a GPU."""

from dataclasses import replace

import pytest
import torch
from footprint import counting

from tilewright.bench import contract, piece, pieces, pieces_losses, tensors
from tilewright.ops import OPS
from tilewright.ops.attention.options import variant_of


@pytest.fixture
def small(monkeypatch):
    """Pieces for cases of a few thousand elements."""
    monkeypatch.setattr(piece, "WORK", 2**9)
    monkeypatch.setattr(piece, "KEPT", 2**7)
    monkeypatch.setattr(pieces_losses, "HEAD", 2**5)


@pytest.mark.parametrize("name", list(pieces.TABLE))
def test_pieces_make_the_whole(name, small):
    op, cut_cases = OPS[name], 0
    for case in (c for c in op.cases if "contract" in c.tags):
        kwargs = case.make("cpu", torch.float32, 0)
        if kwargs.get("prefixes"):  # such cases are small, and never cut
            continue
        if (cut := pieces.of(op, kwargs)) is None or kwargs.get("inplace"):
            continue
        cut_cases += len(cut.parts) > 1
        whole, parts = (contract.reference(op, kwargs, torch.float32, cut=c) for c in (None, cut))
        assert parts.sample == cut.note() and len(parts.grads) == len(whole.grads), case.name
        for name_, truth in whole.truth.items():
            found = parts.truth[name_]
            pairs = [(t, truth["()"][1][at], at) for at, t in found.values()]
            assert pairs and parts.dtypes[name_] == whole.dtypes[name_]
            assert tensors.error_of_parts(pairs)[0] < 1e-10, (case.name, name_)
            assert (
                cut.sample is not None
                or sum(t.numel() for t, *_ in pairs) == truth["()"][1].numel()
            ), name_
            assert parts.eager[name_] <= 4 * whole.eager[name_] + 8 * torch.finfo(torch.float32).eps
        assert not contract.broken(contract.judge(op, "eager", kwargs, parts)), case.name
    assert cut_cases, "no case was cut"


def test_a_fault_in_the_last_block_is_seen(small):
    op = OPS["attention"]
    case = next(c for c in op.cases if c.name == "gqa")
    kwargs = case.make("cpu", torch.float32, 0)
    by = contract.reference(op, kwargs, torch.float32, cut=pieces.of(op, kwargs))

    def wrong(*, implementation, **given):
        variant = variant_of(given["q"].shape[-1], True, None, None, None)
        out = op.eager(given["q"], given["k"], given["v"], None, variant, None, None)
        return torch.cat((out[:, :, :-1], out[:, :, -1:] * 1.01), 2)

    judged = contract.Op("attention", wrong, op.eager, (), (), op.atol)
    found = {f.name: f for f in contract.judge(judged, "eager", kwargs, by)}
    assert not found["out 0"].holds and found["out 0"].where[2] == 8


# ---- memory


def bytes_of_check(op, case, dtype):
    """Bytes that the check of a case allocates beside its inputs: its first two and its last piece,
    and the parts of the others kept for comparison.
    """
    op = contract.Op(
        op.name, op.public, op.eager, ()
    )  # without a tolerance, which would read values
    with counting() as held:
        kwargs = case.make("cpu", dtype, 0)
        held.restart()
        before, cut = held.now, pieces.of(op, kwargs)
        kept = 0
        if cut is not None and len(cut.parts) > 3:
            some = [cut.parts[i] for i in (0, 1, -1)]
            cut, kept = replace(cut, parts=some, sample=None), piece.KEPT * (8 + dtype.itemsize)
        contract.reference(op, kwargs, dtype, cut=cut)
        return held.peak - before + kept


@pytest.fixture
def one_chunk(monkeypatch):
    """Chunks compared one after another reuse the same memory: one is enough."""
    chunks = tensors.chunks
    monkeypatch.setattr(tensors, "chunks", lambda t: chunks(t)[:1])


# Quantized experts are dequantized whole, in float64: a slice of their parts is not a quantized
# tensor.
QUANTIZED = {f"qwen3-30b-a3b_8192_{f}": 16 * 2**30 for f in ("nf4", "nvfp4", "block_fp8")}


@pytest.mark.parametrize("name", list(OPS))
def test_the_check_of_every_timed_case_fits(name, one_chunk):
    op = OPS[name]
    dtype = torch.float32  # the twin's own results are the widest
    for case in (
        c
        for c in op.cases
        if "cuda" in c.tags and any(dtype in i.dtypes for i in op.implementations)
    ):
        needed = bytes_of_check(op, case, dtype)
        assert needed <= QUANTIZED.get(case.name, piece.MEMORY), (
            f"{case.name}: {needed / 2**30:.1f} GiB"
        )


def test_scores_of_all_pairs_do_not_fit(one_chunk, monkeypatch):
    op = OPS["attention"]
    monkeypatch.delitem(pieces.TABLE, "attention")
    case = next(c for c in op.cases if c.name == "qwen3-30b-a3b_8k")
    assert bytes_of_check(op, case, torch.float32) > 32 * 2**30 > piece.MEMORY
