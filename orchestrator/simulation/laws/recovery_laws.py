"""Laws of what is done about failures: rules, waits, hosts, plans and data, counted independently.

What a host or a batch did is known from the simulated world, what was decided from the journal.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator.contract.messages.actions import Action, ReplaceAgent, Requeue, StartAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
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
from orchestrator.job.state import Run
from orchestrator.simulation.laws.law import hold

if TYPE_CHECKING:
    from orchestrator.simulation.world.storage import Checkpoint
    from orchestrator.simulation.world.world import World

GROWS_EVERY_S = 1800.0
AWAY_S = 30.0
"""Before a host that came back is sent away again; twice as long each time after that."""
AT_ONCE_S = 2.0
"""Between the last words of hosts that go together: each says one a second."""
SHORTEST = 0.75
"""Of a rule's wait: the least that jitter leaves of it."""


class Remedies:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.skipped: set[int] = set()
        """Batches that were left out after a rollback; of all launches."""
        self.submitted()

    def submitted(self) -> None:
        """A person starts over: what was decided before is forgiven."""
        self.failing: list[Incident] = []
        """Since the last new step."""
        self.not_before = 0.0
        """The next attempt has to wait for so long."""
        self.replaced: dict[str, str] = {}
        """Host that is left out for good -> why."""
        self.too_large: list[int] = []
        """Numbers of plans that a plan for less memory was asked for in the place of."""
        self.before: int | None = None
        """The step at which the loss went astray, of which training is to go back."""
        self.grown_at: float | None = None
        self.every: int | None = None
        self.lost: list[AgentLost] = []
        """Of the newest attempt's hosts, while they had ranks, and no incident told of them."""
        self.away: dict[str, tuple[int, float]] = {}
        """Host -> how often it was sent away since the newest attempt began, and when last."""

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
        hold(run.progress.save_every == self.every, "the interval between checkpoints is forgotten")
        for action in actions:
            match action:
                case StartAttempt():
                    self._start(action, event, run)
                case Requeue():
                    self.not_before = 0.0
                case ReplaceAgent(host=host, elsewhere=True):
                    self._sent_away(host, event.at)
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
            case CheckpointIntervalChanged(new=new) if event.attempt == before.attempt.number:
                self.every = new
            case TrainingResumed(step=step) if self.before is not None:
                spoilt = f"it goes on from step-{step}, and went astray at step {self.before}"
                hold(step < self.before, spoilt)
                self.before = None
            case StragglerFound(host=host):
                lags = self.world.hosts[host].lagged
                hold(lags, f"{host} is called slow, and never was")
            case Replanned(device_bytes=int()) if run.plans.refits > before.plans.refits:
                takes = run.plan.memory.peak_bytes
                held = before.plan.memory.peak_bytes
                hold(takes < held, f"a plan of {takes} bytes for one of {held} that is short")
            case _:
                pass

    # Incidents

    def _incident(self, incident: Incident, event: Event, before: Run, run: Run) -> None:
        if incident.kind == PREFLIGHT:
            return
        self.failing.append(incident)
        host, pinned = incident.culprit.host, self.world.scenario.pinned
        if incident.kind == "hang" and host is not None:
            hold(self.world.hosts[host].stood, f"{host} is blamed for a hang, and it never stood")
        if incident.kind == "host-lost":
            self._went_alone(incident)
        self.lost = []
        if incident.remedy == "replace" and host is not None:
            always = self.world.scenario.scheduled and pinned.get(host) == "always"
            hold(not always, f"{host} is left out, and is pinned always")
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
        """To before its first bad step; to the beginning only where that leaves no checkpoint."""
        struck = self.world.witness.blame.struck
        since = [one.words.since for (at, _), one in struck.items() if at == incident.attempt]
        self.before = next((step for step in since if step is not None), None)
        if self.before is None:
            return  # a user's rule, for what is not known to have begun before it was seen
        made = [found.step for found in self.world.storage.checkpoints]
        fit = not before.progress.saved or not made or min(made) < self.before
        hold(fit, f"all is thrown away, and step {self.before} went astray first")

    def _left_out(self, new: Sequence[Incident], event: Event, before: Run, run: Run) -> None:
        """Whoever is left out for an incident is so by the rule that the incident names."""
        if isinstance(event, LeaderStarted) or not new:
            return  # it brings the strikes of all jobs
        told = {one.culprit.host for one in new if one.remedy == "replace"}
        gone = {host.name for host in run.hosts.by_name.values() if host.unfit or not host.alive}
        more = sorted({*run.hosts.exclude} - {*before.hosts.exclude} - told - gone)
        rules = ", ".join(one.rule for one in new)
        hold(not more, f"{more} are left out, and rule {rules} does not say so")

    def _went_alone(self, incident: Incident) -> None:
        """Or what they share is to blame: the same moment strikes two hosts seldom by chance."""
        # The first time counts where one came back and went again.
        heard = {lost.host: lost.at - lost.silent_s for lost in reversed(self.lost)}
        own = heard.get(incident.culprit.host or "")
        taken = any(lost.taken for lost in self.lost)
        if own is not None and not taken:
            with_it = [host for host, at in heard.items() if abs(at - own) < AT_ONCE_S]
            hold(len(with_it) == 1, f"{incident.culprit.host} alone is blamed, and {with_it} went")

    def _rule(self, name: str, run: Run) -> PolicyRule | None:
        """The rule, where it lets jobs wait, and how often they have is counted here."""
        assert run.job is not None
        rules = [*run.job.policy, *default_rules()]
        found = next((rule for rule in rules if rule.name == name), None)
        return found if found and found.backoff and found.same == "start" else None

    def _again(self, rule: PolicyRule, last: Incident) -> int:
        """How often it has been before, of what would still be counted."""
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

    def _sent_away(self, host: str, at: float) -> None:
        """Where one comes back again and again it is not for being sent away at once each time."""
        times, last = self.away.get(host, (0, 0.0))
        wait_s = AWAY_S * 2 ** (times - 1) if times else 0.0
        soon = times > 0 and at - last < wait_s
        hold(not soon, f"{host} is sent away again within {wait_s:.0f} s")
        self.away[host] = (times + 1, at)

    # Attempts

    def _start(self, action: StartAttempt, event: Event, run: Run) -> None:
        early = self.not_before - event.at
        hold(early <= 0.1, f"attempt {action.attempt} starts {early:.1f} s too early")
        self.not_before, self.away, self.lost = 0.0, {}, []
        if run.scheduler.allocation is not None:
            used = set(action.hosts) & set(self.replaced)
            hold(not used, f"{sorted(used)} used again, after 'replace'")
            pinned = self.world.scenario.pinned
            never = [host for host in action.hosts if pinned.get(host) == "never"]
            hold(not never, f"{never} used, and pinned never")
        short = run.current.number in self.too_large
        hold(not short, f"plan {run.current.number} did not fit, and is started again")
        named = batches(action.skip)
        hold(named == self.skipped, f"attempt {action.attempt} does not skip what is to be skipped")

    # Data

    def _windows(self, new: Iterable[Incident], before: Run, run: Run) -> None:
        more = batches(run.progress.skipped) - batches(before.progress.skipped)
        lost = batches(before.progress.skipped) - batches(run.progress.skipped)
        hold(not lost, f"batches {sorted(lost)} were to be skipped, and are not any more")
        if more:
            rolled = any(incident.remedy == "rollback" for incident in new)
            hold(rolled, f"batches {sorted(more)} are skipped, and nothing was rolled back")
            read = self.world.trainings[before.attempt.number].read
            hold(more <= set(read), f"batches {sorted(more)} are skipped, and were never read")
        self.skipped |= more

    def marked(self, made: "Checkpoint") -> None:
        """The sample ledger: each batch once, or named as left out."""
        hold(len(made.read) == made.step, f"{len(made.read)} batches in {made.step} steps")
        read, left = set(made.read), batches(made.skipped)
        hold(len(read) == len(made.read), f"step-{made.step} has trained a batch twice")
        hold(not read & left, f"batches {sorted(read & left)} were trained, and are to be skipped")
        whole = set(range(1, max(read, default=0) + 1))
        hold(whole <= read | left, f"{sorted(whole - read - left)} were neither trained nor named")

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
            hold(not trained, f"batches {sorted(trained)} are in the model, and named as skipped")


def batches(windows: Iterable[Window]) -> set[int]:
    return {number for window in windows for number in range(window.first, window.last + 1)}
