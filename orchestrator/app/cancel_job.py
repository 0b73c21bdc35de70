"""`ndctl cancel`: ask the leader of a job to stop, or end what is left of the job."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path

from orchestrator.app.ask_leader import Request, ask_leader
from orchestrator.app.commands import commands_for, commands_of
from orchestrator.app.remote import Found
from orchestrator.app.schedulers import clear, name_of, scheduler_of, standing
from orchestrator.app.submission.submission_lock import refuse_while_submitting
from orchestrator.contract.files.last_metric import last_reached
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import CANCEL_PATH
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.dashboard.snapshot import is_unconfirmed
from orchestrator.dashboard.unsaved_steps import at_risk, lost, repeated
from orchestrator.errors import BackendError, InUse, JobError, Unanswered
from orchestrator.job.stage import Submitted
from orchestrator.job.state import Run
from orchestrator.journal.journal import Journal, has_writer
from orchestrator.journal.snapshot import replay
from orchestrator.seams import Clock, JobCopy

CANCEL_TIMEOUT_S = 10.0
ENDING_POLL_S = 0.1
LEAVE_S = 15.0
"""Time for the agents of an ended job to exit."""
ASK_AGAIN_S = 5.0
COME_BACK_S = 300.0
"""Time for a leader in a cluster to be replaced after it died with the order to cancel."""
NOT_BEGUN = "before its leader started"
LAST_WORDS_S = 20.0
"""Time for the last journal lines to arrive when the scheduler no longer has the job."""


def _what_ranks_do(job: JobSubmitted) -> str:
    if job.run is None:
        return "its ranks write a checkpoint and exit"
    return f"its ranks get SIGTERM and {job.stop_grace:g} s to exit"


def cancel(
    run_dir: RunDir,
    environ: Mapping[str, str],
    clock: Clock,
    found: Found | None = None,
    by: str | None = None,
) -> str:
    """Ask the leader to stop; without a leader, end what is left. Returns what was done, as text.

    Args:
        found: how the job was found. Its run directory may be on another machine.
        by: who cancels it, for the journal; None: this user.
    """
    by = by or user()
    run = replay(run_dir)
    name = run_dir.path.name
    if run.job is None:
        raise JobError(f"the submission of job {name} did not finish", fix="submit it again")
    elsewhere = found is not None and found.copy is not None  # in a Kubernetes cluster
    if run.ending is not None:
        if elsewhere:
            raise _has_ended(name, run)
        return _end_what_is_left(run, run_dir, environ, clock)
    if found is not None and found.copy is not None:
        return _cancel_there(found.here(run), found.copy, environ, clock, by)
    led, asked_at = has_writer(run_dir.journal), clock.now()
    if led and _ask_to_cancel(run_dir, run.job.launch.launch, environ, by):
        risk = at_risk(run_dir)
        return f"cancelling {name}: {_what_ranks_do(run.job)}{risk and f'; {risk}'}"
    refuse_while_submitting(run_dir)
    if not led:
        # InUse: a leader started after `has_writer` was asked. It did not get the order, so the
        # job is ended below, as if the leader could not be reached.
        with suppress(InUse):
            return _cancel_without_leader(run, run_dir, environ, clock, by)
    suspended = _suspended(run, run_dir, environ, clock)
    clear(run, environ, clock)
    if replay(run_dir).ending is not None:
        return (
            f"{name} has ended: its leader could not be reached from here, so its processes were"
            " told to end"
        )
    if record_cancel(run_dir, by, clock, asked_at):
        return f"{name} was cancelled {NOT_BEGUN}"
    why = suspended or "its leader could not be reached, so its processes were ended"
    return f"{name} was cancelled: {why}"


def _suspended(run: Run, run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> str:
    """What the end of a job costs that its scheduler has suspended; empty if it has not."""
    assert run.job is not None
    (seen,) = scheduler_of(run.job.backend, environ, clock).glance([run.job.launch])
    if not seen.resume:
        return ""
    steps = repeated(run_dir)
    return (
        f"{seen.words}, so its ranks could not save{steps and f'; {steps}'}; to keep the steps of a"
        f" suspended job, run `{seen.resume}` before `ndctl cancel`"
    )


def _has_ended(name: str, run: Run) -> JobError:
    return JobError(f"job {name} has already ended: {run.state}", fix="nothing to cancel")


def _end_what_is_left(run: Run, run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> str:
    """End what the scheduler still has of an ended job, which an earlier cancel may have missed."""
    name = run_dir.path.name
    try:
        left = standing(run, environ, clock)
        if left is not None:
            clear(run, environ, clock)
    except BackendError as exc:
        raise _not_reached(run, run_dir, exc, environ, clock) from exc
    asked_again = is_unconfirmed(run_dir, run)
    with suppress(OSError):
        _unconfirmed(run, run_dir).unlink(missing_ok=True)
    ended = f"{name} had already ended: {run.state}"
    if left is not None:
        return f"{ended}; ended what its scheduler still had: {left}"
    if asked_again and (called := name_of(run, environ, clock)) is not None:
        return f"{ended}; {called} is gone"
    raise _has_ended(name, run)


def _cancel_without_leader(
    run: Run, run_dir: RunDir, environ: Mapping[str, str], clock: Clock, by: str
) -> str:
    """Record the end first, so that a queued job exits at once if it starts.

    Raises:
        InUse: a leader has the journal.
        BackendError: the end is recorded, but the scheduler was not reached.
    """
    waiting = record_cancel(run_dir, by, clock)
    try:
        left = standing(run, environ, clock)
        clear(run, environ, clock)
    except BackendError as exc:
        raise _not_reached(replay(run_dir), run_dir, exc, environ, clock) from exc
    called = name_of(run, environ, clock)
    said = f"{run_dir.path.name} was cancelled {NOT_BEGUN if waiting else 'without a leader'}"
    if called is None:
        return said if waiting else f"{said}; what was left of it was ended"
    return f"{said}; {called} {'had already ended' if left is None else 'was ended'}"


def _not_reached(
    run: Run, run_dir: RunDir, exc: BackendError, environ: Mapping[str, str], clock: Clock
) -> BackendError:
    """The error that the end is recorded while the scheduler may still have the job, which is noted
    for later commands. Of a job in a cluster the end is recorded there, by its last pod."""
    if run.job is not None and run.job.backend != "kubernetes":
        with suppress(OSError):
            _unconfirmed(run, run_dir).touch()
    called = name_of(run, environ, clock) or "a part of it"
    again = commands_of(run_dir, environ).of("cancel")
    return type(exc)(
        f"{run_dir.path.name} is recorded as {run.state}, but its scheduler was not reached and may"
        f" still have {called}: {exc.message}",
        fix=f"when the scheduler is reachable, run `{again}` to end what is left; if the job starts"
        " before that, it exits at once",
    )


def _unconfirmed(run: Run, run_dir: RunDir) -> Path:
    assert run.job is not None
    return run_dir.end_unconfirmed(run.job.launch.launch)


def _cancel_there(
    run: Run, copy: JobCopy, environ: Mapping[str, str], clock: Clock, by: str
) -> str:
    """Cancel in one of the job's pods; if no pod runs, end what the scheduler has of the job."""
    name = copy.run_dir.path.name
    done = copy.cancel(by)
    if done is not None and done.code == 0:
        return done.out or f"cancelling {name}"
    with suppress(BackendError):
        copy.refresh()  # the job may have ended since the last refresh
    if (ended := replay(copy.run_dir)).ending is not None:
        raise JobError(f"job {name} has already ended: {ended.state}", fix="nothing to cancel")
    clear(run, environ, clock)
    copy.let_go()
    record_cancel(copy.run_dir, by, clock)
    return f"{name} had no running pod to ask; what was left of it was ended"


