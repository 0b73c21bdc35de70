"""What the loss of an agent, a leader, an allocation or a launch means."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from orchestrator.contract.launch import Breakdown
from orchestrator.contract.messages.events import AgentLost, HostStopped
from orchestrator.diagnosis.cause.exits import class_notes
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit, Evidence, Verdict

HOST_LOST = "host-lost"
"""Kind of the loss of an agent whose host was not heard since."""
AGENT_LOST = "agent-lost"
"""Kind of the loss of an agent whose host works."""
MOST_NAMED = 8
"""Hosts that a message names."""


def cut_off(alone: Sequence[HostStopped], silent: Sequence[str] = ()) -> Verdict:
    """The leader and the agents in `alone` lived all the time, but did not hear each other.

    Args:
        silent: hosts that fell silent at the same moment, and are not heard again.
    """
    hosts = sorted({stopped.host for stopped in alone})
    first = min(alone, key=lambda stopped: stopped.at - stopped.alone_s)
    more = f"; {named(sorted({*silent}))} fell silent with them and did not come back"
    return Verdict(
        kind="cut-off",
        cause=f"the leader and {named(hosts)} did not hear each other for {first.alone_s:.1f} s,"
        f" so ranks were stopped; they hear each other again{more if silent else ''}",
        culprit=NOBODY,
        at=first.at - first.alone_s,
        detected_after_s=first.alone_s,
        evidence=Evidence(
            notes=(
                "the leader and these agents were alive all the time; the network between them, or"
                " the link of one of them, failed",
            )
        ),
    )


def host_lost(lost: AgentLost) -> Verdict:
    if lost.cut_off_s:
        # The leader heard neither the host nor the scheduler, so its own link may have failed.
        return Verdict(
            kind="cut-off",
            cause=f"for {lost.cut_off_s:.1f} s the leader heard neither the scheduler nor"
            f" {lost.host}, which did not come back; which of the two hosts was cut off is not"
            " known",
            culprit=NOBODY,
            at=lost.at - lost.silent_s,
            detected_after_s=lost.silent_s,
            evidence=Evidence(notes=(f"{lost.host}: {lost.why}",)),
        )
    return Verdict(
        kind=HOST_LOST,
        cause=f"the agent of {lost.host} is gone: {lost.why}",
        culprit=Culprit(host=lost.host),
        at=lost.at - lost.silent_s,
        detected_after_s=lost.silent_s,
        evidence=Evidence(notes=(f"{lost.why}; last heard {lost.silent_s:.1f} s before",)),
    )


def shared_cause(
    first: Verdict, hosts: tuple[str, ...], switches: Mapping[str, tuple[str, ...]], when: str
) -> Verdict:
    """`first` happened to several `hosts` together, so none of them is the culprit.

    Args:
        when: how far apart, in words.
    """
    above = [switches.get(host, ()) for host in hosts]
    shared = [name for name in above[0] if all(name in others for others in above)]
    under = f", all below {shared[-1]}" if shared else ""
    what = f"had {first.failure.name}" if first.failure is not None else "were lost"
    return replace(
        first,
        kind="hosts-lost" if first.failure is None else first.kind,
        cause=f"{len(hosts)} hosts {what} {when}: {named(hosts)}{under} (first: {first.cause})",
        culprit=NOBODY,
    )


def named(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return ", ".join(hosts[:MOST_NAMED]) + more


def allocation_broke(broke: Breakdown, findings: Findings) -> Verdict:
    """All agents of the allocation are lost, and neither they nor their hosts are the cause."""
    return Verdict(
        kind="allocation-broke",
        cause=broke.what,
        culprit=NOBODY,
        at=broke.at,
        detected_after_s=max(0.0, findings.noticed_at - broke.at),
        evidence=Evidence(),
    )


def leader_lost(last_heard: float, findings: Findings) -> Verdict:
    where = f", and with it the agent of {findings.leader_host}" if findings.leader_host else ""
    how = f": {findings.leader_ended}" if findings.leader_ended else ""
    return Verdict(
        kind="leader-lost",
        cause=f"the leader was lost{where}{how}",
        # A process may end for many reasons: a person or the kernel kills it, or Slurm ends the
        # step because another node failed. So its end blames no host that works.
        culprit=NOBODY if findings.leader_host_works else Culprit(host=findings.leader_host),
        at=last_heard,
        detected_after_s=max(0.0, findings.noticed_at - last_heard),
        evidence=Evidence(
            notes=(
                "it was lost after its last sign of life: a journal line, a step, or a message to"
                " another agent",
            )
        ),
    )


def launch_failed(findings: Findings) -> Verdict:
    """No rank reported an exit, so all that is known is what torchrun said."""
    failed = [stop for stop in findings.stopped if not stop.finished]
    host = failed[0].host if failed else None
    first = next((stop for stop in failed if stop.why), None)
    why = first.why if first else "it ended without a message"
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    said = ": ".join((*lines[:1], *lines[1:][-1:]))  # how it ended, and the last line
    found = first.reading if first else None
    return Verdict(
        kind="launch-failed",
        cause=f"torchrun failed on {host or 'an unknown host'}: {said}",
        culprit=Culprit(host=host),
        at=findings.opened_at,
        detected_after_s=0.0,
        evidence=Evidence(log_tail=tuple(why.splitlines()[-20:]), notes=class_notes(found)),
        failure=found,
    )
