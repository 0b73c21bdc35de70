"""What has changed of that which a scheduler, asked now and then, holds against hosts. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from orchestrator.contract.messages.events import HostFlagged, HostOpened
from orchestrator.job.stage import LIVE, Stopping, Waiting
from orchestrator.job.state import Run, has_successors, hosts_given

NOTICES_S = 15.0
"""Between two questions about the hosts …"""
UNHEARD_S = 5.0
"""… where no agent has come from some of them, and none may be able to, …"""
HURRY_S = 2.0
"""… and where the job waits for agents that are gone: that a host is lost settles it."""


class Notice(Protocol):
    """What `seams.HostNotice` has."""

    @property
    def host(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def lets_finish(self) -> bool: ...


def asked_about(run: Run) -> tuple[str, ...]:
    """Also hosts that nobody of the job is on any more: they may be opened again."""
    return tuple(dict.fromkeys((*hosts_given(run), *run.hosts.shut)))


def heard(found: Sequence[Notice]) -> set[str]:
    """The hosts of which there is no more to be told, as long as it stays like that. Of one that is
    drained there is: that its time has come."""
    return {one.host for one in found if not one.lets_finish}


def next_question_s(run: Run) -> float:
    """How long after one question the scheduler is asked the next. Where it puts others in the
    place of hosts that are lost, its word about a host does not matter so soon."""
    waits = isinstance(run.stage, Stopping | Waiting) and not has_successors(run)
    gone = any(
        not host.alive and host.name not in run.hosts.exclude for host in run.hosts.by_name.values()
    )
    if waits and gone:
        return HURRY_S
    return UNHEARD_S if unheard(run) else NOTICES_S


def unheard(run: Run) -> tuple[str, ...]:
    """Hosts of an allocation that the job waits for, and that no agent has ever come from."""
    if (
        not isinstance(run.stage, Waiting)
        or run.scheduler.allocation is None
        or has_successors(run)
    ):
        return ()
    return tuple(
        host
        for host in run.scheduler.allocation.hosts
        if host not in {**run.hosts.by_name, **run.hosts.exclude}
    )


def news(
    run: Run, asked: Sequence[str], told: Collection[str], found: Sequence[Notice], at: float
) -> tuple[HostFlagged | HostOpened, ...]:
    """`found` is all that the scheduler holds against the hosts `asked` about; of those `told` it
    was said before."""
    now: Mapping[str, Notice] = {one.host: one for one in found}
    flagged = [
        HostFlagged(
            at=at, host=host, state=one.state, reason=one.reason, lets_finish=one.lets_finish
        )
        for host, one in now.items()
        if host not in told and _is_news(run, one)
    ]
    shut = {*run.hosts.shut, *run.hosts.draining}
    opened = [HostOpened(at=at, host=h) for h in asked if h in shut and h not in now]
    return (*flagged, *opened)


def _is_news(run: Run, one: Notice) -> bool:
    if one.lets_finish:
        return one.host not in {**run.hosts.exclude, **run.hosts.draining}
    # One that the job leaves at its next checkpoint may not have so long after all.
    stays = (
        one.host in run.hosts.shut
        and one.host in run.attempt.placement
        and isinstance(run.stage, LIVE)
    )
    return one.host not in run.hosts.exclude or stays
