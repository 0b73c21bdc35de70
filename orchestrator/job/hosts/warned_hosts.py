"""Hosts that warn of their own failure: a spare replaces them before anything is lost.

The ranks save a checkpoint at the end of their step, as in any orderly stop, and the next attempt
starts with the spare. A host is named by its own report only. What also happens to other hosts at
the same time, such as a warm room, has a shared cause, and no host is replaced for that.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from orchestrator.contract.messages.events import HostWarned, WarningKind
from orchestrator.diagnosis.cause.verdict import Culprit, Evidence, Verdict
from orchestrator.diagnosis.classes import FailureSigns, classify, reading_of
from orchestrator.job.attempt_end import stop
from orchestrator.job.failures.incident_records import drill_on
from orchestrator.job.failures.policy import rule_for
from orchestrator.job.hosts.exclusion import replaced
from orchestrator.job.incident import WARNED, Incident
from orchestrator.job.interruption import Leaving
from orchestrator.job.leave import Result
from orchestrator.job.stage import Running
from orchestrator.job.state import Run, switches_of, usable, with_incident, with_leaving
from orchestrator.plan.placement.place import room_for

WAIT_S: Mapping[WarningKind, float] = {"links": 90.0, "throttling": 90.0}
"""Seconds until a warning counts, because others may report the same. Agents look every 30 s."""
SHARED: tuple[WarningKind, ...] = ("links", "throttling")
"""Problems that a room or a switch may cause. Memory errors are of one device."""
REPLACE_EVERY_S = 600.0
"""Seconds between two stops for warnings. All hosts that warn by then are replaced together."""


def host_warned(run: Run, event: HostWarned) -> Result:
    about = (event.host, event.problem)
    others = tuple(one for one in run.hosts.warned if (one.host, one.problem) != about)
    known = len(others) < len(run.hosts.warned)
    # An agent repeats its warnings after a reconnection, and a replaced host may go on to warn.
    if known == event.lasts or (event.lasts and event.host in run.hosts.exclude):
        return run, ()
    warned = (*others, event) if event.lasts else others
    return replace_warned(replace(run, hosts=replace(run.hosts, warned=warned)), event.at)


def replace_warned(run: Run, at: float) -> Result:
    """Replace the hosts that warn, as far as there are spares. Called often."""
    job = run.job
    if not run.hosts.warned or job is None or not job.replace_warned:
        return run, ()
    if (
        not isinstance(run.stage, Running)
        or run.interruption.leaving is not None
        or run.interruption.cancelled_by is not None
        or at < _last_stop(run) + REPLACE_EVERY_S
    ):
        return run, ()
    after, words = run, []
    for one in run.hosts.warned:
        if why_not(after, one, at):
            continue
        verdict = _verdict(after, one, at)
        rule, action = rule_for(after, verdict)
        without = replaced(after, one.host, words_of(one), at)
        # The rules of a spec may say otherwise.
        if action != "replace" or not _has_room(without):
            continue
        after = with_incident(without, _incident(after, verdict, rule))
        words.append(words_of(one))
    if not words:
        return run, ()
    left = tuple(one for one in after.hosts.warned if one.host not in after.hosts.exclude)
    after = replace(after, hosts=replace(after.hosts, warned=left))
    reason = "; ".join(words)
    leaving = Leaving(cause="drained", words=reason, requeue=False, warned=True)
    return stop(with_leaving(after, leaving), at, reason, job.stop_grace)


def why_not(run: Run, one: HostWarned, at: float) -> str:
    """Why the host is not replaced for this warning, whatever spares there are; empty if it is."""
    if one.host in run.hosts.exclude:
        return "it is replaced already"
    if one.host not in run.attempt.placement:
        return "no rank runs there"
    if one.host in run.hosts.always:
        return "it is pinned"
    if shared := _with_same(run, one):
        return f"{shared} hosts report the same, so the cause is not in one of them"
    if at < one.at + WAIT_S.get(one.problem, 0.0):
        return "other hosts may report the same in a moment"
    return ""


def outlook(run: Run, one: HostWarned, at: float) -> str:
    """What ndctl will do about the warning, ready to print."""
    if run.job is None or not run.job.replace_warned:
        return "not replaced: resilience.replace_warned is false"
    if why := why_not(run, one, at):
        return f"not replaced: {why}"
    rule, action = rule_for(run, _verdict(run, one, at))
    if action != "replace":
        return f"not replaced: rule {rule} says {action}"
    if not _has_room(replaced(run, one.host, "", at)):
        return "not replaced: no spare host is free; cluster.spare_hosts requests spare hosts"
    if (left_s := _last_stop(run) + REPLACE_EVERY_S - at) > 0:
        return f"a spare replaces it in {left_s:.0f} s: the job does not stop more often"
    return "a spare replaces it after the next step"


def words_of(one: HostWarned) -> str:
    return f"{one.host} warns: {one.what}"


def _verdict(run: Run, one: HostWarned, at: float) -> Verdict:
    own = run.job.failure_classes if run.job else ()
    found = classify(FailureSigns(kind=WARNED), own)
    return Verdict(
        kind=WARNED,
        cause=words_of(one),
        culprit=Culprit(host=one.host),
        at=at,
        detected_after_s=0.0,
        evidence=Evidence(notes=(one.what,)),
        failure=reading_of(found, own),
        drill=drill_on(run, one.host, "warn"),
    )


def _incident(run: Run, verdict: Verdict, rule: str) -> Incident:
    assert verdict.failure is not None
    return Incident(
        id=len(run.history.incidents) + 1,
        attempt=run.attempt.number,
        at=verdict.at,
        kind=verdict.kind,
        cause=verdict.cause,
        culprit=verdict.culprit,
        evidence=verdict.evidence,
        action=f"a spare takes the place of {verdict.culprit.host} after the next step",
        # The ranks still train. They save the step that they stop after.
        step=run.attempt.step,
        saved=run.attempt.step,
        detected_after_s=verdict.detected_after_s,
        drill=verdict.drill,
        failure=verdict.failure.name,
        scope=verdict.failure.scope,
        remedy="replace",
        rule=rule,
        advice=verdict.failure.advice,
    )


def _with_same(run: Run, one: HostWarned) -> int:
    """Hosts of the attempt with the same problem, if they are too many for a problem of each."""
    if one.problem not in SHARED:
        return 0
    placed = set(run.attempt.placement)
    alike = {other.host for other in run.hosts.warned if other.problem == one.problem} & placed
    return len(alike) if len(alike) > 1 and 2 * len(alike) >= len(placed) else 0


def _has_room(run: Run) -> bool:
    """Enough hosts are there. A spare that warns itself is no help."""
    placed = set(run.attempt.placement)
    warned = {one.host for one in run.hosts.warned} - placed
    fit = [host for host in usable(run) if host not in warned]
    return room_for(run.plan, fit, switches_of(run)) >= len(run.plan.hosts)


def _last_stop(run: Run) -> float:
    """When a host was last replaced for a warning."""
    before = (one.at for one in reversed(run.history.incidents) if one.kind == WARNED)
    return next(before, -REPLACE_EVERY_S)
