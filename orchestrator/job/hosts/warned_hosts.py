"""Hosts that warn of their own failure: a spare replaces them before anything is lost.

The ranks stop at the end of their step, which stays in memory or is saved, and the next attempt
starts with the spare. Without a spare they save a checkpoint at once and go on. A host is named by
its own report only. What also happens to other hosts at the same time, such as a warm room, has a
shared cause, and no host is replaced for that.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from orchestrator.contract.messages.actions import SaveCheckpoint
from orchestrator.contract.messages.events import HostWarned, WarningKind
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import Culprit, Evidence, Verdict
from orchestrator.diagnosis.classes import FailureSigns, classify, reading_of
from orchestrator.job.attempt_end import stop
from orchestrator.job.failures.incident_records import drill_on, incident_of
from orchestrator.job.failures.policy import rule_for
from orchestrator.job.host_state import Hosts
from orchestrator.job.hosts.exclusion import replaced
from orchestrator.job.incident import WARNED, Incident
from orchestrator.job.interruption import Leaving
from orchestrator.job.leave import Result
from orchestrator.job.stage import Running
from orchestrator.job.state import Run, switches_of, usable, with_incident, with_leaving
from orchestrator.plan.placement.place import room_for

WAIT_S: Mapping[WarningKind, float] = {"links": 90.0, "throttling": 270.0}
"""Seconds until a warning counts, because others may report the same. Agents look every 30 s. An
agent that has just started reports a GPU that slows down after three minutes."""
SHARED: tuple[WarningKind, ...] = ("links", "throttling")
"""Problems that a room or a switch may cause. Memory errors are of one device."""
TOGETHER_S = 300.0
"""A host that has left the job since still counts as one with the same problem, if its warning came
at most so long before or after."""
REPLACE_EVERY_S = 600.0
"""Seconds between two stops for warnings. All hosts that warn by then are replaced together."""
RECENT_S = 60.0
"""A checkpoint that is older than this when a host warns is not recent."""


def host_warned(run: Run, event: HostWarned) -> Result:
    others = _without(run.hosts.warned, event)
    known = len(others) < len(run.hosts.warned)
    # An agent repeats its warnings after a reconnection, and a replaced host may go on to warn.
    if known == event.lasts or (event.lasts and event.host in run.hosts.exclude):
        return run, ()
    warned = (*others, event) if event.lasts else others
    before = _without(run.hosts.warned_before, event)
    run = replace(run, hosts=replace(run.hosts, warned=warned, warned_before=before))
    return replace_warned(run, event.at + event.age_s)


def _without(warnings: Sequence[HostWarned], event: HostWarned) -> tuple[HostWarned, ...]:
    about = (event.host, event.problem)
    return tuple(one for one in warnings if (one.host, one.problem) != about)


def remembered(hosts: Hosts) -> tuple[HostWarned, ...]:
    """What hosts have warned of, for the next launch."""
    newest = {(one.host, one.problem): one for one in (*hosts.warned_before, *hosts.warned)}
    return tuple(newest.values())


def replace_warned(run: Run, at: float) -> Result:
    """Replace the hosts that warn, as far as there are spares. Called often."""
    job = run.job
    if not run.hosts.warned or job is None or not job.replace_warned:
        return run, ()
    if (
        not isinstance(run.stage, Running)
        or run.interruption.leaving is not None
        or run.interruption.cancelled_by is not None
    ):
        return run, ()
    after, gone, stay = _without_warned(run, at)
    if not gone:
        return _save_at_once(run, stay, at)
    left = tuple(one for one in after.hosts.warned if one.host not in after.hosts.exclude)
    after = replace(after, hosts=replace(after.hosts, warned=left))
    reason = "; ".join(map(words_of, gone))
    leaving = Leaving(cause="drained", words=reason, requeue=False, warned=True)
    return stop(with_leaving(after, leaving), at, reason, job.stop_grace)


def _without_warned(run: Run, at: float) -> tuple[Run, list[HostWarned], list[HostWarned]]:
    """Excludes the hosts that spares replace now, each with an incident. Returns these, and those
    for which there is no spare."""
    gone, stay, soon = [], [], at < _last_stop(run) + REPLACE_EVERY_S
    for one in run.hosts.warned:
        if why_not(run, one, at):
            continue
        verdict = _verdict(run, one, at)
        rule, action = rule_for(run, verdict)
        if action != "replace":
            continue  # the rules of the spec say otherwise
        without = replaced(run, one.host, words_of(one), at)
        if not _has_room(without):
            stay.append(one)
        elif not soon:
            run = with_incident(without, _incident(run, verdict, rule))
            gone.append(one)
    return run, gone, stay


def _save_at_once(run: Run, stay: Sequence[HostWarned], at: float) -> Result:
    """Without a spare: little must be lost when the host fails. Once for each warning."""
    assert run.job is not None
    due = [one for one in stay if one.at > run.hosts.save_asked_at and not _is_saved(run, one)]
    # A program of the user decides itself when it saves.
    if not due or run.job.run is not None:
        return run, ()
    words = "; ".join(map(words_of, due))
    run = replace(run, hosts=replace(run.hosts, save_asked_at=at))
    reason = f"{words}; no spare host is free"
    return run, (SaveCheckpoint(attempt=run.attempt.number, reason=reason),)


def _is_saved(run: Run, one: HostWarned) -> bool:
    """The newest checkpoint on the disk is recent, or newer than the warning."""
    saved_at = run.progress.saved_at
    return saved_at is not None and saved_at >= one.at - RECENT_S


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
        spare = "not replaced: no spare host is free; cluster.spare_hosts requests spare hosts"
        return f"{spare}. {_saved_words(run, one)}"
    if (left_s := _last_stop(run) + REPLACE_EVERY_S - at) > 0:
        return f"a spare replaces it in {left_s:.0f} s: the job does not stop more often"
    return "a spare replaces it after the next step"


def _saved_words(run: Run, one: HostWarned) -> str:
    saved = f"the newest checkpoint is of step {run.progress.saved}"
    if _is_saved(run, one):
        return f"If it fails, {saved}"
    if run.hosts.save_asked_at >= one.at:
        return f"The ranks save a checkpoint now; until then {saved}"
    return f"The program saves when it wants to; {saved}"


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
    action = f"a spare takes the place of {verdict.culprit.host} after the next step"
    incident = incident_of(run, Findings(opened_at=verdict.at), verdict, action)
    # The ranks still train. They keep or save the step that they stop after.
    return replace(incident, saved=incident.step, remedy="replace", rule=rule)


def _with_same(run: Run, one: HostWarned) -> int:
    """Hosts with the same problem, if they are too many for a problem of each. They are of the
    attempt, or warned at about the same time: a room stays warm if some hosts or agents are lost.
    """
    if one.problem not in SHARED:
        return 0
    placed = set(run.attempt.placement)
    there = [other for other in run.hosts.warned if other.host in placed]
    near = [
        other
        for other in (*run.hosts.warned, *run.hosts.warned_before)
        if abs(other.at - one.at) <= TOGETHER_S
    ]
    alike = {other.host for other in (*there, *near) if other.problem == one.problem}
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
