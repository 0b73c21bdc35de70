"""Submits jobs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndctl.client.errors import Error, explained
from ndctl.client.job import Job
from ndctl.client.settings import Spec, drills_of, overrides_of, warnings_of, written_of
from orchestrator.system import SystemClock

if TYPE_CHECKING:
    from orchestrator.app.planning.plans import Planned
    from orchestrator.contract.drills import Drill

Folder = str | os.PathLike[str]


@explained
def submit(  # noqa: PLR0913 - one argument for each option of `ndctl submit`
    spec: Spec,
    *,
    set: Mapping[str, Any] | None = None,
    backend: str | None = None,
    run_root: Folder | None = None,
    inventory: Folder | None = None,
    drills: Sequence[str] = (),
    resume: bool = False,
    new: bool = False,
) -> Job:
    """Submit a job and return while it starts, as `ndctl submit`.

    Args:
        spec: path of a spec file, or a mapping with the same keys.
        set: keys to override, such as `{"train.steps": 100}`.
        backend: `local`, `slurm` or `kubernetes`. None: of the spec.
        run_root: folder of the run directories. None: `NDCTL_RUN_ROOT`, else of the spec.
        inventory: file with the hosts to plan for. None: the hosts of the backend.
        drills: faults to inject once, such as `"kill:rank=1@step=25"`.
        resume: resume the run that ended or was interrupted.
        new: start over; the old run is moved to `.archive/`.

    Raises:
        SpecError, PlanError: with everything that is wrong.
        JobError: the job runs, or it has ended and neither `resume` nor `new` is set.
        BackendError: the job could not be started. Nothing is left of it.
    """
    from orchestrator.app.planning.plans import plan_written

    if resume and new:
        raise Error("resume and new exclude each other", fix="give one of them")
    faults = drills_of(drills)
    written = written_of(spec, overrides_of(set, backend))
    hosts = None if inventory is None else Path(inventory)
    if hosts is not None and written.spec.cluster.backend == "local":
        raise Error(
            "an inventory describes a cluster, but the backend is local",
            fix="leave inventory out, or give backend=",
        )
    root = None if run_root is None else Path(run_root)
    planned = plan_written(written, os.environ, hosts, root, resume=resume)
    return _submitted(planned, run_root, faults, resume=resume, new=new)


@explained
def run(  # noqa: PLR0913 - one argument for each option of `ndctl run`
    program: Sequence[Any],
    *,
    name: str | None = None,
    backend: str | None = None,
    hosts: int | None = None,
    gpus_per_host: int | None = None,
    spare_hosts: int | None = None,
    run_root: Folder | None = None,
    set: Mapping[str, Any] | None = None,
    drills: Sequence[str] = (),
) -> Job:
    """Run your own program on each rank and supervise it, as `ndctl run`.

    Args:
        program: `["train.py", "--lr", "3e-4"]`, `["-m", "package.train"]`, or
            `["--no-python", "./program"]`.
        name: name of the job. None: the program's, with a number if it is taken.
        hosts: None: 1.
        gpus_per_host: ranks per host. None: all GPUs of this machine, or 1.
        spare_hosts: hosts that replace lost ones.

    The other arguments and the errors are those of `ndctl.submit`.
    """
    from orchestrator.app.planning.plans import plan_written
    from orchestrator.app.submission.own_program import Asked, refuse_launcher, write

    words = _words(program)
    refuse_launcher(words)
    asked = Asked(
        words=words,
        name=name,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        spare_hosts=spare_hosts,
        overrides=overrides_of(set, backend),
    )
    faults = drills_of(drills)
    written = write(asked, None if run_root is None else os.fspath(run_root), os.environ)
    root = None if run_root is None else Path(run_root)
    planned = plan_written(written, os.environ, run_root=root)
    return _submitted(planned, run_root, faults)


def _words(program: Sequence[Any]) -> tuple[str, ...]:
    fix = 'give a list with the program and its arguments: ["train.py", "--lr", "3e-4"]'
    if isinstance(program, str) or not program:
        raise Error(f"the program is {program!r}", fix=fix)
    # Numbers and paths are arguments too, as in a shell.
    return tuple(os.fspath(one) if isinstance(one, os.PathLike) else str(one) for one in program)


def _submitted(
    planned: "Planned",
    run_root: Folder | None,
    drills: "tuple[Drill, ...]",
    *,
    resume: bool = False,
    new: bool = False,
) -> Job:
    from orchestrator.app.submission import payload, submit_job
    from orchestrator.app.submission.spec_warnings import spec_warnings
    from orchestrator.job_paths import run_root_of

    warnings_of(spec_warnings(planned.spec, planned.plan))
    root = None if run_root is None else os.fspath(run_root)
    submission = payload.Submission(
        planned=planned,
        run_root=run_root_of(root, os.environ, planned.spec.run_root),
        drills=drills,
        resume=resume,
        new=new,
    )
    submitted = submit_job.submit(submission, os.environ, SystemClock())
    warnings_of(submitted.warnings)
    looked = planned.looked.notes if planned.looked is not None else ()
    return Job(submitted.run_dir.path, notes=(*submitted.notes, *planned.notes, *looked))
