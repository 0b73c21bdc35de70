"""`ndctl submit` and `render`: from a plan to running agents."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import join

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.app.commands import remember
from orchestrator.app.excluded_hosts import excluded_hosts
from orchestrator.app.planning.plans import Planned
from orchestrator.app.schedulers import clear, standing, submitter_of
from orchestrator.app.submission.payload import (
    Submission,
    handover_of,
    launch_of,
    run_of,
    steps_of,
    submitted_event,
)
from orchestrator.app.submission.resume_check import (
    is_alive,
    is_running,
    no_run,
    steps_left,
    watch_or_end,
)
from orchestrator.app.submission.submission_lock import submission_lock
from orchestrator.app.submission.submission_rollback import look, restore
from orchestrator.contract.check_results import Finding, troubles, words_of_finding
from orchestrator.contract.codec import Problem
from orchestrator.contract.drills import Drill, faults_of
from orchestrator.contract.files.access import access_of, access_umask
from orchestrator.contract.files.atomic_write import NO_SPACE, why_not_written
from orchestrator.contract.files.last_metric import last_reached
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.spec.job_spec import (
    JobSpec,
    ScriptSpec,
)
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import (
    BackendError,
    DrillError,
    JobError,
    PlanError,
    Refused,
    SpecError,
    Unsettled,
)
from orchestrator.health.package_owners import other_owners
from orchestrator.job.state import Run
from orchestrator.job_paths import run_root_of
from orchestrator.journal import snapshot
from orchestrator.journal.journal import BEGINNING, Journal, Place
from orchestrator.journal.run_dir_init import (
    ARCHIVE,
    archive,
    files_without_journal,
    make_own,
    refuse_similar_name,
    unknown_run,
    write_files,
)
from orchestrator.load import read_spec
from orchestrator.posix.owners import refuse_foreign
from orchestrator.registry.submitted import register_job
from orchestrator.seams import Clock, ExistingJob, JobCopy, RemoteScheduler, SubmittingScheduler

log = logging.getLogger(__name__)
NEVER_RUN = Run()


def hosts_to_exclude(
    run_root: Path, backend: SubmittingScheduler, environ: Mapping[str, str], clock: Clock
) -> tuple[str, ...]:
    """Hosts that strikes or pins exclude. Logs the reason and the end of each."""
    found = excluded_hosts(run_root, backend, environ, clock)
    names = sorted(host.name for host in found)
    known = backend.known(names) if names else ()
    for host in found:
        if host.name in known:
            log.warning("%s", host)
    if gone := ", ".join(name for name in names if name not in known):
        log.warning("ignoring excluded hosts that the cluster does not have: %s", gone)
    return known


def render(submission: Submission, environ: Mapping[str, str]) -> str:
    """What `submit` would start or send to the scheduler."""
    from orchestrator.system import SystemClock

    clock = SystemClock()
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    return backend.describe(_first(submission, backend, environ, clock))


def render_token(submission: Submission) -> str:
    """The Secret that `submit` would create. Its content is new each time."""
    from orchestrator.backends.kubernetes.render import text, token_secret
    from orchestrator.job_secret import draw

    return text([token_secret(launch_of(submission, 1), draw())])


class DryRun(Struct, frozen=True, kw_only=True):
    text: str
    """What `submit` would write and start, with the results of the scheduler's checks as
    comments."""
    refused: BackendError | None = None
    """The error by which the scheduler refuses it."""


def dry_run(
    submission: Submission, environ: Mapping[str, str], clock: Clock, *, asks: bool = True
) -> DryRun:
    """What `submit` would write and start. With `asks`, the scheduler checks it.

    Raises the errors that `submit` raises before it writes anything. Without `asks` those are
    missing that need an answer of the scheduler.
    """
    _check_spec(submission, environ)
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    past = NEVER_RUN
    if not isinstance(backend, RemoteScheduler):
        _check_existing(submission, environ, clock, asks=asks)
        past = past if submission.new else snapshot.replay(submission.run_dir)
    handover = _first(submission, backend, environ, clock, past)
    config = json.dumps(handover.trainer, indent=2)
    text = f"# trainer configuration\n{config}\n\n{backend.describe(handover)}"
    try:
        said = backend.check(handover) if asks else ()
        if asks and isinstance(backend, RemoteScheduler):
            _admit_remotely(submission, backend, handover.launch, environ)
    except BackendError as exc:
        return DryRun(text=text, refused=exc)
    lines = (line for one in said for line in words_of_finding(one).splitlines())
    return DryRun(text=text + "".join(f"\n# {line}" for line in lines))


def first_handover(submission: Submission, environ: Mapping[str, str], clock: Clock) -> Handover:
    """What `submit` would hand over, for checks."""
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    return _first(submission, backend, environ, clock)


def _first(
    submission: Submission,
    backend: SubmittingScheduler,
    environ: Mapping[str, str],
    clock: Clock,
    past: Run = NEVER_RUN,
) -> Handover:
    """The payload for a first launch, or for the one that follows `past`."""
    without = hosts_to_exclude(submission.run_root, backend, environ, clock)
    return handover_of(submission, submitted_event(submission, past, 0.0, without))


def check(submission: Submission, environ: Mapping[str, str], clock: Clock) -> tuple[Finding, ...]:
    """The results of the scheduler's checks. Raises the errors that `submit` raises before it
    writes anything."""
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    _check_spec(submission, environ)
    handover = _first(submission, backend, environ, clock)
    said = backend.check(handover)
    if isinstance(backend, RemoteScheduler):
        _admit_remotely(submission, backend, handover.launch, environ)
    else:
        _check_existing(submission, environ, clock)
    return said


class Submitted(Struct, frozen=True, kw_only=True):
    run_dir: RunDir
    known: int
    """Number of journal lines before the submission."""
    copy: JobCopy | None = None
    """The copy on this machine, if the run directory is in a cluster."""
    at: float = 0.0
    """Time of the submission to the cluster."""
    warnings: tuple[str, ...] = ()
    """Problems that did not stop the submission but may delay the job."""
    notes: tuple[str, ...] = ()


def submit(submission: Submission, environ: Mapping[str, str], clock: Clock) -> Submitted:
    """Write the run directory, start the agents, and return while they run.

    Raises:
        SpecError: data, tokenizer or weights are missing, or the checkpoint to resume from has
            another model, optimizer or other data.
        PlanError: the bundled trainer cannot train the model, although it can be planned.
        JobError: the job is running or being submitted; or it ended and neither `resume` nor `new`
            is set; or it has no steps left; or all its checkpoints are lost; or the path of its run
            directory is not UTF-8; or another user made the run directory.
        BackendError: the agents could not be started, and nothing is left running. If the
            scheduler refused the job, the run directory is restored or removed.
    """
    run_dir = submission.run_dir
    _check_path(run_dir.path)
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    _check_spec(submission, environ)
    handover = _first(submission, backend, environ, clock)
    said = backend.check(handover)
    first = handover.job
    warnings = tuple(map(words_of_finding, troubles((*other_owners(), *said))))
    notes = tuple(words_of_finding(one) for one in said if one.verdict == "note")
    if isinstance(backend, RemoteScheduler):
        submitted = _submit_remotely(submission, backend, first, environ, clock)
        return replace(submitted, warnings=(*warnings, *submitted.warnings), notes=notes)
    with _writable(run_dir), submission_lock(run_dir):
        before = look(run_dir, _admit(submission, environ, clock))
        end = _journal_end(run_dir, clock)
        try:
            with access_umask(access_of(first.launch)):
                backend.submit(_begin(submission, first.launch.exclude, clock))
        except (OSError, Refused):
            restore(before, end, clock)
            raise
        except BackendError:  # something may run
            register_job(first, run_dir.path, clock.now(), environ)
            raise
    warnings += register_job(first, run_dir.path, clock.now(), environ)
    return Submitted(run_dir=run_dir, known=end.lines, warnings=warnings, notes=notes)


def begin_inside(
    submission: Submission, environ: Mapping[str, str], clock: Clock
) -> tuple[LaunchPlan, int]:
    """Write the run directory of a job with an existing allocation. Returns the launch and the
    number of journal lines before it. Raises the errors of `submit`."""
    from orchestrator.backends.slurm.on_nodes import program_copy

    _check_spec(submission, environ)
    launch = launch_of(submission, 1)
    for one in program_copy.look(launch, run_of(submission.planned.spec), clock):
        log.warning("%s: %s", one.verdict, words_of_finding(one))
    with _writable(submission.run_dir), submission_lock(submission.run_dir):
        _admit(submission, environ, clock)
        lines = _journal_end(submission.run_dir, clock).lines
        with access_umask(access_of(launch_of(submission, 0))):
            job = _begin(submission, (), clock).job
    for warning in register_job(job, submission.run_dir.path, job.at, environ):
        log.warning("%s", warning)
    return job.launch, lines


@contextmanager
def _writable(run_dir: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        free = "free space there, or " if exc.errno in NO_SPACE else ""
        place = exc.filename or run_dir.path
        raise BackendError(
            f"cannot write the run directory {place}: {why_not_written(exc, run_dir.path)}",
            fix=f"{free}{_how_to_write(run_dir.path)}",
        ) from exc


def _how_to_write(run_dir: Path) -> str:
    # To resume a job, another run root does not help.
    other = "" if run_dir.exists() else "set --run-root to a directory that you can write to, or "
    checks = join(["ndctl", "doctor", "--run-root", str(run_dir.parent)])
    return f"{other}make {run_dir.parent} writable; `{checks}` checks it"


def _journal_end(run_dir: RunDir, clock: Clock) -> Place:
    if not run_dir.journal.exists():
        return BEGINNING
    with Journal(run_dir.journal, clock) as journal:
        return journal.place


def _begin(submission: Submission, without: Sequence[str], clock: Clock) -> Handover:
    """Write the run directory and the first journal line."""
    run_dir = submission.run_dir
    launch = launch_of(submission, 0)  # the journal, read below, gives the real number
    make_own(run_dir, access_of(launch))
    with Journal(run_dir.journal, clock) as journal:
        past = snapshot.replay(run_dir)
        job = submitted_event(submission, past, clock.now(), without)
        job = replace(job, reached=last_reached(run_dir.metrics) if job.resume else None)
        handover = handover_of(submission, job)
        write_files(run_dir, handover, job.plan_number)
        journal.append(job)
    return handover


def _submit_remotely(
    submission: Submission,
    backend: RemoteScheduler,
    first: JobSubmitted,
    environ: Mapping[str, str],
    clock: Clock,
) -> Submitted:
    """Send everything to the cluster, where the leader writes the run directory."""
    launch = first.launch
    former = _admit_remotely(submission, backend, launch, environ)
    number = 1
    if submission.resume or submission.new:
        # If the last launch is unknown, use the time, which is larger than any launch number.
        number = former.launch + 1 if former is not None else int(clock.now())
    job = replace(first, launch=replace(launch, launch=number), resume=submission.resume)
    at, handover = clock.now(), handover_of(submission, job)
    try:
        copy = backend.copy(replace(handover, job=replace(job, at=at)), submission.run_root)
        if submission.planned.written is not None:
            remember(copy.run_dir, submission.planned.written)
    except OSError as exc:
        raise BackendError(
            f"the job is not submitted, because its local copy cannot be written: {exc}",
            fix="set --run-root to a directory that you can write to;"
            f" `{join(['ndctl', 'doctor', '--run-root', str(submission.run_root)])}` checks it",
        ) from exc
    try:
        backend.submit(handover)
    except Unsettled:
        # The job may run, so keep the copy for list, status and cancel.
        register_job(job, copy.run_dir.path, at, environ)
        raise
    except BaseException:
        copy.forget()
        raise
    copy.keep()
    unregistered = register_job(job, copy.run_dir.path, at, environ)
    return Submitted(run_dir=copy.run_dir, known=0, copy=copy, at=at, warnings=unregistered)


def _admit_remotely(
    submission: Submission, backend: RemoteScheduler, launch: LaunchPlan, environ: Mapping[str, str]
) -> ExistingJob | None:
    """The former launch in the cluster or on this machine. Raises JobError for a second start."""
    name, former = launch.job, backend.former(launch, submission.run_root)
    if former is not None and not former.over:
        raise JobError(
            f"job {name} is at the scheduler: {former.words}",
            fix=watch_or_end(submission.run_dir, environ, "status"),
        )
    if former is not None and not (submission.resume or submission.new):
        raise JobError(
            f"job {name} already exists: {former.words}",
            fix="--resume continues from its newest checkpoint; --new starts over and moves the old"
            f" run to {ARCHIVE}/",
        )
    if former is not None and former.copy is not None and submission.resume:
        refusal = steps_left(submission.planned.spec, snapshot.replay(former.copy))
        if refusal is not None:
            raise refusal
    return former


def _check_path(run_dir: Path) -> None:
    """Spec, journal and registry hold the path as text."""
    try:
        str(run_dir).encode()
    except UnicodeEncodeError:
        raise JobError(
            f"the path of the run directory is not UTF-8: {run_dir}",
            fix="give --run-root or NDCTL_RUN_ROOT a folder whose path is UTF-8",
        ) from None


def _check_spec(submission: Submission, environ: Mapping[str, str]) -> None:
    _check_inputs(submission, environ)
    _check_trainable(submission)
    _check_drills(submission)


def _check_inputs(submission: Submission, environ: Mapping[str, str]) -> None:
    """Raises SpecError if an input of the spec is missing."""
    from orchestrator.app.submission.inputs import look
    from orchestrator.app.submission.program_check import look_at_program
    from orchestrator.model_config import hub_cache

    planned = submission.planned
    looked, spec = planned.looked, planned.spec
    if looked is None and isinstance(spec, JobSpec):
        looked = look(spec, hub_cache(environ))
    if looked is None and isinstance(spec, ScriptSpec):
        looked = look_at_program(spec, environ)
    if looked is not None and looked.problems:
        raise _refused(planned, looked.problems)


def _check_resume(submission: Submission, run: Run) -> None:
    """Raises JobError if the job cannot resume, SpecError if its spec does not match the run."""
    from orchestrator.app.submission.resume_check import look_at_run

    planned = submission.planned
    if not isinstance(planned.spec, JobSpec):
        if (refusal := steps_left(planned.spec, run)) is not None:
            raise refusal
        return
    looked = look_at_run(planned.spec, planned.model_config, submission.run_dir, run)
    if looked.problems:
        raise _refused(planned, looked.problems, looked.refusal)
    if looked.refusal is not None:
        raise looked.refusal


def _refused(
    planned: Planned, problems: Sequence[Problem], refusal: JobError | None = None
) -> SpecError:
    also = () if refusal is None else (refusal,)
    if planned.written is not None:
        return planned.written.refused(problems, also)
    from orchestrator.yaml_document import spec_error

    return spec_error("the spec", [("the spec", problem) for problem in problems], also)


def _check_trainable(submission: Submission) -> None:
    from orchestrator.plan.model.families import shape_of

    if not isinstance(submission.planned.spec, JobSpec):
        return
    shape = shape_of(submission.planned.model_config)
    if shape.untrainable is not None:
        raise PlanError(
            f"the bundled trainer cannot train {shape.model_type}: {shape.untrainable}",
            fix="use `ndctl plan` to plan it, and train it with your own script:"
            " ndctl run -- train.py",
        )


def _check_drills(submission: Submission) -> None:
    """Raises DrillError with each drill that can never happen."""
    refused = [why for one in submission.drills if (why := _impossible(one, submission.planned))]
    if refused:
        told, fixes = zip(*refused, strict=True)
        raise DrillError("\n".join(told), fix=fixes[0])


def _impossible(drill: Drill, planned: Planned) -> tuple[str, str] | None:
    """Why the drill can never happen, and a drill that can; None: it can happen."""
    plan, steps, run = planned.plan, steps_of(planned.spec), run_of(planned.spec)
    of_rank = drill.target == "rank"
    if run is not None and of_rank and drill.fault not in faults_of(run):
        can = ", ".join(faults_of(run))
        return (
            f"drill {drill} needs the bundled trainer: ndctl injects it inside a step",
            f"use one of {can}, for example --drill kill:rank=0@step=2",
        )
    count = plan.world_size if of_rank else len(plan.hosts)
    if drill.index < count and not (steps and drill.step > steps):
        return None
    of = f", and {steps} steps" if steps else ""
    return (
        f"drill {drill} can never happen: the job has {count} {drill.target}s, numbered from 0{of}",
        f"use for example --drill {drill.fault}:{drill.target}=0@step={min(2, steps or 2)}",
    )


def refuse_existing(
    path: Path,
    overrides: Sequence[str],
    run_root: str | None,
    environ: Mapping[str, str],
    clock: Clock,
    *,
    again: bool,
) -> None:
    """Raise JobError if the job of the spec `path` exists already: the reason of a PlanError may be
    that this very job has the hosts, or waits for them.

    Args:
        again: the job may be submitted again if it has ended.
    """
    if not path.is_file():  # standard input, which cannot be read again
        return
    spec = read_spec(path, overrides, environ)
    if spec.cluster.backend == "kubernetes":  # its run directory is in its pods
        return
    run_dir = RunDir(run_root_of(run_root, environ, spec.run_root) / spec.name)
    if is_alive(run_dir, environ, clock):
        raise is_running(run_dir, environ, "dashboard")
    run = snapshot.replay(run_dir)
    if run.job is None:
        return
    if (left := standing(run, environ, clock)) is not None:
        raise _at_scheduler(run_dir, left, environ)
    if not again:
        raise _was_run(run_dir, run)


def _admit(submission: Submission, environ: Mapping[str, str], clock: Clock) -> Path | None:
    """Raise JobError for a second start. With `new`, move the old run and return its new path."""
    _check_existing(submission, environ, clock)
    run_dir = submission.run_dir
    if not submission.new:
        return None
    run = snapshot.replay(run_dir)
    if run.job is not None:
        clear(run, environ, clock)
        return archive(run_dir, clock.now())
    return archive(run_dir, clock.now()) if files_without_journal(run_dir) else None


def _check_existing(
    submission: Submission, environ: Mapping[str, str], clock: Clock, *, asks: bool = True
) -> None:
    """Raise JobError for a second start. `asks`: a scheduler may be asked for the former one."""
    run_dir = submission.run_dir
    refuse_similar_name(run_dir)
    if not submission.new:  # which moves another user's run away, if the run root lets it
        refuse_foreign(run_dir.path)
    if is_alive(run_dir, environ, clock):
        raise is_running(run_dir, environ, "dashboard")
    run = snapshot.replay(run_dir)
    if submission.new:
        return
    if run.job is None:
        if files := files_without_journal(run_dir):
            raise unknown_run(run_dir, files)
        if submission.resume:
            raise no_run(run_dir)
        return
    asks = asks and not _has_own(submission, run)
    if asks and (left := standing(run, environ, clock)) is not None:
        raise _at_scheduler(run_dir, left, environ)
    if not submission.resume:
        raise _was_run(run_dir, run)
    _check_resume(submission, run)


def _at_scheduler(run_dir: RunDir, left: str, environ: Mapping[str, str]) -> JobError:
    return JobError(
        f"job {run_dir.path.name} is at the scheduler: {left}",
        fix=watch_or_end(run_dir, environ, "status"),
    )


def _was_run(run_dir: RunDir, run: Run) -> JobError:
    state = run.state
    ended = f"ended {state}" if state in ("SUCCEEDED", "FAILED", "CANCELLED") else "was interrupted"
    return JobError(
        f"job {run_dir.path.name} already exists in {run_dir.path} and {ended}",
        fix="--resume continues from its newest checkpoint; --new starts over and moves the old"
        f" run to {ARCHIVE}/",
    )


def _has_own(submission: Submission, run: Run) -> bool:
    """Whether the former run was in the Slurm job that runs this command."""
    from orchestrator.backends.slurm.job_lookup import recorded

    job = run.job
    return submission.own is not None and job is not None and recorded(job.launch) == submission.own
