"""What agents do whose leader is gone.

Where a job has its hosts for as long as it runs, they have the scheduler queue it again, without
the leader's host; where the scheduler replaces hosts that are lost, they see to it that it does.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from orchestrator.agent.agent import Agent
from orchestrator.agent.whereabouts import Term
from orchestrator.contract.fence import read_fence
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.locks import try_lock
from orchestrator.seams import Backend, Clock
from orchestrator.supervise.log import read
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import fold

log = logging.getLogger(__name__)

RETRY_S = 5.0
REFUSED_S = 600.0
"""How long a scheduler is asked that answers and refuses; one that does not answer is asked for
as long as this host is left to us."""
TURN_S = 400.0
"""For the one whose turn it is: longer than Slurm takes to give up a node. A file server may keep
the lock of a host that died in its turn."""

SEE_S = 30.0
"""Longer than a leader whose host lives takes to come back; and how long each host waits for the
one before it to have done something about it."""


def queue_again(
    run_dir: RunDir, term: Term, backend_named: Callable[[str], Backend], clock: Clock
) -> None:
    """Ask until the scheduler has taken the job back, or until it is not ours any more.

    Nobody else would: the allocation would stand idle to its end. Every agent that is left comes
    here, and they ask one after the other: a thousand at once are more than a scheduler bears.
    """
    begun, refused_at = clock.monotonic(), None
    fence = read_fence(run_dir.fence)
    former = None if fence is None else fence.leader
    with run_dir.requeue_lock.open("a") as turn:
        while (run := _still_ours(run_dir, term, former)) is not None:
            now = clock.monotonic()
            if not try_lock(turn.fileno()) and now - begun < TURN_S:
                clock.sleep(RETRY_S)
                continue
            assert run.job is not None
            try:
                backend_named(run.job.backend).requeue(run.job.launch, (run.leader,))
            except Ended as exc:
                log.info("the job is not queued again: %s", exc)
                return
            except Unanswered as exc:
                log.error("the job is not queued again yet, asking again: %s", exc)
                refused_at = None
            except BackendError as exc:
                refused_at = now if refused_at is None else refused_at
                if now - refused_at >= REFUSED_S:
                    log.error(
                        "the job could not be queued again, and its hosts stand idle: `ndctl cancel"
                        " %s` gives them back, and `ndctl submit SPEC --resume` goes on: %s",
                        run.job.launch.job,
                        exc,
                    )
                    return
                log.error("the scheduler does not take the job back, asking again: %s", exc)
            else:
                log.info("the job is queued again, without %s, whose leader is gone", run.leader)
                return
            clock.sleep(RETRY_S)


def _still_ours(run_dir: RunDir, term: Term, former: str | None) -> Run | None:
    """The job, if nobody has ended it or leads it again."""
    run = fold(entry.event for entry in read(run_dir.journal))
    now = read_fence(run_dir.fence)
    if run.job is None or run.ending is not None:
        log.info("the job is over: it is not queued again")
        return None
    if run.job.launch.launch != term.launch or (now is not None and now.leader != former):
        log.info("another leader has the job: it is not queued again")
        return None
    return run


async def see_to_the_leader(
    agent: Agent, turn: int, backend_named: Callable[[str], Backend]
) -> None:
    """While no leader is heard, ask now and then for another agent in the place of the last one.

    A scheduler does that by itself unless the leader's host does not answer; hosts take turns, for
    the first one that lives to be enough.
    """
    run_dir, timeout = agent.config.place.run_dir, agent.config.agent_timeout
    while True:
        await asyncio.sleep(SEE_S / 3)
        if agent.silent_for() < timeout + SEE_S * turn:
            continue
        run = fold(entry.event for entry in await asyncio.to_thread(read, run_dir.journal))
        if run.job is None or run.ending is not None or not run.leader:
            continue
        backend = backend_named(run.job.backend)
        try:
            silent_s = agent.silent_for()
            replaced = partial(backend.replace, run.job.launch, run.leader, silent_s=silent_s)
            await asyncio.to_thread(replaced)
        except BackendError as exc:
            log.error("whether %s can be replaced is not known: %s", run.leader, exc)
        await asyncio.sleep(SEE_S)
