"""What became of a hint, in five words (vLLM's KvHintsEnvelope, as its executors answer it).

Law: a verdict without a reason is `accepted`. Of several reasons a refusal tells more than a cut, and a cut more than
pages that are nowhere: who reads `missing` knows that all there is has been brought, pinned or demoted.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from forestage.core.job import Job, JobState, Lengths, Reason

__all__ = [
    "HINT_PRIORITY",
    "HintCounts",
    "HintKind",
    "HintOutcome",
    "Verdict",
    "judge_demotion",
    "judge_expectation",
    "judge_job",
    "judge_pin",
]

#: Of a prefetch that a hint asks for: behind every request that does not say, since nobody waits for it yet.
HINT_PRIORITY = -1


class HintKind(StrEnum):
    """What an action asks for."""

    PREFETCH = "prefetch"
    PIN = "pin"
    RETAIN = "retain"
    EXPECT = "expect"
    RELEASE = "release"
    DEMOTE = "demote"
    UNKNOWN = "unknown"


class HintOutcome(StrEnum):
    ACCEPTED = "accepted"  # done in full, or under way
    CLIPPED = "clipped"  # done in part, although there is more
    DEFERRED = "deferred"  # waits for admission
    REJECTED = "rejected"  # not done: the reason says who must change something
    MISSING = "missing"  # done as far as there are pages


class Verdict(NamedTuple):
    """An outcome and what decided it: a reason of a shortfall, or the slug of an error."""

    outcome: HintOutcome
    reason: str | None = None


_OUTCOMES: Mapping[Reason, HintOutcome] = {
    Reason.NOT_STORED: HintOutcome.MISSING,
    Reason.STORAGE_UNAVAILABLE: HintOutcome.MISSING,
    Reason.NO_BOUNDARY: HintOutcome.CLIPPED,
    Reason.HOST_CAPACITY: HintOutcome.CLIPPED,
    Reason.BELOW_MIN_PAGES: HintOutcome.REJECTED,
    Reason.DEADLINE: HintOutcome.CLIPPED,
    Reason.FINISHED: HintOutcome.CLIPPED,
    Reason.CANCELLED: HintOutcome.CLIPPED,
    Reason.SHUTDOWN: HintOutcome.CLIPPED,
    Reason.VANISHED: HintOutcome.MISSING,
    Reason.CORRUPT: HintOutcome.MISSING,
    Reason.STORAGE_ERROR: HintOutcome.MISSING,
}


class HintCounts:
    """How many actions of each kind were carried out, by the outcome that their first answer gave."""

    def __init__(self) -> None:
        self.of = {(kind, outcome): 0 for kind in HintKind for outcome in HintOutcome}

    def add(self, action_type: str, outcome: HintOutcome) -> None:
        """Count an action; a type that is none of ours is `unknown`."""
        kind = HintKind(action_type) if action_type in set(HintKind) else HintKind.UNKNOWN
        self.of[kind, outcome] += 1


_STRONGEST = (HintOutcome.REJECTED, HintOutcome.CLIPPED, HintOutcome.MISSING)


def judge_job(job: Job) -> Verdict:
    """Say how a hinted prefetch stands; final once the job is done."""
    if job.state is JobState.QUEUED:
        return Verdict(HintOutcome.DEFERRED, "queued")
    if not job.done or not job.shortfall:
        return Verdict(HintOutcome.ACCEPTED)

    def weight(reason: Reason) -> tuple[int, int]:
        return -_STRONGEST.index(_OUTCOMES[reason]), job.shortfall[reason]

    decisive = max(job.shortfall, key=weight)
    return Verdict(_OUTCOMES[decisive], decisive.value)


def judge_pin(lengths: Lengths) -> Verdict:
    """Say how much of what was to be kept is kept, by the lengths that pinning it answered."""
    if lengths.granted < lengths.restorable:
        return Verdict(HintOutcome.CLIPPED, Reason.HOST_CAPACITY.value)
    if lengths.restorable < lengths.stored:
        return Verdict(HintOutcome.CLIPPED, Reason.NO_BOUNDARY.value)
    if lengths.stored < lengths.requested:
        return Verdict(HintOutcome.MISSING, "not_resident")
    return Verdict(HintOutcome.ACCEPTED)


def judge_expectation(expected: int, marked: int, room: int) -> Verdict:
    """Say how much of an expected prefix is evicted last: of its pages so many, with room for so many more."""
    if marked == expected:
        return Verdict(HintOutcome.ACCEPTED)
    if room:
        return Verdict(HintOutcome.MISSING, "not_resident")
    return Verdict(HintOutcome.CLIPPED, Reason.HOST_CAPACITY.value)


def judge_demotion(demoted: int, kept: int) -> Verdict:
    """Say how a demotion went, by the pages that were demoted and those that somebody holds."""
    if kept:
        return Verdict(HintOutcome.CLIPPED, "held")
    return Verdict(HintOutcome.ACCEPTED) if demoted else Verdict(HintOutcome.MISSING, "not_resident")
