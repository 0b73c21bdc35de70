"""What to do about a verdict: ordered rules, the first that fits wins, and a budget above them.

The rules are data: `policy.yaml`, and before them the spec's own (`resilience.policy`). Pure: the
state of the job holds all incidents that are counted, and jitter is drawn of job and attempt.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from orchestrator import host_strikes
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.spec.failures import FailureRule, Reading, Remedy, Scope
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.diagnosis.cause.exits import EARLY
from orchestrator.diagnosis.cause.verdict import Verdict
from orchestrator.diagnosis.classes import default_rules as known_classes
from orchestrator.job.incident import Incident
from orchestrator.job.state import Run, coming, has_successors, switches_of, usable
from orchestrator.plan.placement.place import room_for

TABLE = Path(__file__).with_name("policy.yaml")
BUDGET = "max-restarts"
"""Names the budget by progress where it decides, as if it were a rule."""
LOSS = ("nan-loss", "loss-spike")
ROLLBACK = "--set resilience.on_nan=rollback"

ON_PROCESSORS = "cpu"
"""The profile of a machine whose devices are its processors."""
BEFORE_FIX = "; fix: "
"""Between why a job ended and what to do, in the reason of its end."""
OOM_ON_CPU = "on-oom-cpu"
"""The additional rule of `resilience.on_oom` on such a machine."""
INVALID_CONFIGURATION = "invalid-configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    action: Remedy
    rule: str
    """Which rule decided, by its name."""
    reason: str
    """What is done and why, ready to print."""
    wait_s: float = 0.0
    """Before the next attempt."""
    counts: bool = True
    """Whether it is taken from the budget by progress."""
    without: str | None = None
    """The host that is left out."""
    fix: str = ""
    """What a person has to do first, where the job ends for a mistake of its configuration."""

    @property
    def words(self) -> str:
        """With the fix last, so that a screen can put it on a line of its own."""
        return f"{self.reason} (rule {self.rule}){BEFORE_FIX + self.fix if self.fix else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Of an incident, what rules look at."""

    name: str
    """Of its class."""
    scope: Scope
    remedy: Remedy
    """What its class says."""
    verdict: Verdict


def trouble_of(verdict: Verdict) -> Trouble:
    rule = verdict.failure
    if rule is None:
        return Trouble(name=verdict.kind, scope="rank", remedy="restart", verdict=verdict)
    return Trouble(name=rule.name, scope=rule.scope, remedy=rule.action, verdict=verdict)


def decide(run: Run, verdict: Verdict) -> Decision:
    """The first rule that fits, within the budget by progress."""
    job = run.job
    assert job is not None
    trouble = trouble_of(verdict)
    rule, times = _first(run, trouble)
    action = trouble.remedy if rule.action == "class" else rule.action
    counts = (
        run.interruption.leaving is None
    )  # what befalls a job that a scheduler takes down is not its fault
    if action == "stop":
        reason = _why_stop(rule, verdict, times)
        return Decision(action="stop", rule=rule.name, reason=reason, fix=verdict.fix)
    if counts and run.history.fruitless >= job.max_restarts:
        budget = f"{run.history.fruitless} of max_restarts {job.max_restarts}"
        reason = f"no new checkpoint in {budget} restarts; last cause: {verdict.cause}"
        return Decision(action="stop", rule=BUDGET, reason=reason)
    found = _possible(run, action, verdict)
    wait_s = (
        0.0
        if run.interruption.leaving
        else backoff_s(rule, times, job.launch.job, run.attempt.number)
    )
    return Decision(
        action=found.action,
        rule=rule.name,
        reason=found.words,
        wait_s=0.0 if found.action == "requeue" else wait_s,
        counts=counts,
        without=found.without,
    )


# Which rule


def _first(run: Run, trouble: Trouble) -> tuple[PolicyRule, int]:
    """With how many such incidents there were, this one among them."""
    assert run.job is not None
    for rule in rules_of(run.job):
        said = not rule.says or trouble.remedy in rule.says
        if said and rule.covers(trouble.name, trouble.scope, trouble.verdict.phase):
            times = count(rule, run, trouble)
            if times >= rule.times:
                return rule, times
    raise AssertionError("the last rule covers everything")


