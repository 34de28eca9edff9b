"""A collector stub: takes OTLP over HTTP on loopback, and keeps the spans."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Collector", "collecting"]


@dataclass
class Collector:
    """`resources` are the attributes of whoever sent spans."""

    port: int
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def until_there_are(self, count: int, deadline_s: float = 30.0) -> None:
        deadline = time.monotonic() + deadline_s
        while len(self.spans) < count:
            assert time.monotonic() < deadline, f"{len(self.spans)} of {count} spans came"
            time.sleep(0.01)


@contextmanager
def collecting(hang: threading.Event | None = None) -> Iterator[Collector]:
    """Run a collector; with `hang` it does not answer before that is set."""
    collector = Collector(0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if hang is not None:
                hang.wait(60)
            assert self.path == "/v1/traces"
            sent = ExportTraceServiceRequest.FromString(body)
            for part in sent.resource_spans:
                collector.resources.append({pair.key: pair.value.string_value for pair in part.resource.attributes})
                for scope in part.scope_spans:
                    collector.spans += scope.spans
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.port = server.server_address[1]
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield collector
    finally:
        if hang is not None:
            hang.set()
        server.shutdown()
        serving.join(10)
        server.server_close()
