"""A finished prefetch as spans: `prefetch`, and in it queue, probe, reserve, load and settle, as far as it came.

Law: spans of one job lie within its `prefetch` span, and follow each other without overlap. They are made when the job
is done, from the moments it noted: while it runs it costs no more than without tracing.
"""

import time
from collections.abc import Callable, Iterator

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    TracerProvider,
    set_span_in_context,
)

from forestage import __version__
from forestage.core.job import Job
from forestage.core.timeline import Event

__all__ = ["JobSpans"]


class JobSpans:
    """Implements JobObserver. The caller's span, if it sent one, is the parent, and whether it is sampled decides."""

    def __init__(
        self,
        provider: TracerProvider,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Make spans with a provider.

        Args:
            provider: who samples and exports them.
            clock: the engine's, in seconds.
            wall_clock: seconds since 1970, for what is exported.
        """
        self._tracer = provider.get_tracer("forestage", __version__)
        self._clock = clock
        self._wall_clock = wall_clock

    def job_finished(self, job: Job) -> None:
        # The same shift for all moments of a job: spans keep their lengths although a wall clock may jump.
        shift = self._wall_clock() - self._clock()

        def to_ns(moment: float) -> int:
            return int((moment + shift) * 1e9)

        arrived, done = job.timing.arrived, job.timing.done
        assert done is not None
        root = self._tracer.start_span(
            "prefetch", _parent_of(job), SpanKind.SERVER, _attributes(job), start_time=to_ns(arrived)
        )
        if root.is_recording():
            within = set_span_in_context(root, Context())
            for name, begin, end in _phases(job, done):
                self._tracer.start_span(name, within, start_time=to_ns(begin)).end(to_ns(end))
            for moment in job.timeline.moments():
                if moment.event in (Event.FIRST_PAGE, Event.LAST_PAGE, Event.CUT):
                    _add_event(root, moment.event.value, moment.pages, moment.reason, to_ns(moment.at))
        root.end(to_ns(done))


def _phases(job: Job, done: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end of what the job went through."""
    timing, timeline = job.timing, job.timeline
    started = done if timing.started is None else timing.started
    yield "queue", timing.arrived, started
    if timing.started is None:
        return
    granted = done if timing.granted is None else timing.granted
    if timeline.first(Event.PROBE) is not None:
        yield "probe", started, granted
    if timing.granted is None:
        return
    # A job that ends in the very step of its grant is done at the moment at which that step began.
    reserved = granted if timeline.reserved is None else min(timeline.reserved, done)
    yield "reserve", granted, reserved
    cut = timeline.first(Event.CUT)
    stopped = done if cut is None else max(reserved, cut.at)
    yield "load", reserved, stopped
    if cut is not None:
        yield "settle", stopped, done


def _attributes(job: Job) -> dict[str, str | int]:
    loaded, joined = job.count_pages()
    lengths = job.lengths()
    attributes: dict[str, str | int] = {
        "forestage.request_id": job.request.request_id,
        "forestage.model": job.layout.name,
        "forestage.tenant": job.request.tenant,
        "forestage.outcome": "" if job.outcome is None else job.outcome.value,
        "forestage.pages.device": job.request.device_pages,
        "forestage.pages.requested": lengths.requested,
        "forestage.pages.host": lengths.host,
        "forestage.pages.stored": lengths.stored,
        "forestage.pages.restorable": lengths.restorable,
        "forestage.pages.granted": lengths.granted,
        "forestage.pages.ready": lengths.ready,
        "forestage.pages.loaded": loaded,
        "forestage.pages.joined": joined,
    }
    return attributes | {f"forestage.shortfall.{reason.value}": pages for reason, pages in job.shortfall.items()}


def _add_event(span: Span, name: str, pages: int, reason: str | None, at_ns: int) -> None:
    attributes: dict[str, str | int] = {"forestage.pages": pages}
    if reason is not None:
        attributes["forestage.reason"] = str(reason)
    span.add_event(name, attributes, at_ns)


def _parent_of(job: Job) -> Context:
    """Return a context with the caller's span in it, an empty one if the caller sent none."""
    if not job.request.traceparent:
        return Context()
    _, trace_id, span_id, flags = job.request.traceparent.split("-")
    span_context = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(span_context), Context())
