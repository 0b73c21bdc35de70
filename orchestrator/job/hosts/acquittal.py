"""A host whose agent was lost has shown that it works: it is no culprit.

A host without power or network closes no connection. A host that reboots in order does, but its
next agent finds another boot. So a host works if it closed the connection of its agent, and the
next agent starts there in the same boot: then only the process of the agent has ended.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.cause.host_verdicts import AGENT_LOST, HOST_LOST
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.diagnosis.classes import FailureSigns, classify
from orchestrator.job.host_state import HostState
from orchestrator.job.incident import Incident
from orchestrator.job.state import Run

SAME_S = 1e-3
"""Tolerance for one time that is computed in two ways."""


def is_same_boot(known: HostState, boot: str) -> bool:
    """Whether the host has not booted since its last agent registered; false if unknown."""
    return bool(boot) and known.boot == boot


def acquitted(run: Run, name: str) -> Run:
    """The incident of the host's last loss has no culprit any more, if the host works.

    An incident of a drill stays: the drill ends an agent to rehearse the loss of its host.
    """
    host = run.hosts.by_name.get(name)
    if host is None or not host.works:
        return run

    def blames_it(one: Incident) -> bool:
        same = abs(one.at + one.detected_after_s - host.lost_at) < SAME_S
        return one.kind == HOST_LOST and one.culprit.host == name and same and one.drill is None

    own = run.job.failure_classes if run.job else ()
    incidents = tuple(
        _of_its_agent(one, name, own) if blames_it(one) else one for one in run.history.incidents
    )
    return replace(run, history=replace(run.history, incidents=incidents))


def _of_its_agent(incident: Incident, host: str, own: Sequence[FailureRule]) -> Incident:
    found = classify(FailureSigns(kind=AGENT_LOST), own)
    assert found is not None, "the default rules have a class for each kind"
    return replace(
        incident,
        kind=AGENT_LOST,
        cause=f"{incident.cause}; {host} works: its next agent started in the same boot",
        culprit=NOBODY,
        failure=found.rule.name,
        scope=found.rule.scope,
        advice=found.rule.advice,
    )
