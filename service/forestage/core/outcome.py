"""What a finished job says about itself: the reasons why `ready` is short of `requested`, and the outcome."""

from forestage.core.job import Job, Outcome, Reason

__all__ = ["outcome_of", "shortfall_of"]


def shortfall_of(job: Job) -> dict[Reason, int]:
    """Return pages by reason; they add up to requested - ready (CONTRACT section 3).

    A job that was stopped before L3 had answered knows no span: all that is missing is due to the stop.
    """
    if job.timing.granted is None:
        assert job.stop_reason is not None or job.ready == job.requested
        spans = [(job.stop_reason, job.requested - job.ready)]
    else:
        spans = [
            (job.span_reason, job.requested - job.stored),
            (Reason.NO_BOUNDARY, job.stored - job.restorable),
            (Reason.HOST_CAPACITY, job.restorable - job.granted),
            (job.stop_reason, job.granted - job.ready),
        ]
    return {reason: pages for reason, pages in spans if pages and reason is not None}


def outcome_of(job: Job) -> Outcome:
    """Return the outcome of a job whose lengths and shortfall are final."""
    if job.stop_reason is Reason.CANCELLED:
        return Outcome.CANCELLED
    if job.ready == job.requested:
        return Outcome.COMPLETE
    if job.ready > job.request.device_pages:
        return Outcome.PARTIAL
    return Outcome.DECLINED if Reason.BELOW_MIN_PAGES in job.shortfall else Outcome.MISS
