"""One trace of one prefetch, exported by a real service to a collector; and what a collector cannot do to us."""

import threading
import time
from pathlib import Path

import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from faults.stored_pages import StoredPages
from forestage.core.engine import EngineSettings
from forestage.core.job import Job, Reason
from forestage.observe.job_spans import JobSpans
from forestage.observe.tracing import start_tracing
from observe.collector import collecting
from support.configs import write_config
from support.engine_driver import EngineDriver, chain, kv_model
from support.live import make_keys
from support.running import running

KEYS = make_keys(6)
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{CALLER}-01"


def _prefetch(url: str, **headers: str) -> None:
    body = {"model": "m", "keys": [key.hex() for key in KEYS], "wait_ms": 10_000, "request_id": "r"}
    assert httpx2.post(f"{url}/v1/prefetch", json=body, headers=headers, timeout=30).status_code == 200


def _environ(url: str, **more: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50", **more}


def test_a_trace_of_a_real_service(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    pages.store(KEYS[:4])
    pages.file(KEYS[3]).write_bytes(b"too short")
    with collecting() as collector, running(pages.config, environ=_environ(collector.url)) as service:
        _prefetch(service.url, traceparent=SAMPLED)
        collector.until_there_are(6)
        assert service.stop() == 0
        assert {span.name for span in collector.spans} == {"prefetch", "queue", "probe", "reserve", "load", "settle"}
        assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
        root = collector.named("prefetch")
        assert root.parent_span_id.hex() == CALLER
        assert root.kind == 2  # SERVER
        said = {pair.key: pair.value.string_value or pair.value.int_value for pair in root.attributes}
        assert (said["forestage.request_id"], said["forestage.outcome"]) == ("r", "partial")
        assert (said["forestage.pages.requested"], said["forestage.pages.ready"]) == (6, 3)
        assert said["forestage.shortfall.corrupt"] == 1
        assert [event.name for event in root.events] == ["first_page", "last_page", "cut"]
        ends = [root.start_time_unix_nano]
        for name in ("queue", "probe", "reserve", "load", "settle"):
            span = collector.named(name)
            assert span.parent_span_id == root.span_id
            assert ends[-1] == span.start_time_unix_nano <= span.end_time_unix_nano
            ends.append(span.end_time_unix_nano)
        assert ends[-1] == root.end_time_unix_nano
        assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60
        assert collector.resources[0]["service.name"] == "forestage"
        assert not [key for key in KEYS if any(key.hex() in str(span) for span in collector.spans)]
        (line,) = [line for line in service.log if "prefetch ended" in line]
        assert f'"trace_id": "{TRACE}"' in line


def test_who_does_not_sample_gets_no_spans_and_a_name_of_ones_own_is_kept(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    with collecting() as collector:
        environ = _environ(collector.url, OTEL_SERVICE_NAME="mine")
        with running(pages.config, environ=environ) as service:
            _prefetch(service.url, traceparent=SAMPLED.removesuffix("01") + "00")
            body = {"model": "m", "keys": [KEYS[0].hex()], "wait_ms": 10_000, "request_id": "root"}
            httpx2.post(f"{service.url}/v1/prefetch", json=body, timeout=30)
            assert service.stop() == 0
        collector.until_there_are(1)
        assert {span.trace_id.hex() for span in collector.spans}.isdisjoint({TRACE})
        assert collector.named("prefetch").parent_span_id == b""
        assert collector.resources[0]["service.name"] == "mine"


def test_a_collector_that_hangs_costs_no_more_than_its_share_of_the_grace(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    hang = threading.Event()
    with (
        collecting(hang) as collector,
        running(pages.config, "--grace", "5", environ=_environ(collector.url)) as service,
    ):
        _prefetch(service.url)
        began = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - began < 10
        assert [line for line in service.log if "did not take the last spans" in line]
        assert not [line for line in service.log if "Traceback" in line]


def test_without_the_extra_it_says_so_and_serves(tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(
        "import sys\n"
        "sys.modules['opentelemetry.sdk'] = None\n"
        "sys.modules['opentelemetry.exporter'] = None\n"
        "from forestage.cli import main\n"
        "sys.exit(main())\n"
    )
    config = write_config(tmp_path)
    with running(config, environ=_environ("http://127.0.0.1:9"), entry=(str(entry),)) as service:
        assert httpx2.get(f"{service.url}/readyz").status_code == 200
        assert service.stop() == 0
    (line,) = [line for line in service.log if "forestage[otel]" in line]
    assert "WARNING" in line


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_it_is_off_unless_configured(environ: dict[str, str]) -> None:
    assert start_tracing(environ) is None


# ---- which spans a job has


def _spans_of(job: Job) -> list[str]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    JobSpans(provider, lambda: 1000.0, lambda: 5000.0).job_finished(job)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["prefetch"]
    assert root.start_time == int((job.timing.arrived + 4000) * 1e9)
    for span in spans.values():
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time  # type: ignore[operator]
    provider.shutdown()
    return [span.name for span in exporter.get_finished_spans()]


def test_a_job_that_never_left_the_queue() -> None:
    driver = EngineDriver(kv_model(), [8], EngineSettings(budget_bytes=1))
    driver.store(chain("a", 4))
    driver.submit(chain("a", 4))
    waiting = driver.submit(chain("b", 4))
    driver.advance(1)
    driver.engine.stop(waiting, Reason.DEADLINE, driver.now)
    assert _spans_of(waiting) == ["queue", "prefetch"]


def test_a_job_that_was_stopped_while_l3_was_asked() -> None:
    driver = EngineDriver(kv_model(), [8])
    job = driver.submit(chain("a", 4))
    driver.advance(1)
    driver.engine.stop(job, Reason.DEADLINE, driver.now)
    assert _spans_of(job) == ["queue", "probe", "prefetch"]


def test_a_job_that_found_everything() -> None:
    driver = EngineDriver(kv_model(), [8])
    driver.store(chain("a", 4))
    for _ in range(2):
        job = driver.submit(chain("a", 4))
        driver.answer_probes()
        driver.begin_all_reads()
        for load in list(driver.in_flight):
            driver.end_read(load)
    assert _spans_of(job) == ["queue", "reserve", "load", "prefetch"]
