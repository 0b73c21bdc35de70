"""What to do about a verdict: the first rule that fits decides, within a budget of restarts.

The rules are data: first the spec's own (`resilience.policy`), then those of `policy.yaml`. The
state of the job holds all incidents that rules count, and the jitter of a wait depends only on job
and attempt, so a replay decides the same.
"""

from fnmatch import fnmatchcase
from functools import cache
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

from ndctl.rank.phases import Phase
from orchestrator import host_strikes
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.spec.failures import FailureRule, Reading, Remedy, Scope
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.diagnosis.cause.exits import EARLY
from orchestrator.diagnosis.cause.verdict import NOBODY, Verdict, named_cause
from orchestrator.diagnosis.classes import default_rules as known_classes
from orchestrator.job.incident import Incident
from orchestrator.job.state import Run, coming, has_successors, switches_of, usable
from orchestrator.plan.placement.place import room_for

TABLE = Path(__file__).with_name("policy.yaml")
BUDGET = "max-restarts"
"""The name of the restart budget where a rule is named."""
LOSS = ("nan-loss", "loss-spike")
ROLLBACK = "--set resilience.on_nan=rollback"

ON_PROCESSORS = "cpu"
"""The profile of a machine whose devices are its processors."""
HANG = "hang"
"""Kind of the incident of ranks that made no progress."""
UNKNOWN = "unknown"
"""The class of a failure that no line explains; its name tells a person nothing."""
CLOCKS_S = 3600.0
"""Limit of what the clocks of two leaders may differ by."""
BEFORE_FIX = "; fix: "
"""Separates why a job ended from what to do, in the reason of its end."""
OOM_ON_CPU = "on-oom-cpu"
"""The rule that `resilience.on_oom` adds on a machine without GPUs."""


class Decision(Struct, frozen=True, kw_only=True):
    action: Remedy
    rule: str
    """The name of the rule that decided."""
    reason: str
    """What ndctl does and why, ready to print."""
    wait_s: float = 0.0
    """Seconds before the next attempt."""
    counts: bool = True
    """It costs one restart of the budget."""
    without: str | None = None
    """The host that is excluded."""
    fix: str = ""
    """What a person must change, if the job ends because of its configuration."""

    @property
    def words(self) -> str:
        """The reason with the fix last, so that a screen can print it on its own line."""
        return f"{self.reason} (rule {self.rule}){BEFORE_FIX + self.fix if self.fix else ''}"


class Classified(Struct, frozen=True, kw_only=True):
    """A verdict with what rules look at."""

    name: str
    """The name of its failure class."""
    scope: Scope
    remedy: Remedy
    """The remedy of its failure class."""
    verdict: Verdict


def classified(verdict: Verdict) -> Classified:
    rule = verdict.failure
    if rule is None:
        return Classified(name=verdict.kind, scope="rank", remedy="restart", verdict=verdict)
    return Classified(name=rule.name, scope=rule.scope, remedy=rule.action, verdict=verdict)


def decide(run: Run, verdict: Verdict) -> Decision:
    """The first rule that fits, within the budget by progress."""
    job = run.job
    assert job is not None
    failure = classified(verdict)
    rule, times = _first(run, failure)
    action = failure.remedy if rule.action == "class" else rule.action
    # A failure while the scheduler takes the job down costs no restart.
    counts = run.interruption.leaving is None
    if action == "stop":
        reason = _why_stop(run, rule, verdict, times)
        return Decision(action="stop", rule=rule.name, reason=reason, fix=verdict.fix)
    if counts and run.history.fruitless >= job.max_restarts:
        many = "1 restart" if job.max_restarts == 1 else f"{run.history.fruitless} restarts"
        spent = (
            f"{many} without a new checkpoint, the most that max_restarts allows"
            if job.max_restarts
            else "max_restarts is 0"
        )
        reason = f"{spent}; last cause: {verdict.cause}"
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


def rule_for(run: Run, verdict: Verdict) -> tuple[str, Remedy]:
    """The name and the action of the first rule that fits, before anything has failed: no budget is
    used, and nothing is said of what is possible."""
    failure = classified(verdict)
    rule, _ = _first(run, failure)
    return rule.name, failure.remedy if rule.action == "class" else rule.action


# Which rule


def _first(run: Run, failure: Classified) -> tuple[PolicyRule, int]:
    """The rule that decides, and the number of such incidents including this one."""
    assert run.job is not None
    for rule in rules_of(run.job):
        said = not rule.says or failure.remedy in rule.says
        if said and covers(rule, failure.name, failure.scope, failure.verdict.phase):
            times = count(rule, run, failure)
            if times >= rule.times:
                return rule, times
    raise AssertionError("the last rule covers everything")


def concerns(rule: PolicyRule, name: str, scope: Scope) -> bool:
    """The rule's failure classes and scopes match a failure of class `name`."""
    named = not rule.classes or any(fnmatchcase(name, each) for each in rule.classes)
    return named and (not rule.scopes or scope in rule.scopes)


