"""A collector of OpenTelemetry: a real HTTP server that decodes the protobuf of OTLP."""

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """Answers with these codes in turn, then with 200."""

    url: str = ""
    codes: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.paths.append(path)
        self.headers.append(headers)
        if (code := self.codes.pop(0) if self.codes else 200) != 200:
            return code
        request = ExportTraceServiceRequest.FromString(
            gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        )
        for resource in request.resource_spans:
            self.resources.append(attributes_of(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return 200

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


def attributes_of(found: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in found.attributes}


@contextlib.contextmanager
def collecting(*codes: int, address: str = "127.0.0.1") -> Iterator[Collector]:
    """A collector that listens at `address` of this machine."""
    found = Collector(codes=[*codes])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(found.take(self.path, dict(self.headers), body))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, 0), Handler)
    found.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