def usual_remedy(rule: FailureRule | Reading) -> Remedy:
    """What ndctl's own rules do the first time that something of this class happens."""
    for one in default_rules():
        first = one.times == 1 and (not one.says or rule.action in one.says)
        if first and one.covers(rule.name, rule.scope, None):
            return rule.action if one.action == "class" else one.action
    raise AssertionError("the last rule covers everything")


def rules_of(job: JobSubmitted) -> tuple[PolicyRule, ...]:
    chosen = options(job.on_oom, job.on_nan, on_processors=job.plan.profile == ON_PROCESSORS)
    return (*job.policy, *chosen, *default_rules())


def options(on_oom: str, on_nan: str, *, on_processors: bool) -> tuple[PolicyRule, ...]:
    """What single keys of the spec say, as rules. No plan for GPUs helps their hosts' memory."""
    chosen = []
    if on_oom == "replan":
        why = "resilience.on_oom is replan"
        cuda, host = ("cuda-out-of-memory",), ("host-out-of-memory",)
        chosen.append(PolicyRule(name="on-oom", classes=cuda, action="replan", why=why))
        if on_processors:
            why += ", and the devices are the hosts' processors"
            chosen.append(PolicyRule(name=OOM_ON_CPU, classes=host, action="replan", why=why))
    if on_nan == "rollback":
        why = "resilience.on_nan is rollback"
        chosen.append(PolicyRule(name="on-nan", classes=LOSS, action="rollback", why=why))
    return tuple(chosen)


@cache
def default_rules() -> tuple[PolicyRule, ...]:
    """Ours; read when something first goes wrong."""
    from orchestrator.yaml_document import decode_document, parse, read_text

    document = parse(read_text(TABLE, "it comes with ndctl"), str(TABLE))
    return decode_document(_Table, document).rules


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    rules: tuple[PolicyRule, ...]


def count(rule: PolicyRule, run: Run, trouble: Trouble) -> int:
    """How often there was what the rule covers, this time among them."""
    before = [
        incident
        for incident in run.history.incidents[run.history.forgiven :]
        if rule.covers(incident.failure, incident.scope, incident.phase)
        and (rule.window is None or trouble.verdict.at - incident.at <= rule.window)
    ]
    return 1 + sum(_is_same(rule, run, incident, trouble) for incident in before)


def _is_same(rule: PolicyRule, run: Run, incident: Incident, trouble: Trouble) -> bool:
    verdict = trouble.verdict
    match rule.same:
        case "any":
            return True
        case "class":
            return incident.failure == trouble.name
        case "checkpoint":
            advanced = incident.id <= run.history.advanced
            return incident.failure == trouble.name and not advanced
        case "error":
            return bool(verdict.signature) and incident.signature == verdict.signature
        case "start":
            return incident.recovered_after_s is None
        case "host":
            rehearsed = verdict.drill is not None or incident.drill is not None
            known = verdict.culprit.host is not None and not rehearsed
            there = _counts_against(run, verdict.culprit.host, incident)
            return known and there and incident.failure == trouble.name
        case "strike":
            there = _counts_against(run, verdict.culprit.host, incident)
            return there and _is_whole_strike(incident) and _would_strike(trouble)


def _counts_against(run: Run, host: str | None, incident: Incident) -> bool:
    """Whether the host was the culprit, and no person has cleared it since."""
    return incident.culprit.host == host and incident.at > run.hosts.cleared.get(host or "", 0.0)


def backoff_s(rule: PolicyRule, times: int, job: str, attempt: int) -> float:
    """Doubled each time, and between three and five quarters of that, so that jobs which lost the
    same switch do not all come back in one moment; drawn of job and attempt, as a replay must
    find the same."""
    again = times - max(2, rule.times)
    if not rule.backoff or again < 0:
        return 0.0
    digest = blake2b(f"{job}/{attempt}".encode(), digest_size=4).digest()
    jitter = 0.75 + 0.5 * int.from_bytes(digest) / 2**32
    return round(min(rule.backoff_max, rule.backoff * 2.0 ** min(again, 30) * jitter), 1)


# What can be done


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    action: Remedy
    words: str
    without: str | None = None


