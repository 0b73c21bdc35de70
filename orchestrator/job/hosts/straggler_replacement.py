"""A straggler: a rank that keeps its peers waiting.

It is known while its attempt lasts. If the spec asks for it, a spare replaces its host after the
next checkpoint. Nothing failed, so this costs no restart. This job does not use the host again, and
the host gets half a strike for other jobs, because slowness may pass.
"""

from msgspec.structs import replace

from orchestrator.contract.messages.events import StragglerFound, StragglerGone
from orchestrator.host_strikes import STRAGGLER, Strike
from orchestrator.job.attempt_end import stop
from orchestrator.job.failures.incident_records import drilled
from orchestrator.job.hosts.exclusion import replaced
from orchestrator.job.interruption import Leaving
from orchestrator.job.leave import Result
from orchestrator.job.stage import Running
from orchestrator.job.state import Run, switches_of, usable, with_leaving
from orchestrator.plan.placement.place import room_for


def straggler_found(run: Run, event: StragglerFound) -> Result:
    stragglers = {**run.attempt.stragglers, event.rank: event}
    return replace(run, attempt=replace(run.attempt, stragglers=stragglers)), ()


def straggler_gone(run: Run, event: StragglerGone) -> Result:
    left = {rank: found for rank, found in run.attempt.stragglers.items() if rank != event.rank}
    return replace(run, attempt=replace(run.attempt, stragglers=left)), ()


def replace_straggler(run: Run, at: float) -> Result:
    """A checkpoint is complete: replace the slowest straggler's host, if there is a spare."""
    job = run.job
    assert job is not None
    slow = [
        found for found in run.attempt.stragglers.values() if found.host not in run.hosts.always
    ]
    if not (job.replace_stragglers and slow):
        return run, ()
    if (
        not isinstance(run.stage, Running)
        or run.interruption.leaving is not None
        or run.interruption.cancelled_by is not None
    ):
        return run, ()
    worst = max(slow, key=lambda found: found.own_s - found.peers_s)
    words = f"{worst.host} keeps its peers waiting: {why_slow(worst)}"
    after = replaced(run, worst.host, words, at)
    if room_for(run.plan, usable(after), switches_of(run)) < len(run.plan.hosts):
        return run, ()
    leaving = Leaving(cause="drained", words=words, requeue=False, straggler=worst)
    return stop(with_leaving(after, leaving), at, words, job.stop_grace)


def strike_of(before: Run, after: Run) -> Strike | None:
    """The strike against a host that was just replaced as slow; None if a drill slowed it."""
    job, leaving = after.job, after.interruption.leaving
    if job is None or leaving is None or leaving.straggler is None:
        return None
    slow = leaving.straggler
    if before.interruption.leaving is not None or drilled(after, slow.host):
        return None
    cause = why_slow(slow)
    measured = f"over {slow.steps} steps of {slow.step_s:.3f} s"
    return Strike(
        at=slow.at,
        host=slow.host,
        job=job.launch.job,
        attempt=slow.attempt,
        kind=STRAGGLER,
        cause=cause,
        evidence=(measured,),
        submitted=job.at,
    )


def why_slow(found: StragglerFound) -> str:
    lost = found.lost_tokens_per_second
    price = "" if lost is None else f", which costs {lost:,.0f} tokens/s"
    return (
        f"rank {found.rank} takes {found.own_s:.3f} s of its own a step, its peers"
        f" {found.peers_s:.3f} s{price}"
    )
