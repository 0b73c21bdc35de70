"""Polls the scheduler for the state of hosts: how often, about which hosts, and what is news."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from orchestrator.contract.messages.events import HostFlagged, HostOpened
from orchestrator.job.stage import LIVE, Stopping, Waiting
from orchestrator.job.state import Run, has_successors, hosts_given

NOTICES_S = 15.0
"""Seconds between two questions about the hosts."""
UNHEARD_S = 3.0
"""The same while the job waits for hosts from which no agent has come: perhaps none can. Less than
a new leader waits for spares, so that a spare that cannot be used is known before ranks start."""
HURRY_S = 2.0
"""The same while the job waits for a lost agent: that its host is down settles it."""


class Notice(Protocol):
    """The fields of `seams.HostNotice`."""

    @property
    def host(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def lets_finish(self) -> bool: ...
    @property
    def down(self) -> bool: ...


def asked_about(run: Run) -> tuple[str, ...]:
    """The hosts of the job, and drained hosts that it left: the scheduler may open these."""
    return tuple(dict.fromkeys((*hosts_given(run), *run.hosts.shut)))


def heard(found: Sequence[Notice]) -> set[str]:
    """Hosts whose notice is final as long as it stays. A host that only drains may become final."""
    return {one.host for one in found if not one.lets_finish}


def next_question_s(run: Run) -> float:
    """Seconds until the next question to the scheduler. A scheduler with successors replaces lost
    hosts by itself, so there is no hurry."""
    waits = isinstance(run.stage, Stopping | Waiting) and not has_successors(run)
    gone = any(
        not host.alive and host.name not in run.hosts.exclude for host in run.hosts.by_name.values()
    )
    if waits and gone:
        return HURRY_S
    return UNHEARD_S if isinstance(run.stage, Waiting) and unheard(run) else NOTICES_S


def unheard(run: Run) -> tuple[str, ...]:
    """Hosts of the allocation from which no agent has ever come.

    While ranks run these are spares. A spare that cannot be used must be known before it is needed.
    """
    if (
        not isinstance(run.stage, (Waiting, *LIVE))
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
    """Events for what has changed.

    Args:
        asked: hosts that the question was about.
        told: hosts whose notice is known already.
        found: all notices of the scheduler on these hosts.
    """
    now: Mapping[str, Notice] = {one.host: one for one in found}
    flagged = [
        HostFlagged(
            at=at,
            host=host,
            state=one.state,
            reason=one.reason,
            lets_finish=one.lets_finish,
            down=one.down,
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
    # A drained host that the job leaves at its next checkpoint may be taken sooner.
    stays = (
        one.host in run.hosts.shut
        and one.host in run.attempt.placement
        and isinstance(run.stage, LIVE)
    )
    return one.host not in run.hosts.exclude or stays
