"""`srun ndctl agent SPEC` in the user's own batch script: run a job in that allocation.

Each task of the step runs this module. The first one plans for the nodes and creates the run
directory; the others wait for it. Then each becomes the agent of its node. The Slurm job is
requeued at its time limit, and when a node is lost.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from msgspec import Struct

from orchestrator import run_module
from orchestrator.app.planning.planned_hosts import Given
from orchestrator.app.planning.plans import plan_and_look
from orchestrator.app.submission import submit_job
from orchestrator.app.submission.payload import Submission
from orchestrator.backends.slurm import job_lookup, render
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.contract.files.access import access_of, access_umask, umask_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError, JobError
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.job_paths import run_root_of
from orchestrator.journal.current_launch import current_launch
from orchestrator.journal.snapshot import replay
from orchestrator.load import read_spec
from orchestrator.seams import Clock, Shell

log = logging.getLogger(__name__)

WAIT_S = 900.0
"""Time for the first task to plan and create the run directory. It ends the step if it fails."""
POLL_S = 1.0
END_S = 30.0
"""Timeout of scancel."""
FIRST_S = 15.0
"""Delay of the errors of the other tasks, so that the first one reports first."""


class Wanted(Struct, frozen=True, kw_only=True):
    """Arguments of the command line."""

    spec: Path
    overrides: tuple[str, ...] = ()
    run_root: str | None = None
    resume: bool = False
    new: bool = False


class Task(Struct, frozen=True, kw_only=True):
    """Slurm task of this process."""

    job_id: str
    """In the form that scontrol takes, for example 12 or 12_3."""
    step: str
    rank: int
    restarts: int
    nodes: tuple[str, ...]
    devices: int | None
    array_task: str | None

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> Self:
        """Raises JobError if srun did not start exactly one task on each node of the job."""
        job_id, step = job_lookup.own_id(environ), environ.get("SLURM_STEP_ID")
        if job_id is None or step is None or not step.isdigit():
            raise JobError(
                "`ndctl agent` must be started by srun on each node of a Slurm job",
                fix="put `srun ndctl agent SPEC` into a batch script; or queue a job with `ndctl"
                " submit SPEC`, or run it in an allocation with `ndctl submit SPEC --here`",
            )
        nodes = expand(environ.get("SLURM_JOB_NODELIST", ""))
        there = int(environ.get("SLURM_STEP_NUM_NODES", "0"))
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "0"))
        if not len(nodes) == there == tasks:
            raise JobError(
                f"srun started {tasks} agents on {there} nodes, but Slurm job {job_id} has"
                f" {len(nodes)} nodes, and each node needs one agent, which starts its ranks",
                fix=f"use srun --nodes={len(nodes)} --ntasks={len(nodes)} --ntasks-per-node=1",
            )
        return cls(
            job_id=job_id,
            step=step,
            rank=int(environ.get("SLURM_PROCID", "0")),
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
            nodes=nodes,
            devices=devices_in(environ),
            array_task=environ.get("SLURM_ARRAY_TASK_ID"),
        )

    @property
    def mark(self) -> str:
        """Identifies the step and the run of the Slurm job, so that tasks do not use old files."""
        return f"{self.step}, restart {self.restarts}"


def devices_in(environ: Mapping[str, str]) -> int | None:
    """GPUs per node from Slurm's variables, such as `2` or `a100:2`."""
    said = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE") or ""
    found = re.search(r"(\d+)$", said)
    return int(found[1]) if found else None


