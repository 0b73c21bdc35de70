"""Who of several controllers acts: the one that holds a Lease.

No clock but each one's own monotonic one decides. A holder acts until two thirds of the Lease's
duration after it *sent* its last renewal; the others take over when the Lease has been the same for
its whole duration since they *saw* it change. `renewTime` is written for people.
"""

import logging
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.controller.asking import LEASE
from orchestrator.backends.kubernetes.refusals import Conflict
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import LEASES, Object, lookup
from orchestrator.errors import BackendError, Unanswered
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

DURATION_S = 15
RENEWALS = 6
"""So many in a duration; the others look as often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A Lease as it was seen."""

    holder: str
    """Empty: it was given back."""
    renewed: str
    duration_s: float
    transitions: int
    version: str

    @classmethod
    def of(cls, lease: Object) -> Self:
        spec = lookup(lease, ("spec",), {})
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            renewed=str(spec.get("renewTime") or ""),
            duration_s=float(spec.get("leaseDurationSeconds") or DURATION_S),
            transitions=int(spec.get("leaseTransitions") or 0),
            version=str(lease["metadata"]["resourceVersion"]),
        )


@dataclass(slots=True, kw_only=True)
class Standing:
    """What one contender knows; all times are monotonic and its own. No I/O."""

    me: str
    duration_s: float
    record: Record | None = None
    """None: there is no Lease."""
    changed_at: float = 0.0
    """When we first saw the record as it is."""
    renewed_at: float | None = None
    """When we sent the renewal that went through last; None: it is not ours."""

    other_lives: bool = False
    """We saw another holder renew it."""

    def saw(self, record: Record | None, at: float) -> None:
        before = self.record
        if record != before:
            self.record, self.changed_at = record, at
            held = record is not None and record.holder not in ("", self.me)
            same = before is not None and record is not None and before.holder == record.holder
            self.other_lives = held and same
        if record is None or record.holder != self.me:
            self.renewed_at = None

    def renewed(self, record: Record, sent_at: float) -> None:
        self.saw(record, sent_at)
        self.renewed_at = sent_at

    def may_take(self, at: float) -> bool:
        record = self.record
        if record is None or record.holder in ("", self.me):
            return True
        return at >= self.changed_at + record.duration_s

    def acts(self, at: float) -> bool:
        return self.renewed_at is not None and at < self.renewed_at + self.duration_s * 2 / 3

    def spec(self, now: float) -> dict[str, Any]:
        """Of the Lease when we take or renew it. `now`: the wall clock."""
        said = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "holderIdentity": self.me,
            "leaseDurationSeconds": int(self.duration_s),
            "renewTime": said,
        }
        if self.record is None or self.record.holder != self.me:
            before = -1 if self.record is None else self.record.transitions
            spec |= {"acquireTime": said, "leaseTransitions": before + 1}
        return spec


@dataclass(slots=True, kw_only=True)
class Election:
    """Renews and looks in a thread of its own: no slow request of the work keeps it from that."""

    api: Api
    clock: Clock
    namespace: str
    standing: Standing
    turned: threading.Event
    """Set whenever it is won or lost."""
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    led: bool = False
    """What was said last."""

    @property
    def acts(self) -> bool:
        return self.standing.acts(self.clock.monotonic())

    def begin(self) -> None:
        """Raises BackendError where we have no right to the Lease."""
        self._step()
        self.thread = threading.Thread(target=self._run, name="election", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stopping.wait(self.standing.duration_s / RENEWALS):
            try:
                self._step()
            except BackendError as exc:
                log.error("the Lease %s/%s: %s", self.namespace, LEASE, exc)

    def _step(self) -> None:
        others = self.standing.other_lives
        try:
            self._contend()
        except (Conflict, Unanswered) as exc:
            log.debug("the Lease %s/%s: %s", self.namespace, LEASE, exc.message)
        if self.acts != self.led:
            self.led = self.acts
            log.info("%s %s", self.standing.me, "leads" if self.led else "leads no more")
            self.turned.set()
        if self.standing.other_lives and not others:
            self.turned.set()

    def _contend(self) -> None:
        standing = self.standing
        if not self.acts:  # a holder knows what it wrote; the version tells if it is not so
            found = self.api.get(LEASES, self.namespace, LEASE)
            record = None if found is None else Record.of(found)
            standing.saw(record, self.clock.monotonic())
        sent_at = self.clock.monotonic()
        if not standing.may_take(sent_at):
            return
        try:
            made = self._written(standing.spec(self.clock.now()))
        except Conflict:
            standing.renewed_at = None
            raise
        standing.renewed(Record.of(made), sent_at)

    def _written(self, spec: dict[str, Any]) -> Object:
        record = self.standing.record
        if record is None:
            labels = {names.MANAGED_LABEL: "ndctl", "app.kubernetes.io/part-of": "ndctl"}
            metadata: dict[str, Any] = {"name": LEASE, "labels": labels}
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            return self.api.create({**kind, "metadata": metadata, "spec": spec}, self.namespace)
        change = {"metadata": {"resourceVersion": record.version}, "spec": spec}
        return self.api.merge(LEASES, self.namespace, LEASE, change)

    def end(self) -> None:
        """Give the Lease back, so that nobody has to wait for it to run out."""
        self.stopping.set()
        if self.thread is not None:
            self.thread.join(self.standing.duration_s)
        record = self.standing.record
        if record is None or not self.acts:
            return
        self.standing.renewed_at = None
        change = {"metadata": {"resourceVersion": record.version}, "spec": {"holderIdentity": ""}}
        try:
            self.api.merge(LEASES, self.namespace, LEASE, change)
            log.info("%s gives the Lease back", self.standing.me)
        except BackendError as exc:
            log.warning("the Lease is not given back, and runs out: %s", exc.message)
