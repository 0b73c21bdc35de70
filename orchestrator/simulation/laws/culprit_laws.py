"""Laws of culprits: the simulated world knows which rank it made fail, and how.

The root cause is the first failure that reached the leader in time and that can be a cause. An
error about a lost peer is a symptom, and so is the exit of a rank that was told to stop. A kill
comes before an exception of no known kind at nearly the same time on another host.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    Event,
    HostStopped,
    RankExited,
)
from orchestrator.job.incident import Incident
from orchestrator.job.stage import ATTEMPT
from orchestrator.job.state import Run
from orchestrator.simulation.laws.law import require
from orchestrator.simulation.world.training_faults import RankFailure

if TYPE_CHECKING:
    from orchestrator.simulation.world.world import World

SAME_MOMENT_S = 3.0
"""If several hosts fail in the same way within this time, no single host is the culprit."""
TIME_TOLERANCE_S = 1e-3
"""Tolerance when times are compared, because they are floats."""
KILL = "sigkill-from-outside"
ANY_EXCEPTION = "python-exception"
"""Failure class of an exception of no known kind."""
HOST_FAILURES = frozenset(("gpu-lost", "xid-48-double-bit-ecc", "uncorrectable-ecc", KILL))
"""Failure classes whose cause is the host of the rank."""
NO_CULPRIT = frozenset(("nan-loss", "loss-spike", "refused"))
"""Failure classes without a culprit. All ranks have the same loss and the same configuration, so it
is chance which rank reports first."""
HOST_INCIDENTS = ("host-lost", "hosts-lost", "agent-lost")
"""Kinds of incidents that concern a whole host or its agent."""


class FailedRank(Struct, frozen=True):
    host: str
    failure: RankFailure


class Cause(Struct, frozen=True):
    """A failure that can be the root cause, as the leader received it."""

    at: float
    rank: int
    host: str
    failure: str


class CulpritLaws:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.failed_ranks: dict[tuple[int, int], FailedRank] = {}
        """Key: attempt and rank."""
        self.hung_ranks: set[tuple[int, str, int]] = set()
        """Attempt, host and rank of each rank that hung."""
        self.ended_alone: dict[str, str] = {}
        """Incarnation of each agent whose process ended while its host worked -> the host's boot.
        """
        self.user_classes = {rule.name for rule in world.scenario.classes}
        self.reset()

    def reset(self) -> None:
        """Reset at the start of an attempt or a launch."""
        self.causes: list[Cause] = []
        self.agent_lost = False
        """An agent with ranks was lost."""
        self.stopped_alone = False
        """An agent stopped its ranks because it did not hear the leader."""
        self.failed_before_cancel = False
        """A cause was received before the job was cancelled."""

    def before_decision(self, event: Event, before: Run) -> None:
        if not isinstance(before.stage, ATTEMPT):
            return
        if isinstance(event, AgentLost | AgentRegistered):
            self.agent_lost = self.agent_lost or event.host in before.attempt.placement
        if isinstance(event, HostStopped) and event.attempt == before.attempt.number:
            self.stopped_alone = self.stopped_alone or event.alone_s > 0
        leaves = (
            before.interruption.leaving is not None and not before.interruption.leaving.by_choice
        )
        if not isinstance(event, RankExited) or event.attempt != before.attempt.number or leaves:
            return
        failed = self.failed_ranks.get((event.attempt, event.rank))
        again = any(cause.rank == event.rank for cause in self.causes)
        if failed is None or failed.failure.symptom or again:
            return
        was_told_to_stop = event.stopped or failed.failure.failure_class == "scheduler-sigterm"
        if was_told_to_stop and (
            before.interruption.leaving is not None or before.interruption.cancelled_by is not None
        ):
            return  # the ranks exited because they were asked to
        if not event.stopped:
            failure = self.class_of(failed.failure)
            self.causes.append(Cause(event.at, event.rank, failed.host, failure))
            self.failed_before_cancel = (
                self.failed_before_cancel or before.interruption.cancelled_by is None
            )

    def class_of(self, failure: RankFailure) -> str:
        users = (
            failure.failure_class == "licence-server"
            and failure.failure_class not in self.user_classes
        )
        return "python-exception" if users else failure.failure_class

    def check_decision(self, event: Event, before: Run, run: Run) -> None:
        if isinstance(event, AgentRegistered):
            self._check_acquittal(event, before, run)
        new = run.history.incidents[len(before.history.incidents) :]
        for incident in new:
            if incident.kind == "host-warned":
                self._check_warned(incident)
            elif incident.kind != "preflight":
                self._check_incident(incident)
        if run.ending == "CANCELLED" and before.ending is None:
            message = "the job is cancelled, and no incident reports the earlier failure"
            require(bool(new) or not self.failed_before_cancel, message)
        if new or run.attempt.number > before.attempt.number or run.ending is not None:
            self.reset()

    def _check_acquittal(self, event: AgentRegistered, before: Run, run: Run) -> None:
        """A host is named no more once the next agent runs there, if the agent alone had ended."""
        former = before.hosts.by_name.get(event.host)
        if former is None or former.incarnation == event.incarnation:
            return
        works = self.ended_alone.get(former.incarnation) == event.boot
        lost_at = run.hosts.by_name[event.host].lost_at
        incidents = zip(before.history.incidents, run.history.incidents, strict=False)
        for old, new in incidents:
            require(old == new or works, f"{event.host} is cleared of {old.cause}, and was down")
            found = abs(new.at + new.detected_after_s - lost_at) <= TIME_TOLERANCE_S
            blamed = new.kind == "host-lost" and new.culprit.host == event.host
            require(
                not (found and blamed and works and former.closed) or new.drill is not None,
                f"{event.host} is blamed for {new.cause}, and works",
            )

    def _check_warned(self, one: Incident) -> None:
        """A host is replaced only for what it alone has reported."""
        host = self.world.hosts[one.culprit.host or ""]
        require(bool(host.own_warnings), f"{host.name} is replaced, and has no problem of its own")

    def _check_incident(self, one: Incident) -> None:
        host, rank, attempt = one.culprit.host, one.culprit.rank, one.attempt
        if one.kind == "hang" and rank is not None:
            hung = (attempt, host, rank) in self.hung_ranks
            require(hung, f"{one.culprit} is blamed for a hang, and did not hang")
        elif rank is not None:
            failed = self.failed_ranks.get((attempt, rank))
            require(
                failed is not None and failed.host == host and not failed.failure.symptom,
                f"{one.culprit} is blamed ({one.cause}), and never failed",
            )
            assert failed is not None
            failure = self.class_of(failed.failure)
            require(
                one.failure == failure,
                f"{one.culprit} had {failure}, and {one.failure} is reported",
            )
            require(
                failure not in NO_CULPRIT,
                f"{one.culprit} is blamed for {failure}, which all ranks had",
            )
        if self.causes:
            self._check_first_failure(one)

    def _check_first_failure(self, one: Incident) -> None:
        first = self._first_cause()
        what = f"rank {first.rank} on {first.host} had {first.failure}"
        if one.culprit.rank is None:
            of_hosts = self.agent_lost and one.kind in HOST_INCIDENTS
            together = self._is_shared_failure(first) and one.failure == first.failure
            alike = first.failure in NO_CULPRIT and one.failure == first.failure
            # An agent that loses the leader stops its ranks. These agree with all other ranks to
            # save a checkpoint and exit, so the incident has no single culprit.
            with_others = first.failure == "scheduler-sigterm" and self.stopped_alone
            cut_off = with_others and one.kind == "cut-off"
            require(
                of_hosts or together or alike or cut_off,
                f"{what}, but the culprit is {one.culprit} ({one.kind})",
            )
        blamed = next((each for each in self.causes if each.rank == one.culprit.rank), first)
        at = max(one.at, blamed.at)
        later = f"{what}, and a later failure is blamed: {one.cause}"
        require(one.kind != "hang" and at <= first.at + TIME_TOLERANCE_S, later)

    def _first_cause(self) -> Cause:
        first = min(self.causes, key=lambda cause: cause.at)
        if first.failure != ANY_EXCEPTION:
            return first
        kills = (cause for cause in self.causes if _is_kill_elsewhere(cause, first))
        return min(kills, key=lambda cause: cause.at, default=first)

    def _is_shared_failure(self, first: Cause) -> bool:
        same = [
            cause.host
            for cause in self.causes
            if cause.failure == first.failure and cause.at - first.at <= SAME_MOMENT_S
        ]
        return first.failure in HOST_FAILURES and len({*same}) > 1


def _is_kill_elsewhere(cause: Cause, first: Cause) -> bool:
    """An exception kills no rank on another host, but may be how a rank reports a lost peer."""
    near = cause.at - first.at <= SAME_MOMENT_S
    return cause.failure == KILL and cause.host != first.host and near
