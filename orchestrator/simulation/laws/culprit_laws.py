"""Laws of who is blamed, and for what: the simulated world knows what it struck.

Of what reached the leader in time the first that can be a cause is the cause, with its class. What
a rank says of a peer that went away is none; nor is what it says when it was told to stop.
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
"""Within which the same strikes several hosts: none of them is to blame for it alone."""
LATER_S = 1e-3
"""What counts as later: times are floats."""
OF_HOSTS = frozenset(
    ("gpu-lost", "xid-48-double-bit-ecc", "uncorrectable-ecc", "sigkill-from-outside")
)
"""Classes of what strikes a rank that lie with its host."""
OF_NOBODY = frozenset(("nan-loss", "loss-spike", "refused"))
"""Classes that no rank is blamed for: all ranks have the same loss and the same configuration, so
which of them is heard first is chance."""
OF_THE_HOST = ("host-lost", "hosts-lost")
"""Kinds of what happens to a host as a whole."""


@dataclass(frozen=True, slots=True)
class Strike:
    host: str
    words: Words


@dataclass(frozen=True, slots=True)
class Cause:
    """What was struck, as its leader was told."""

    at: float
    rank: int
    host: str
    failure: str


class Blame:
    def __init__(self, world: "World") -> None:
        self.struck: dict[tuple[int, int], Strike] = {}
        """By attempt and rank."""
        self.stood: set[tuple[int, str, int]] = set()
        """Attempt, host and rank of those that hung."""
        self.own = {rule.name for rule in world.scenario.classes}
        self.begins()

    def begins(self) -> None:
        """An attempt, or a launch."""
        self.causes: list[Cause] = []
        self.lost = False
        """An agent with ranks."""
        self.alone = False
        """An agent stopped its ranks because it did not hear the leader."""
        self.trouble = False
        """A cause was heard before somebody cancelled."""

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
            return  # as they were asked to
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
            words = "the job is cancelled, and what broke before is not said"
            hold(bool(new) or not self.trouble, words)
        if new or run.attempt.number > before.attempt.number or run.ending is not None:
            self.begins()

    def _incident(self, one: Incident) -> None:
        host, rank, attempt = one.culprit.host, one.culprit.rank, one.attempt
        if one.kind == "hang" and rank is not None:
            stood = (attempt, host, rank) in self.stood
            hold(stood, f"{one.culprit} is blamed for a hang, and did not stand still")
        elif rank is not None:
            struck = self.struck.get((attempt, rank))
            hold(
                struck is not None and struck.host == host and not struck.words.symptom,
                f"{one.culprit} is blamed ({one.cause}), and never broke",
            )
            assert struck is not None
            failure = self.failure_of(struck.words)
            hold(one.failure == failure, f"{one.culprit} had {failure}, and {one.failure} is said")
            hold(failure not in OF_NOBODY, f"{one.culprit} is blamed for {failure}, as all had it")
        if self.causes:
            self._is_the_first(one)

    def _is_the_first(self, one: Incident) -> None:
        first = min(self.causes, key=lambda cause: cause.at)
        what = f"rank {first.rank} on {first.host} had {first.failure}"
        if one.culprit.rank is None:
            of_hosts = self.lost and one.kind in OF_THE_HOST
            together = self._together(first) and one.failure == first.failure
            alike = first.failure in OF_NOBODY and one.failure == first.failure
            # Ranks that one agent stops agree with all others to save a checkpoint and leave.
            with_others = first.failure == "scheduler-sigterm" and self.alone
            cut_off = with_others and one.kind == "cut-off"
            hold(
                of_hosts or together or alike or cut_off,
                f"{what}, and {one.culprit} is blamed ({one.kind})",
            )
        blamed = next((each for each in self.causes if each.rank == one.culprit.rank), first)
        at = max(one.at, blamed.at)
        later = f"{what}, and what came after it is blamed: {one.cause}"
        hold(one.kind != "hang" and at <= first.at + LATER_S, later)

    def _together(self, first: Cause) -> bool:
        same = [
            cause.host
            for cause in self.causes
            if cause.failure == first.failure and cause.at - first.at <= AT_ONCE_S
        ]
        return first.failure in OF_HOSTS and len({*same}) > 1
