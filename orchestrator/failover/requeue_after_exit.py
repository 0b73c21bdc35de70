"""What the script of an allocation does when no agent is left in it, and nobody has ended the job.

As a rule somebody has: the leader, or agents that lost it, ask the scheduler before they go. Where
all of them were killed the allocation would end with them, and the job would not go on.
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
    backend_named: Callable[[str], AllocationBackend],
    clock: Clock,
) -> int:
    """Have the job queued again, if that is for nobody else to do; the allocation's exit code.

    `code`: of what started the agents.
    """
    why = retry_io(partial(superseded, run_dir, term, backend_named, clock), UNREADABLE, clock)
    if why is not None:
        log.info("the job is not queued again: %s", why)
        return code
    run = retry_io(partial(replay, run_dir), UNREADABLE, clock)
    if run.ending is not None:
        return exit_codes.FAILED if run.ending == "FAILED" else exit_codes.OK
    if run.job is None or run.interruption.cancelled_by is not None:
        return code
    most = run.job.max_allocations or UNLED
    if (vain := restarts_in_vain(run, term.restarts)) >= most:
        log.error(
            "nothing came of %s allocations in a row: the job is not queued again; %s say why, and"
            " then resume with `ndctl submit SPEC --resume`",
            vain,
            run_dir.agent_log("*"),
        )
        return code
    why = f"no agent is left, and what started them ended with code {code}"
    # A leader that had decided on it has said which hosts are left out; else nothing is known
    # against any of them.
    without = run.scheduler.left_out if was_given_back(run, term) else ()
    asking = Asking(backend_named, clock)
    while not asyncio.run(asking.settles(run, without, why)):
        clock.sleep(RETRY_S)
    return code


def restarts_in_vain(run: Run, restarts: int) -> int:
    """Allocations up to this one, the scheduler's `restarts`th again, without a new checkpoint."""
    known = -1 if run.scheduler.allocation is None else run.scheduler.allocation.restarts
    return run.history.allocations + restarts - known
