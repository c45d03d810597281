"""What a run is made of beside its configuration, as its checkpoints name it: each thing by its
content, and where it was read, which may be elsewhere when the run goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

ACCEPTS = "train.accept_changes"
# What a change of the samples changes of the kind `data` of a run's identity.
OF_SAMPLES = ("bins", "tokens", "contents", "packing")
PARTS = {"data", "teacher", "routes", "reference"}  # what can be in the samples
_LISTED = 2  # files that a sentence names


class Thing(NamedTuple):
    """digest: of the content.   places: where it was read."""

    digest: str
    places: list[str]

    def __str__(self) -> str:
        more = len(self.places) - _LISTED
        named = ", ".join(self.places[:_LISTED]) + (f" and {more} more" if more > 0 else "")
        return f"{named} ({self.digest[:16]})"


class MadeOf(NamedTuple):
    """now: the things of a run, by the names that `train.accept_changes` has.   accepted: those
    that may be others than the checkpoint's.
    """

    now: Mapping[str, Thing]
    accepted: Collection[str] = ()

    def recorded(self) -> dict[str, Any]:
        """What a checkpoint holds of them."""
        return {name: thing._asdict() for name, thing in self.now.items()}

    def changed(self, state: Mapping[str, Any]) -> dict[str, tuple[Thing, Thing]]:
        """Those that were others when a checkpoint was written: (then, now). What only one of the
        two has is no other thing.
        """
        had = {name: Thing(**said) for name, said in state.get("made_of", {}).items()}
        return {
            name: (had[name], thing)
            for name, thing in self.now.items()
            if name in had and had[name].digest != thing.digest
        }

    def unexplained(self, state: Mapping[str, Any], differ: dict[str, Any]) -> dict[str, Any]:
        """The differences in the `data` part of a run's identity, without those that follow from
        another thing that is in the samples.
        """
        changed, recorded = self.changed(state).keys() & PARTS, "made_of" in state
        known = (
            OF_SAMPLES if "data" in self.accepted and ("data" in changed or not recorded) else ()
        )
        if changed and "data" not in changed:
            known = ("contents",)
        return {k: v for k, v in differ.items() if k not in known}

    def refused(self, state: Mapping[str, Any], differ: Mapping[str, Any]) -> str | None:
        """Why a run is not the checkpoint's, in the words that follow the checkpoint's name.

        differ: what `unexplained` returned, as (checkpoint, configuration).
        """
        known = {*self.accepted, "base"}  # which has a sentence and a field of its own
        wrong = {n: both for n, both in self.changed(state).items() if n not in known}
        if not wrong:
            return None
        said = [f"{then} then, {now} now" for then, now in wrong.values()]
        if "data" in wrong and differ:
            said = [f"{differ} (checkpoint, configuration)", *said]
        names = ", ".join(wrong)
        which = "this one" if len(wrong) == 1 else "these"
        return (
            f"was written with another {' and another '.join(wrong)}: {'; '.join(said)}. Set back "
            f"what it was, or {ACCEPTS} to [{names}] to go on with {which}"
        )

    def told(self, state: Mapping[str, Any]) -> list[str]:
        """Lines for the log of a run that goes on: what is accepted, or could not be compared."""
        absent = [n for n in self.now if n not in ("data", "base")]
        if "made_of" not in state and absent:
            return [
                f"the checkpoint is of a version that did not record its {', '.join(absent)}: taken "
                "to be what this run reads"
            ]
        return [
            f"the run goes on with another {name}, as accepted: {then} then, {now} now"
            for name, (then, now) in self.changed(state).items()
        ]


NOTHING = MadeOf({})
