"""A Slurm job goes back to the queue, and its next run does without nodes that are no good.

`scontrol requeue` ends this run of the job: Slurm signals all its processes and kills, KillWait (by
default 30 s) later, those that are left. The process that asks is one of them, and the next run
cannot start before the last one has gone. So everything is asked for at once, nothing is waited
for, and then all agents leave.
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
from orchestrator.journal.snapshot import known
from orchestrator.seams import HostNotice

log = logging.getLogger(__name__)

VERDICT_S = 330.0
"""Slurm's own default of SlurmdTimeout is 300."""
VERDICT_POLL_S = 1.0
ALIVE_S = 10.0
"""For a step that does nothing."""
EXCLUDE_ANSWER_S = 2.0
"""For an answer to what slurmctld does at once or, however long it is waited for, not now."""
EXCLUDE_S = 6.0
"""For a slurmctld that cannot be reached just then."""
EXCLUDE_POLL_S = 0.5
NOT_YET = re.compile(r"DB index is being set|unexpected message received", re.IGNORECASE)
"""What scontrol prints of an update that slurmctld does not take yet. Before Slurm 24.11, without
accounting, that is each one of a run out of which Slurm has taken a node. Nor does 22.05 take this
list from a job that runs, so it cannot be given before the requeue."""


@dataclass(slots=True)
class Requeue:
    """Asked by one process of a run; more than once where an answer was lost."""

    slurm: Slurm
    finder: Finder
    environ: Mapping[str, str]
    job_id: str
    restarts: int
    """Of this run."""
    notices: Callable[[LaunchPlan, Sequence[str]], Sequence[HostNotice]]
    has_asked: bool = field(default=False, init=False)
    """Then the nodes that the next run is to do without are for this process to say."""

    def __call__(
        self, launch: LaunchPlan, exclude: Sequence[str], again: Collection[str] = ()
    ) -> None:
        """Raises Ended where the job cannot be queued again, else BackendError."""
        job = self.finder.show(launch, self.job_id)
        if job is None or job.is_over:
            raise Ended(f"Slurm job {self.job_id} has ended")
        if self._is_settled(job):
            return
        is_asked_for = job.restarts == self.restarts
        if is_asked_for and job.meaning == "running":
            self._await_verdict(launch, exclude, job.ends_at)
        names = self._left_out(launch, job, exclude, again)
        if is_asked_for:
            self.has_asked = True  # before the answer, which may be lost
            self.slurm.told(["scontrol", "requeue", self.job_id])
        if {*names} != {*job.excluded}:
            self._exclude(names)

    def _is_settled(self, job: SlurmJob) -> bool:
        """Whether the job is queued again already. Raises Ended where it will not be."""
        if job.restarts == self.restarts:
            if job.meaning == "leaving" and not observe.can_be_queued_again(job, self.restarts):
                raise Ended(f"{pending_hints.words(job)}: it is being ended")
            return job.meaning in ("queued", "held")
        if job.restarts == self.restarts + 1 and job.meaning != "running" and self.has_asked:
            return False
        # Another agent, Slurm or a person has queued it again, and has said which nodes the next
        # run does without. What is known here is older than that.
        log.info("%s: it was queued again before", pending_hints.words(job))
        return True

    def _left_out(
        self, launch: LaunchPlan, job: SlurmJob, exclude: Sequence[str], again: Collection[str]
    ) -> tuple[str, ...]:
        asked_for = expand((launch.slurm and launch.slurm.exclude) or "")
        standing = {*job.excluded} - ({*again} - {*asked_for})
        nodes = parse_nodes(self.slurm.told(NODES))
        partition, unusable = self.environ.get("SLURM_JOB_PARTITION"), self._unusable(launch)
        out = left_out(launch, standing, exclude, nodes, partition, unusable)
        for host, why in out.dropped.items():
            log.warning("Slurm is not asked to leave %s out: %s", host, why)
        return out.names

    def _unusable(self, launch: LaunchPlan) -> set[str]:
        """Hosts that the next leader would not use: this job replaced them, or strikes exclude
        them. A journal that cannot be read now costs only that."""
        run_dir, found = RunDir(Path(launch.run_dir)), set[str]()
        if cluster := self.environ.get("SLURM_CLUSTER_NAME"):
            struck = host_strikes.path_of(run_dir.path.parent, cluster)
            found |= {*host_strikes.excluded(struck, self.slurm.clock.now())}
        with contextlib.suppress(OSError, JobError):
            found |= {*known(run_dir).hosts.replaced}
        return found

    def _await_verdict(
        self, launch: LaunchPlan, exclude: Sequence[str], ends_at: float | None
    ) -> None:
        """Wait until Slurm itself has given up those hosts that do not answer.

        A job cannot complete, and so not start again, before that anyway; and 22.05 loses count of
        the GPUs of a job whose node goes down while it completes: no step can be created in its
        next run, and the GPUs stay taken until slurmctld starts again. But a job that comes to its
        time limit meanwhile may be lost: Slurm does not queue it again by itself.
        """
        clock = self.slurm.clock
        given = expand(self.environ.get("SLURM_JOB_NODELIST", ""))
        own = self.environ.get("SLURMD_NODENAME")
        doubtful = ({*exclude} & {*given} | {*given[:1]}) - {own}
        left_s = VERDICT_S if ends_at is None else ends_at - clock.now() - ASK_S
        until = clock.monotonic() + min(VERDICT_S, left_s)
        while doubtful and clock.monotonic() < until:
            given_up: set[str] = set()
            with contextlib.suppress(BackendError):  # it is asked again, as long as it takes
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
        """Whether slurmd there can start anything."""
        job = self.environ.get("SLURM_JOB_ID", "")  # srun does not know `12_3`
        place = [f"--jobid={job}", "--overlap", f"--nodelist={host}"]
        argv = ["srun", *place, "--nodes=1", "--ntasks=1", "true"]
        try:
            done = self.slurm.shell(argv, timeout=ALIVE_S)
        except TimeoutError:
            return False
        return done.code == 0

    def _exclude(self, names: Sequence[str]) -> None:
        """Have the next run do without these nodes, where slurmctld takes that now.

        Where it does not yet, it goes on trying by itself for some seconds, and takes the list if
        this run is over by then. If not, nothing waits for it: a node that Slurm has given up is
        given to no job, and the next leader looks at each node that it is given.
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
            said = " ".join((done.err or done.out).split()) or f"scontrol ended with {done.code}"
            # Slurm signals all of this run's processes just now, scontrol too: once.
            is_signalled = done.code < 0
            if not is_signalled and (NOT_YET.search(said) or not AGAIN.search(said)):
                break
            clock.sleep(EXCLUDE_POLL_S)
        log.warning(
            "Slurm has not confirmed that the next run does without %s: %s", fold(names), said
        )
