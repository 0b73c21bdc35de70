"""From a plan to running agents: `ndctl submit` and `render`."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.app.commands import remember, submitted_from
from orchestrator.app.excluded_hosts import excluded_hosts
from orchestrator.app.planning.plans import Planned
from orchestrator.app.schedulers import clear, standing, submitter_of
from orchestrator.app.submission.resume_check import is_running, no_run, steps_left, watch_or_end
from orchestrator.app.submission.submission_lock import alone
from orchestrator.app.submission.submission_rollback import look, restore
from orchestrator.backends.by_name import HERE
from orchestrator.contract.check_results import Finding, words_of_finding
from orchestrator.contract.codec import Problem, encode
from orchestrator.contract.files.access import access_of, as_said
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.spec.drills import Drill
from orchestrator.contract.spec.job_spec import INIT_TIMEOUT_S, JobSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, JobError, PlanError, Refused, SpecError, Unsettled
from orchestrator.job.state import Run
from orchestrator.journal import snapshot
from orchestrator.journal.journal import BEGINNING, Journal, Place, has_writer
from orchestrator.journal.run_dir_init import (
    ARCHIVE,
    archive,
    left_behind,
    refuse_look_alike,
    unknown_run,
    write_files,
)
from orchestrator.seams import Clock, Copy, Former, RemoteScheduler, SubmittingScheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    planned: Planned
    run_root: Path
    drills: tuple[Drill, ...] = ()
    resume: bool = False
    new: bool = False
    own: str | None = None
    """The Slurm job in which this is said, and whose nodes it is to have."""
    backend: str = ""
    """Another than the spec's."""

    @property
    def run_dir(self) -> RunDir:
        """As this machine sees it."""
        return RunDir((self.run_root / self.planned.spec.name).absolute())

    @property
    def run_dir_of_hosts(self) -> Path:
        """As the hosts of the job see it."""
        cluster = self.planned.spec.cluster
        if cluster.backend == "kubernetes":
            return Path(cluster.kubernetes.run_root) / self.planned.spec.name
        return self.run_dir.path


def launch_of(submission: Submission, number: int, exclude: Sequence[str] = ()) -> LaunchPlan:
    spec = submission.planned.spec
    cluster, count = spec.cluster, len(submission.planned.plan.hosts) + spec.cluster.spare_hosts
    # Which hosts a scheduler gives is known when it has given them.
    stem = "host" if cluster.backend == "local" else "node"
    return LaunchPlan(
        job=spec.name,
        run_dir=str(submission.run_dir_of_hosts),
        launch=number,
        hosts=tuple(f"{stem}-{i}" for i in range(count)),
        devices_per_host=cluster.gpus_per_host,
        agent_timeout=spec.resilience.agent_timeout,
        slurm=cluster.slurm if cluster.backend == "slurm" else None,
        kubernetes=cluster.kubernetes if cluster.backend == "kubernetes" else None,
        exclude=tuple(exclude),
    )


def struck(
    run_root: Path, backend: SubmittingScheduler, environ: Mapping[str, str], clock: Clock
) -> tuple[str, ...]:
    """Hosts of the cluster that the job does without, each said with why and until when."""
    found = excluded_hosts(run_root, backend, environ, clock)
    names = sorted(host.name for host in found)
    known = backend.known(names) if names else ()
    for host in found:
        if host.name in known:
            log.warning("%s", host)
    if gone := ", ".join(name for name in names if name not in known):
        log.warning("%s: to be excluded, but the cluster has no such host", gone)
    return known


def render(submission: Submission, environ: Mapping[str, str]) -> str:
    """Exactly what `submit` would start, or hand to a scheduler."""
    from orchestrator.system import SystemClock

    clock = SystemClock()
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    return backend.describe(_first(submission, backend, environ, clock))


def render_token(submission: Submission) -> str:
    """The Secret that `submit` would make: another one each time."""
    from orchestrator.backends.kubernetes.render import text, token_secret
    from orchestrator.job_secret import draw

    return text([token_secret(launch_of(submission, 1), draw())])


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    text: str
    """What `submit` would write and start, with the scheduler's answers as comments."""
    refused: BackendError | None = None
    """What stands in the way of it."""


