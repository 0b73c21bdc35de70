"""The hosts of a job and the health of each of their ranks at present."""

from collections.abc import Iterable, Mapping

from orchestrator.contract.messages.events import StragglerFound
from orchestrator.dashboard.job_view.health import Health, HostRow
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob
from orchestrator.job.stage import ENDED, IDLE, Queued, State, Submitted
from orchestrator.job.state import Run


def host_rows(seen: ReplayedJob, state: State) -> Iterable[HostRow]:
    run, each = seen.run, seen.run.plan.ranks_per_host
    slow = set() if state in ENDED else {found.rank for found in run.attempt.stragglers.values()}
    # The ranks of an incident ran on hosts of an earlier allocation.
    over = state == "SUCCEEDED" or seen.granted
    blamed = set() if over else set(_culprit_ranks(run))
    names = seen.hosts
    lost = {node for node, host in enumerate(names) if host in seen.lost}
    exited = any(word == "dead" and rank // each not in lost for rank, word in seen.health.items())
    for node, host in enumerate(names):
        rest = _rest(seen, state, host)
        told: Mapping[int, Health] = seen.health
        if state == "SUCCEEDED" or host in seen.lost:
            told = {}
        numbers = range(node * each, (node + 1) * each)
        ranks = [_health(told.get(rank, rest), rest) for rank in numbers]
        # All ranks of a lost host are dead. They need a mark only if ranks of other hosts, which
        # lost their peers, exited too.
        if (slow or blamed) and (exited or node not in lost):
            marked = zip(numbers, ranks, strict=True)
            ranks = [_mark(health, rank in slow, rank in blamed) for rank, health in marked]
        yield HostRow(
            name=host,
            first_rank=node * each,
            ranks=tuple(ranks),
            agent_lost=host in seen.lost and state != "SUCCEEDED",
        )


def _culprit_ranks(run: Run) -> Iterable[int]:
    """Ranks of the current attempt that the present incident names; all ranks of a named host."""
    if run.interruption.findings is not None and run.interruption.findings.judged is not None:
        return run.interruption.findings.judged.ranks
    last = run.history.incidents[-1] if run.history.incidents else None
    if last is None or last.attempt != run.attempt.number or last.recovered_after_s is not None:
        return ()
    if last.culprit.rank is not None:
        return (last.culprit.rank,)
    if last.culprit.host not in run.attempt.placement:
        return ()
    first = run.attempt.placement.index(last.culprit.host) * run.plan.ranks_per_host
    return range(first, first + run.plan.ranks_per_host)


def _mark(health: Health, slow: bool, blamed: bool) -> Health:
    """A straggler still sends heartbeats, so a worse health hides the mark."""
    if blamed:
        return "culprit"
    return "straggler" if slow and health in ("ok", "slow") else health


def _health(told: Health, rest: Health) -> Health:
    """The health to show: a stopped or starting rank has no heartbeat health."""
    return rest if rest in ("stopped", "done", "starting") and told != "dead" else told


def _rest(seen: ReplayedJob, state: State, host: str) -> Health:
    """The health of the ranks of `host` that have no reported health."""
    run = seen.run
    if state == "SUCCEEDED":
        return "done"
    if host in seen.lost:
        return "dead"
    if state in ENDED:
        return "stopped"
    if isinstance(run.stage, (Submitted, *IDLE, Queued)):
        queued = state == "PENDING" and isinstance(run.stage, Submitted)
        return "stopped" if run.attempt.number or queued else "starting"
    if host in run.attempt.done:
        return "done" if run.attempt.done[host] else "stopped"
    return "ok" if seen.started or run.attempt.runs else "starting"


def stragglers(seen: ReplayedJob, state: State) -> tuple[StragglerFound, ...]:
    """Without those whose ranks have stopped."""
    found = seen.run.attempt.stragglers.values()
    present = (one for one in found if _rest(seen, state, one.host) == "ok")
    return tuple(sorted(present, key=lambda one: one.peers_s - one.own_s))


def spares(seen: ReplayedJob) -> tuple[str, ...]:
    """Registered hosts without ranks. Before the first attempt there are none."""
    run = seen.run
    if not run.attempt.placement or run.state in ENDED:
        return ()
    placed = frozenset(seen.hosts)
    return tuple(
        host.name for host in run.hosts.by_name.values() if host.alive and host.name not in placed
    )
