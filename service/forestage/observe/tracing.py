"""OpenTelemetry, where the extra `otel` is installed and a collector is named in OpenTelemetry's own variables.

Law: without them nothing is imported; and whatever the collector does, no prefetch and no stop waits for it longer than
it is told to.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from forestage import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from forestage.observe.job_spans import JobSpans

__all__ = ["Tracing", "start_tracing"]

_log = logging.getLogger("forestage.tracing")
_COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracing:
    """What is exported, until `aclose`. `spans` is the observer that makes spans of jobs."""

    def __init__(self, provider: "TracerProvider", spans: "JobSpans") -> None:
        self.spans = spans
        self._provider = provider

    async def aclose(self, grace_s: float) -> None:
        """Export what is left, within so many seconds; what does not get through then is lost."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waited so long
                loop.call_soon_threadsafe(done.set)

        # Not a thread of the loop's pool: the end of the process would wait for that one.
        threading.Thread(target=shut_down, name="forestage-last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(grace_s):
                await done.wait()
        except TimeoutError:
            _log.warning("the collector did not take the last spans within %.1f s", grace_s)


def start_tracing(environ: Mapping[str, str]) -> Tracing | None:
    """Begin to export spans if a collector is configured; None if none is, or the extra is not installed."""
    if not any(environ.get(name) for name in _COLLECTORS):
        return None
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from forestage.observe.job_spans import JobSpans
    except ImportError as error:
        _log.warning('no traces although a collector is configured: pip install "forestage[otel]" (%s)', error)
        return None
    # Variables win: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
    named = Resource({SERVICE_NAME: "forestage", SERVICE_VERSION: __version__})
    if environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        named = Resource({SERVICE_VERSION: __version__}).merge(Resource.create())
    provider = TracerProvider(resource=Resource.create().merge(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, JobSpans(provider))