def dry_run(
    submission: Submission, environ: Mapping[str, str], clock: Clock, *, asks: bool = True
) -> DryRun:
    """What `submit` would write and start, and what a scheduler says to it, if it `asks` one.

    Raises as `submit` does where the spec names what is not there, or nothing is left to do.
    """
    _check_inputs(submission, environ)
    if submission.resume:
        _check_resume(submission, snapshot.known(submission.run_dir))
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    handover = _first(submission, backend, environ, clock)
    config = json.dumps(handover.trainer, indent=2)
    text = f"# trainer configuration\n{config}\n\n{backend.describe(handover)}"
    try:
        said = backend.check(handover) if asks else ()
    except BackendError as exc:
        return DryRun(text=text, refused=exc)
    lines = (line for one in said for line in words_of_finding(one).splitlines())
    return DryRun(text=text + "".join(f"\n# {line}" for line in lines))


def first_handover(submission: Submission, environ: Mapping[str, str], clock: Clock) -> Handover:
    """What `submit` would hand over, to be looked at."""
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    return _first(submission, backend, environ, clock)


def _first(
    submission: Submission, backend: SubmittingScheduler, environ: Mapping[str, str], clock: Clock
) -> Handover:
    """As though nothing had been submitted before."""
    without = struck(submission.run_root, backend, environ, clock)
    return handover_of(submission, submitted_event(submission, Run(), 0.0, without))


def handover_of(submission: Submission, job: JobSubmitted) -> Handover:
    from orchestrator.load import dump_spec
    from orchestrator.plan.show.explain import plan_json
    from orchestrator.plan.training import trainer_config

    planned, out = submission.planned, str(submission.run_dir_of_hosts)
    spec, submitted = planned.spec, None
    if spec.cluster.backend != "kubernetes":  # where another machine's folder says nothing
        spec = replace(spec, run_root=str(submission.run_root.absolute()))
        submitted = (
            None
            if planned.written is None
            else submitted_from(planned.written, here=submission.backend == HERE)
        )
    config = trainer_config(planned.spec, planned.plan, planned.model_config, out)
    return Handover(
        job=job,
        spec=dump_spec(spec),
        plan=plan_json(planned.plan),
        trainer=encode(config),
        new=submission.new,
        submitted=submitted,
    )


def check(submission: Submission, environ: Mapping[str, str], clock: Clock) -> tuple[Finding, ...]:
    """What the scheduler says to it. Raises what `submit` would before it writes anything."""
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    _check_inputs(submission, environ)
    _check_trainable(submission)
    _check_drills(submission)
    without = struck(submission.run_root, backend, environ, clock)
    first = submitted_event(submission, Run(), 0.0, without)
    said = backend.check(handover_of(submission, first))
    if isinstance(backend, RemoteScheduler):
        _admit_remotely(submission, backend, first.launch, environ)
    elif not submission.new:
        _admit(submission, environ, clock)
    elif has_writer(submission.run_dir.journal):
        raise is_running(submission.run_dir, environ, "dashboard")
    return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    run_dir: RunDir
    known: int
    """Lines that the journal had before."""
    copy: Copy | None = None
    """Where the run directory is elsewhere: what is known of it here."""
    at: float = 0.0
    """When it was handed over there."""
    warnings: tuple[str, ...] = ()
    """What did not stop it, and may make it wait or suffer."""


def submit(submission: Submission, environ: Mapping[str, str], clock: Clock) -> Submitted:
    """Write the run directory, start the agents, and return while they work.

    Raises:
        SpecError: data, tokenizer or weights are not there, or the checkpoint to resume from is of
            another model, optimizer or data.
        PlanError: the bundled trainer cannot train the model, which can be planned all the same.
        JobError: the job runs already, or is being submitted, or ended and neither `resume` nor
            `new` is said, or has nothing left to do, or lost all its checkpoints.
        BackendError: the agents could not be started; nothing is left running. Where the scheduler
            refuses the job, the run directory is as it was, or not there.
    """
    run_dir = submission.run_dir
    backend = submitter_of(submission.planned.spec.cluster.backend, environ, clock)
    _check_inputs(submission, environ)
    _check_trainable(submission)
    _check_drills(submission)
    without = struck(submission.run_root, backend, environ, clock)
    first = submitted_event(submission, Run(), 0.0, without)
    said = backend.check(handover_of(submission, first))
    warnings = tuple(words_of_finding(one) for one in said if one.verdict == "warns")
    if isinstance(backend, RemoteScheduler):
        submitted = _submit_remotely(submission, backend, first, environ, clock)
        return replace(submitted, warnings=warnings)
    with _writable(), alone(run_dir):
        before = look(run_dir, _admit(submission, environ, clock))
        end = _journal_end(run_dir, clock)
        try:
            with as_said(access_of(first.launch)):
                handover = _begin(submission, without, clock)
                backend.submit(handover)
        except (OSError, Refused):
            restore(before, end, clock)
            raise
    return Submitted(run_dir=run_dir, known=end.lines, warnings=warnings)


