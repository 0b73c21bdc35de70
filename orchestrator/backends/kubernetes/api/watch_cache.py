"""A list plus a watch: `Cache` applies events (pure); `ListWatch` sends the requests."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from orchestrator.backends.kubernetes.api.api_errors import Expired, Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.resources import Object, Resource
from orchestrator.errors import Unanswered

log = logging.getLogger(__name__)

WATCH_S = 300.0
"""The server closes a watch after this time; the next one continues from there."""
POLL_S = 3.0
"""Interval of lists without the right to watch."""
CATCH_UP_S = 1.0
"""How long to read pending changes."""
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(slots=True)
class Cache:
    """Objects by namespace and name, as of `version`."""

    items: dict[tuple[str, str], Object] = field(default_factory=dict)
    version: str = ""
    """Empty: list first."""

    def fill(self, items: tuple[Object, ...], version: str) -> None:
        self.items = {_key(item): item for item in items}
        self.version = version

    def take(self, event: Object) -> bool:
        """Apply one watch event; return whether an object changed. A bookmark changes none."""
        item = event["object"]
        self.version = item["metadata"]["resourceVersion"]
        match event["type"]:
            case "ADDED" | "MODIFIED":
                before = self.items.get(_key(item))
                self.items[_key(item)] = item
                return before is None or _version(before) != _version(item)
            case "DELETED":
                return self.items.pop(_key(item), None) is not None
        return False


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _version(item: Object) -> str:
    return str(item["metadata"].get("resourceVersion", ""))


@dataclass(slots=True, kw_only=True)
class ListWatch:
    """Objects of one kind, kept current while the caller iterates over `changes`.

    It survives an unreachable API server. If the server no longer has the version of the watch
    (status 410), all objects are listed again, which also removes deleted ones from the cache.
    """

    api: Api
    resource: Resource
    namespace: str | None
    labels: str = ""
    cached: bool = False
    """Accept the API server's cache for the first list."""
    trim: Callable[[Object], Object] = lambda item: item
    """Removes the parts of an object that need not be kept."""
    cache: Cache = field(default_factory=Cache)
    list_after_silence: bool = False
    """List again when the server is reachable again, so that the caller notices this at once and
    not only at the next event."""
    polls: bool = False
    """The user may list but not watch."""
    silent_since: float | None = None
    """When the server became unreachable; None while it is reachable."""

    def changes(self, deadline: float) -> Iterator[Cache]:
        """Yield the cache after the first list and after each change, until `deadline` (monotonic).

        If the server is unreachable, it retries. Without the right to watch, it lists all objects
        every `POLL_S` and yields the cache each time.

        Raises:
            BackendError: the server refused the request.
        """
        failures = 0
        while (left := deadline - self.api.clock.monotonic()) > 0:
            try:
                if not self.cache.version:
                    self._list()
                    self.silent_since = None
                    yield self.cache
                # Any event, even a bookmark, proves that the server answers again.
                for changed in self._changed(left):
                    failures, self.silent_since = 0, None
                    if changed:
                        yield self.cache
                    if self.api.clock.monotonic() > deadline:
                        return
                failures = 0
            # The server keeps versions for some minutes only. Empty: list again.
            except Expired:
                self.cache.version = ""
            except Unanswered:
                # Keep the first time: callers measure how long the server has been silent.
                if self.silent_since is None:
                    self.silent_since = self.api.clock.monotonic()
                pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                failures += 1
                if self.list_after_silence:
                    self.cache.version = ""
                self.api.clock.sleep(min(pause, max(0.0, deadline - self.api.clock.monotonic())))

    def _changed(self, left_s: float) -> Iterator[bool]:
        # An older Role may have `list` without `watch`.
        if not self.polls:
            try:
                yield from self._watch(min(WATCH_S, left_s))
            except Forbidden as exc:
                words = "no right to watch %s, listing them every %.0f s: %s"
                log.warning(words, self.resource.word, POLL_S, exc)
                self.polls = True
            return
        self.api.clock.sleep(min(POLL_S, left_s))
        self._list()
        yield True

    def catch_up(self) -> Cache:
        """The current objects, with one request for the changes since the last call.

        Raises:
            BackendError: the server is unreachable or refused the request.
        """
        try:
            # The watch returns after a second, with what has changed since the last call.
            if self.cache.version:
                for _ in self._watch(CATCH_UP_S):
                    pass
        except (Expired, Forbidden):
            self.cache.version = ""
        if not self.cache.version:
            self._list()
        return self.cache

    def _list(self) -> None:
        found = self.api.list(self.resource, self.namespace, labels=self.labels, cached=self.cached)
        self.cache.fill(tuple(self.trim(item) for item in found.items), found.version)

    def _watch(self, timeout_s: float) -> Iterator[bool]:
        """Apply each event; yield whether it changed anything."""
        for event in self.api.watch(
            self.resource,
            self.namespace,
            version=self.cache.version,
            labels=self.labels,
            timeout_s=timeout_s,
        ):
            yield self.cache.take({**event, "object": self.trim(event["object"])})
