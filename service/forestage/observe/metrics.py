"""Metrics of CONTRACT section 8. Labels come from configuration and fixed words only.

Law: requested_pages_total == ready_pages_total + shortfall_pages_total, summed over reasons, for the same model; the
states of pool_slots add up to a component's capacity. Gauges are read from the engine when scraped, so they cannot
drift; counters are raised once a finished job. Nothing here can fail a request.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from forestage.core.engine import Engine
from forestage.core.hints import HintCounts
from forestage.core.job import Job, JobState, Outcome, Reason
from forestage.core.pool_map import slot_counts
from forestage.prefetch.feed import Channel, ResidencyFeed
from forestage.storage.base import ReadOutcome

__all__ = ["Metrics"]

_NO_ERROR = (ReadOutcome.LOADED, ReadOutcome.STOPPED)
_ERROR_KINDS = (*(str(outcome) for outcome in ReadOutcome if outcome not in _NO_ERROR), "probe", "write")

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One registry a service. Implements JobObserver and the storages' observer."""

    def __init__(self, backend: str, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, that nobody reads
        self._backend = backend
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="forestage", registry=self.registry)
        gauge = partial(Gauge, namespace="forestage", registry=self.registry)
        histogram = partial(Histogram, namespace="forestage", registry=self.registry, buckets=_SECONDS)
        self._requests = counter("prefetch_requests", "Prefetches that ended", ["model", "outcome"])
        self._requested = counter("requested_pages", "Pages asked for by prefetches that ended", ["model"])
        self._ready = counter("ready_pages", "Pages of usable prefixes handed out", ["model"])
        self._short = counter("shortfall_pages", "Pages asked for and not ready", ["model", "reason"])
        self._host = counter("host_pages", "Pages found resident in the host pool", ["model"])
        self._loaded = counter("loaded_pages", "Pages read from L3", ["model"])
        self._joined = counter("joined_pages", "Pages whose read another job had begun", ["model"])
        self._seconds = histogram("prefetch_seconds", "From arrival to the end of a job")
        self._probe = histogram("probe_seconds", "From start to grant of a job")
        self._read_bytes = counter("storage_read_bytes", "Payload bytes read from L3", ["backend"])
        self._read_seconds = histogram("storage_read_seconds", "One batch of reads", ["backend"])
        self._errors = counter("storage_errors", "Reads and probes that failed", ["backend", "kind"])
        self._up = gauge("storage_up", "1 while L3 answers", ["backend"])
        build = Info("build", "Version of the service", namespace="forestage", registry=self.registry)
        build.info({"version": version})
        self._up.labels(backend).set(1)
        self._read_bytes.labels(backend)
        self._read_seconds.labels(backend)
        for kind in _ERROR_KINDS:
            self._errors.labels(backend, kind)

    def watch(
        self, engine: Engine, feed: ResidencyFeed, hints: HintCounts, path: str, pinned: str, generation: int
    ) -> None:
        """Read from an engine and its pool, from its feed of events and from the counts of hints from now on."""
        for model in engine.pools:
            for outcome in Outcome:
                self._requests.labels(model, outcome.value)
            for reason in Reason:
                self._short.labels(model, reason.value)
            for counter in (self._requested, self._ready, self._host, self._loaded, self._joined):
                counter.labels(model)
        info = Info("pool", "The shared pool", namespace="forestage", registry=self.registry)
        info.info({"path": path, "pinned": pinned, "generation": str(generation)})
        self.registry.register(_EngineCollector(engine))
        self.registry.register(_EventCollector(feed))
        self.registry.register(_HintCollector(hints))

    # ---- JobObserver

    def job_finished(self, job: Job) -> None:
        model, lengths = job.layout.name, job.lengths()
        loaded, joined = job.count_pages()
        assert job.outcome is not None
        self._requests.labels(model, job.outcome.value).inc()
        self._requested.labels(model).inc(lengths.requested)
        self._ready.labels(model).inc(lengths.ready)
        for reason, pages in job.shortfall.items():
            self._short.labels(model, reason.value).inc(pages)
        self._host.labels(model).inc(lengths.host - job.request.device_pages)
        self._loaded.labels(model).inc(loaded)
        self._joined.labels(model).inc(joined)
        timing = job.timing
        if timing.done is not None:
            self._seconds.observe(timing.done - timing.arrived)
        if timing.started is not None and timing.granted is not None:
            self._probe.observe(timing.granted - timing.started)

    # ---- StorageObserver

    def storage_read(self, pages: int, num_bytes: int, seconds: float) -> None:
        self._read_bytes.labels(self._backend).inc(num_bytes)
        self._read_seconds.labels(self._backend).observe(seconds)

    def storage_error(self, kind: str, count: int) -> None:
        self._errors.labels(self._backend, kind).inc(count)

    def storage_up(self, is_up: bool) -> None:
        self._up.labels(self._backend).set(is_up)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Render everything, as OpenMetrics if the scraper accepts it; returns body and content type."""
        encode, media_type = choose_encoder(accept)
        body: bytes = encode(self.registry)
        return body, media_type


class _EngineCollector:
    """Reads the engine when scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        jobs = GaugeMetricFamily("forestage_jobs", "Jobs that are not done", labels=["state"])
        states = [job.state for job in engine.live]
        for state in (JobState.QUEUED, JobState.PROBING, JobState.LOADING):
            jobs.add_metric([state.value], states.count(state))
        yield jobs
        yield GaugeMetricFamily(
            "forestage_inflight_bytes", "Bytes of the pool promised to running jobs", engine.admission.promised
        )
        yield GaugeMetricFamily("forestage_leases", "Leases alive", len(engine.leases))
        yield GaugeMetricFamily("forestage_pins", "Pins alive", len(engine.pins))
        yield CounterMetricFamily(
            "forestage_lease_expired", "Leases that ended by time instead of by release", engine.leases.expired
        )
        writes = CounterMetricFamily("forestage_writes_pages", "Pages asked to write, by their end", labels=["result"])
        for result, pages in engine.writes.results.items():
            writes.add_metric([result.value], pages)
        yield writes
        yield from self._pools()

    def _pools(self) -> Iterator[Metric]:
        slots = GaugeMetricFamily("forestage_pool_slots", "Slots by state", labels=["model", "component", "state"])
        evicted = CounterMetricFamily(
            "forestage_evicted_pages", "Pages evicted to make room", labels=["model", "component"]
        )
        fates: Mapping[str, int] = {"used": 0, "unused": 0}
        for model, pool in self._engine.pools.items():
            for c, component in enumerate(pool.layout.components):
                index = pool.index[c]
                for state, number in slot_counts(pool, c).items():
                    slots.add_metric([model, component.name, state], number)
                evicted.add_metric([model, component.name], index.evicted)
                fates = {"used": fates["used"] + index.used, "unused": fates["unused"] + index.unused}
        yield slots
        yield evicted
        fate = CounterMetricFamily(
            "forestage_prefetched_pages_fate",
            "Prefetched pages wanted again or released in time, or dropped before",
            labels=["fate"],
        )
        for word, number in fates.items():
            fate.add_metric([word], number)
        yield fate