def begin_inside(
    submission: Submission, environ: Mapping[str, str], clock: Clock
) -> tuple[LaunchPlan, int]:
    """Write the run directory of a job whose nodes are there already; also, how many lines its
    journal had before. Raises as `submit`."""
    _check_inputs(submission, environ)
    _check_trainable(submission)
    _check_drills(submission)
    with _writable(), alone(submission.run_dir):
        _admit(submission, environ, clock)
        lines = _journal_end(submission.run_dir, clock).lines
        with as_said(access_of(launch_of(submission, 0))):
            return _begin(submission, (), clock).launch, lines


@contextmanager
def _writable() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise BackendError(
            f"the run directory cannot be written: {exc}",
            fix="give --run-root a directory that you may write to; `ndctl doctor` looks at it",
        ) from exc


def _journal_end(run_dir: RunDir, clock: Clock) -> Place:
    if not run_dir.journal.exists():
        return BEGINNING
    with Journal(run_dir.journal, clock) as journal:
        return journal.place


def _begin(submission: Submission, without: Sequence[str], clock: Clock) -> Handover:
    """Write the run directory; what is handed over."""
    run_dir = submission.run_dir
    launch = launch_of(submission, 0)  # its number is known when the journal has been read
    run_dir.make(access_of(launch))
    with Journal(run_dir.journal, clock) as journal:
        past = snapshot.known(run_dir)
        job = submitted_event(submission, past, clock.now(), without)
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
    """Hand it all over; the leader writes the run directory."""
    launch = first.launch
    former = _admit_remotely(submission, backend, launch, environ)
    number = 1
    if submission.resume or submission.new:
        # Where nothing tells which launch was the last one, the time is later than all of them.
        number = former.launch + 1 if former is not None else int(clock.now())
    job = replace(first, launch=replace(launch, launch=number), resume=submission.resume)
    at, handover = clock.now(), handover_of(submission, job)
    try:
        copy = backend.copy(replace(handover, job=replace(job, at=at)), submission.run_root)
        if submission.planned.written is not None:
            remember(copy.run_dir, submission.planned.written)
    except OSError as exc:
        raise BackendError(
            f"what is known of the job cannot be written, so it is not submitted: {exc}",
            fix="give --run-root a directory that you may write to; `ndctl doctor` looks at it",
        ) from exc
    try:
        backend.submit(handover)
    except Unsettled:
        raise  # something of it may run: list, status and cancel know it
    except BaseException:
        copy.forget()
        raise
    copy.keep()
    return Submitted(run_dir=copy.run_dir, known=0, copy=copy, at=at)


def _admit_remotely(
    submission: Submission, backend: RemoteScheduler, launch: LaunchPlan, environ: Mapping[str, str]
) -> Former | None:
    """What there is of the job, in the cluster or here; refuses a second start."""
    name, former = launch.job, backend.former(launch, submission.run_root)
    if former is not None and not former.over:
        raise JobError(
            f"job {name} is in the scheduler's hands: {former.words}",
            fix=watch_or_end(submission.run_dir, environ, "status"),
        )
    if former is not None and not (submission.resume or submission.new):
        raise JobError(
            f"job {name} exists: {former.words}",
            fix="--resume goes on from its newest checkpoint; --new starts over and keeps the old"
            f" run in {ARCHIVE}/",
        )
    if former is not None and former.copy is not None and submission.resume:
        refusal = steps_left(submission.planned.spec, snapshot.known(former.copy))
        if refusal is not None:
            raise refusal
    return former


def _check_inputs(submission: Submission, environ: Mapping[str, str]) -> None:
    """Raises SpecError where something is missing that the spec names."""
    from orchestrator.app.submission.inputs import look
    from orchestrator.model_config import hub_cache

    planned = submission.planned
    looked = planned.looked or look(planned.spec, hub_cache(environ))
    if looked.problems:
        raise _refused(planned, looked.problems)


