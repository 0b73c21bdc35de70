"""A host whose agent was lost has shown that it works: it is no culprit.

A host without power or network closes no connection. A host that reboots in order does, but its
next agent finds another boot. So a host works if it closed the connection of its agent, and the
next agent starts there in the same boot: then only the process of the agent has ended. An agent
that a signal stops is silent, but its connection stays open. Its successor finds it, and kills it.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from orchestrator.contract.messages.events import AgentRegistered
from orchestrator.contract.spec.failures import Reading
from orchestrator.diagnosis.cause.exits import class_notes
from orchestrator.diagnosis.cause.host_verdicts import AGENT_LOST, HOST_LOST
from orchestrator.diagnosis.cause.verdict import NOBODY, Evidence, Verdict
from orchestrator.diagnosis.classes import FailureSigns, classify, reading_of
from orchestrator.job.host_state import HostState
from orchestrator.job.incident import Incident
from orchestrator.job.state import Run

SAME_S = 1e-3
"""Tolerance for one time that is computed in two ways."""

ENDED = "its next agent started without a reboot"
STOPPED = "its next agent found the former one stopped by a signal (such as SIGSTOP) and killed it"
"""What shows that a host whose agent was lost is no culprit."""


def is_same_boot(known: HostState, boot: str) -> bool:
    """Whether the host has not booted since its last agent registered; false if unknown."""
    return bool(boot) and known.boot == boot


def why_it_works(known: HostState, event: AgentRegistered) -> str:
    """What shows, with its next agent, that only the former agent of the host was lost; empty:
    nothing does."""
    if not is_same_boot(known, event.boot):
        return ""
    if event.former_stopped:
        return STOPPED
    return ENDED if known.closed else ""


def acquitted(run: Run, host: HostState) -> Run:
    """The incident of the last loss of `host`, which works, has no culprit any more."""
    incidents = tuple(
        _of_its_agent(run, one, host) if _is_of(host, one) else one for one in run.history.incidents
    )
    return replace(run, history=replace(run.history, incidents=incidents))


def without_blame(run: Run, verdict: Verdict) -> Verdict:
    """The verdict on a lost host, whose next agent may have come before the verdict."""
    host = run.hosts.by_name.get(verdict.culprit.host or "")
    if host is None or not (host.works and _is_of(host, verdict)):
        return verdict
    failure = _class_of_agent(run)
    return replace(
        verdict,
        kind=AGENT_LOST,
        cause=_cause(verdict, host),
        culprit=NOBODY,
        evidence=_evidence(verdict.evidence, failure),
        failure=failure,
    )


def _is_of(host: HostState, found: Incident | Verdict) -> bool:
    """Whether it blames the host for its last loss. A drill ends an agent to rehearse the loss of
    its host, so that stays one."""
    same = abs(found.at + found.detected_after_s - host.lost_at) < SAME_S
    blamed = found.kind == HOST_LOST and found.culprit.host == host.name
    return blamed and same and found.drill is None


def _of_its_agent(run: Run, incident: Incident, host: HostState) -> Incident:
    failure = _class_of_agent(run)
    return replace(
        incident,
        kind=AGENT_LOST,
        cause=_cause(incident, host),
        culprit=NOBODY,
        evidence=_evidence(incident.evidence, failure),
        failure=failure.name,
        scope=failure.scope,
        advice=failure.advice,
    )


def _class_of_agent(run: Run) -> Reading:
    own = run.job.failure_classes if run.job else ()
    found = reading_of(classify(FailureSigns(kind=AGENT_LOST), own), own)
    assert found is not None, "the default rules have a class for each kind"
    return found


def _cause(found: Incident | Verdict, host: HostState) -> str:
    return f"{found.cause}; {host.name} works: {host.works}"


def _evidence(evidence: Evidence, failure: Reading) -> Evidence:
    """The evidence with the present class in place of the one before."""
    kept = tuple(note for note in evidence.notes if not note.startswith("class "))
    return replace(evidence, notes=(*kept, *class_notes(failure)))


def cleared(before: Run, after: Run) -> Iterator[tuple[str, str]]:
    """Hosts that an incident named as the culprit `before` and does not name `after`, and why."""
    old, new = before.history.incidents, after.history.incidents
    if old is new:
        return
    for was, is_now in zip(old, new, strict=False):
        name = was.culprit.host
        if name and is_now.kind == AGENT_LOST and was.kind == HOST_LOST:
            yield name, after.hosts.by_name[name].works
