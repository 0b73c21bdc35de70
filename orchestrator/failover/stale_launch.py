"""Checks whether this host belongs to a submission that is not the job's current one.

A scheduler may process a submission late, when the job was already submitted again or has another
allocation for the same launch. An agent of the stale one changes nothing: neither the fence, which
would end the ranks of the other, nor the journal.
"""

import logging
from collections.abc import Callable

from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import Unanswered
from orchestrator.failover.ask_scheduler import RETRY_S
from orchestrator.journal.current_launch import current_launch
from orchestrator.seams import AllocationBackend, Clock

log = logging.getLogger(__name__)


def superseded(
    run_dir: RunDir, term: Term, backend_named: Callable[[str], AllocationBackend], clock: Clock
) -> str | None:
    """Why this agent must not start; None if it may."""
    counts = current_launch(run_dir)
    # No launch is recorded yet, so none can have replaced this one.
    if counts is None:
        return None
    if counts.launch.launch != term.launch:
        return later_launch(counts.launch, term)
    while True:
        try:
            fixed_hosts = backend_named(counts.backend).fixed_hosts
            rival = None if fixed_hosts is None else fixed_hosts.rival(counts.launch)
        # Starting without an answer could run the job twice, so ask until there is one.
        except Unanswered as exc:
            log.error("failed to ask whether the job has other hosts, retrying: %s", exc)
            clock.sleep(RETRY_S)
        else:
            return None if rival is None else f"the job has other hosts: {rival}"


def later_launch(launch: LaunchPlan, term: Term) -> str:
    return (
        f"these hosts are of launch {term.launch} of {launch.job}, which was submitted again:"
        f" launch {launch.launch} is the current one"
    )