def covers(rule: PolicyRule, name: str, scope: Scope, phase: Phase | None) -> bool:
    """Like `concerns`, and the phase matches too."""
    return concerns(rule, name, scope) and (not rule.phases or phase in rule.phases)


def usual_remedy(rule: FailureRule | Reading) -> Remedy:
    """What ndctl's own rules do at the first failure of this class."""
    for one in default_rules():
        first = one.times == 1 and (not one.says or rule.action in one.says)
        if first and covers(one, rule.name, rule.scope, None):
            return rule.action if one.action == "class" else one.action
    raise AssertionError("the last rule covers everything")


def rules_of(job: JobSubmitted) -> tuple[PolicyRule, ...]:
    chosen = options(job.on_oom, job.on_nan, on_processors=job.plan.profile == ON_PROCESSORS)
    return (*job.policy, *chosen, *default_rules())


def options(on_oom: str, on_nan: str, *, on_processors: bool) -> tuple[PolicyRule, ...]:
    """Rules for single keys of the spec. A plan for GPUs cannot reduce host memory."""
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
    """The rules of `policy.yaml`, which is read at the first failure."""
    from orchestrator.yaml_document import decode_document, parse, read_text

    document = parse(read_text(TABLE, "it comes with ndctl"), str(TABLE))
    return decode_document(_Table, document).rules


class _Table(Struct, frozen=True, kw_only=True):
    rules: tuple[PolicyRule, ...]


def count(rule: PolicyRule, run: Run, failure: Classified) -> int:
    """The number of failures that the rule covers, including this one."""
    return 1 + len(_covered(rule, run, failure))


def _covered(rule: PolicyRule, run: Run, failure: Classified) -> list[Incident]:
    """The earlier failures that the rule covers, the newest first. It looks no further back than it
    must: a job of months has thousands."""
    if rule.same == "error" and not failure.verdict.signature:
        return []
    found = []
    for incident in reversed(run.history.incidents[run.history.forgiven :]):
        if _is_over(rule, run, incident, failure.verdict.at):
            break
        if (
            _is_same(rule, run, incident, failure)
            and covers(rule, incident.failure, incident.scope, incident.phase)
            and (rule.window is None or failure.verdict.at - incident.at <= rule.window)
        ):
            found.append(incident)
    return found


def _is_over(rule: PolicyRule, run: Run, incident: Incident, at: float) -> bool:
    """Neither this incident nor one before it counts."""
    match rule.same:
        case "start" if incident.recovered_after_s is not None:
            return True
        case "checkpoint" if incident.id <= run.history.advanced:
            return True
    # Incidents come in the order of their times, but leaders may have had different clocks.
    return rule.window is not None and at - incident.at > rule.window + CLOCKS_S


def _is_same(rule: PolicyRule, run: Run, incident: Incident, failure: Classified) -> bool:
    verdict = failure.verdict
    match rule.same:
        case "any":
            return True
        case "class" | "checkpoint":
            return incident.failure == failure.name
        case "error":
            return incident.signature == verdict.signature
        case "start":
            return incident.recovered_after_s is None
        case "host":
            rehearsed = verdict.drill is not None or incident.drill is not None
            known = verdict.culprit.host is not None and not rehearsed
            there = _counts_against(run, verdict.culprit.host, incident)
            return known and there and incident.failure == failure.name
        case "strike":
            there = _counts_against(run, verdict.culprit.host, incident)
            return there and _is_whole_strike(incident) and _would_strike(failure)


def _counts_against(run: Run, host: str | None, incident: Incident) -> bool:
    """The host was the culprit, and no person has cleared it since."""
    return incident.culprit.host == host and incident.at > run.hosts.cleared.get(host or "", 0.0)


def backoff_s(rule: PolicyRule, times: int, job: str, attempt: int) -> float:
    """The wait before a restart. It doubles each time, times a jitter from 0.75 to 1.25, so that
    jobs that lost the same switch do not all restart at once. The jitter is a hash of job and
    attempt, so a replay finds the same."""
    again = times - max(2, rule.times)
    if not rule.backoff or again < 0:
        return 0.0
    digest = blake2b(f"{job}/{attempt}".encode(), digest_size=4).digest()
    jitter = 0.75 + 0.5 * int.from_bytes(digest) / 2**32
    return round(min(rule.backoff_max, rule.backoff * 2.0 ** min(again, 30) * jitter), 1)


# What can be done


class _Found(Struct, frozen=True, kw_only=True):
    action: Remedy
    words: str
    without: str | None = None


