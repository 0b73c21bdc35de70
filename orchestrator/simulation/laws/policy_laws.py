"""Laws of the policy: which rule decides, which remedy follows, and when the budget is spent.

The rules of the user and of ndctl are data. These laws find the first rule that fits, and count the
budget, from the recorded incidents and independently of the supervisor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.contract.messages.events import (
    CheckpointSaved,
    Event,
    LeaderStarted,
    LeaveAsked,
    StepReached,
    TrainingResumed,
)
from orchestrator.contract.spec.failures import Remedy
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.diagnosis.classes import default_rules as known_classes
from orchestrator.job.failures import no_progress
from orchestrator.job.failures.policy import covers, default_rules, options
from orchestrator.job.incident import Incident
from orchestrator.job.stage import Running, Starting
from orchestrator.job.state import Run
from orchestrator.simulation.laws.law import reached, require

if TYPE_CHECKING:
    from orchestrator.simulation.world.world import World

BUDGET = "max-restarts"
HOST_INCIDENTS = frozenset(("host-lost", "leader-lost", "hang", "preflight"))
HOST_SIGNALS = frozenset(("SIGKILL", "SIGBUS"))


class PolicyLaws:
    def __init__(self, world: "World") -> None:
        self.scenario = scenario = world.scenario
        self.rules: tuple[PolicyRule, ...] = (
            *scenario.policy,
            *options(scenario.on_oom, scenario.on_nan, on_processors=False),
            *default_rules(),
        )
        self.class_actions: dict[str, Remedy] = {}
        for rule in (*scenario.classes, *known_classes()):
            self.class_actions.setdefault(rule.name, rule.action)
        self.job_submitted()

    def job_submitted(self) -> None:
        """A new submission resets all counts."""
        self.incidents: list[Incident] = []
        self.recovered: set[int] = set()
        """Numbers of the incidents that were followed by a step."""
        self.advanced: set[int] = set()
        """Numbers of the incidents that were followed by a checkpoint."""
        self.spent = 0
        """Restarts that count against the budget since the last sign of progress."""

    def check_decision(self, event: Event, before: Run, run: Run) -> None:
        # An earlier incident may have changed: a host that works was cleared of it.
        known = {incident.id: incident for incident in before.history.incidents}
        self.incidents = [known.get(one.id, one) for one in self.incidents]
        match event:
            case StepReached() if isinstance(before.stage, Starting):
                self.recovered |= {incident.id for incident in self.incidents}
            case CheckpointSaved() if run.progress.saved > before.progress.saved:
                self.spent = 0
                self.advanced |= {incident.id for incident in self.incidents}
            # A resume from memory further on than ever is progress as a checkpoint is.
            case TrainingResumed() if reached(run) > reached(before):
                self.spent = min(self.spent, 1)
                self.advanced |= {incident.id for incident in self.incidents[:-1]}
            case _:
                pass
        for incident in run.history.incidents[len(before.history.incidents) :]:
            if incident.kind == "preflight":
                self.recovered |= {incident.id} if isinstance(before.stage, Running) else set()
            elif incident.kind == "host-warned":
                self._check_warned(incident)
            elif incident.rule == no_progress.RULE:
                require(run.ending == "FAILED", f"{incident.rule} decides, but the job continues")
            elif incident.remedy is not None and incident.rule:
                self._check_incident(incident, event, before, run)
            self.incidents.append(incident)

    def _check_warned(self, one: Incident) -> None:
        """Nothing has failed, so no budget counts. A rule of the user may keep the host."""
        require(self.scenario.replace_warned, "a host is replaced, against replace_warned")
        rule = self._first_rule(one)
        action = self.class_actions[one.failure] if rule.action == "class" else rule.action
        fit = (one.rule, action, one.remedy) == (rule.name, "replace", "replace")
        require(fit, f"rule {one.rule} replaces a host, and {rule.name} says {action}")

    def _check_incident(self, one: Incident, event: Event, before: Run, run: Run) -> None:
        rule = self._first_rule(one)
        action = self.class_actions[one.failure] if rule.action == "class" else rule.action
        most, counts = self.scenario.max_restarts, _counts_against_budget(event, before)
        if one.rule == BUDGET:
            spent = self.spent if counts else 0
            message = f"{one.failure} ends the job by {BUDGET} {most}"
            require(counts and spent >= most, f"{message}, and only {spent} restarts are spent")
        over = counts and action != "stop" and (self.spent >= most or one.rule == BUDGET)
        name = BUDGET if over else rule.name
        require(
            one.rule == name,
            f"rule {one.rule} decides on {one.failure}, but {name} is the first that fits",
        )
        fit = ("stop",) if name == BUDGET else self._allowed_remedies(action, one, run)
        require(one.remedy in fit, f"rule {name} says {action}, and {one.remedy} is done")
        self.spent += counts and one.remedy != "stop"

    def _allowed_remedies(self, action: Remedy, one: Incident, run: Run) -> Sequence[Remedy]:
        """Remedies that are allowed for `action`, given the hosts and the scheduler of the job."""
        scheduled, host = run.scheduler.allocation is not None, one.culprit.host
        match action:
            case "requeue":
                return ("requeue",) if scheduled else ("restart",)
            case "replace" if host is None:
                return ("restart",)
            case "replace" if scheduled:
                pinned = self.scenario.pinned.get(host or "") == "always"
                return ("restart",) if pinned else ("replace",)
            case "replace":
                return ("replace", "restart")
            case "replan":
                return ("replan",) if one.failure == "cuda-out-of-memory" else ("stop",)
            case "rollback":
                return ("rollback", "stop")
            case _:
                return (action,)

    def _first_rule(self, one: Incident) -> PolicyRule:
        says = self.class_actions[one.failure]
        for rule in self.rules:
            said = not rule.says or says in rule.says
            if said and self._covers(rule, one) and self._num_occurrences(rule, one) >= rule.times:
                return rule
        raise AssertionError("the last rule covers everything")

    def _covers(self, rule: PolicyRule, one: Incident) -> bool:
        return covers(rule, one.failure, one.scope, one.phase)

    def _num_occurrences(self, rule: PolicyRule, one: Incident) -> int:
        near = [
            former
            for former in self.incidents
            if self._covers(rule, former)
            and (rule.window is None or one.at - former.at <= rule.window)
        ]
        return 1 + sum(self._is_same(rule, former, one) for former in near)

    def _is_same(self, rule: PolicyRule, former: Incident, one: Incident) -> bool:
        on_one_host = one.culprit.host is not None and former.culprit.host == one.culprit.host
        match rule.same:
            case "any":
                return True
            case "class":
                return former.failure == one.failure
            case "checkpoint":
                return former.failure == one.failure and former.id not in self.advanced
            case "error":
                return bool(one.signature) and former.signature == one.signature
            case "start":
                return former.id not in self.recovered
            case "host":
                return on_one_host and former.failure == one.failure
            case "strike":
                return on_one_host and self._is_strike(former) and self._is_strike(one)

    def _is_strike(self, one: Incident) -> bool:
        """Whether the incident counts as a whole strike against its host."""
        # A host that only warned has broken nothing, which is half a strike.
        if one.scope == "user" or one.kind == "host-warned":
            return False
        excluded = "replace" in (self.class_actions[one.failure], one.remedy)
        explained = one.failure != "sigkill-from-outside"
        by_signal = one.kind == "rank-killed" and one.evidence.signal in HOST_SIGNALS and explained
        return (
            (one.scope == "host" and excluded and explained)
            or one.kind in HOST_INCIDENTS
            or by_signal
        )


def _counts_against_budget(event: Event, before: Run) -> bool:
    """Whether an incident counts against the budget. A failure while the scheduler ends the job
    does not count."""
    if isinstance(event, LeaderStarted):
        return True
    asked = before.interruption.leaving is not None and not before.interruption.leaving.by_choice
    return not asked and not isinstance(event, LeaveAsked)
