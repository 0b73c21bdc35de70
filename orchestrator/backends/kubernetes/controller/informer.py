"""All objects of one kind, kept current in a thread by list and watch."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.backends.kubernetes.api.api_errors import Missing
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.watch_cache import ListWatch
from orchestrator.backends.kubernetes.resources import Object, Resource
from orchestrator.errors import BackendError

log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""Pause after an error."""
ABSENT_S = 300.0
"""Pause before an unknown kind is looked up again."""
WINDOW_S = 3600.0


@dataclass(slots=True, kw_only=True)
class Informer:
    api: Api
    resource: Resource
    namespace: str | None
    labels: str
    changed: threading.Event
    trim: Callable[[Object], Object]
    """Removes the parts of an object that need not be kept."""
    watching: ListWatch = field(init=False)
    items: Sequence[Object] | None = None
    """None: unknown."""

    def __post_init__(self) -> None:
        self.watching = ListWatch(
            api=self.api,
            resource=self.resource,
            namespace=self.namespace,
            labels=self.labels,
            trim=self.trim,
            # The controller may act again as soon as its view is current, not only at the next
            # change.
            list_after_silence=True,
        )

    @property
    def known(self) -> Sequence[Object] | None:
        """The objects; None while unknown, because the controller must not act on stale data."""
        return None if self.watching.silent_since is not None else self.items

    def begin(self) -> None:
        threading.Thread(target=self._run, name=self.resource.plural, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                for cache in self.watching.changes(self.api.clock.monotonic() + WINDOW_S):
                    self.items = tuple(cache.items.values())
                    self.changed.set()
            except Missing:  # without the operator, no object of this kind exists
                self._nothing_known(())
                self.api.clock.sleep(ABSENT_S)
            # For example, a right was taken away. The thread keeps trying, because an administrator
            # may give it back.
            except BackendError as exc:
                log.error("cannot watch %s: %s", self.resource.word, exc)
                self._nothing_known(None)
                self.api.clock.sleep(AGAIN_S)

    def _nothing_known(self, items: Sequence[Object] | None) -> None:
        # The next round must list again: deletions may have been missed.
        self.watching.cache.version = ""
        self.items = items
        self.changed.set()
