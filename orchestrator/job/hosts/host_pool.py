"""Whether the hosts of a job are enough, why some are not used, and how long to wait for others."""

from orchestrator.job.host_state import HostState
from orchestrator.job.stage import Waiting
from orchestrator.job.state import Run, has_successors, switches_of, usable
from orchestrator.plan.placement.place import room_for

MOST_DOUBLINGS = 6
"""Doublings of the wait for successors: 10 minutes become at most 10 hours 40 minutes."""


def preferred(run: Run, there: list[str]) -> list[str]:
    """The hosts `there` without those that warn, if there are enough others."""
    warned = {one.host for one in run.hosts.warned}
    others = [host for host in there if host not in warned]
    enough = room_for(run.plan, others, switches_of(run)) >= len(run.plan.hosts)
    return others if enough else there


def must_not_run(run: Run, host: HostState) -> bool:
    """The host failed a check, or is excluded."""
    return bool(host.unfit) or host.name in run.hosts.exclude


def successor_may_come(run: Run, at: float) -> bool:
    """It is still worth waiting for a host in the place of one that was lost."""
    until = gives_back_at(run)
    return until is not None and at < until


def gives_back_at(run: Run) -> float | None:
    """The time at which the wait for successors ends and all hosts are given back; None where the
    scheduler replaces no hosts.

    The wait doubles each time that all hosts were given back and again too few came: giving them
    back did not help, and it costs the hosts that are there.
    """
    patience_s = run.scheduler.allocation.successor_s if run.scheduler.allocation else None
    if patience_s is None:
        return None
    return run.stage.since + patience_s * 2.0 ** min(run.scheduler.given_back, MOST_DOUBLINGS)


def is_short(run: Run) -> bool:
    """The job waits for successors, because it has too few hosts to start."""
    if not isinstance(run.stage, Waiting) or not has_successors(run):
        return False
    return room_for(run.plan, usable(run), switches_of(run)) < len(run.plan.hosts)


def who_came(run: Run, fit: list[str]) -> str:
    """How many hosts registered in time, and why the others are not used, as a message."""
    assert run.job is not None
    plan, limit = run.plan, run.job.init_timeout
    missing = {
        host.name: _why_unused(run, host)
        for host in run.hosts.by_name.values()
        if host.name not in fit
    }
    words = "".join(f"; {name}: {why}" for name, why in sorted(missing.items()) if why)
    if len(fit) >= len(plan.hosts):
        room = room_for(plan, fit, switches_of(run))
        words += f"; only {room} of them have room for tp groups that stay in an NVLink block"
    return (
        f"{len(fit)} of {len(plan.hosts)} hosts registered within {limit:.0f} s"
        f" ({', '.join(sorted(fit)) or 'none'}){words}; see logs/agent-<host>.log of the others"
    )


def _why_unused(run: Run, host: HostState) -> str:
    if host.name in run.hosts.exclude:
        return run.hosts.exclude[host.name]
    if host.unfit:
        return host.unfit
    need = run.plan.ranks_per_host
    return f"fewer than {need} devices" if host.alive and host.devices < need else ""