def _check_resume(submission: Submission, run: Run) -> None:
    """Raises JobError where the job cannot resume, SpecError where its spec is of another one."""
    from orchestrator.app.submission.resume_check import look_at_run

    planned = submission.planned
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

    shape = shape_of(submission.planned.model_config)
    if shape.untrainable is not None:
        raise PlanError(
            f"the bundled trainer cannot train {shape.model_type}: {shape.untrainable}",
            fix="`ndctl plan` plans it; train it with a trainer of your own",
        )


def _check_drills(submission: Submission) -> None:
    """A drill that can never happen would rehearse nothing."""
    plan, steps = submission.planned.plan, submission.planned.spec.train.steps
    for drill in submission.drills:
        count = plan.world_size if drill.target == "rank" else len(plan.hosts)
        if drill.index >= count or drill.step > steps:
            raise JobError(
                f"drill {drill} would never happen: the job has {count} {drill.target}s,"
                f" counted from 0, and {steps} steps",
                fix=f"for example --drill {drill.fault}:{drill.target}=0@step={min(2, steps)}",
            )


def _admit(submission: Submission, environ: Mapping[str, str], clock: Clock) -> Path | None:
    """Refuse a second start; make room for a new one: where the old run was put, if it was."""
    run_dir, name = submission.run_dir, submission.planned.spec.name
    refuse_look_alike(run_dir)
    if has_writer(run_dir.journal):
        raise is_running(submission.run_dir, environ, "dashboard")
    run = snapshot.known(run_dir)
    if run.job is None:
        return _admit_without_a_journal(submission, clock)
    if submission.new:
        clear(run, environ, clock)
        return archive(run_dir, clock.now())
    left = None if _has_own(submission, run) else standing(run, environ, clock)
    if left is not None:
        raise JobError(
            f"job {name} is in the scheduler's hands: {left}",
            fix=watch_or_end(submission.run_dir, environ, "status"),
        )
    if submission.resume:
        _check_resume(submission, run)
        return None
    state = run.state
    ended = f"ended {state}" if state in ("SUCCEEDED", "FAILED", "CANCELLED") else "was cut off"
    raise JobError(
        f"job {name} exists in {run_dir.path} and {ended}",
        fix="--resume goes on from its newest checkpoint; --new starts over and keeps the old"
        f" run in {ARCHIVE}/",
    )


def _has_own(submission: Submission, run: Run) -> bool:
    """Whether the run was in this very Slurm job, which goes on without it."""
    from orchestrator.backends.slurm.job_lookup import recorded

    job = run.job
    return submission.own is not None and job is not None and recorded(job.launch) == submission.own


def _admit_without_a_journal(submission: Submission, clock: Clock) -> Path | None:
    run_dir = submission.run_dir
    left = left_behind(run_dir)
    if left and submission.new:
        return archive(run_dir, clock.now())
    if left:
        raise unknown_run(run_dir, left)
    if submission.resume:
        raise no_run(run_dir)
    return None


def submitted_event(
    submission: Submission, past: Run, at: float, exclude: Sequence[str] = ()
) -> JobSubmitted:
    spec = submission.planned.spec
    resilience = spec.resilience
    number = past.job.launch.launch + 1 if past.job else 1
    plans = max(past.current.number + 1, number) if past.job else number
    return JobSubmitted(
        at=at,
        backend=submission.backend or spec.cluster.backend,
        steps=spec.train.steps,
        plan=submission.planned.plan,
        plan_number=plans,
        launch=launch_of(submission, number, exclude),
        max_restarts=resilience.max_restarts,
        max_allocations=resilience.max_allocations,
        replace_stragglers=resilience.replace_stragglers,
        hang_timeout=None if resilience.hang_timeout == "auto" else resilience.hang_timeout,
        checkpoint_timeout=None
        if resilience.checkpoint_timeout == "auto"
        else resilience.checkpoint_timeout,
        init_timeout=INIT_TIMEOUT_S
        if resilience.init_timeout == "auto"
        else resilience.init_timeout,
        stop_grace=resilience.stop_grace,
        drills=submission.drills,
        resume=past.job is not None,
        shrink=resilience.shrink,
        min_hosts=resilience.min_hosts,
        preflight=_preflight(spec),
        policy=resilience.policy,
        failure_classes=resilience.failure_classes,
        on_oom=resilience.on_oom,
        on_nan=resilience.on_nan,
        keep_attempts=resilience.keep_attempts,
    )


def _preflight(spec: JobSpec) -> bool:
    wanted = spec.resilience.preflight
    return spec.cluster.backend != "local" if wanted == "auto" else wanted
