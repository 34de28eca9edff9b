"""One log line for each prefetch that ends: what it asked for, what it got, why not more, and where the time went."""

import logging

from forestage.core.job import Job
from forestage.core.trace_context import trace_id_of

__all__ = ["JobLog"]

_log = logging.getLogger("forestage.jobs")


class JobLog:
    """Implements JobObserver. Lines name the request and its trace, never a key."""

    def job_finished(self, job: Job) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        assert job.outcome is not None
        assert job.timing.done is not None
        lengths, (loaded, joined) = job.lengths(), job.count_pages()
        fields: dict[str, object] = {
            "request_id": job.request.request_id,
            "trace_id": trace_id_of(job.request.traceparent),
            "model": job.layout.name,
            "tenant": job.request.tenant,
            "outcome": job.outcome.value,
            "device_pages": job.request.device_pages,
            "requested": lengths.requested,
            "host": lengths.host,
            "stored": lengths.stored,
            "restorable": lengths.restorable,
            "granted": lengths.granted,
            "ready": lengths.ready,
            "loaded": loaded,
            "joined": joined,
            "shortfall": {reason.value: pages for reason, pages in job.shortfall.items()},
            "ms": {name: round(ms, 3) for name, ms in job.timing.spans_ms(job.timing.done).items()},
        }
        _log.info("prefetch ended", extra={"fields": fields})
