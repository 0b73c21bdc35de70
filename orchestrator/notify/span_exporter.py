"""Exports the spans of a job to an OpenTelemetry collector, next to the leader's own work.

The standard variables of OpenTelemetry in the leader's environment turn it on and configure it. A
span is exported until the collector takes it. A leader that takes over exports the spans of the
submission again, under the same ids.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import JobError
from orchestrator.job.stage import Ended
from orchestrator.job.state import Run
from orchestrator.journal.journal import entries_of
from orchestrator.notify.notifier import DELAYS_S, LAST_S, LOOK_S
from orchestrator.notify.spans import KINDS, Span, Trace, trace_of
from orchestrator.posix.run_with_timeout import within

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL = "http/protobuf"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
BATCH = 512
"""Most spans in one request, as in the batches of OpenTelemetry's SDK."""


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for spans. Logs why they cannot be exported."""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    to_other = environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    if off or to_other or not any(environ.get(name) for name in ENDPOINTS):
        return False
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), PROTOCOL)
    if protocol != PROTOCOL:
        log.warning("no spans are exported: the protocol must be %s, not %s", PROTOCOL, protocol)
        return False
    return True


def collector_of(environ: Mapping[str, str]) -> "OTLPSpanExporter | None":
    """The client of the collector that the environment names; None if it names none. Logs why a
    client cannot be made."""
    if not is_wanted(environ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        log.warning("no spans are exported: `pip install 'ndctl[otel]'` installs OpenTelemetry")
        return None
    try:
        return OTLPSpanExporter()
    # For example, OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER names what is not installed.
    except (RuntimeError, ValueError) as exc:
        log.warning("no spans are exported: OpenTelemetry cannot be set up: %s", exc)
        return None


class SpanExporter:
    def __init__(
        self,
        collector: "OTLPSpanExporter",
        run_dir: RunDir,
        run: Callable[[], Run],
        environ: Mapping[str, str],
        delays_s: Sequence[float] = DELAYS_S,
    ) -> None:
        self.collector, self.run_dir, self.run, self.delays_s = collector, run_dir, run, delays_s
        named = "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        named |= bool(environ.get("OTEL_SERVICE_NAME"))
        self.service = {} if named else {"service.name": "ndctl"}
        self.looking = asyncio.Lock()
        self.sent: set[str] = set()
        """Keys of spans that the collector has taken."""
        self.known: tuple[int, int, bool] | None = None
        """The state of the job after whose spans all were taken."""

    async def look(self) -> bool:
        """Export what has ended. Returns False if the collector did not take all."""
        # `finish` may come while a look is under way, and must not export the same spans.
        async with self.looking:
            return await self._look()

    async def _look(self) -> bool:
        run = self.run()
        resumed = sum(one.resumed_after_s is not None for one in run.history.incidents)
        state = (run.attempt.number, resumed, isinstance(run.stage, Ended))
        if run.job is None or state == self.known:
            return True
        try:
            taken = await within(LAST_S, self._export, run)
        except (OSError, JobError) as exc:  # the storage is slow, or a line cannot be read
            log.warning("failed to export spans: %s", exc)
            return False
        if taken:
            self.known = state
        return taken

    def _export(self, run: Run) -> bool:
        """Whether the collector took all. Blocks for as long as the collector does."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        trace = trace_of(self.run_dir.path, entries_of(self.run_dir.journal, *KINDS), run)
        new = [span for span in trace.spans if span.key not in self.sent]
        while new:
            batch, new = new[:BATCH], new[BATCH:]
            spans = [self._span(trace, span) for span in batch]
            if self.collector.export(spans) is not SpanExportResult.SUCCESS:
                return False
            self.sent.update(span.key for span in batch)
        return True

    def _span(self, trace: Trace, span: Span) -> "ReadableSpan":
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(key: str) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(trace.id, trace.span_id(key), is_remote=False, trace_flags=flags)

        failed = span.error is not None
        return ReadableSpan(
            name=span.name,
            context=context(span.key),
            parent=None if span.parent is None else context(span.parent),
            resource=Resource.create(self.service),
            attributes=span.attributes,
            status=Status(StatusCode.ERROR, span.error) if failed else Status(),
            start_time=round(span.start * 1e9),
            end_time=round(span.end * 1e9),
            instrumentation_scope=InstrumentationScope("ndctl"),
        )

    async def keep_looking(self) -> None:
        fails = 0
        while True:
            fails = 0 if await self.look() else fails + 1
            delays_s = (LOOK_S, *self.delays_s)
            await asyncio.sleep(delays_s[min(fails, len(self.delays_s))])

    async def finish(self) -> None:
        """Export the spans that the end of the job ended, within a limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                while not await self.look():
                    await asyncio.sleep(self.delays_s[0])
                return
        log.warning("the collector did not take the last spans of the job")


@asynccontextmanager
async def exporting(exporter: SpanExporter) -> AsyncIterator[None]:
    looking = asyncio.create_task(exporter.keep_looking())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