class _EventCollector:
    """Reads the feed of events when scraped."""

    def __init__(self, feed: ResidencyFeed) -> None:
        self._feed = feed

    def collect(self) -> Iterator[Metric]:
        feed = self._feed
        listeners = GaugeMetricFamily("forestage_event_listeners", "Who follows the pool", labels=["channel"])
        told = CounterMetricFamily(
            "forestage_events_published", "Pages that came or went, as told to listeners", labels=["channel"]
        )
        lost = CounterMetricFamily(
            "forestage_events_dropped", "Pages that came or went and that a slow listener missed", labels=["channel"]
        )
        for channel in Channel:
            listeners.add_metric([channel.value], feed.count_listeners(channel))
            told.add_metric([channel.value], feed.told[channel])
            lost.add_metric([channel.value], feed.lost[channel])
        yield listeners
        yield told
        yield lost


class _HintCollector:
    """Reads the counts of hints when scraped."""

    def __init__(self, hints: HintCounts) -> None:
        self._hints = hints

    def collect(self) -> Iterator[Metric]:
        actions = CounterMetricFamily(
            "forestage_hint_actions", "Actions of hints, by their first answer", labels=["action", "outcome"]
        )
        for (kind, outcome), number in self._hints.of.items():
            actions.add_metric([kind.value, outcome.value], number)
        yield actions
