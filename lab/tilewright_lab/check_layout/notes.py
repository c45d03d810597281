"""What a comparison of a layout with one process could not see."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright_lab.check_layout.compare import Alone, Compared
from tilewright_lab.check_layout.findings import divisors, is_small, names_where


def notes(one: Alone, ranks: Sequence[Compared], differs: bool) -> list[str]:
    """What the check could not see.   differs: whether anything did."""
    texts = [_shared_tokens(one, ranks), _same_tokens(one, ranks)]
    texts += [
        _left_out("norm", [one.norm is not None, *(c.norm is not None for c in ranks)]),
        _left_out("optimizer step", [one.steps, *(bool(c.updates) for c in ranks)]),
    ]
    reported = [c.reported is not None for c in ranks]
    texts.append(_left_out("reported loss", [one.reported is not None or any(reported), *reported]))
    below = names_where(ranks, "updates", lambda n, d: d.small and not is_small(n, ranks))
    if below:
        texts.append(
            f"the step of {len(below)} of {len(names_where(ranks, 'updates'))} parameters, such as "
            f"{below[0]}, is below the rounding of its weights: nothing of it shows"
        )
    if differs and (one.drew or any(c.drew for c in ranks)):
        texts.append(
            "the forward draws random numbers, as dropout does: a layout that computes other "
            "shapes draws others; compare without them"
        )
    return [note for note in texts if note]


def notes_of_one(one: Alone) -> list[str]:
    """What the check cannot see in any layout."""
    texts = []
    if one.idle:
        require = (
            "requires a gradient and has" if len(one.idle) == 1 else "require gradients and have"
        )
        texts.append(f"{_such(one.idle)} {require} none in one process")
    if one.buffers:
        texts.append(f"buffers are not compared, and the step changes {_such(one.buffers)}")
    return texts


def _such(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _shared_tokens(one: Alone, ranks: Sequence[Compared]) -> str:
    counts = {c.tokens for c in ranks} - {0}
    if len(counts) != 1 or one.tokens in counts or sum(c.tokens for c in ranks) != one.tokens:
        return ""
    return (
        f"every rank has {counts.pop()} tokens: with equal numbers a divisor by local tokens "
        "does not show"
    )


def _same_tokens(one: Alone, ranks: Sequence[Compared]) -> str:
    """The step does not tell a batch that ranks share from data that are wrongly the same."""
    times, size = sum(c.tokens for c in ranks) / one.tokens, len(ranks)
    if times not in divisors(size)[1:]:
        return ""
    if all(times * sum(n in c.kinds for c in ranks) <= size for n in one.order):
        return ""  # stages of a pipeline, of which as many share a batch
    said = f"the ranks have {times:.0f} times the tokens of one process between them: "
    if all(c.kinds.get(n) == "copy" for c in ranks for n in one.order):
        return said + (
            "as each has the whole model, they do the same work; data parallelism needs other data "
            "on every rank"
        )
    return said + (
        "right where ranks share a batch, as in tensor parallelism, a fault where each should have "
        "data of its own"
    )


def _left_out(what: str, there: Sequence[bool]) -> str:
    """there: whether one process has it, then whether each rank has."""
    if all(there) or not any(there):
        return ""
    if not there[0]:
        return f"no {what} is compared: one process has none"
    if not any(there[1:]):
        return f"no {what} is compared: the ranks have none"
    without = [str(rank) for rank, has in enumerate(there[1:]) if not has]
    ranks = f"rank{'s' if len(without) > 1 else ''} {', '.join(without)}"
    if what == "optimizer step":  # compared on each rank alone
        return f"no {what} is compared on {ranks}"
    return f"no {what} is compared: there is none on {ranks}"
