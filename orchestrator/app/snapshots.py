"""The state of jobs, with what their schedulers say about them."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from orchestrator.app.commands import commands_for
from orchestrator.app.planning.copied_speeds import remember_speed
from orchestrator.app.remote import Found
from orchestrator.dashboard.measured.steady import attempts_of_plan, read_steady
from orchestrator.dashboard.scheduler_status import Ask, is_quiet, needs_no_scheduler
from orchestrator.dashboard.snapshot import Snapshot, read_snapshot
from orchestrator.errors import JobError
from orchestrator.seams import Clock


def asker(found: Found, environ: Mapping[str, str], clock: Clock) -> Ask:
    """A function that asks the scheduler for the state of the job."""
    from orchestrator.app.launch_statuses import launch_statuses

    return lambda run: launch_statuses([(found, run, False, False)], environ, clock)[0]


def snapshots_of(
    jobs: Sequence[tuple[Found, bool]], environ: Mapping[str, str], clock: Clock
) -> list[Snapshot]:
    """A snapshot of each job, each scheduler asked once for all.

    Args:
        jobs: each with whether a job without a complete submission is an error. Otherwise it is
            skipped, as for a job that a pattern matched.
    """
    seen = []
    for found, is_named in jobs:
        snapshot = read_snapshot(found.run_dir, clock.now(), commands_for(found, environ))
        if snapshot is not None:
            remember_speed(found, snapshot, environ)
            seen.append((found, _with_steady(snapshot)))
        elif is_named:
            name = found.run_dir.path.name
            raise JobError(f"the submission of job {name} did not finish", fix="submit it again")
    snapshots = with_scheduler(seen, environ, clock)
    if len(seen) == 1:  # it costs a request for each job
        return [_with_deletion(seen[0][0], snapshots[0])]
    return snapshots


def _with_deletion(found: Found, snapshot: Snapshot) -> Snapshot:
    """With the deletion of a job in its cluster, which its leader may outlive: a finalizer holds
    the job, and its pods run on."""
    status = snapshot.launch_status
    if found.copy is None or status is None or not snapshot.leader_alive:
        return snapshot
    words = found.copy.deletion()
    return replace(snapshot, launch_status=replace(status, words=words)) if words else snapshot


def snapshot_of(found: Found, environ: Mapping[str, str], clock: Clock) -> Snapshot:
    """A snapshot of one job, with its state at its scheduler. Raises JobError if the submission of
    the job did not finish."""
    return snapshots_of([(found, True)], environ, clock)[0]


def _with_steady(snapshot: Snapshot) -> Snapshot:
    """With the measured steps, which only the views of single jobs show."""
    run = snapshot.seen.run
    if run.plan.is_own:
        return snapshot
    steady = read_steady(snapshot.run_dir.metrics, attempts_of_plan(run))
    return replace(snapshot, steady=steady)


def with_scheduler(
    snapshots: Sequence[tuple[Found, Snapshot]], environ: Mapping[str, str], clock: Clock
) -> list[Snapshot]:
    """The snapshots with the state of each job at its scheduler."""
    if all(needs_no_scheduler(one.seen.run, one.leader_alive) for _, one in snapshots):
        return [one for _, one in snapshots]
    from orchestrator.app.excluded_hosts import excluded_while_queued
    from orchestrator.app.launch_statuses import launch_statuses

    # A copy that could not be refreshed says nothing about the leader, even if another process
    # holds the lock of its journal.
    led = [one.leader_alive and found.stale is None for found, one in snapshots]
    jobs = [
        (found, one.seen.run, alive, is_quiet(one.heard_at, clock.now()))
        for (found, one), alive in zip(snapshots, led, strict=True)
    ]
    statuses_at_schedulers = launch_statuses(jobs, environ, clock)
    return [
        replace(
            one,
            leader_alive=alive,
            launch_status=replace(seen, at=seen.at or one.heard_at)
            if alive and seen.resume
            else seen,
            excluded=excluded_while_queued(one.seen.run, seen, environ, clock),
        )
        for (_, one), alive, seen in zip(snapshots, led, statuses_at_schedulers, strict=True)
    ]