def _ask_to_cancel(run_dir: RunDir, launch: int, environ: Mapping[str, str], by: str) -> bool:
    """Whether the leader accepted the order.

    Raises:
        BackendError: the leader refused the order.
    """
    request = Request(
        path=CANCEL_PATH, purpose="cancel", body={"by": by}, timeout_s=CANCEL_TIMEOUT_S
    )
    answer = ask_leader(run_dir, launch, environ, request)
    if answer is None:
        return False
    if answer.status == HTTPStatus.ACCEPTED:
        return True
    raise BackendError(
        f"the leader refused to cancel: {answer.status} {answer.text}",
        fix=f"use the secret in {run_dir.token}",
    )


def wait_until_ended(
    run_dir: RunDir, environ: Mapping[str, str], clock: Clock, found: Found | None = None
) -> str:
    """Wait for the end of a cancelled job, also at its scheduler. Returns its state and reason.

    Raises:
        JobError: the leader died before the job ended.
    """
    alive, leads = True, _leads(run_dir, environ, clock, found)
    # Read again each time: a copy may hold a guessed end, which the line of the leader replaces.
    while (run := replay(run_dir)).ending is None:
        if not alive:
            raise JobError(
                f"the leader of {run_dir.path.name} died before the job ended",
                fix=f"run `{commands_for(found or Found(run_dir), environ).of('cancel')}` again",
            )
        clock.sleep(ENDING_POLL_S)
        alive = leads()  # before the journal is read: the leader writes the end and then exits
    run = found.here(run) if found is not None else run
    leaving = clock.monotonic()
    try:
        while standing(run, environ, clock) is not None and clock.monotonic() - leaving < LEAVE_S:
            clock.sleep(ENDING_POLL_S)
        if run.job is not None and run.job.backend != "local":
            clear(run, environ, clock)
    except Unanswered as exc:
        raise _not_reached(run, run_dir, exc, environ, clock) from exc
    gone = lost(run_dir)
    return f"{run_dir.path.name}: {run.state}, {run.stage.reason}{gone and f'; {gone}'}"


