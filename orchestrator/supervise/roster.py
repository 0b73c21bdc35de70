"""Which hosts a job has, which of them can carry ranks, and which may still come."""

from collections.abc import Mapping

from orchestrator.plan.placement.place import room_for
from orchestrator.supervise.state import HostState, Run

REPLACE_S = 30.0
"""After an agent was lost, for another one of its host to register."""


def switches_of(run: Run) -> Mapping[str, tuple[str, ...]]:
    """Above each host, as the scheduler says that granted it, or else as planned."""
    return run.allocation.switches if run.allocation else run.plan.switches


def hosts_given(run: Run) -> tuple[str, ...]:
    """All hosts that the job has, spares included, whether their agents have come or not."""
    assert run.job is not None
    if run.allocation is None:
        return run.job.launch.hosts
    if run.allocation.successor_s is None:
        return run.allocation.hosts
    return tuple(dict.fromkeys((*run.allocation.hosts, *run.hosts)))


def usable(run: Run) -> list[str]:
    """Hosts that can carry their part of the plan."""
    need = run.plan.ranks_per_host
    return [
        host.name
        for host in run.hosts.values()
        if host.alive and not host.going and host.devices >= need and not no_good(run, host)
    ]


def no_good(run: Run, host: HostState) -> bool:
    return bool(host.unfit) or host.name in run.exclude


def has_successors(run: Run) -> bool:
    """Whether the scheduler replaces hosts that are lost while the others wait."""
    return run.allocation is not None and run.allocation.successor_s is not None


def successor_may_come(run: Run, at: float) -> bool:
    """In the place of a host that was lost before the job began to wait."""
    assert run.allocation is not None
    patience_s = run.allocation.successor_s
    return patience_s is not None and at < run.since + patience_s


def coming(run: Run, at: float) -> list[str]:
    """Hosts without an agent that may have one soon."""
    return [
        name
        for name in hosts_given(run)
        if name not in run.exclude and _may_come(run.hosts.get(name), at)
    ]


def _may_come(host: HostState | None, at: float) -> bool:
    if host is None:
        return True  # its agent is starting
    return not host.alive and not host.unfit and (host.back or at < host.lost_at + REPLACE_S)


def who_came(run: Run, fit: list[str]) -> str:
    assert run.job is not None
    plan, limit = run.plan, run.job.init_timeout
    missing = {
        host.name: _against(run, host) for host in run.hosts.values() if host.name not in fit
    }
    words = "".join(f"; {name}: {why}" for name, why in sorted(missing.items()) if why)
    if len(fit) >= len(plan.hosts):
        room = room_for(plan, fit, switches_of(run))
        words += f"; tp groups that stay in an NVLink block find room on {room} of them"
    return (
        f"{len(fit)} of {len(plan.hosts)} hosts registered within {limit:.0f} s"
        f" ({', '.join(sorted(fit)) or 'none'}){words}; see logs/agent-<host>.log of the others"
    )


def _against(run: Run, host: HostState) -> str:
    """Why a host that registered is not used."""
    if host.name in run.exclude:
        return run.exclude[host.name]
    if host.unfit:
        return host.unfit
    need = run.plan.ranks_per_host
    return f"fewer than {need} devices" if host.alive and host.devices < need else ""
