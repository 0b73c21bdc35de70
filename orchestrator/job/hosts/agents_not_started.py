"""Hosts on which the scheduler cannot start an agent: an interpreter or a library is missing.

Each is an incident as soon as that is known, and the job does not wait for it. If most hosts are
concerned, the job ends without a culprit: what is missing is missing everywhere.
"""

from msgspec.structs import replace

from orchestrator.contract.messages.events import HostUnavailable
from orchestrator.job.failures.incident_records import left_out
from orchestrator.job.failures.policy import BEFORE_FIX
from orchestrator.job.host_state import HostState
from orchestrator.job.state import Run, hosts_given, with_host

FIX = (
    "every host must have ndctl's interpreter, its libraries and the run directory at the paths of"
    " the submit host"
)


def noted(run: Run, event: HostUnavailable) -> Run:
    """While the job waits, the next tick decides: the scheduler may name more hosts in the same
    moment."""
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
    """Why the job ends, if most hosts cannot start an agent; otherwise empty."""
    given, unable = hosts_given(run), _unable(run)
    if 2 * len(unable) <= len(given):
        return ""
    host = unable[0]
    return (
        f"no agent can start on {len(unable)} of {len(given)} hosts, too many to exclude them; on"
        f" {host.name}: {host.unfit}{BEFORE_FIX}{FIX}; then resume with"
        " `ndctl submit SPEC --resume`"
    )


def with_incidents(run: Run, at: float) -> Run:
    """Adds an incident for each such host that has none yet."""
    for host in _unable(run):
        if not host.checked:
            run = left_out(
                run,
                at,
                host.name,
                host.unfit,
                cause=f"no agent can start on {host.name}: {host.unfit}",
                advice=f"check the mounts of {host.name}: {FIX}",
            )
            run = with_host(run, replace(host, checked=True))
    return run


def _unable(run: Run) -> list[HostState]:
    return [host for host in run.hosts.by_name.values() if not host.incarnation and host.unfit]
