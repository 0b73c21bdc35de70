"""What there is of one kind of object, kept up to date in a thread by a list and its watch."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.backends.kubernetes.api.api_errors import Missing
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.watch_cache import Watching
from orchestrator.backends.kubernetes.resources import Object, Resource
from orchestrator.errors import BackendError
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""After a refusal."""
ABSENT_S = 300.0
"""Before a kind that the cluster does not know is looked for again."""
WINDOW_S = 3600.0


@dataclass(slots=True, kw_only=True)
class Informer:
    api: Api
    clock: Clock
    resource: Resource
    namespace: str | None
    labels: str
    changed: threading.Event
    trim: Callable[[Object], Object]
    """What of an object is kept."""
    watching: Watching = field(init=False)
    items: Sequence[Object] | None = None
    """None: not known."""

    def __post_init__(self) -> None:
        self.watching = Watching(
            api=self.api,
            clock=self.clock,
            resource=self.resource,
            namespace=self.namespace,
            labels=self.labels,
            trim=self.trim,
            anew=True,
        )

    @property
    def known(self) -> Sequence[Object] | None:
        """What there is; None while nobody can say: an old view is no reason to act."""
        return None if self.watching.silent_since is not None else self.items

    def begin(self) -> None:
        threading.Thread(target=self._run, name=self.resource.plural, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                for cache in self.watching.changes(self.clock.monotonic() + WINDOW_S):
                    self.items = tuple(cache.items.values())
                    self.changed.set()
            except Missing:  # of a kind whose operator is not installed there is nothing
                self._nothing_known(())
                self.clock.sleep(ABSENT_S)
            except BackendError as exc:
                log.error("%s cannot be watched: %s", self.resource.word, exc)
                self._nothing_known(None)
                self.clock.sleep(AGAIN_S)

    def _nothing_known(self, items: Sequence[Object] | None) -> None:
        self.watching.cache.version = ""
        self.items = items
        self.changed.set()
