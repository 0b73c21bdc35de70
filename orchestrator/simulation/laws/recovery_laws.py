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
from orchestrator.job.incident import PREFLIGHT, WARNED, Incident
from orchestrator.job.stage import IDLE
from orchestrator.job.state import Run
from orchestrator.simulation.clock import EPOCH
from orchestrator.simulation.laws.law import require

if TYPE_CHECKING:
    from orchestrator.simulation.world.storage import Checkpoint
    from orchestrator.simulation.world.world import World

SCALE_UP_EVERY_S = 1800.0
REPLACE_WARNED_EVERY_S = 600.0
REPLACE_AGAIN_S = 30.0
"""Seconds before a host that came back may be replaced again; doubles each time."""
SAME_MOMENT_S = 2.0
"""Hosts whose last messages are this close were lost together. Each sends one message a second."""
MIN_JITTER = 0.75
"""Shortest fraction of a rule's backoff that jitter can leave."""

AT_ONCE = (0.0, 0.0)
READ_S = 5.0
"""Most seconds between a new leader's look at the metrics and its first line in the journal."""


class RecoveryLaws:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.skipped_batches: set[int] = set()
        """Batches that are skipped after a rollback, in all launches."""
        self.job_submitted()

    def job_submitted(self) -> None:
        """A new submission cancels earlier decisions."""
        self.incidents_since_step: list[Incident] = []
        """Incidents since the last new step."""
        self.earliest_start = AT_ONCE
        """Earliest time of the next attempt, by the leader's clock and by that of the world."""
        self.replaced: dict[str, str] = {}
        """Host that is excluded permanently -> reason."""
        self.oom_plans: list[int] = []
        """Numbers of the plans that ran out of memory and had to be replaced."""
        self.first_bad_step: int | None = None
        """The first bad step. Training must resume from an earlier step."""
        self.last_scale_up: float | None = None
        self.last_warned: float | None = None
        """When hosts were last replaced for their warnings."""
        self.save_every: int | None = None
        self.losses: list[AgentLost] = []
        """Losses of hosts with ranks of the newest attempt that no incident reports yet."""
        self.returned_hosts: set[str] = set()
        """Hosts of `lost` that came back."""
        self.replacements: dict[str, tuple[int, float]] = {}
        """Host -> how often it was replaced since the newest attempt began, and when last."""

    def check_decision(
        self, event: Event, actions: Sequence[Action], before: Run, run: Run
    ) -> None:
        if isinstance(event, TrainingResumed):
            self.world.laws.memory.heard(event)
            if event.in_memory:
                self._check_in_memory(event)
        self._note_event(event, before, run)
        known = len(before.history.incidents)
        for incident in run.history.incidents[known:]:
            self._check_incident(incident, event, before, run)
        scales_up = (
            run.interruption.leaving is not None and run.interruption.leaving.cause == "growing"
        )
        if scales_up and before.interruption.leaving is None:
            self._check_scale_up(event.at, run)
        if isinstance(event, LeaderStarted):
            self._check_last_step(run.history.incidents[known:], event.at)
        self._check_exclusions(run.history.incidents[known:], event, before, run)
        self._check_skipped(run.history.incidents[known:], before, run)
        require(run.progress.save_every == self.save_every, "the checkpoint interval is lost")
        for action in actions:
            match action:
                case StartAttempt():
                    self._check_start(action, event, run)
                case Requeue():
                    self.earliest_start = AT_ONCE
                case ReplaceAgent(host=host, elsewhere=True):
                    self._check_replacement(host, event.at)
                case _:
                    pass

    def _check_in_memory(self, event: TrainingResumed) -> None:
        """A host may come back with checkpoints of steps that others have trained again since."""
        trained = {
            number: training.step
            for number, training in self.world.trainings.items()
            if training.begun and number < event.attempt
        }
        reached = trained[max(trained)] if trained else 0
        require(
            event.step <= reached,
            f"training resumes from step {event.step} in memory, but the last attempt only"
            f" reached step {reached}",
        )

    def _note_event(self, event: Event, before: Run, run: Run) -> None:
        match event:
            case StepReached() if event.attempt == before.attempt.number:
                self.incidents_since_step = []
            case AgentLost(host=host) if host in set(before.attempt.placement) - set(
                before.attempt.done
            ):
                known = before.hosts.by_name.get(host)
                if known is not None and (known.alive or known.back):  # not given up before
                    self.losses.append(event)
                    self.returned_hosts.discard(host)
            case AgentRegistered(host=host) if isinstance(before.stage, IDLE):
                # While no rank runs, an outage from which all hosts come back is over, and a host
                # that is lost later is lost for another reason.
                self.returned_hosts.add(host)
                if {lost.host for lost in self.losses} <= self.returned_hosts:
                    self.losses = []
            case CheckpointIntervalChanged(new=new) if event.attempt == before.attempt.number:
                self.save_every = new
            case TrainingResumed(step=step) if self.first_bad_step is not None:
                message = (
                    f"training resumes from step-{step}, but step {self.first_bad_step} is bad"
                )
                require(step < self.first_bad_step, message)
                self.first_bad_step = None
            case StragglerFound(host=host):
                lags = self.world.hosts[host].ever_slow
                require(lags, f"{host} is called a straggler, and never was slow")
            case Replanned(device_bytes=int()) if run.plans.refits > before.plans.refits:
                takes = run.plan.needs.peak_bytes
                held = before.plan.needs.peak_bytes
                require(
                    takes < held,
                    f"a plan of {held} bytes is too large, and the new one takes {takes}",
                )
            case _:
                pass

    # Incidents

    def _check_incident(self, incident: Incident, event: Event, before: Run, run: Run) -> None:
        if incident.kind == PREFLIGHT:
            return
        self.incidents_since_step.append(incident)
        if incident.kind == WARNED:
            self._check_warned(incident)
            return
        host, pinned = incident.culprit.host, self.world.scenario.pinned
        if incident.kind == "hang" and host is not None:
            require(
                self.world.hosts[host].ever_hung, f"{host} is blamed for a hang, and never hung"
            )
        if incident.kind == "host-lost":
            self._check_lost_alone(incident)
        self.losses = []
        if incident.remedy == "replace" and host is not None:
            always = self.world.scenario.scheduled and pinned.get(host) == "always"
            require(not always, f"{host} is excluded, but is pinned to be always used")
            self.replaced[host] = incident.cause
        if incident.remedy == "rollback":
            self._check_rollback(incident, before)
        if incident.remedy == "replan":
            self.oom_plans.append(before.current.number)
        rule = self._rule_with_backoff(incident.rule, run)
        if rule is not None and incident.remedy not in ("stop", "requeue"):
            again = self._num_earlier_incidents(rule, incident)
            wait_s = self._min_backoff_s(rule, again)
            self.earliest_start = (event.at + wait_s, self.world.timeline.now + wait_s)

    def _check_warned(self, incident: Incident) -> None:
        """A host that warns is replaced, but a job does not stop for warnings all the time."""
        host, last = incident.culprit.host or "", self.last_warned
        pinned = self.world.scenario.scheduled and self.world.scenario.pinned.get(host) == "always"
        require(not pinned, f"{host} is excluded, but is pinned to be always used")
        soon = last is not None and 0 < incident.at - last < REPLACE_WARNED_EVERY_S
        require(not soon, "the job stops twice for warnings within ten minutes")
        self.last_warned, self.replaced[host] = incident.at, incident.cause

    def _check_rollback(self, incident: Incident, before: Run) -> None:
        """A rollback resumes before the first bad step. It restarts from step 0 only if there is no
        checkpoint before that step."""
        failed_ranks = self.world.laws.culprits.failed_ranks
        since = [
            one.failure.first_bad_step
            for (at, _), one in failed_ranks.items()
            if at == incident.attempt
        ]
        self.first_bad_step = next((step for step in since if step is not None), None)
        if self.first_bad_step is None:
            return  # a user's rule rolls back a failure that has no earlier first bad step
        saved = [found.step for found in self.world.storage.checkpoints]
        fit = not before.progress.saved or not saved or min(saved) < self.first_bad_step
        require(
            fit,
            f"all steps are discarded, but only those from step {self.first_bad_step} on are bad",
        )

    def _check_last_step(self, new: Sequence[Incident], at: float) -> None:
        """After the loss of a leader, lost steps are counted from the last step in the metrics. The
        new leader reads them before it writes its first line, the event of `at`."""
        reached = self.world.storage.reached
        # Ranks may go on while the new leader reads them, and until a slow storage has the line.
        read_at = min(at, EPOCH + self.world.timeline.now)
        if reached is None or reached.at > read_at - READ_S:
            return
        for incident in new:
            if incident.attempt == reached.attempt:
                require(
                    incident.step >= reached.step,
                    f"incident {incident.id} says step {incident.step}, but step {reached.step} was"
                    " done",
                )

    def _check_exclusions(
        self, new: Sequence[Incident], event: Event, before: Run, run: Run
    ) -> None:
        """A host is excluded for an incident only if the rule of the incident says so."""
        if isinstance(event, LeaderStarted) or not new:
            return  # the event brings exclusions from the strikes of other jobs
        replaced = {one.culprit.host for one in new if one.remedy == "replace"}
        gone = {host.name for host in run.hosts.by_name.values() if host.unfit or not host.alive}
        more = sorted({*run.hosts.exclude} - {*before.hosts.exclude} - replaced - gone)
        rules = ", ".join(one.rule for one in new)
        require(not more, f"{more} are excluded, but rule {rules} does not say so")

    def _check_lost_alone(self, incident: Incident) -> None:
        """Hosts that are lost at the same moment share a cause, so no single host is blamed."""
        # If a host was lost twice, its first loss counts; hence the reversed order.
        heard = {lost.host: lost.at - lost.silent_s for lost in reversed(self.losses)}
        own = heard.get(incident.culprit.host or "")
        taken = any(lost.taken for lost in self.losses)
        if own is not None and not taken:
            same_moment = [host for host, at in heard.items() if abs(at - own) < SAME_MOMENT_S]
            require(
                len(same_moment) == 1,
                f"{incident.culprit.host} alone is blamed, but {same_moment} were lost together",
            )

    def _rule_with_backoff(self, name: str, run: Run) -> PolicyRule | None:
        """The rule of this name if it has a backoff that these laws can compute; else None."""
        assert run.job is not None
        rules = [*run.job.policy, *default_rules()]
        found = next((rule for rule in rules if rule.name == name), None)
        return found if found and found.backoff and found.same == "start" else None

    def _num_earlier_incidents(self, rule: PolicyRule, last: Incident) -> int:
        """Number of earlier incidents that count for the backoff of `rule`."""
        covered = [
            one
            for one in self.incidents_since_step[:-1]
            if covers(rule, one.failure, one.scope, one.phase)
            and (rule.window is None or last.at - one.at <= rule.window)
        ]
        return len(covered)

    def _min_backoff_s(self, rule: PolicyRule, again: int) -> float:
        doublings = again + 1 - max(2, rule.times)
        if doublings < 0:
            return 0.0
        return min(rule.backoff_max, MIN_JITTER * rule.backoff * 2.0**doublings)

    def _check_scale_up(self, at: float, run: Run) -> None:
        last, self.last_scale_up = self.last_scale_up, at
        soon = last is not None and at - last < SCALE_UP_EVERY_S
        require(not soon, f"the job grows twice within {SCALE_UP_EVERY_S:.0f} s")

    def _check_replacement(self, host: str, at: float) -> None:
        """A host that keeps coming back must not be replaced at once each time."""
        times, last = self.replacements.get(host, (0, 0.0))
        wait_s = REPLACE_AGAIN_S * 2 ** (times - 1) if times else 0.0
        soon = times > 0 and at - last < wait_s
        require(not soon, f"{host} is replaced again within {wait_s:.0f} s")
        self.replacements[host] = (times + 1, at)

    # Attempts

    def _check_start(self, action: StartAttempt, event: Event, run: Run) -> None:
        by_leader, by_world = self.earliest_start
        # The clock of the next leader may differ from that of this one, and a slow storage delays
        # what happens after a decision. Either clock may say that it is time.
        early = min(by_leader - event.at, by_world - self.world.timeline.now)
        require(early <= 0.1, f"attempt {action.attempt} starts {early:.1f} s too early")
        self.earliest_start, self.replacements, self.losses = AT_ONCE, {}, []
        if run.scheduler.allocation is not None:
            used = set(action.hosts) & set(self.replaced)
            require(not used, f"{sorted(used)} used again after they were replaced")
            pinned = self.world.scenario.pinned
            never = [host for host in action.hosts if pinned.get(host) == "never"]
            require(not never, f"{never} used, but pinned to be never used")
        short = run.current.number in self.oom_plans
        require(not short, f"plan {run.current.number} ran out of memory, and is started again")
        named = batches(action.skip)
        require(
            named == self.skipped_batches,
            f"attempt {action.attempt} does not skip the batches that it must skip",
        )

    # Data

    def _check_skipped(self, new: Iterable[Incident], before: Run, run: Run) -> None:
        more = batches(run.progress.skipped) - batches(before.progress.skipped)
        lost = batches(before.progress.skipped) - batches(run.progress.skipped)
        require(not lost, f"batches {sorted(lost)} are no longer skipped")
        if more:
            rolled = any(incident.remedy == "rollback" for incident in new)
            require(rolled, f"batches {sorted(more)} are skipped, and nothing was rolled back")
            read = self.world.trainings[before.attempt.number].batches
            require(more <= set(read), f"batches {sorted(more)} are skipped, and were never read")
        self.skipped_batches |= more

    def checkpoint_saved(self, saved: "Checkpoint") -> None:
        """Checks the sample ledger: each batch is trained once or is named as skipped."""
        require(
            len(saved.batches) == saved.step, f"{len(saved.batches)} batches in {saved.step} steps"
        )
        read, left = set(saved.batches), batches(saved.skipped)
        require(len(read) == len(saved.batches), f"step-{saved.step} has trained a batch twice")
        require(not read & left, f"batches {sorted(read & left)} were trained, but must be skipped")
        whole = set(range(1, max(read, default=0) + 1))
        require(
            whole <= read | left,
            f"{sorted(whole - read - left)} were neither trained nor named as skipped",
        )

    def at_end(self) -> None:
        run = self.world.run
        self._check_nothing_lost(run)
        for incident in run.history.incidents:
            again = incident.action == "the job was submitted again"
            person = incident.remedy is None and (again or incident.action.startswith("cancelled"))
            named = bool(incident.rule) and incident.remedy is not None
            require(named or person, f"incident {incident.id} names no rule")
        if run.ending == "SUCCEEDED" and self.world.storage.checkpoints:
            last = max(self.world.storage.checkpoints, key=lambda saved: (saved.step, saved.at))
            trained = set(last.batches) & batches(run.progress.skipped)
            require(
                not trained, f"batches {sorted(trained)} were trained, but are named as skipped"
            )

    def _check_nothing_lost(self, run: Run) -> None:
        """If hosts only warn and nothing else happens, no step is trained twice."""
        if {fault.kind for fault in self.world.scenario.faults} != {"warning"}:
            return
        for incident in run.history.incidents:
            lost = incident.lost_steps
            require(not lost, f"incident {incident.id} ({incident.kind}) costs {lost} steps")


def batches(windows: Iterable[Window]) -> set[int]:
    return {number for window in windows for number in range(window.first, window.last + 1)}
