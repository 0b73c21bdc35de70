"""The leader's watch of its own job object.

When a job is deleted, Kubernetes also deletes the account of its pods and so all their rights. At
SIGTERM the leader's requests are then refused, and it could not tell a deleted job from a pod that
will be recreated. A watch that started earlier still reports the deletion.
"""

import logging
import threading

from orchestrator.backends.kubernetes.api.api_errors import Expired, Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.observe.object_fields import launch_of
from orchestrator.backends.kubernetes.resources import JobKind, Object
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError, Unanswered

log = logging.getLogger(__name__)

WATCH_S = 300.0
SHORT_S = 1.0
AGAIN_S = 5.0
"""Pause after an error, which the deletion of the job may have caused."""
REFUSED_S = 300.0


class OwnJob:
    def __init__(self, api: Api, kind: JobKind, namespace: str, launch: LaunchPlan) -> None:
        self.api, self.kind, self.namespace, self.launch = api, kind, namespace, launch
        self.job: Object | None = None
        """The last observed version."""
        self.gone = threading.Event()
        """Set when the job was deleted or replaced by another of its name."""
        self.seen = threading.Event()
        """Set after the first read, whatever its result."""

    def begin(self) -> None:
        threading.Thread(target=self._follow, name="own-job", daemon=True).start()

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"]) if self.job is not None else ""

    def _follow(self) -> None:
        while not self.gone.is_set():
            try:
                self._look()
                self.seen.set()
                # A deleted job has no resourceVersion to watch from.
                if not self.gone.is_set():
                    begun = self.api.clock.monotonic()
                    self._watch()
                    if self.api.clock.monotonic() - begun < SHORT_S:
                        self.api.clock.sleep(SHORT_S)  # the server may close each watch at once
            # The server no longer has that version. Read the object again and watch from its new
            # version.
            except Expired:
                continue
            except Unanswered:
                self.api.clock.sleep(AGAIN_S)
            except BackendError as exc:
                # Even a refusal counts as an answer: the reporter waits for it before it sends its
                # first event.
                self.seen.set()
                self._refused(exc)

    def _refused(self, exc: BackendError) -> None:
        """An older Role lacks `watch`: then the leader reads the job when it needs to know."""
        log.warning("cannot watch the leader's own job, so its deletion stays unnoticed: %s", exc)
        self.api.clock.sleep(REFUSED_S if isinstance(exc, Forbidden) else AGAIN_S)

    def _look(self) -> None:
        found = self.api.get(self.kind.resource, self.namespace, self.launch.job)
        if found is None or launch_of(found) not in (None, self.launch.launch):
            self.gone.set()
        else:
            self.job = found

    def _watch(self) -> None:
        assert self.job is not None
        events = self.api.watch(
            self.kind.resource,
            self.namespace,
            version=str(self.job["metadata"]["resourceVersion"]),
            fields=f"metadata.name={self.launch.job}",
            timeout_s=WATCH_S,
        )
        for event in events:
            # Only this event proves a deletion. A watch that ends or is refused proves nothing.
            if event["type"] == "DELETED":
                self.gone.set()
                return
            if event["type"] == "MODIFIED":
                self.job = event["object"]
