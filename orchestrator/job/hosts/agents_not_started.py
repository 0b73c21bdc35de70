"""Hosts on which no agent can begin, as a scheduler says: an interpreter or a library is not there.

They are named as soon as that is known, and nobody waits for them. Where it is most hosts of all,
what is missing is missing everywhere, and none of them is to blame. Pure.
"""

from dataclasses import replace

from orchestrator.contract.messages.events import HostUnavailable
from orchestrator.job.failures.incident_records import left_out
from orchestrator.job.host_state import HostState
from orchestrator.job.hosts.host_pool import hosts_given
from orchestrator.job.policy import BEFORE_FIX
from orchestrator.job.state import Run, with_host

FIX = (
    "ndctl's interpreter, what it links to, and the run directory have to be where they were at"
    " submission on every host"
)


def noted(run: Run, event: HostUnavailable) -> Run:
    """Judged at the next tick: others may be said in the same moment."""
    if event.host not in hosts_given(run):
        return run
    host = HostState(
        name=event.host,
        address="",
        devices=0,
        pid=0,
        incarnation="",
        alive=False,
        unfit=event.why,
    )
    return with_host(run, host)


def everywhere(run: Run) -> str:
    """Why the job ends, where most hosts cannot begin an agent; else empty."""
    given, unable = hosts_given(run), _unable(run)
    if 2 * len(unable) <= len(given):
        return ""
    host = unable[0]
    return (
        f"no agent can begin on {len(unable)} of {len(given)} hosts, too many to blame them; on"
        f" {host.name}: {host.unfit}{BEFORE_FIX}{FIX}; then `ndctl submit SPEC --resume` goes on"
    )


def told(run: Run, at: float) -> Run:
    """With the incident of each that has none yet."""
    for host in _unable(run):
        if not host.checked:
            run = left_out(
                run,
                at,
                host.name,
                host.unfit,
                cause=f"no agent can begin on {host.name}: {host.unfit}",
                advice=f"look at what {host.name} mounts: {FIX}",
            )
            run = with_host(run, replace(host, checked=True))
    return run


def _unable(run: Run) -> list[HostState]:
    return [host for host in run.hosts.by_name.values() if not host.incarnation and host.unfit]
