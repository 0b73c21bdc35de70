"""Laws of recovery: waits, hosts, plans and data after a failure, counted independently.

The simulated world tells what a host or a batch did; the journal tells what was decided.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator.contract.messages.actions import Action, ReplaceAgent, Requeue, StartAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CheckpointIntervalChanged,
    Event,
    LeaderStarted,
    Replanned,
    StepReached,
    StragglerFound,
    TrainingResumed,
)
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.job.failures.policy import covers, default_rules
from orchestrator.job.incident import PREFLIGHT, Incident
from orchestrator.job.stage import IDLE
from orchestrator.job.state import Run
from orchestrator.simulation.laws.law import hold

if TYPE_CHECKING:
    from orchestrator.simulation.world.storage import Checkpoint
    from orchestrator.simulation.world.world import World

GROWS_EVERY_S = 1800.0
AWAY_S = 30.0
"""Seconds before a host that came back may be replaced again; doubles each time."""
AT_ONCE_S = 2.0
"""Hosts whose last messages are this close were lost together. Each sends one message a second."""
SHORTEST = 0.75
"""Shortest fraction of a rule's backoff that jitter can leave."""


class Remedies:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.skipped: set[int] = set()
        """Batches that are skipped after a rollback, in all launches."""
        self.submitted()

    def submitted(self) -> None:
        """A new submission cancels earlier decisions."""
        self.failing: list[Incident] = []
        """Incidents since the last new step."""
        self.not_before = 0.0
        """Earliest time of the next attempt."""
        self.replaced: dict[str, str] = {}
        """Host that is excluded permanently -> reason."""
        self.too_large: list[int] = []
        """Numbers of the plans that ran out of memory and had to be replaced."""
        self.before: int | None = None
        """The first bad step. Training must resume from an earlier step."""
        self.grown_at: float | None = None
        self.every: int | None = None
        self.lost: list[AgentLost] = []
        """Losses of hosts with ranks of the newest attempt that no incident reports yet."""
        self.returned: set[str] = set()
        """Hosts of `lost` that came back."""
        self.away: dict[str, tuple[int, float]] = {}
        """Host -> how often it was replaced since the newest attempt began, and when last."""

    def decided(self, event: Event, actions: Sequence[Action], before: Run, run: Run) -> None:
        self._heard(event, before, run)
        known = len(before.history.incidents)
        for incident in run.history.incidents[known:]:
            self._incident(incident, event, before, run)
        grew = run.interruption.leaving is not None and run.interruption.leaving.cause == "growing"
        if grew and before.interruption.leaving is None:
            self._grows(event.at, run)
        self._left_out(run.history.incidents[known:], event, before, run)
        self._windows(run.history.incidents[known:], before, run)
        hold(run.progress.save_every == self.every, "the checkpoint interval is lost")
        for action in actions:
            match action:
                case StartAttempt():
                    self._start(action, event, run)
                case Requeue():
                    self.not_before = 0.0
                case ReplaceAgent(host=host, elsewhere=True):
                    self._replaces(host, event.at)
                case _:
                    pass

    def _heard(self, event: Event, before: Run, run: Run) -> None:
        match event:
            case StepReached() if event.attempt == before.attempt.number:
                self.failing = []
            case AgentLost(host=host) if host in set(before.attempt.placement) - set(
                before.attempt.done
            ):
                known = before.hosts.by_name.get(host)
                if known is not None and (known.alive or known.back):  # not given up before
                    self.lost.append(event)
                    self.returned.discard(host)
            case AgentRegistered(host=host) if isinstance(before.stage, IDLE):
                # While no rank runs, an outage from which all hosts come back is over, and a host
                # that is lost later is lost for another reason.
                self.returned.add(host)
                if {lost.host for lost in self.lost} <= self.returned:
                    self.lost = []
            case CheckpointIntervalChanged(new=new) if event.attempt == before.attempt.number:
                self.every = new
            case TrainingResumed(step=step) if self.before is not None:
                spoilt = f"training resumes from step-{step}, but step {self.before} is bad"
                hold(step < self.before, spoilt)
                self.before = None
            case StragglerFound(host=host):
                lags = self.world.hosts[host].lagged
                hold(lags, f"{host} is called a straggler, and never was slow")
            case Replanned(device_bytes=int()) if run.plans.refits > before.plans.refits:
                takes = run.plan.memory.peak_bytes
                held = before.plan.memory.peak_bytes
                hold(
                    takes < held,
                    f"a plan of {held} bytes is too large, and the new one takes {takes}",
                )
            case _:
                pass

    # Incidents

    def _incident(self, incident: Incident, event: Event, before: Run, run: Run) -> None:
        if incident.kind == PREFLIGHT:
            return
        self.failing.append(incident)
        host, pinned = incident.culprit.host, self.world.scenario.pinned
        if incident.kind == "hang" and host is not None:
            hold(self.world.hosts[host].stood, f"{host} is blamed for a hang, and never hung")
        if incident.kind == "host-lost":
            self._went_alone(incident)
        self.lost = []
        if incident.remedy == "replace" and host is not None:
            always = self.world.scenario.scheduled and pinned.get(host) == "always"
            hold(not always, f"{host} is excluded, but is pinned to be always used")
            self.replaced[host] = incident.cause
        if incident.remedy == "rollback":
            self._rolled_back(incident, before)
        if incident.remedy == "replan":
            self.too_large.append(before.current.number)
        rule = self._rule(incident.rule, run)
        if rule is not None and incident.remedy not in ("stop", "requeue"):
            again = self._again(rule, incident)
            self.not_before = event.at + self._least(rule, again)

    def _rolled_back(self, incident: Incident, before: Run) -> None:
        """A rollback resumes before the first bad step. It restarts from step 0 only if there is no
        checkpoint before that step."""
        struck = self.world.witness.blame.struck
        since = [one.words.since for (at, _), one in struck.items() if at == incident.attempt]
        self.before = next((step for step in since if step is not None), None)
        if self.before is None:
            return  # a user's rule rolls back a failure that has no earlier first bad step
        made = [found.step for found in self.world.storage.checkpoints]
        fit = not before.progress.saved or not made or min(made) < self.before
        hold(fit, f"all steps are discarded, but only those from step {self.before} on are bad")

    def _left_out(self, new: Sequence[Incident], event: Event, before: Run, run: Run) -> None:
        """A host is excluded for an incident only if the rule of the incident says so."""
        if isinstance(event, LeaderStarted) or not new:
            return  # the event brings exclusions from the strikes of other jobs
        told = {one.culprit.host for one in new if one.remedy == "replace"}
        gone = {host.name for host in run.hosts.by_name.values() if host.unfit or not host.alive}
        more = sorted({*run.hosts.exclude} - {*before.hosts.exclude} - told - gone)
        rules = ", ".join(one.rule for one in new)
        hold(not more, f"{more} are excluded, but rule {rules} does not say so")

    def _went_alone(self, incident: Incident) -> None:
        """Hosts that are lost at the same moment share a cause, so no single host is blamed."""
        # If a host was lost twice, its first loss counts; hence the reversed order.
        heard = {lost.host: lost.at - lost.silent_s for lost in reversed(self.lost)}
        own = heard.get(incident.culprit.host or "")
        taken = any(lost.taken for lost in self.lost)
        if own is not None and not taken:
            with_it = [host for host, at in heard.items() if abs(at - own) < AT_ONCE_S]
            hold(
                len(with_it) == 1,
                f"{incident.culprit.host} alone is blamed, but {with_it} were lost together",
            )

    def _rule(self, name: str, run: Run) -> PolicyRule | None:
        """The rule of this name if it has a backoff that these laws can compute; else None."""
        assert run.job is not None
        rules = [*run.job.policy, *default_rules()]
        found = next((rule for rule in rules if rule.name == name), None)
        return found if found and found.backoff and found.same == "start" else None

    def _again(self, rule: PolicyRule, last: Incident) -> int:
        """Number of earlier incidents that count for the backoff of `rule`."""
        covered = [
            one
            for one in self.failing[:-1]
            if covers(rule, one.failure, one.scope, one.phase)
            and (rule.window is None or last.at - one.at <= rule.window)
        ]
        return len(covered)

    def _least(self, rule: PolicyRule, again: int) -> float:
        doublings = again + 1 - max(2, rule.times)
        if doublings < 0:
            return 0.0
        return min(rule.backoff_max, SHORTEST * rule.backoff * 2.0**doublings)

    def _grows(self, at: float, run: Run) -> None:
        last, self.grown_at = self.grown_at, at
        soon = last is not None and at - last < GROWS_EVERY_S
        hold(not soon, f"the job grows twice within {GROWS_EVERY_S:.0f} s")

    def _replaces(self, host: str, at: float) -> None:
        """A host that keeps coming back must not be replaced at once each time."""
        times, last = self.away.get(host, (0, 0.0))
        wait_s = AWAY_S * 2 ** (times - 1) if times else 0.0
        soon = times > 0 and at - last < wait_s
        hold(not soon, f"{host} is replaced again within {wait_s:.0f} s")
        self.away[host] = (times + 1, at)

    # Attempts

    def _start(self, action: StartAttempt, event: Event, run: Run) -> None:
        early = self.not_before - event.at
        hold(early <= 0.1, f"attempt {action.attempt} starts {early:.1f} s too early")
        self.not_before, self.away, self.lost = 0.0, {}, []
        if run.scheduler.allocation is not None:
            used = set(action.hosts) & set(self.replaced)
            hold(not used, f"{sorted(used)} used again after they were replaced")
            pinned = self.world.scenario.pinned
            never = [host for host in action.hosts if pinned.get(host) == "never"]
            hold(not never, f"{never} used, but pinned to be never used")
        short = run.current.number in self.too_large
        hold(not short, f"plan {run.current.number} ran out of memory, and is started again")
        named = batches(action.skip)
        hold(
            named == self.skipped,
            f"attempt {action.attempt} does not skip the batches that it must skip",
        )

    # Data

    def _windows(self, new: Iterable[Incident], before: Run, run: Run) -> None:
        more = batches(run.progress.skipped) - batches(before.progress.skipped)
        lost = batches(before.progress.skipped) - batches(run.progress.skipped)
        hold(not lost, f"batches {sorted(lost)} are no longer skipped")
        if more:
            rolled = any(incident.remedy == "rollback" for incident in new)
            hold(rolled, f"batches {sorted(more)} are skipped, and nothing was rolled back")
            read = self.world.trainings[before.attempt.number].read
            hold(more <= set(read), f"batches {sorted(more)} are skipped, and were never read")
        self.skipped |= more

    def marked(self, made: "Checkpoint") -> None:
        """Checks the sample ledger: each batch is trained once or is named as skipped."""
        hold(len(made.read) == made.step, f"{len(made.read)} batches in {made.step} steps")
        read, left = set(made.read), batches(made.skipped)
        hold(len(read) == len(made.read), f"step-{made.step} has trained a batch twice")
        hold(not read & left, f"batches {sorted(read & left)} were trained, but must be skipped")
        whole = set(range(1, max(read, default=0) + 1))
        hold(
            whole <= read | left,
            f"{sorted(whole - read - left)} were neither trained nor named as skipped",
        )

    def at_the_end(self) -> None:
        run = self.world.run
        for incident in run.history.incidents:
            again = incident.action == "the job was submitted again"
            person = incident.remedy is None and (again or incident.action.startswith("cancelled"))
            named = bool(incident.rule) and incident.remedy is not None
            hold(named or person, f"incident {incident.id} names no rule")
        if run.ending == "SUCCEEDED" and self.world.storage.checkpoints:
            last = max(self.world.storage.checkpoints, key=lambda made: (made.step, made.at))
            trained = set(last.read) & batches(run.progress.skipped)
            hold(not trained, f"batches {sorted(trained)} were trained, but are named as skipped")


def batches(windows: Iterable[Window]) -> set[int]:
    return {number for window in windows for number in range(window.first, window.last + 1)}
