"""Creates the run directory of a launch, before its first agent registers."""

import json
import logging
import os
import secrets
import stat
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.files.access import Access, access_of
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.last_metric import last_reached
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import JobError
from orchestrator.job.state import Run
from orchestrator.journal.current_launch import write_current_launch
from orchestrator.journal.journal import Journal
from orchestrator.journal.snapshot import replay
from orchestrator.posix.denied import user_of
from orchestrator.posix.owners import is_trusted, refuse_foreign
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

ARCHIVE = ".archive"
"""Folder below the run root to which `--new` moves the earlier run of the same name."""
PATIENCE_S = 120.0
"""Time for a former leader that was cut off to release the journal."""


def write_files(run_dir: RunDir, handover: Handover, number: int, *, token: bool = True) -> None:
    """Write everything except the journal. `number` is the plan's; `token`: write the job's secret,
    because agents read it here."""
    run_dir.make()
    write_current_launch(run_dir, handover.job)
    run_dir.spec_of(handover.launch.launch).write_text(handover.spec, encoding="utf-8")
    if not run_dir.spec.exists():  # else it belongs to a launch that trained; this one has not yet
        run_dir.spec.write_text(handover.spec, encoding="utf-8")
    run_dir.plan(number).write_text(json.dumps(handover.plan, indent=2))
    if handover.trainer:  # else the ranks run the user's own program
        run_dir.trainer_config(number).write_text(json.dumps(handover.trainer, indent=2))
    if handover.submitted is not None:
        write_whole(run_dir.submitted, json.dumps(handover.submitted, indent=2).encode())
    if token:
        _write_token(run_dir.token)


def _write_token(path: Path) -> None:
    from orchestrator.job_secret import draw  # imported late: no other command needs it

    try:
        if (wrong := _distrusted(path)) is None:
            return
        # No agent of an earlier launch needs the old secret any more.
        log.warning("replacing the job's secret %s: %s", path, wrong)
        path.unlink()
    except FileNotFoundError:
        pass
    # Other users must not read the secret, not even for a moment, so the file is created with its
    # mode.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(draw())


def _distrusted(path: Path) -> str | None:
    """Why other users may know the secret, or why it is none. Raises OSError."""
    from orchestrator.job_secret import NoSecret, secret_from

    found = path.lstat()
    if not is_trusted(path, found):
        return f"it belongs to {user_of(found)}"
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"other users have access to it (mode {stat.S_IMODE(found.st_mode):o})"
    try:
        secret_from(read_regular(path).decode(errors="replace"))
    except NoSecret as exc:
        return str(exc)
    return None


def make_own(run_dir: RunDir, access: Access | None) -> None:
    """Create the run directory, unless it exists and no other user made it.

    Raises JobError and OSError.
    """
    refuse_foreign(run_dir.path)
    run_dir.make(access)
    refuse_foreign(run_dir.path)  # another user may have been faster


def archive(run_dir: RunDir, at: float) -> Path:
    """Move a run aside, so that another one of its name can start. Returns its new path."""
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")
    shelf = run_dir.path.parent / ARCHIVE
    shelf.mkdir(exist_ok=True)
    # Two runs may be archived within one second.
    return run_dir.path.rename(shelf / f"{run_dir.path.name}-{stamp}-{secrets.token_hex(2)}")


def files_without_journal(run_dir: RunDir) -> str:
    """What ranks wrote into a folder that has no journal; empty if nothing."""
    if any(run_dir.checkpoints.glob("step-*")):
        return "checkpoints"
    return run_dir.metrics.name if run_dir.metrics.exists() else ""


def refuse_similar_name(run_dir: RunDir) -> None:
    """Raises JobError if another job's name differs only in upper and lower case. Some file systems
    treat the two as the same name, and people mix them up."""
    name = run_dir.path.name
    try:
        others = sorted(path.name for path in run_dir.path.parent.iterdir())
    except OSError:  # it does not exist yet, or cannot be listed; neither is a reason to refuse
        return
    for other in others:
        if other != name and other.casefold() == name.casefold():
            raise JobError(
                f"job {name} differs from {other} in {run_dir.path.parent} only in upper and lower"
                " case",
                fix="give the job another name: --set name=…",
            )