def _possible(run: Run, action: Remedy, verdict: Verdict) -> _Found:
    """What comes of the wish where hosts and scheduler allow it, in words."""
    origin = (
        f"checkpoint step-{run.progress.saved}"
        if run.progress.saved
        else "the beginning: no checkpoint yet"
    )
    again = f"restart as attempt {run.attempt.number + 1} from {origin}"
    if (
        run.interruption.leaving is not None
        and run.interruption.leaving.requeue
        and action != "requeue"
    ):
        again = f"back to the queue, as the job was leaving; then {again}"
    if action == "requeue":
        if run.scheduler.allocation is None:
            return _Found(action="restart", words=f"{again}; there is no queue to go back to")
        return _Found(action="requeue", words=f"back to the queue; then {again}")
    if action != "replace":
        return _Found(action=action, words=again)
    host = verdict.culprit.host
    if host is None:
        return _Found(action="restart", words=f"{again}; which host is to blame is not known")
    if host in run.hosts.always:
        return _Found(
            action="restart", words=f"{again}; {host} stays, as it is pinned: always used"
        )
    how = _without(run, host, verdict.at)
    if how is None:
        why = f"{host} stays, as there is no spare and no scheduler to ask for another host"
        return _Found(action="restart", words=f"{again}; {why}")
    return _Found(action="replace", words=f"{again}; {host} is left out: {how}", without=host)


def _without(run: Run, host: str, at: float) -> str | None:
    """How the job goes on without the host; None: it cannot."""
    job = run.job
    assert job is not None
    there = [name for name in (*usable(run), *coming(run, at)) if name != host]
    if room_for(run.plan, there, switches_of(run)) >= len(run.plan.hosts):
        return "a spare takes its place"
    if has_successors(run):
        return "another host comes in its place"
    if job.shrink and len(there) >= job.min_hosts:
        return "the job goes on with fewer hosts"
    return None if run.scheduler.allocation is None else "the job is queued again for another host"


def _why_stop(rule: PolicyRule, verdict: Verdict, times: int) -> str:
    """Without the cause: the incident has it. But for a refused configuration, of which there is
    nothing else to tell: no rank and no host is at fault."""
    stopped = "the job was stopped"
    if rule.name == INVALID_CONFIGURATION:
        return verdict.cause
    if verdict.kind == EARLY:
        return f"{EARLY}: {verdict.cause}"
    if rule.same == "error" and times > 1:
        words = {2: "twice"}.get(times, f"{times} times")
        return f"{stopped}: the same error {words}, so the program has a bug"
    advice = verdict.failure.advice if verdict.failure else ""
    often = f", {times} times: {rule.why}" if rule.times > 1 and rule.why else ""
    name = trouble_of(verdict).name
    return f"{stopped}: {name}{often}" + (f"; {advice}" if advice else "")


def ways_to_go_on(run: Run, incident: Incident, decision: Decision) -> tuple[str, ...]:
    """What is to be changed so that a stopped job does not meet the same again, as it is typed, the
    best first, where that is a matter of a key of the spec."""
    assert run.job is not None
    own = decision.rule in [rule.name for rule in run.job.policy]
    if decision.action != "stop" or own or run.job.on_nan == "rollback":
        return ()
    return (ROLLBACK,) if incident.failure in LOSS else ()


# Hosts


def strike_weight(incident: Incident) -> float:
    """What it counts against the host that it names, if it names one; 0: it is no strike.

    A host that its class would have replaced is no better where the job ended instead.
    """
    broken = any(
        one.name == incident.failure and one.action == "replace" for one in known_classes()
    )
    return host_strikes.weight(
        host_strikes.Failure(
            kind=incident.kind,
            name=incident.failure,
            signal=incident.evidence.signal,
            drill=incident.drill,
            scope=incident.scope,
            remedy="replace" if broken else incident.remedy,
        )
    )


def _is_whole_strike(incident: Incident) -> bool:
    return strike_weight(incident) >= 1.0


def _would_strike(trouble: Trouble) -> bool:
    """Whether this time is a whole one against the host, if one is to blame."""
    verdict = trouble.verdict
    failure = host_strikes.Failure(
        kind=verdict.kind,
        name=trouble.name,
        signal=verdict.evidence.signal,
        drill=verdict.drill,
        scope=trouble.scope,
        remedy=trouble.remedy,
    )
    return verdict.culprit.host is not None and host_strikes.weight(failure) >= 1.0
