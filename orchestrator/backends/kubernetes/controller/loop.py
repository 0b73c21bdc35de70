"""The controller's loop: observe, decide, act, wait for a change."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.backends.kubernetes.api.api_errors import Conflict
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller.actions import Action, Create, Patch
from orchestrator.backends.kubernetes.controller.decide import BESIDE, Decision, Scope, Seen, decide
from orchestrator.backends.kubernetes.controller.election import Election
from orchestrator.backends.kubernetes.controller.informer import Informer
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    JOB_KINDS,
    NODES,
    PODS,
    Object,
    Resource,
)
from orchestrator.errors import BackendError

log = logging.getLogger("orchestrator.controller")

TOGETHER_S = 0.2
"""Changes within this time are handled together."""
BACKOFF_S = (1.0, 5.0, 30.0, 120.0)
"""Pause before a failed action is retried."""
OURS = f"{names.MANAGED_LABEL}=ndctl,{names.JOB_LABEL}"
MADE = f"{names.MANAGED_LABEL}=ndctl"
"""Label selector for pods: those of jobs, and placeholders, which have no job label."""

Order = tuple[str, str, str]
"""Verb and object of an action, the uid of the object, and its version."""


@dataclass(slots=True)
class Refused:
    again_at: float
    times: int = 1


@dataclass(kw_only=True)
class Controller:
    api: Api
    scope: Scope
    duration_s: int
    woken: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    since: Mapping[str, float] = field(default_factory=dict)
    done: set[Order] = field(default_factory=set)
    """Actions that succeeded, until the object shows them."""
    refused: dict[Order, Refused] = field(default_factory=dict)
    told: frozenset[str] = frozenset()
    """Rejected requests that were already logged."""

    def __post_init__(self) -> None:
        self.jobs = {kind: self._informer(one.resource) for kind, one in JOB_KINDS.items()}
        self.pods = self._informer(PODS, MADE)
        self.beside = {resource: self._informer(resource, OURS) for resource in BESIDE}
        self.nodes = self._informer(NODES)
        me = f"{socket.gethostname()}-{os.getpid()}"
        self.election = Election(self.api, self.scope.home, me, self.duration_s, self.woken)

    def _informer(self, resource: Resource, labels: str = "") -> Informer:
        return Informer(
            api=self.api,
            resource=resource,
            namespace=self.scope.namespace if resource.namespaced else None,
            labels=labels,
            changed=self.woken,
            trim=_without_contents,
        )

    def stop(self) -> None:
        self.stopping.set()
        self.woken.set()

    def run(self, *, once: bool) -> None:
        """Run until `stop`; `once`: until nothing is left to do.

        Raises BackendError if a right is missing at the start.
        """
        self.election.begin()
        beside = self.beside.values()
        for informer in (*self.jobs.values(), self.pods, *beside, self.nodes):
            informer.begin()
        try:
            pause_s: float | None = None
            while not self.stopping.is_set():
                self.woken.wait(pause_s)
                # An operator changes many objects at once. One round for all of them costs less
                # than one for each.
                if self.stopping.wait(TOGETHER_S):
                    return
                # Clear it before the look: a change during the look must wake the loop once more.
                self.woken.clear()
                decision = self._look()
                pause_s = self._pause(decision)
                if once and self._is_finished(decision):
                    return
        finally:
            self.election.end()
            log.info("%d requests were sent", self.api.requests)

    def _is_finished(self, decision: Decision | None) -> bool:
        if self.election.other is not None:
            log.info("%s leads", self.election.other)
            return True
        # The Lease may still be contended, or an action failed and is tried again.
        if decision is None or not self.election.acts or self.refused:
            return False
        return not (decision.busy or decision.chains)

    def _look(self) -> Decision | None:
        """One round; None while some objects are unknown."""
        jobs = {kind: informer.known for kind, informer in self.jobs.items()}
        pods, nodes = self.pods.known, self.nodes.known
        known = {kind: items for kind, items in jobs.items() if items is not None}
        # The other kinds are needed only for cleanup, which can wait.
        beside = {one: informer.known or () for one, informer in self.beside.items()}
        # With an incomplete view, a job could look deleted or a node lost, and the controller would
        # delete what belongs to it.
        if pods is None or nodes is None or len(known) < len(jobs):
            return None
        if self.beside[CONFIG_MAPS].known is None:
            return None  # they hold the requests of pods
        seen = Seen(jobs=known, pods=pods, nodes=nodes, beside=beside)
        decision = decide(seen, self.scope, self.since, self.api.clock.monotonic())
        # A request stays in the ConfigMap until its pod removes it, so it is logged once and not
        # each round.
        for words in sorted({*decision.refused} - self.told):
            log.warning("%s", words)
        self.told = frozenset(decision.refused)
        self.since = decision.since  # standbys measure these times too, in case they take over
        orders = {order_of(action) for chain in decision.chains for action in chain}
        # An order that is no longer decided was carried out, or the object changed. To keep it
        # would let the set grow for ever.
        self.done &= orders
        self.refused = {key: one for key, one in self.refused.items() if key in orders}
        for chain in decision.chains:
            self._perform(chain)
        return decision

    def _pause(self, decision: Decision | None) -> float | None:
        waits = [one.again_at - self.api.clock.monotonic() for one in self.refused.values()]
        if decision is not None and decision.due_s is not None:
            waits.append(decision.due_s)
        # A standby wakes for its timers, but it cannot act, so it does not hurry.
        if not self.election.acts:
            return max([*waits, self.duration_s]) if waits else None
        return max(TOGETHER_S, min(waits)) if waits else None

    def _perform(self, chain: Iterable[Action]) -> None:
        for action in chain:
            order = order_of(action)
            before = self.refused.get(order)
            # The watch has not shown the result yet. Without this check the action would be sent
            # again each round.
            if order in self.done:
                continue
            # The rest of the chain needs this action, so it waits as well.
            if before is not None and before.again_at > self.api.clock.monotonic():
                return
            # The Lease may be lost in the middle of a round.
            if self.stopping.is_set() or not self.election.acts:
                return
            try:
                perform(self.api, action)
            except BackendError as exc:
                times = 0 if before is None else before.times
                self._refuse(order, action, exc, times)
                return
            log.info("%s: %s", action.does, action.reason)
            self.done.add(order)
            self.refused.pop(order, None)

    def _refuse(self, order: Order, action: Action, exc: BackendError, times: int) -> None:
        wait_s = BACKOFF_S[min(times, len(BACKOFF_S) - 1)]
        self.refused[order] = Refused(self.api.clock.monotonic() + wait_s, times + 1)
        if isinstance(exc, Conflict):
            log.debug("%s: %s", action.does, exc.message)  # the object changed: observe again
        else:
            log.error(
                "%s (%s) failed, retrying in %g s: %s", action.does, action.reason, wait_s, exc
            )


def _without_contents(item: Object) -> Object:
    """Drop the data of a ConfigMap (up to 1 MiB); only its metadata is needed."""
    metadata = {key: said for key, said in item["metadata"].items() if key != "managedFields"}
    kept = {key: said for key, said in item.items() if key not in ("data", "binaryData")}
    return {**kept, "metadata": metadata}


def order_of(action: Action) -> Order:
    return action.does, action.what.uid, action.what.version


def perform(api: Api, action: Action) -> None:
    """Raises BackendError; Conflict if the object changed."""
    what = action.what
    if isinstance(action, Patch):
        # The version makes the server refuse the patch with a conflict if the object has changed
        # since the decision.
        metadata = {**action.change.get("metadata", {}), "resourceVersion": what.version}
        change = {**action.change, "metadata": metadata}
        api.merge(what.resource, what.namespace or None, what.name, change)
    elif isinstance(action, Create):
        api.create(action.item, what.namespace)
    else:
        # The status first: without it the deletion would not remove the pod.
        if action.status is not None:
            api.merge(what.resource, what.namespace, what.name, action.status, "status")
        api.delete(what.resource, what.namespace, what.name, grace_s=action.grace_s, uid=what.uid)


def serve(api: Api, scope: Scope, *, duration_s: int, once: bool) -> None:
    """Run until SIGTERM or SIGINT."""
    controller = Controller(api=api, scope=scope, duration_s=duration_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: controller.stop())
    controller.run(once=once)
