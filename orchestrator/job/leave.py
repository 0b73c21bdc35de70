"""The job leaves its hosts: it ends, or goes back to the scheduler's queue."""

from msgspec.structs import replace

from orchestrator.contract.messages.actions import Action, Ending, EndJob, Requeue
from orchestrator.contract.messages.events import RunDirLost
from orchestrator.job.failures import no_progress
from orchestrator.job.stage import Ended, Queued
from orchestrator.job.state import Run, has_successors, with_findings

Result = tuple[Run, tuple[Action, ...]]


def end(run: Run, at: float, ending: Ending, reason: str) -> Result:
    stage = Ended(since=at, reason=reason, ending=ending)
    return with_findings(replace(run, stage=stage), None), (EndJob(state=ending, reason=reason),)


def run_dir_lost(run: Run, event: RunDirLost) -> Result:
    """Agents leave at the end of the job, and their ranks with them."""
    return end(run, event.at, "FAILED", event.why)


def requeue(run: Run, at: float, reason: str, *, whole: bool = True) -> Result:
    """Give the allocation back and queue for another one, without the hosts that failed.

    Args:
        whole: see `Requeue.whole`.
    """
    # Three allocations in a row without a new checkpoint: another one would end the same way.
    if not has_successors(run) and (why := no_progress.last_one(run, reason)):
        return end(run, at, "FAILED", why)
    # An agent that is gone counts against its host, with two exceptions: agents end with a job that
    # leaves, and a scheduler with successors moves agents between hosts.
    silence_tells = run.interruption.leaving is None and not has_successors(run)
    bad = {
        host.name: host.unfit or "its agent was gone when the job was queued again"
        for host in run.hosts.by_name.values()
        if host.unfit or (silence_tells and not (host.alive or host.back))
    }
    # Hosts that were excluded for one allocation only may be granted again: see `Hosts.carried`.
    carried = () if has_successors(run) else run.hosts.carried
    known = {host: why for host, why in run.hosts.exclude.items() if host not in carried}
    exclude = {**bad, **known}
    # No pod starts on a node that is cordoned, so it needs no exclusion. It may be uncordoned.
    opens = run.hosts.shut if has_successors(run) else ()
    names = tuple(sorted({*exclude} - ({*opens} - {*bad})))
    # The scheduler was asked to leave these out for an earlier reason that no longer holds.
    again = () if has_successors(run) else tuple(sorted({*run.scheduler.left_out} - {*exclude}))
    after = replace(
        run,
        stage=Queued(since=at, reason=reason),
        interruption=replace(run.interruption, findings=None, leaving=None),
        hosts=replace(run.hosts, exclude=exclude),
        scheduler=replace(run.scheduler, left_out=names),
        plans=replace(run.plans, replanning=None),
    )
    return after, (Requeue(exclude=names, reason=reason, whole=whole, again=again),)
