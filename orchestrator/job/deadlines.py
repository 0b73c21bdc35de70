"""Time passes: what follows in each stage that waits for something."""

from orchestrator.contract.messages.events import Tick
from orchestrator.job.attempt_end import give_up_stuck_hosts, recover, stop_failed
from orchestrator.job.hosts import scale_up
from orchestrator.job.hosts.agent_membership import outage_is_over
from orchestrator.job.hosts.warned_hosts import replace_warned
from orchestrator.job.leave import Result
from orchestrator.job.start import checked, start_if_ready, wait
from orchestrator.job.state import Run, is_overdue


def waiting(run: Run, event: Tick) -> Result:
    # A new leader: the hosts that register first are not the best ones to choose.
    if run.interruption.findings is None and event.at < run.hosts.settle_until:
        return run, ()
    return _after_outage(run, event.at)


def holding(run: Run, event: Tick) -> Result:
    if not is_overdue(run, event.at):
        return run, ()
    return _after_outage(wait(run, event.at, run.stage.reason), event.at)


def _after_outage(run: Run, at: float) -> Result:
    """Start if enough hosts are there. Hosts that were lost while no rank ran come first: what that
    means is decided before."""
    if run.interruption.findings is not None and outage_is_over(run, at):
        return recover(run, run.interruption.findings, at)
    return start_if_ready(run, at)


def checking(run: Run, event: Tick) -> Result:
    """A check that has no result in time has found nothing."""
    return checked(run, event.at, {}) if is_overdue(run, event.at) else (run, ())


def running(run: Run, event: Tick) -> Result:
    after, actions = replace_warned(run, event.at)
    return (after, actions) if actions else scale_up.ask(run, event.at)


def diagnosing(run: Run, event: Tick) -> Result:
    """The evidence of some hosts did not come in time: stop the ranks without it."""
    if not is_overdue(run, event.at):
        return run, ()
    return stop_failed(run, event.at, run.stage.reason)


def stopping(run: Run, event: Tick) -> Result:
    return give_up_stuck_hosts(run, event.at) if is_overdue(run, event.at) else (run, ())