def _possible(run: Run, action: Remedy, verdict: Verdict) -> _Found:
    """What hosts and scheduler allow of the wanted `action`, and its text."""
    origin = (
        f"checkpoint step-{run.progress.saved}"
        if run.progress.saved
        else "the beginning: no checkpoint yet"
    )
    if run.is_own:
        # The program decides. It may load nothing: trl's sft.py saves, and always begins at step 0.
        origin = "where your program resumes: " + (
            f"its newest checkpoint is step-{run.progress.saved}"
            if run.progress.saved
            else "ndctl knows no checkpoint of it"
        )
    if run.copies_in_memory is not None:
        origin = f"the newest step in memory, else from {origin}"
    again = f"restart as attempt {run.attempt.number + 1} from {origin}"
    if (
        run.interruption.leaving is not None
        and run.interruption.leaving.requeue
        and action != "requeue"
    ):
        again = f"requeue, as the job was leaving; then {again}"
    if action == "requeue":
        if run.scheduler.allocation is None:
            return _Found(action="restart", words=f"{again}; there is no queue")
        return _Found(action="requeue", words=f"requeue; then {again}")
    if action != "replace":
        return _Found(action=action, words=again)
    host = verdict.culprit.host
    if host is None:
        return _Found(action="restart", words=f"{again}; no host is known as the culprit")
    if host in run.hosts.always:
        return _Found(action="restart", words=f"{again}; {host} stays, as it is pinned")
    how = _without(run, host, verdict.at)
    if how is None:
        why = f"{host} stays, as there is no spare and no scheduler to ask for another host"
        return _Found(action="restart", words=f"{again}; {why}")
    return _Found(action="replace", words=f"{again}; {host} is excluded: {how}", without=host)


def _without(run: Run, host: str, at: float) -> str | None:
    """How the job continues without the host; None if it cannot."""
    job = run.job
    assert job is not None
    there = [name for name in (*usable(run), *coming(run, at)) if name != host]
    if room_for(run.plan, there, switches_of(run)) >= len(run.plan.hosts):
        return "a spare takes its place"
    if has_successors(run):
        return "another host comes in its place"
    if job.shrink and len(there) >= job.min_hosts:
        return "the job continues with fewer hosts"
    return None if run.scheduler.allocation is None else "the job is requeued for another host"


def _why_stop(run: Run, rule: PolicyRule, verdict: Verdict, times: int) -> str:
    """The reason. It has the cause if the trainer refused to start, if the program is at fault, or
    if the failure was one of several; otherwise the incident has it."""
    stopped = "the job was stopped"
    if verdict.final:
        return verdict.cause
    if verdict.kind == EARLY:
        return f"{EARLY}: {verdict.cause}"
    if rule.same == "error" and times > 1:
        words = {2: "twice"}.get(times, f"{times} times")
        return f"{verdict.cause}: the same error {words}, so the program has a bug"
    advice = verdict.failure.advice if verdict.failure else ""
    what = classified(verdict).name
    if rule.times > 1 and rule.why:
        what = f"{_failures_text(run, rule, verdict, times)}: {rule.why}"
    return f"{stopped}: {what}" + (f"; {advice}" if advice else "")


def _failures_text(run: Run, rule: PolicyRule, verdict: Verdict, times: int) -> str:
    """`rank 1 on host-1 exited with code 3, 6 times`. Failures of one class may be of several
    ranks, so only those that were alike are counted as the same."""
    failure = classified(verdict)
    before = _covered(rule, run, failure)
    if verdict.kind == HANG:
        # Its cause has the times and the evidence, which differ each time.
        phase = f" in phase {verdict.phase}" if verdict.phase else ""
        who = f"culprit {verdict.culprit}" if verdict.culprit != NOBODY else "no culprit"
        what = f"hang{phase} ({who})"
        alike = all(
            (one.kind, one.culprit, one.phase) == (HANG, verdict.culprit, verdict.phase)
            for one in before
        )
    else:
        named = f" (class {failure.name})" if failure.name != UNKNOWN else ""
        what = f"{named_cause(verdict.cause, verdict.culprit)}{named}"
        alike = all((one.cause, one.culprit) == (verdict.cause, verdict.culprit) for one in before)
    if alike:
        return f"{what}, {times} times"
    earlier = "1 failure" if times == 2 else f"{times - 1} failures"
    return f"{what}, and {earlier} before it"


def ways_to_go_on(run: Run, incident: Incident, decision: Decision) -> tuple[str, ...]:
    """Options of `ndctl submit` that avoid the failure, the best first; empty if no key of the spec
    helps."""
    assert run.job is not None
    own = decision.rule in [rule.name for rule in run.job.policy]
    if decision.action != "stop":
        return ()
    # ndctl cannot skip the data of a user's program, so `on_nan` is refused beside `run`.
    if incident.edits or own or run.is_own or run.job.on_nan == "rollback":
        return incident.edits
    return (ROLLBACK,) if incident.failure in LOSS else ()


# Hosts


def strike_weight(incident: Incident) -> float:
    """The weight of the incident as a strike against its host; 0 if it is no strike.

    A host that its failure class replaces gets the same strike if the job ended instead.
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


def _would_strike(failure: Classified) -> bool:
    """This failure is a whole strike against its host, if it has one."""
    verdict = failure.verdict
    strike = host_strikes.Failure(
        kind=verdict.kind,
        name=failure.name,
        signal=verdict.evidence.signal,
        drill=verdict.drill,
        scope=failure.scope,
        remedy=failure.remedy,
    )
    return verdict.culprit.host is not None and host_strikes.weight(strike) >= 1.0
