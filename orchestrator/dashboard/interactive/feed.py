"""Reads the sources of pages on threads of their own, so that a slow file system stops no key.

The threads are daemons: one that hangs on a dead file system does not keep the program.
"""

import threading
from collections.abc import Callable

from orchestrator.dashboard.interactive.content import Content, Reading, Services, Source
from orchestrator.errors import NdctlError
from orchestrator.seams import Clock

INTERVAL_S = {"fleet": 2.0, "job": 0.5, "logs": 0.5, "events": 1.0}
"""Between two reads. Stacks are read once."""
LEAST_PAUSE = 4.0
"""A reader waits so many times as long as it has read: at most a fifth of one CPU."""
KEPT = 12
"""Sources that stay open while no page shows them."""


class Feed:
    """One source. At most one thread reads it at any time."""

    def __init__(
        self,
        opened: Callable[[], Callable[[], Content]],
        interval_s: float | None,
        fresh: Callable[[], object],
        clock: Clock,
    ) -> None:
        """
        Args:
            opened: makes the function that reads. It may block as well.
            interval_s: None: read once.
            fresh: called after each read, on the thread that has read.
        """
        self._open, self._interval_s = opened, interval_s
        self._fresh, self._clock = fresh, clock
        self._read: Callable[[], Content] | None = None
        self._known = Reading()
        self._began: float | None = None
        self._unwanted = threading.Event()
        self._lock = threading.Lock()
        self._runs = False

    @property
    def reading(self) -> Reading:
        began = self._began
        busy_s = 0.0 if began is None else max(0.0, self._clock.monotonic() - began)
        return Reading(content=self._known.content, problem=self._known.problem, busy_s=busy_s)

    def start(self) -> None:
        with self._lock:
            self._unwanted.clear()
            if self._runs:  # also if its read hangs since before `stop`
                return
            self._runs = True
        threading.Thread(target=self._run, name="ndctl-screen", daemon=True).start()

    def stop(self) -> None:
        self._unwanted.set()

    def _run(self) -> None:
        while True:
            self._began = self._clock.monotonic()
            self._known = self._once()
            took_s = self._clock.monotonic() - self._began
            self._began = None
            self._fresh()
            if self._interval_s is not None:
                self._unwanted.wait(max(self._interval_s, took_s * LEAST_PAUSE))
            with self._lock:
                if self._interval_s is None or self._unwanted.is_set():
                    self._runs = False
                    return

    def _once(self) -> Reading:
        try:
            if self._read is None:
                self._read = self._open()
            return Reading(content=self._read())
        except Exception as exc:  # noqa: BLE001 - the thread's outermost loop: the screen says why
            known = exc.message if isinstance(exc, NdctlError) else str(exc)
            problem = known or type(exc).__name__
            return Reading(content=self._known.content, problem=problem)


class Feeds:
    """The sources of the pages that were opened."""

    def __init__(self, services: Services, fresh: Callable[[], object], clock: Clock) -> None:
        self._services, self._fresh, self._clock = services, fresh, clock
        self._feeds: dict[Source, Feed] = {}

    def show(self, sources: tuple[Source, ...]) -> None:
        """Read these sources and no others. What the others have read stays known."""
        for source, feed in self._feeds.items():
            if source not in sources:
                feed.stop()
        for source in sources:
            known = source in self._feeds
            feed = self._feeds.pop(source) if known else self._feed(source)
            self._feeds[source] = feed  # at the end: it is the newest
            if source.kind in INTERVAL_S or feed.reading == Reading():
                feed.start()
        for source in list(self._feeds)[:-KEPT]:
            del self._feeds[source]

    def readings(self) -> dict[Source, Reading]:
        return {source: feed.reading for source, feed in self._feeds.items()}

    def _feed(self, source: Source) -> Feed:
        return Feed(
            lambda: _opened(self._services, source),
            INTERVAL_S.get(source.kind),
            self._fresh,
            self._clock,
        )


def _opened(services: Services, source: Source) -> Callable[[], Content]:
    match source.kind:
        case "fleet":
            return services.fleet
        case "logs":
            return services.open_logs(source.job, source.host, source.rank)
        case "events":
            return services.open_events(source.job)
        case "stacks":
            return lambda: services.stacks(source.job)
        case _:
            return services.open_job(source.job)
