"""Requeues the job from the allocation's script, if all agents are gone but the job has not ended.

Normally the leader, or an agent that lost it, asks the scheduler before it exits. If all of them
were killed, the allocation would end and the job would stop.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.failover.after_leader import UNLED, was_given_back
from orchestrator.failover.ask_scheduler import RETRY_S, Asking
from orchestrator.failover.journal_watch import UNREADABLE
from orchestrator.failover.stale_launch import superseded
from orchestrator.job.state import Run
from orchestrator.journal.snapshot import replay
from orchestrator.posix.retry_io import retry_io
from orchestrator.seams import AllocationBackend, Clock

log = logging.getLogger(__name__)


def see_to_the_job(
    run_dir: RunDir,
    term: Term,
    code: int,
    said: str,
    backend_named: Callable[[str], AllocationBackend],
    clock: Clock,
) -> int:
    """Requeue the job, unless another process does it or the job is over. Returns the exit code of
    the allocation.

    Args:
        code: exit code of the command that started the agents (`srun`).
        said: its last errors, as the end of a sentence; empty if they are unknown.
    """
    why = retry_io(partial(superseded, run_dir, term, backend_named, clock), UNREADABLE, clock)
    if why is not None:
        log.info("the job is not queued again: %s", why)
        return code
    run = retry_io(partial(replay, run_dir), UNREADABLE, clock)
    # A leader has ended the job, so the allocation ends with the result of the job, not with the
    # code of `srun`.
    if run.ending is not None:
        return exit_codes.FAILED if run.ending == "FAILED" else exit_codes.OK
    # A person has cancelled the job, but no leader was left to end it.
    if run.job is None or run.interruption.cancelled_by is not None:
        return code
    most = run.job.max_allocations or UNLED
    # A job that fails in each allocation before it saves would be requeued without end.
    if (vain := restarts_in_vain(run, term.restarts)) >= most:
        log.error(
            "no new checkpoint in %s allocations in a row, so the job is not queued again; the"
            " command that started the agents ended with exit code %s%s; fix the cause, which"
            " may also be in %s, then resume with `ndctl submit SPEC --resume`",
            vain,
            code,
            said,
            run_dir.agent_log("*"),
        )
        return code
    why = f"no agent is left, and the command that started them ended with exit code {code}{said}"
    # If the leader had decided to requeue the job, the journal has the hosts to exclude. Otherwise
    # no host is known to be bad.
    without = run.scheduler.left_out if was_given_back(run, term) else ()
    asking = Asking(backend_named, clock)
    # This script is the last process of the allocation, so no other one can ask later.
    while not asyncio.run(asking.settles(run, without, why)):
        clock.sleep(RETRY_S)
    return code


def restarts_in_vain(run: Run, restarts: int) -> int:
    """Number of allocations up to this one without a new checkpoint.

    Args:
        restarts: how often the scheduler has restarted the job, from this allocation.
    """
    # The journal counts an allocation only when a leader starts in it. The others are added here.
    known = -1 if run.scheduler.allocation is None else run.scheduler.allocation.restarts
    return run.history.allocations + restarts - known
