"""`ndctl submit --here`: run a job in an existing Slurm allocation.

The command keeps running. It starts the agents as a step, prints what happens, warns the job before
the allocation ends, ends it at Ctrl-C, and starts another step if the job can continue in one. It
never requeues or ends the allocation.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from msgspec import Struct

from orchestrator.app.cancel_job import cancel
from orchestrator.app.commands import commands_of
from orchestrator.app.excluded_hosts import excluded_hosts
from orchestrator.app.planning.planned_hosts import Given
from orchestrator.app.planning.plans import plan_and_look
from orchestrator.app.submission import submit_job
from orchestrator.app.submission.inside import Wanted, devices_in, named
from orchestrator.app.submission.payload import Submission
from orchestrator.backends.by_name import HERE
from orchestrator.backends.slurm import job_lookup, render
from orchestrator.backends.slurm.detach import Detached, start_beside
from orchestrator.backends.slurm.here import HereBackend
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.backends.slurm.on_nodes.srun_end import CANCELLED
from orchestrator.contract.drills import Drill
from orchestrator.contract.files.access import access_of, access_umask
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import LeaderStarted
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.dashboard.follow.follow_loop import follow_job
from orchestrator.errors import BackendError, JobError, NdctlError
from orchestrator.failover.after_leader import UNLED
from orchestrator.failover.requeue_after_exit import restarts_in_vain
from orchestrator.job.stage import Queued
from orchestrator.job.state import Run
from orchestrator.job_paths import run_root_of
from orchestrator.journal.journal import Journal
from orchestrator.journal.snapshot import replay
from orchestrator.journal.supervisor import Supervisor
from orchestrator.load import read_spec
from orchestrator.posix.locks import try_lock
from orchestrator.seams import Clock, Shell

log = logging.getLogger(__name__)

LOOK_S = 15.0
"""Seconds between two checks of the end of the allocation."""
STEPS_S = 2.0
"""Seconds between two checks of steps that run on without srun."""
LEAVE_S, LEAVE_POLL_S = 15.0, 0.1
"""Seconds for the agents of an ended job to exit, and between two checks."""
END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = (signal.SIGUSR1, signal.SIGUSR2)

Say = Callable[[str], object]


class Here(Struct, frozen=True, kw_only=True):
    """A job whose run directory is written, and the nodes of its allocation."""

    launch: LaunchPlan
    lines: int
    """Number of journal lines before this launch."""
    hosts: tuple[str, ...]


def submit_here(
    wanted: Wanted,
    drills: tuple[Drill, ...],
    environ: Mapping[str, str],
    clock: Clock,
    shell: Shell,
) -> Here:
    """Plan for the nodes of the allocation and write the run directory. Raises NdctlError."""
    backend = HereBackend(environ, clock, shell)
    job = _allocation(backend, environ)
    overrides = named(wanted, environ.get("SLURM_ARRAY_TASK_ID"), environ)
    root = run_root_of(
        wanted.run_root, environ, read_spec(wanted.spec, overrides, environ).run_root
    )
    nodes = _nodes(backend, job, root, environ, clock)
    given = Given(nodes=nodes, devices=devices_in(environ))
    planned = plan_and_look(wanted.spec, overrides, environ, purpose=given)
    _check_end(job, planned.spec.cluster.slurm, clock)
    submission = Submission(
        planned=planned,
        run_root=root,
        drills=drills,
        resume=wanted.resume,
        new=wanted.new,
        own=job.id,
        backend=HERE,
    )
    launch, lines = submit_job.begin_inside(submission, environ, clock)
    with access_umask(access_of(launch)):
        backend.allocated.make_folder(launch)
        job_lookup.record(launch, job.id)
    return Here(launch=launch, lines=lines, hosts=nodes)


def _allocation(backend: HereBackend, environ: Mapping[str, str]) -> SlurmJob:
    job_id = job_lookup.own_id(environ)
    if job_id is None:
        raise JobError(
            "--here needs a Slurm allocation, but this shell has none",
            fix="run `salloc --nodes=N --exclusive`, and the command in its shell; or remove --here"
            " to queue the job",
        )
    if environ.get("SLURM_PROCID", "0") != "0" or environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise JobError(
            "srun started several of these commands, but `ndctl submit --here` runs once and calls"
            " srun itself",
            fix="run it without srun; in batch scripts use `srun ndctl agent SPEC`",
        )
    job = backend.allocated.finder.show(_NO_LAUNCH, job_id)
    if job is None or job.meaning != "running":
        raise JobError(
            f"Slurm job {job_id} is not running" + (f": {job.state}" if job else ""),
            fix="run `salloc` again; if SLURM_JOB_ID is stale, `unset SLURM_JOB_ID`",
        )
    return job


_NO_LAUNCH = LaunchPlan(
    job="", run_dir="", launch=0, hosts=("",), devices_per_host=1, agent_timeout=1.0
)
"""Placeholder to query a Slurm job that belongs to no launch."""


def _nodes(
    backend: HereBackend, job: SlurmJob, root: Path, environ: Mapping[str, str], clock: Clock
) -> tuple[str, ...]:
    """Usable nodes of the allocation. Raises JobError if there are none."""
    excluded = [
        one for one in excluded_hosts(root, backend, environ, clock) if one.name in job.nodes
    ]
    for one in excluded:
        log.warning("%s", one)
    nodes = backend.usable(job, [one.name for one in excluded])
    if not nodes:
        raise JobError(
            f"no node of the allocation (Slurm job {job.id}) is usable: {', '.join(job.nodes)}",
            fix="see `sinfo -R` for reasons of Slurm and `ndctl hosts` for reasons of ndctl",
        )
    return nodes


def _check_end(job: SlurmJob, slurm: SlurmSpec, clock: Clock) -> None:
    left = None if job.ends_at is None else job.ends_at - clock.now()
    if left is not None and left <= slurm.notice_s:
        raise JobError(
            f"the allocation (Slurm job {job.id}) ends in {max(0.0, left):.0f} s, but the job is"
            f" told to stop {slurm.notice_s:g} s before its end (cluster.slurm.notice_s)",
            fix="request an allocation with more time, or lower cluster.slurm.notice_s",
        )


def run_here(here: Here, environ: Mapping[str, str], clock: Clock, shell: Shell, say: Say) -> int:
    """Start the agents, and wait until the job has ended or cannot continue in this allocation.
    Returns the exit code of the command."""
    starter = Starter(here, environ, clock, shell, say)
    run_dir, commands = starter.run_dir, commands_of(starter.run_dir, environ)
    with starter.running():
        return follow_job(run_dir, here.lines, clock, lambda run: None, commands, starter.has_ended)


@dataclass
class Starter:
    here: Here
    environ: Mapping[str, str]
    clock: Clock
    shell: Shell
    say: Say
    process: Detached | None = None
    """srun of the current step."""
    before: set[Path] = field(default_factory=set)
    """Output files of earlier steps."""
    starts: int = 0
    asked_to_end: int = 0
    """Number of signals that ask to end the job, such as Ctrl-C."""
    handled_ends: int = 0
    """Number of these signals that were handled."""
    near_end: bool = False
    """The allocation ends soon."""
    warned: bool = False
    """The agents of the current step were told so."""
    looked_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.backend = HereBackend(self.environ, self.clock, self.shell)
        self.run_dir = RunDir(Path(self.here.launch.run_dir))
        self.looked_at = self.clock.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the lock that tells agents that another step follows the current one."""
        self.run_dir.logs.mkdir(exist_ok=True)
        before = {number: signal.getsignal(number) for number in (*END, *NOTICE)}
        with self.run_dir.starter_lock.open("a") as file:
            if not try_lock(file.fileno()):
                raise JobError(f"{self.run_dir.starter_lock} is held by another process")
            for number in END:
                signal.signal(number, self._end)
            for number in NOTICE:
                signal.signal(number, self._notice)
            try:
                self._start(self.here.hosts)
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                self._leave()

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_end += 1
        if number == signal.SIGHUP:  # the terminal is closed, and writing to it would fail
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.near_end = True

    def _leave(self) -> None:
        """Wait for the agents to exit, then end what is left of the job in the allocation."""
        begun = self.clock.monotonic()
        while self.process is not None and self.process.poll() is None:
            if self.clock.monotonic() - begun > LEAVE_S:
                break
            self.clock.sleep(LEAVE_POLL_S)
        with suppress(BackendError):
            self.backend.clear(self.here.launch)
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def _start(self, hosts: tuple[str, ...]) -> None:
        """Start a step on `hosts`. A second step looks like a requeued job to its agents."""
        argv = render.step_here(self.here.launch, hosts, sys.executable)
        self.before = self._outputs()
        own = self.here.launch.slurm.env if self.here.launch.slurm else {}
        environ = {**self.environ, **own, "SLURM_RESTART_COUNT": str(self._restarts)}
        with access_umask(access_of(self.here.launch)):
            self.process = start_beside(argv, environ, self._log)
        self.starts, self.warned = self.starts + 1, False

    @property
    def _restarts(self) -> int:
        """SLURM_RESTART_COUNT of the next step."""
        return int(self.environ.get("SLURM_RESTART_COUNT", "0")) + self.starts

    @property
    def _log(self) -> Path:
        return render.folder(self.here.launch) / "srun.log"

    # Polled by `follow_job`

    def has_ended(self) -> bool:
        """Whether the job has ended or cannot continue. Also handles signals and starts steps."""
        try:
            self._handle_end()
            self._check_end_of_allocation()
            assert self.process is not None
            return self.process.poll() is not None and self._settled(self.process.returncode)
        except BackendError as exc:  # slurmctld is unreachable; the step runs without it
            log.warning("%s", exc.message)
            self.clock.sleep(STEPS_S)
            return False

    def _handle_end(self) -> None:
        """At the first Ctrl-C the ranks write a checkpoint and exit; the second one kills them."""
        if self.handled_ends >= self.asked_to_end:
            return
        self.handled_ends = self.asked_to_end
        if self.handled_ends > 1:
            self.say("ending the job now")
            self.backend.clear(self.here.launch)
            return
        try:
            self.say(cancel(self.run_dir, self.environ, self.clock))
        except NdctlError as exc:
            self.say(f"{exc}")

    def _check_end_of_allocation(self) -> None:
        """Warn the job before the allocation ends. Slurm itself warns only batch jobs."""
        now = self.clock.monotonic()
        if self.warned or (not self.near_end and now - self.looked_at < LOOK_S):
            return
        self.looked_at = now
        job = self.backend.allocated.finder.show(self.here.launch, self._job_id, tries=1)
        notice_s = self.here.launch.slurm_spec.notice_s
        ends_at = job.ends_at if job is not None else None
        is_near = ends_at is not None and ends_at - self.clock.now() <= notice_s
        if is_near or self.near_end:
            self.warned, self.near_end = True, False
            for step in self.backend.steps(self.here.launch):
                self.backend.slurm.ask(["scancel", "--signal=USR2", step])

    @property
    def _job_id(self) -> str:
        return job_lookup.own_id(self.environ) or ""

    def _settled(self, code: int) -> bool:
        """After srun ended: True if the job has ended or cannot continue, else start a step."""
        run = replay(self.run_dir)
        if run.ending is not None:
            return True
        if self.backend.steps(self.here.launch):  # only srun was killed; the agents still run
            self.clock.sleep(STEPS_S)
            return False
        if self.handled_ends or (code >= 0 and self._was_cancelled()):
            cancel(self.run_dir, self.environ, self.clock)
            return True
        why = self._why_not(run)
        if why:
            self._give_up(
                f"the job cannot continue in this allocation: {why}; srun exited with code {code}"
            )
            return True
        self._start(self._hosts(run))
        return False

    def _give_up(self, why: str) -> None:
        """Record the end in the journal, because the job has no leader."""
        with Journal(self.run_dir.journal, self.clock) as journal:
            host, pid = self.here.hosts[0], os.getpid()
            ended = LeaderStarted(at=self.clock.now(), host=host, pid=pid, unable=why)
            Supervisor(journal).feed(ended)

    def _was_cancelled(self) -> bool:
        said = (path.read_text(errors="replace") for path in self._outputs() - self.before)
        # If Slurm itself ended the step, the line has a reason. Slurm writes the same line if srun
        # was killed, but then srun has no exit code.
        return any(not found[2] for text in said for found in CANCELLED.finditer(text))

    def _outputs(self) -> set[Path]:
        """Output files of all steps; the step number is in the name."""
        return {*render.folder(self.here.launch).glob("*_log.err")}

    def _why_not(self, run: Run) -> str:
        vain = restarts_in_vain(run, self._restarts - 1)
        most = (run.job.max_allocations if run.job else None) or UNLED
        if not isinstance(run.stage, Queued) and vain >= most:
            return f"{vain} steps in a row made no progress"
        return self.backend.why_not(self.here.launch, run.scheduler.left_out)

    def _hosts(self, run: Run) -> tuple[str, ...]:
        job = self.backend.allocated.finder.show(self.here.launch, self._job_id)
        usable = self.backend.usable(job, run.scheduler.left_out) if job is not None else ()
        return tuple(host for host in usable if host in self.here.hosts)