def unknown_run(run_dir: RunDir, left: str) -> JobError:
    return JobError(
        f"{run_dir.path} has {left} but no {run_dir.journal.name}: ndctl does not know which run"
        " they belong to, so it does not resume from them",
        fix=f"--new moves the folder to {ARCHIVE}/ and starts from step 0; if only the journal was"
        " moved, put it back and use --resume",
    )


def begin(run_dir: RunDir, handover: Handover, clock: Clock, *, token: bool) -> Run:
    """Add this launch to the run directory, and return the state of the run.

    If the launch is there already, the scheduler has only restarted it, and nothing is written.

    Raises:
        JobError: a later launch exists; or there is a run and neither --resume nor --new was given;
            or there is no run to resume; or another user made the run directory.
    """
    run, number = replay(run_dir), handover.launch.launch
    former = run.job.launch.launch if run.job else 0
    if former == number:
        return run
    _admit(run_dir, handover, run, former)
    if handover.new and (former or files_without_journal(run_dir)):
        archive(run_dir, clock.now())
        run = Run()
    access = access_of(handover.launch)
    if token:
        make_own(run_dir, access)
    else:  # a volume of the cluster may give the folder any owner, and the secret is not in it
        run_dir.make(access)
    # Opening the journal waits for a former leader. Its files must not be replaced before it has
    # exited.
    with Journal(run_dir.journal, clock, PATIENCE_S) as journal:
        plans = run.current.number + 1 if run.job else handover.job.plan_number
        write_files(run_dir, handover, plans, token=token)
        resume = run.job is not None
        reached = last_reached(run_dir.metrics) if resume else None
        job = replace(handover.job, plan_number=plans, resume=resume, reached=reached)
        journal.append(replace(job, at=clock.now()))
    return replay(run_dir)


def is_same_launch(run_dir: RunDir, handover: Handover, run: Run) -> bool:
    """Whether the current launch of the run started from this very handover."""
    job = run.job
    assert job is not None
    asked = replace(
        handover.job,
        at=job.at,
        plan_number=job.plan_number,
        resume=job.resume,
        reached=job.reached,
    )
    try:
        spec = run_dir.spec_of(job.launch.launch).read_text(encoding="utf-8")
        return asked == job and spec == handover.spec
    except FileNotFoundError:  # a user deleted the spec of that launch
        return asked == job


def _admit(run_dir: RunDir, handover: Handover, run: Run, former: int) -> None:
    name, number = handover.launch.job, handover.launch.launch
    refuse_similar_name(run_dir)
    if former > number:  # Kubernetes: `kubectl apply` of a manifest that was rendered long ago
        raise JobError(
            f"this is launch {number} of job {name}, but launch {former} exists already:"
            " an old manifest was applied",
            fix=f"`ndctl submit --resume` creates launch {former + 1}",
        )
    if former == 0 and not handover.new and (left := files_without_journal(run_dir)):
        raise unknown_run(run_dir, left)
    # A wrong volume or run root looks like a job without a run. Starting at step 0 would waste the
    # earlier work.
    if former == 0 and handover.job.resume:
        raise JobError(
            f"job {name} has no run to resume in {run_dir.path}",
            fix="submit it without --resume, or with the volume that has its run directory",
        )
    # Neither continuing nor replacing a run is a safe default, so the user must choose.
    if former and not (handover.job.resume or handover.new):
        raise JobError(
            f"job {name} exists in {run_dir.path}: {run.state}",
            fix="--resume continues from its newest checkpoint; --new starts over and keeps the old"
            f" run in {ARCHIVE}/",
        )


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a handover, as they are mounted. Raises OSError."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
