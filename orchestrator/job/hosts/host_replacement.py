"""Hosts that are no good are sent away, for others to come in their place; some come back.

One that came back is sent away again later and later: where a scheduler gives it back there is no
better one just now, and to take it away at once again would only keep the cluster busy.
"""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.contract.messages.actions import ReplaceAgent
from orchestrator.job.host_state import Away, HostState
from orchestrator.job.hosts.host_pool import no_good
from orchestrator.job.state import Run

AGAIN_S = 30.0
"""Before a host that came back is sent away again; twice as long each time after that."""


def in_the_way(run: Run, at: float) -> list[HostState]:
    """Hosts to send away now: they keep others from coming in their place."""
    return [host for host in _unwanted(run) if at >= _due_at(run, host)]


def make_room(
    run: Run, away: Sequence[HostState], at: float, reason: str
) -> tuple[Run, tuple[ReplaceAgent, ...]]:
    """Send hosts away; of those that came back, due or not, is told who looks."""
    back = [_came_back(run, host) for host in _unwanted(run) if host.name in run.hosts.away]
    if back:
        reason = "; ".join((reason, *back))
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
    return f"{host.name} is not used ({why}), was sent away {often}, and came back"


def send_away(run: Run, hosts: Sequence[HostState], at: float) -> Run:
    """It is written down that they were."""
    if not hosts:
        return run  # the very same: what changes nothing is not journalled
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
        if host.alive and not host.going and not host.sent_away and no_good(run, host)
    ]


def _due_at(run: Run, host: HostState) -> float:
    before = run.hosts.away.get(host.name)
    return before.last_at + AGAIN_S * 2 ** (before.times - 1) if before else 0.0


def _times(run: Run, host: str) -> int:
    return run.hosts.away[host].times if host in run.hosts.away else 0
