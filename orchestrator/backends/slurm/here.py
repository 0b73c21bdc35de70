"""Backend of `ndctl submit --here`: a job runs as steps in an existing allocation.

The allocation is never requeued or ended; only its steps end. Instead of a requeue, the command
(`app/submission/here.py`, which holds `starter.lock`) starts another step on the nodes that are
left.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from orchestrator.backends.slurm import job_lookup, render
from orchestrator.backends.slurm.backend import CLEAR_S, POLL_S, SlurmBackend
from orchestrator.backends.slurm.commands import UNKNOWN_JOB, Slurm, refusal
from orchestrator.backends.slurm.job_lookup import GLANCE_S, Finder
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.times import date_time
from orchestrator.errors import BackendError, Ended
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.journal.snapshot import replay
from orchestrator.posix.locks import is_held_alone
from orchestrator.seams import (
    Clock,
    CurrentRun,
    FixedHosts,
    GrantingScheduler,
    HostNotice,
    LaunchStatus,
    Shell,
)

STARTER = "`ndctl submit --here`"


class HereBackend:
    successors = None
    """Slurm starts no agent again by itself."""
    unattended = None
    """The allocation belongs to a person, who may want it for more."""

    def __init__(self, environ: Mapping[str, str], clock: Clock, shell: Shell) -> None:
        self.environ = environ
        self.clock = clock
        self.slurm = Slurm(shell, clock)
        self.allocated = SlurmBackend(environ, clock, shell)
        """Backend for questions about the allocation and its nodes."""
        self.allocated.finder = Finder(self.slurm, any_job=True)
        self.cannot_go_on = False
        """The job ends because of this, and not because a person cancelled it."""

    @property
    def granted(self) -> GrantingScheduler:
        return self

    @property
    def fixed_hosts(self) -> FixedHosts:
        return self

    # State

    def standing(self, launch: LaunchPlan) -> str | None:
        return self._standing(launch, self.steps(launch))

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[LaunchStatus]:
        return [self._glimpse(launch) for launch in launches]

    def _glimpse(self, launch: LaunchPlan) -> LaunchStatus:
        try:
            words = self._standing(launch, self.steps(launch, tries=1, answer_s=GLANCE_S))
        except BackendError as exc:
            return LaunchStatus(f"{self.name_of(launch)}: {exc.message}", held=True)
        if words is not None:
            return LaunchStatus(words, held=True)
        return LaunchStatus(f"{self.name_of(launch)} has ended", held=False)

    def _standing(self, launch: LaunchPlan, steps: Sequence[str]) -> str | None:
        if steps:
            return f"step {steps[0]} of {STARTER} is running"
        if self._has_starter(launch):
            return f"{STARTER} is starting it in Slurm job {job_lookup.recorded(launch)}"
        return None

    def name_of(self, launch: LaunchPlan) -> str | None:
        return f"{STARTER} in Slurm job {job_lookup.recorded(launch)}"

    def steps(
        self, launch: LaunchPlan, *, tries: int = 3, answer_s: float | None = None
    ) -> tuple[str, ...]:
        """Ids of the steps of this launch. Raises BackendError."""
        job_id = job_lookup.recorded(launch)
        if job_id is None:
            return ()
        argv = ["squeue", "-h", "-s", "-j", job_id, "-o", "%i|%j"]
        done = self.slurm.ask(argv, tries=tries, answer_s=answer_s)
        if done.code != 0 and not UNKNOWN_JOB.search(done.err):
            raise refusal(argv, done)
        rows = (line.partition("|") for line in done.out.splitlines())
        return tuple(step for step, _, name in rows if name == render.job_name(launch))

    def _has_starter(self, launch: LaunchPlan) -> bool:
        """Whether a process runs that starts another step when this one ends."""
        return is_held_alone(RunDir(Path(launch.run_dir)).starter_lock)

    def cluster(self) -> str:
        return self.allocated.cluster()

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        return self.allocated.known(hosts)

    # For the agents, and for the leader

    def rival(self, launch: LaunchPlan) -> str | None:
        own = job_lookup.own_id(self.environ)
        noted = job_lookup.recorded(launch)
        return None if noted == own else f"it runs in Slurm job {noted}"

    def allocation(self, launch: LaunchPlan) -> Allocation:
        granted = self.allocated.allocation(launch)
        hosts = self._hosts()
        switches = {host: above for host, above in granted.switches.items() if host in hosts}
        return replace(granted, hosts=hosts, switches=switches)

    def _hosts(self) -> tuple[str, ...]:
        """Hosts of the step; the allocation may have more."""
        return expand(self.environ.get("SLURM_STEP_NODELIST", ""))

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        return self.allocated.notices(launch, hosts)

    def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        return self.allocated.unbegun(launch, hosts)

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        return replace(self.allocated.own_run(launch, hosts), hosts=self._hosts())

    def why_ending(self, launch: LaunchPlan) -> Cause:
        """A signal to a step of a running allocation means that a person wants the job to end."""
        cause = self.allocated.why_ending(launch)
        return "cancelled" if cause == "unknown" and not self.cannot_go_on else cause

    def clear_host(self, launch: LaunchPlan, host: str) -> str:
        return self.allocated.clear_host(launch, host)

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        self.allocated.replace(launch, host)

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        """Let the starter start another step when this one ends. Slurm is not involved.

        Raises:
            Ended: another step cannot run, or the starter has exited.
        """
        why = self.why_not(launch, exclude)
        if not why and not self._has_starter(launch):
            why = f"{STARTER}, which starts its steps, has exited"
        if why:
            self.cannot_go_on = True
            raise Ended(why)

    def why_not(self, launch: LaunchPlan, exclude: Sequence[str]) -> str:
        """Why another step cannot continue the job; empty if it can.

        Raises:
            BackendError: Slurm does not answer.
        """
        job_id = job_lookup.recorded(launch) or ""
        job = self.allocated.finder.show(launch, job_id)
        name = f"its allocation, Slurm job {job_id},"
        if job is None or job.meaning != "running":
            return f"{name} is over" + (f": {job.state}" if job else "")
        notice_s = launch.slurm_spec.notice_s
        if job.ends_at is not None and job.ends_at - self.clock.now() <= notice_s:
            return f"{name} ends at {date_time(job.ends_at)}"
        need = len(replay(RunDir(Path(launch.run_dir))).plan.hosts)
        left = self.usable(job, exclude)
        if len(left) < need:
            return f"{name} has only {len(left)} of {need} needed nodes left"
        return ""

    def usable(self, job: SlurmJob, exclude: Sequence[str]) -> tuple[str, ...]:
        """Nodes of the allocation that can run a step. Raises BackendError."""
        wanted = [host for host in job.nodes if host not in exclude]
        dead = (
            {node.name for node in self.allocated.nodes(wanted) if node.is_dead} if wanted else ()
        )
        return tuple(host for host in wanted if host not in dead)

    # The end

    def clear(self, launch: LaunchPlan) -> None:
        begun, asked = self.clock.monotonic(), set[str]()
        while steps := self.steps(launch):
            if self.clock.monotonic() - begun > CLEAR_S:
                raise BackendError(
                    f"step {steps[0]} was cancelled {CLEAR_S:.0f} s ago and is still running",
                    fix=f"`squeue -s -j {steps[0].partition('.')[0]}` shows what is left",
                )
            for step in {*steps} - asked:
                self.slurm.ask(["scancel", step])
                asked.add(step)
            self.clock.sleep(POLL_S)
