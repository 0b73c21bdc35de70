"""Asks the scheduler to replace hosts that cannot be used. Some of them come back.

A host that came back is replaced again, with a wait that doubles each time. If the scheduler gives
it back, it has no better host just now, and to ask again at once would only keep the cluster busy.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.contract.messages.actions import ReplaceAgent
from orchestrator.job.host_state import Away, HostState
from orchestrator.job.hosts.host_pool import must_not_run
from orchestrator.job.state import Run

AGAIN_S = 30.0
"""Seconds before a host that came back is replaced again. They double each time."""


def in_the_way(run: Run, at: float) -> list[HostState]:
    """Hosts to replace now: they take the place of others."""
    return [host for host in _unwanted(run) if at >= _due_at(run, host)]


def make_room(
    run: Run, away: Sequence[HostState], at: float, reason: str
) -> tuple[Run, tuple[ReplaceAgent, ...]]:
    """Replace the hosts in `away`. The stage's reason names those that came back, due or not."""
    back = [_came_back(run, host) for host in _unwanted(run) if host.name in run.hosts.away]
    if back:
        reason = "; ".join((reason, *back))
        # Else the same object: a tick that changes nothing is not journalled.
        if reason != run.stage.reason:
            run = replace(run, stage=replace(run.stage, reason=reason))
    orders = tuple(
        ReplaceAgent(
            host=host.name,
            reason=reason,
            elsewhere=True,
            shut=host.name in run.hosts.shut and not host.unfit,
        )
        for host in away
    )
    return send_away(run, away, at), orders


def _came_back(run: Run, host: HostState) -> str:
    times = run.hosts.away[host.name].times
    often = f"{times} times" if times > 1 else "once"
    why = host.unfit or run.hosts.exclude.get(host.name, "")
    return f"{host.name} is not used ({why}), was replaced {often}, and came back"


def send_away(run: Run, hosts: Sequence[HostState], at: float) -> Run:
    """Records that these hosts are being replaced."""
    if not hosts:
        return run  # the same object: an event that changes nothing is not journalled
    gone = {host.name: replace(host, sent_away=True) for host in hosts}
    away = {name: Away(times=_times(run, name) + 1, last_at=at) for name in gone}
    return replace(
        run,
        hosts=replace(
            run.hosts, by_name={**run.hosts.by_name, **gone}, away={**run.hosts.away, **away}
        ),
    )


def _unwanted(run: Run) -> list[HostState]:
    return [
        host
        for host in run.hosts.by_name.values()
        if host.alive and not host.going and not host.sent_away and must_not_run(run, host)
    ]


def _due_at(run: Run, host: HostState) -> float:
    before = run.hosts.away.get(host.name)
    return before.last_at + AGAIN_S * 2 ** (before.times - 1) if before else 0.0


def _times(run: Run, host: str) -> int:
    return run.hosts.away[host].times if host in run.hosts.away else 0
