"""Laws of culprits: the simulated world knows which rank it made fail, and how.

The root cause is the first failure that reached the leader in time and that can be a cause. An
error about a lost peer is a symptom, and so is the exit of a rank that was told to stop.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from orchestrator.simulation.laws.law import hold
from orchestrator.simulation.world.training_faults import Words

if TYPE_CHECKING:
    from orchestrator.simulation.world.world import World

AT_ONCE_S = 3.0
"""If several hosts fail in the same way within this time, no single host is the culprit."""
LATER_S = 1e-3
"""Tolerance when times are compared, because they are floats."""
HOST_FAILURES = frozenset(
    ("gpu-lost", "xid-48-double-bit-ecc", "uncorrectable-ecc", "sigkill-from-outside")
)
"""Failure classes whose cause is the host of the rank."""
NO_CULPRIT = frozenset(("nan-loss", "loss-spike", "refused"))
"""Failure classes without a culprit. All ranks have the same loss and the same configuration, so it
is chance which rank reports first."""
HOST_INCIDENTS = ("host-lost", "hosts-lost")
"""Kinds of incidents that concern a whole host."""


@dataclass(frozen=True, slots=True)
class Strike:
    host: str
    words: Words


@dataclass(frozen=True, slots=True)
class Cause:
    """A failure that can be the root cause, as the leader received it."""

    at: float
    rank: int
    host: str
    failure: str


class Blame:
    def __init__(self, world: "World") -> None:
        self.struck: dict[tuple[int, int], Strike] = {}
        """Key: attempt and rank."""
        self.stood: set[tuple[int, str, int]] = set()
        """Attempt, host and rank of each rank that hung."""
        self.own = {rule.name for rule in world.scenario.classes}
        self.begins()

    def begins(self) -> None:
        """Reset at the start of an attempt or a launch."""
        self.causes: list[Cause] = []
        self.lost = False
        """An agent with ranks was lost."""
        self.alone = False
        """An agent stopped its ranks because it did not hear the leader."""
        self.trouble = False
        """A cause was received before the job was cancelled."""

    def heard(self, event: Event, before: Run) -> None:
        if not isinstance(before.stage, ATTEMPT):
            return
        if isinstance(event, AgentLost | AgentRegistered):
            self.lost = self.lost or event.host in before.attempt.placement
        if isinstance(event, HostStopped) and event.attempt == before.attempt.number:
            self.alone = self.alone or event.alone_s > 0
        leaves = (
            before.interruption.leaving is not None and not before.interruption.leaving.by_choice
        )
        if not isinstance(event, RankExited) or event.attempt != before.attempt.number or leaves:
            return
        struck = self.struck.get((event.attempt, event.rank))
        again = any(cause.rank == event.rank for cause in self.causes)
        if struck is None or struck.words.symptom or again:
            return
        told_to = event.stopped or struck.words.failure == "scheduler-sigterm"
        if told_to and (
            before.interruption.leaving is not None or before.interruption.cancelled_by is not None
        ):
            return  # the ranks exited because they were asked to
        if not event.stopped:
            failure = self.failure_of(struck.words)
            self.causes.append(Cause(event.at, event.rank, struck.host, failure))
            self.trouble = self.trouble or before.interruption.cancelled_by is None

    def failure_of(self, words: Words) -> str:
        users = words.failure == "licence-server" and words.failure not in self.own
        return "python-exception" if users else words.failure

    def decided(self, before: Run, run: Run) -> None:
        new = run.history.incidents[len(before.history.incidents) :]
        for incident in new:
            if incident.kind != "preflight":
                self._incident(incident)
        if run.ending == "CANCELLED" and before.ending is None:
            words = "the job is cancelled, and no incident reports the earlier failure"
            hold(bool(new) or not self.trouble, words)
        if new or run.attempt.number > before.attempt.number or run.ending is not None:
            self.begins()

    def _incident(self, one: Incident) -> None:
        host, rank, attempt = one.culprit.host, one.culprit.rank, one.attempt
        if one.kind == "hang" and rank is not None:
            stood = (attempt, host, rank) in self.stood
            hold(stood, f"{one.culprit} is blamed for a hang, and did not hang")
        elif rank is not None:
            struck = self.struck.get((attempt, rank))
            hold(
                struck is not None and struck.host == host and not struck.words.symptom,
                f"{one.culprit} is blamed ({one.cause}), and never failed",
            )
            assert struck is not None
            failure = self.failure_of(struck.words)
            hold(
                one.failure == failure,
                f"{one.culprit} had {failure}, and {one.failure} is reported",
            )
            hold(
                failure not in NO_CULPRIT,
                f"{one.culprit} is blamed for {failure}, which all ranks had",
            )
        if self.causes:
            self._is_the_first(one)

    def _is_the_first(self, one: Incident) -> None:
        first = min(self.causes, key=lambda cause: cause.at)
        what = f"rank {first.rank} on {first.host} had {first.failure}"
        if one.culprit.rank is None:
            of_hosts = self.lost and one.kind in HOST_INCIDENTS
            together = self._together(first) and one.failure == first.failure
            alike = first.failure in NO_CULPRIT and one.failure == first.failure
            # An agent that loses the leader stops its ranks. These agree with all other ranks to
            # save a checkpoint and exit, so the incident has no single culprit.
            with_others = first.failure == "scheduler-sigterm" and self.alone
            cut_off = with_others and one.kind == "cut-off"
            hold(
                of_hosts or together or alike or cut_off,
                f"{what}, but the culprit is {one.culprit} ({one.kind})",
            )
        blamed = next((each for each in self.causes if each.rank == one.culprit.rank), first)
        at = max(one.at, blamed.at)
        later = f"{what}, and a later failure is blamed: {one.cause}"
        hold(one.kind != "hang" and at <= first.at + LATER_S, later)

    def _together(self, first: Cause) -> bool:
        same = [
            cause.host
            for cause in self.causes
            if cause.failure == first.failure and cause.at - first.at <= AT_ONCE_S
        ]
        return first.failure in HOST_FAILURES and len({*same}) > 1