def named(wanted: Wanted, array_task: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The overrides. In a job array, the job name gets the number of the array task appended,
    unless an override sets the name."""
    overrides = wanted.overrides
    if array_task is None or any(one.startswith("name=") for one in overrides):
        return overrides
    name = read_spec(wanted.spec, overrides, environ).name
    return (*overrides, f"name='{name}-{array_task}'")


class AgentCommand(Struct, frozen=True, kw_only=True):
    """The command of the agent, which replaces this process."""

    argv: list[str]
    environ: Mapping[str, str]
    umask: int | None
    """None: unchanged."""


def agent_command(
    wanted: Wanted, environ: Mapping[str, str], clock: Clock, shell: Shell
) -> AgentCommand:
    """The agent's command, with the variables, hooks and permissions of the spec."""
    task = Task.from_mapping(environ)
    if task.rank != 0:
        launch = _await_launch(wanted, task, environ, clock)
    else:
        launch = _begin(wanted, task, environ, clock, shell)
    return AgentCommand(
        argv=_command(launch),
        environ={**environ, **(launch.slurm.env if launch.slurm else {})},
        umask=umask_of(launch),
    )


def wait_for_first_task(environ: Mapping[str, str], clock: Clock) -> None:
    """Delay the error of a task that is not the first.

    All tasks find the same errors in the spec and in the srun options. The first task reports
    them and ends the step, so that they are printed once. Errors of one node appear later.
    """
    if environ.get("SLURM_PROCID", "0") != "0":
        clock.sleep(FIRST_S)


def end_step(environ: Mapping[str, str], shell: Shell) -> None:
    """End the step if the first task failed, because the others wait for its run directory."""
    job_id, step = job_lookup.own_id(environ), environ.get("SLURM_STEP_ID")
    if job_id is not None and step is not None and environ.get("SLURM_PROCID") == "0":
        with contextlib.suppress(TimeoutError):
            shell(["scancel", f"{job_id}.{step}"], timeout=END_S)


def _begin(
    wanted: Wanted, task: Task, environ: Mapping[str, str], clock: Clock, shell: Shell
) -> LaunchPlan:
    backend = SlurmBackend(environ, clock, shell)
    overrides = named(wanted, task.array_task, environ)
    run_dir = _run_dir(wanted, overrides, environ)
    launch = _requeued_launch(run_dir, task)
    if launch is None:
        _warn_of(backend.batch_job(), environ)
        given = Given(nodes=task.nodes, devices=task.devices)
        planned = plan_and_look(wanted.spec, overrides, environ, purpose=given)
        submission = Submission(
            planned=planned,
            run_root=run_dir.path.parent,
            resume=wanted.resume,
            new=wanted.new,
            own=task.job_id,
        )
        launch, _ = submit_job.begin_inside(submission, environ, clock)
        backend.take_allocation(launch)
        with access_umask(access_of(launch)):
            backend.make_folder(launch)
    with access_umask(access_of(launch)):
        backend.record(launch, task.mark)
    return launch


def _run_dir(wanted: Wanted, overrides: Sequence[str], environ: Mapping[str, str]) -> RunDir:
    spec = read_spec(wanted.spec, overrides, environ)
    return RunDir((run_root_of(wanted.run_root, environ, spec.run_root) / spec.name).absolute())


def _requeued_launch(run_dir: RunDir, task: Task) -> LaunchPlan | None:
    """The unfinished launch of this Slurm job from before a requeue; None: there is none."""
    counts = current_launch(run_dir)
    if counts is None or job_lookup.recorded(counts.launch) != task.job_id:
        return None
    run = replay(run_dir)
    if run.job is None or run.ending is not None:
        return None
    led = run.scheduler.allocation
    is_new = led is None or led.id != task.job_id or led.restarts < task.restarts
    return counts.launch if is_new else None


def _warn_of(job: SlurmJob, environ: Mapping[str, str]) -> None:
    if not job.may_requeue:
        log.warning(
            "Slurm job %s cannot be requeued at its time limit or after a node failure; add"
            " `#SBATCH --requeue`",
            job.id,
        )
    bound, there = len(os.sched_getaffinity(0)), int(environ.get("SLURM_CPUS_ON_NODE", "0"))
    if bound < there:
        log.warning(
            "the ranks of this node share %s of its %s CPUs; use `srun --cpu-bind=none`",
            bound,
            there,
        )


def _await_launch(
    wanted: Wanted, task: Task, environ: Mapping[str, str], clock: Clock
) -> LaunchPlan:
    run_dir = _run_dir(wanted, named(wanted, task.array_task, environ), environ)
    begun = clock.monotonic()
    while clock.monotonic() - begun < WAIT_S:
        with contextlib.suppress(OSError):  # a file server may fail for a moment
            counts = current_launch(run_dir)
            if counts and job_lookup.recorded_step(counts.launch) == (task.job_id, task.mark):
                return counts.launch
        clock.sleep(POLL_S)
    raise BackendError(
        f"the first task of step {task.step} did not start the job in {run_dir.path} within"
        f" {WAIT_S:.0f} s",
        fix="see the output of the step; every node must see the run directory",
    )


def _command(launch: LaunchPlan) -> list[str]:
    """The program that a rendered batch script starts on each node."""
    copy = render.snapshot_path(launch) / render.ENTRY
    place = str(copy) if launch.slurm_spec.snapshot else run_module.__file__
    return [
        *(sys.executable, "-P", "-u", place, render.TASK),
        *(f"--run-dir={launch.run_dir}", f"--launch={launch.launch}"),
        *(f"--devices={launch.devices_per_host}", f"--agent-timeout={launch.agent_timeout}"),
        "--first-leads",
        *render.hooks_of(launch),
    ]
