"""Requeue a Slurm job, and exclude bad nodes from its next run.

`scontrol requeue` ends this run of the job: Slurm signals all its processes, and kills the rest
after KillWait (30 s by default). The calling process is one of them, and the next run cannot start
before it exits. So all requests are sent at once without waiting, and then all agents exit.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import host_strikes
from orchestrator.backends.slurm import observe, pending_hints
from orchestrator.backends.slurm.commands import AGAIN, Slurm
from orchestrator.backends.slurm.exclude_nodes import left_out
from orchestrator.backends.slurm.inventory import NODES
from orchestrator.backends.slurm.job_lookup import Finder
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError, Ended, JobError
from orchestrator.inventory.slurm.hostlist import expand, fold
from orchestrator.inventory.slurm.nodes import parse_nodes
from orchestrator.job.hosts.preemption import ASK_S
from orchestrator.journal.snapshot import replay
from orchestrator.seams import HostNotice

log = logging.getLogger(__name__)

VERDICT_S = 330.0
"""Seconds to wait until Slurm gives up a host; the default of SlurmdTimeout is 300."""
VERDICT_POLL_S = 1.0
ALIVE_S = 10.0
"""Timeout of a step that runs `true`."""
EXCLUDE_ANSWER_S = 2.0
"""Timeout of the update. slurmctld does it immediately, or not at all at this time."""
EXCLUDE_S = 6.0
"""Seconds to retry while slurmctld is unreachable."""
EXCLUDE_POLL_S = 0.5
NOT_YET = re.compile(r"DB index is being set|unexpected message received", re.IGNORECASE)
"""Output of scontrol for an update that slurmctld does not accept yet. Before Slurm 24.11 without
accounting, it accepts none for a run that lost a node. Slurm 22.05 also does not accept this list
for a running job, so it cannot be set before the requeue."""


@dataclass(slots=True)
class Requeue:
    """Requeues one run of a job. May be called again if an answer was lost."""

    slurm: Slurm
    finder: Finder
    environ: Mapping[str, str]
    job_id: str
    restarts: int
    """Number of requeues before this run."""
    notices: Callable[[LaunchPlan, Sequence[str]], Sequence[HostNotice]]
    has_asked: bool = field(default=False, init=False)
    """This process requested the requeue, so it also sets the excluded nodes."""

    def __call__(
        self, launch: LaunchPlan, exclude: Sequence[str], again: Collection[str] = ()
    ) -> None:
        """Raises Ended if the job cannot be requeued, BackendError for other failures."""
        job = self.finder.show(launch, self.job_id)
        if job is None or job.is_over:
            raise Ended(f"Slurm job {self.job_id} has ended")
        if self._is_settled(job):
            return
        is_asked_for = job.restarts == self.restarts
        if is_asked_for and job.meaning == "running":
            self._await_dead_nodes(launch, exclude, job.ends_at)
        names = self._left_out(launch, job, exclude, again)
        if is_asked_for:
            self.has_asked = True  # before the answer, which may be lost
            self.slurm.told(["scontrol", "requeue", self.job_id])
        if {*names} != {*job.excluded}:
            self._exclude(names)

    def _is_settled(self, job: SlurmJob) -> bool:
        """Whether the job is already requeued. Raises Ended if it will not be."""
        if job.restarts == self.restarts:
            if job.meaning == "leaving" and not observe.can_be_queued_again(job, self.restarts):
                raise Ended(f"{pending_hints.words(job)}: it is being ended")
            return job.meaning in ("queued", "held")
        if job.restarts == self.restarts + 1 and job.meaning != "running" and self.has_asked:
            return False
        # Another agent, Slurm or a person requeued the job and chose the excluded nodes. The
        # information of this process is older.
        log.info("already requeued: %s", pending_hints.words(job))
        return True

    def _left_out(
        self, launch: LaunchPlan, job: SlurmJob, exclude: Sequence[str], again: Collection[str]
    ) -> tuple[str, ...]:
        asked_for = expand(launch.slurm_spec.exclude or "")
        standing = {*job.excluded} - ({*again} - {*asked_for})
        nodes = parse_nodes(self.slurm.told(NODES))
        partition, unusable = self.environ.get("SLURM_JOB_PARTITION"), self._unusable(launch)
        out = left_out(launch, standing, exclude, nodes, partition, unusable)
        for host, why in out.dropped.items():
            log.warning("not excluding %s: %s", host, why)
        return out.names

    def _unusable(self, launch: LaunchPlan) -> set[str]:
        """Hosts that this job replaced or that strikes exclude, so that the next leader would not
        use them. An unreadable journal is ignored."""
        run_dir, found = RunDir(Path(launch.run_dir)), set[str]()
        if cluster := self.environ.get("SLURM_CLUSTER_NAME"):
            struck = host_strikes.path_of(run_dir.path.parent, cluster)
            found |= {*host_strikes.excluded(struck, self.slurm.clock.now())}
        with contextlib.suppress(OSError, JobError):
            found |= {*replay(run_dir).hosts.replaced}
        return found

    def _await_dead_nodes(
        self, launch: LaunchPlan, exclude: Sequence[str], ends_at: float | None
    ) -> None:
        """Wait until Slurm gives up the hosts that do not respond.

        The job cannot complete and start again before that anyway. And if a node goes down while a
        job completes, Slurm 22.05 miscounts the GPUs of the job: its next run cannot create steps,
        and the GPUs stay allocated until slurmctld restarts. The wait ends before the time limit,
        because Slurm does not requeue a job at its time limit.
        """
        clock = self.slurm.clock
        given = expand(self.environ.get("SLURM_JOB_NODELIST", ""))
        own = self.environ.get("SLURMD_NODENAME")
        doubtful = ({*exclude} & {*given} | {*given[:1]}) - {own}
        left_s = VERDICT_S if ends_at is None else ends_at - clock.now() - ASK_S
        until = clock.monotonic() + min(VERDICT_S, left_s)
        while doubtful and clock.monotonic() < until:
            given_up: set[str] = set()
            with contextlib.suppress(BackendError):  # retried until the timeout
                given_up = {
                    notice.host
                    for notice in self.notices(launch, sorted(doubtful))
                    if notice.state == "REMOVED" or "DOWN" in notice.state.split("+")
                }
            doubtful -= given_up
            for host in sorted(doubtful):
                if clock.monotonic() < until and self._answers(host):
                    doubtful.remove(host)
            clock.sleep(VERDICT_POLL_S if doubtful else 0)

    def _answers(self, host: str) -> bool:
        """Whether slurmd on the host can start a step."""
        job = self.environ.get("SLURM_JOB_ID", "")  # srun does not accept `12_3`
        place = [f"--jobid={job}", "--overlap", f"--nodelist={host}"]
        argv = ["srun", *place, "--nodes=1", "--ntasks=1", "true"]
        try:
            done = self.slurm.shell(argv, timeout=ALIVE_S)
        except TimeoutError:
            return False
        return done.code == 0

    def _exclude(self, names: Sequence[str]) -> None:
        """Exclude these nodes from the next run, if slurmctld accepts it now.

        If not, scontrol itself retries for some seconds, and succeeds if this run has ended by
        then. A failure is harmless: Slurm gives a dead node to no job, and the next leader checks
        each node.
        """
        argv = ["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={fold(names)}"]
        clock, said = self.slurm.clock, ""
        until = clock.monotonic() + EXCLUDE_S
        while not said or clock.monotonic() < until:
            try:
                done = self.slurm.shell(argv, timeout=EXCLUDE_ANSWER_S)
            except TimeoutError as exc:
                said = str(exc)
                break
            if done.code == 0:
                return
            said = (
                " ".join((done.err or done.out).split()) or f"scontrol exited with code {done.code}"
            )
            # Slurm signals all processes of this run now, also scontrol. So retry after a signal.
            is_signalled = done.code < 0
            if not is_signalled and (NOT_YET.search(said) or not AGAIN.search(said)):
                break
            clock.sleep(EXCLUDE_POLL_S)
        log.warning("Slurm did not confirm that the next run excludes %s: %s", fold(names), said)
