"""Which hosts a job has, which of them can carry ranks, and which may still come."""

from collections import Counter
from collections.abc import Mapping

from orchestrator.job.host_state import HostState
from orchestrator.job.stage import Waiting
from orchestrator.job.state import Run
from orchestrator.plan.placement.place import room_for

REPLACE_S = 30.0
"""After an agent was lost, for another one of its host to register."""
MOST_DOUBLINGS = 6
"""Of the wait for successors: at ten minutes, ten hours and 40 minutes are the longest."""


def switches_of(run: Run) -> Mapping[str, tuple[str, ...]]:
    """Above each host, as the scheduler says that granted it, or else as planned."""
    return run.scheduler.allocation.switches if run.scheduler.allocation else run.plan.switches


def hosts_given(run: Run) -> tuple[str, ...]:
    """All hosts that the job has, spares included, whether their agents have come or not."""
    assert run.job is not None
    if run.scheduler.allocation is None:
        return run.job.launch.hosts
    if run.scheduler.allocation.successor_s is None:
        return run.scheduler.allocation.hosts
    return tuple(dict.fromkeys((*run.scheduler.allocation.hosts, *run.hosts.by_name)))


def addresses(run: Run) -> Mapping[str, str]:
    """Address -> its host; none that several hosts have, as on one machine."""
    known = [(host.address, host.name) for host in run.hosts.by_name.values() if host.address]
    many = Counter(address for address, _ in known)
    return {address: name for address, name in known if many[address] == 1}


def usable(run: Run) -> list[str]:
    """Hosts that can carry their part of the plan."""
    # Asked once for each of thousands of hosts that register, about all of them: no call inside.
    need, exclude = run.plan.ranks_per_host, run.hosts.exclude
    return [
        name
        for name, host in run.hosts.by_name.items()
        if host.alive
        and not host.going
        and host.devices >= need
        and not host.unfit
        and name not in exclude
    ]


def no_good(run: Run, host: HostState) -> bool:
    return bool(host.unfit) or host.name in run.hosts.exclude


def has_successors(run: Run) -> bool:
    """Whether the scheduler replaces hosts that are lost while the others wait."""
    return run.scheduler.allocation is not None and run.scheduler.allocation.successor_s is not None


def successor_may_come(run: Run, at: float) -> bool:
    """In the place of a host that was lost before the job began to wait."""
    until = gives_back_at(run)
    return until is not None and at < until


def gives_back_at(run: Run) -> float | None:
    """When hosts that have successors have been waited for long enough.

    Twice as long each time that all were given back and too few came again: it changed nothing,
    and each time costs the hosts that are there, and lines in the journal.
    """
    patience_s = run.scheduler.allocation.successor_s if run.scheduler.allocation else None
    if patience_s is None:
        return None
    return run.stage.since + patience_s * 2.0 ** min(run.scheduler.given_back, MOST_DOUBLINGS)


def is_short(run: Run) -> bool:
    """It waits for successors of hosts, without which it cannot go on."""
    if not isinstance(run.stage, Waiting) or not has_successors(run):
        return False
    return room_for(run.plan, usable(run), switches_of(run)) < len(run.plan.hosts)


def coming(run: Run, at: float) -> list[str]:
    """Hosts without an agent that may have one soon."""
    known, exclude = run.hosts.by_name, run.hosts.exclude
    return [  # no call for hosts that are there or never came, nearly all of them: see `usable`
        name
        for name in hosts_given(run)
        if ((host := known.get(name)) is None or (not host.alive and _may_come(host, at)))
        and name not in exclude
    ]


def _may_come(gone: HostState, at: float) -> bool:
    return not gone.unfit and (gone.back or at < gone.lost_at + REPLACE_S)


def who_came(run: Run, fit: list[str]) -> str:
    assert run.job is not None
    plan, limit = run.plan, run.job.init_timeout
    missing = {
        host.name: _against(run, host)
        for host in run.hosts.by_name.values()
        if host.name not in fit
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
    if host.name in run.hosts.exclude:
        return run.hosts.exclude[host.name]
    if host.unfit:
        return host.unfit
    need = run.plan.ranks_per_host
    return f"fewer than {need} devices" if host.alive and host.devices < need else ""