def _leads(
    run_dir: RunDir, environ: Mapping[str, str], clock: Clock, found: Found | None
) -> Callable[[], bool]:
    if found is None or found.copy is None:
        return partial(has_writer, run_dir.journal)
    return _may_end(found, environ, clock)


def _may_end(found: Found, environ: Mapping[str, str], clock: Clock) -> Callable[[], bool]:
    """A function that says whether a leader in a cluster may still end the job. A leader that died
    may be replaced, as long as the scheduler has the job."""
    led_at = asked_at = clock.monotonic()
    held = True

    def may_end() -> bool:
        nonlocal led_at, asked_at, held
        now = clock.monotonic()
        if has_writer(found.run_dir.journal):
            led_at, held = now, True
        elif now - asked_at >= ASK_AGAIN_S:
            asked_at = now
            run = replay(found.run_dir)
            with suppress(BackendError):
                held = standing(found.here(run), environ, clock) is not None
        return now - led_at < (COME_BACK_S if held else LAST_WORDS_S)

    return may_end


def record_cancel(run_dir: RunDir, by: str, clock: Clock, asked_at: float | None = None) -> bool:
    """Record the end in the journal of a job without a leader. Returns whether its leader had yet
    to start, as for a job that was submitted a second ago.

    Args:
        asked_at: when a leader was asked that had the journal and whose processes were then ended.
    """
    from orchestrator.contract.messages.events import CancelRequested
    from orchestrator.journal.supervisor import Supervisor

    with Journal(run_dir.journal, clock) as journal:
        supervisor = Supervisor(journal)
        assert supervisor.run.job is not None
        waiting = isinstance(supervisor.run.stage, Submitted)
        # The journal has few steps, and no leader tells how far the ranks came.
        reached = last_reached(run_dir.metrics)
        supervisor.feed(
            CancelRequested(at=clock.now(), by=by, led=False, reached=reached, asked_at=asked_at)
        )
    return waiting


def user() -> str:
    import getpass

    return getpass.getuser()
