"""A run directory begins: what is in it before the first agent registers."""

import json
import os
import secrets
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.contract.files.access import access_of
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import JobError
from orchestrator.job.state import Run
from orchestrator.journal.current_launch import note
from orchestrator.journal.journal import Journal
from orchestrator.journal.snapshot import known
from orchestrator.seams import Clock

ARCHIVE = ".archive"
"""Where `--new` puts the run of the same name that ended before, below the run root."""
PATIENCE_S = 120.0
"""For a former leader, cut off, to let go of the journal."""


def write_files(run_dir: RunDir, handover: Handover, number: int, *, token: bool = True) -> None:
    """All but the journal. `number` is the plan's; `token`: agents find it here."""
    run_dir.make()
    note(run_dir, handover.job)
    run_dir.spec_of(handover.launch.launch).write_text(handover.spec)
    if not run_dir.spec.exists():  # else it is of a launch that trained, as this one has yet to
        run_dir.spec.write_text(handover.spec)
    run_dir.plan(number).write_text(json.dumps(handover.plan, indent=2))
    run_dir.trainer_config(number).write_text(json.dumps(handover.trainer, indent=2))
    if handover.submitted is not None:
        write_whole(run_dir.submitted, json.dumps(handover.submitted, indent=2).encode())
    if token and not run_dir.token.exists():
        from orchestrator.job_secret import draw  # late: nothing else that is typed needs it

        fd = os.open(run_dir.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(draw())


def archive(run_dir: RunDir, at: float) -> Path:
    """Put a run aside, so that another of its name can begin; where it lies now."""
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")
    shelf = run_dir.path.parent / ARCHIVE
    shelf.mkdir(exist_ok=True)
    return run_dir.path.rename(shelf / f"{run_dir.path.name}-{stamp}-{secrets.token_hex(2)}")


def left_behind(run_dir: RunDir) -> str:
    """What ranks wrote into a folder that has no journal; empty where they did not."""
    if any(run_dir.checkpoints.glob("step-*")):
        return "checkpoints"
    return run_dir.metrics.name if run_dir.metrics.exists() else ""


def refuse_look_alike(run_dir: RunDir) -> None:
    """Raises JobError where another job's name differs in upper and lower case alone: some file
    systems hold both for one, and so do people."""
    name = run_dir.path.name
    try:
        others = sorted(path.name for path in run_dir.path.parent.iterdir())
    except OSError:  # there is none yet; or it cannot be listed, which is no reason to refuse
        return
    for other in others:
        if other != name and other.casefold() == name.casefold():
            raise JobError(
                f"job {name} would differ from {other} in {run_dir.path.parent} in upper and lower"
                " case alone",
                fix="give the job another name: --set name=…",
            )


def unknown_run(run_dir: RunDir, left: str) -> JobError:
    return JobError(
        f"{run_dir.path} has {left} but no {run_dir.journal.name}: ndctl does not know which run"
        " they belong to, so it does not resume from them",
        fix=f"--new puts the folder in {ARCHIVE}/ and starts again; if only the journal was moved"
        " away, put it back and use --resume",
    )


def begin(run_dir: RunDir, handover: Handover, clock: Clock, *, token: bool) -> Run:
    """See to it that the run directory has this launch; what is known of the run then.

    A launch that is there already has merely started again.

    Raises:
        JobError: another launch has come after this one; or there is a run, and neither --resume
            nor --new was said; or there is none to resume.
    """
    run, number = known(run_dir), handover.launch.launch
    former = run.job.launch.launch if run.job else 0
    if former == number:
        return run
    _admit(run_dir, handover, run, former)
    if handover.new and (former or left_behind(run_dir)):
        archive(run_dir, clock.now())
        run = Run()
    run_dir.make(access_of(handover.launch))
    with Journal(run_dir.journal, clock, PATIENCE_S) as journal:
        plans = run.current.number + 1 if run.job else handover.job.plan_number
        write_files(run_dir, handover, plans, token=token)
        resume = run.job is not None
        journal.append(replace(handover.job, at=clock.now(), plan_number=plans, resume=resume))
    return known(run_dir)


def is_of(run_dir: RunDir, handover: Handover, run: Run) -> bool:
    """Whether the run of this launch, which goes on as it began, began with this very text."""
    job = run.job
    assert job is not None
    asked = replace(handover.job, at=job.at, plan_number=job.plan_number, resume=job.resume)
    try:
        return asked == job and run_dir.spec_of(job.launch.launch).read_text() == handover.spec
    except FileNotFoundError:  # somebody tidied up
        return asked == job


def _admit(run_dir: RunDir, handover: Handover, run: Run, former: int) -> None:
    name, number = handover.launch.job, handover.launch.launch
    refuse_look_alike(run_dir)
    if former > number:
        raise JobError(
            f"this is launch {number} of job {name}, and launch {former} has come after it:"
            " an old manifest was applied",
            fix=f"`ndctl submit --resume` makes launch {former + 1}",
        )
    if former == 0 and not handover.new and (left := left_behind(run_dir)):
        raise unknown_run(run_dir, left)
    if former == 0 and handover.job.resume:
        raise JobError(
            f"job {name} has no run to resume in {run_dir.path}",
            fix="submit it without --resume, or with the volume that has its run directory",
        )
    if former and not (handover.job.resume or handover.new):
        raise JobError(
            f"job {name} exists in {run_dir.path}: {run.state}",
            fix="--resume goes on from its newest checkpoint; --new starts over and keeps the old"
            f" run in {ARCHIVE}/",
        )


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a handover, as they are mounted. Raises OSError."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
