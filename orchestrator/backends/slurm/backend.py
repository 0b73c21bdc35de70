"""The Slurm backend: submit once, observe, ask for nodes again, give them back, clear.

What Slurm has of a job is seen by our own look at squeue and scontrol, never by submitit's: its
`done()` is true while a job is being queued again. Gone is only what slurmctld, twice asked, says
that it does not know.
"""

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.backends.slurm import observe, render, snapshot
from orchestrator.backends.slurm.checks import problems
from orchestrator.backends.slurm.commands import UNKNOWN_JOB, Slurm, refusal
from orchestrator.backends.slurm.detached import Detached, start
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.backends.slurm.task import AgentTask
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.slurm import SlurmSpec
from orchestrator.errors import BackendError
from orchestrator.seams import Clock, HostNotice, Shell

LOOK_AGAIN_S = 1.0
"""One empty answer is not to be believed; the second is taken after this."""
CLEAR_S = 120.0
"""For all processes to end: KillWait, the epilog, and what a slow node adds."""
CANCEL_AGAIN_S = 5.0
"""A job that is being queued again survives scancel."""
POLL_S = 0.25
EXCLUDE_S = 20.0
"""For a job that is queued again to take its exclude list: at first Slurm refuses."""
VERDICT_S = 330.0
"""Slurm's own default of SlurmdTimeout is 300."""
VERDICT_POLL_S = 1.0
ALIVE_S = 10.0
"""For a step that does nothing."""
NOTICE_SLACK_S = 75.0
"""Slurm may warn of the time limit up to a minute early."""
START_S = 2.0
"""A step that cannot be created says so by then."""


class SlurmBackend:
    def __init__(self, environ: Mapping[str, str], clock: Clock, shell: Shell) -> None:
        self.environ = environ
        self.clock = clock
        self.shell = shell
        self.slurm = Slurm(shell, clock)
        self.steps: list[Detached] = []
        """Of agents that were started again."""

    # Before and at submission

    def describe(self, launch: LaunchPlan) -> str:
        return render.script(launch, sys.executable)

    def check(self, launch: LaunchPlan) -> str:
        partitions = observe.parse_partitions(
            self.slurm.told(["scontrol", "show", "partition", "-o"])
        )
        nodes = observe.parse_nodes(self.slurm.told(["scontrol", "show", "node", "-o"]))
        found = problems(launch, sys.executable, partitions, nodes)
        if found:
            raise BackendError(
                "Slurm could not run this job as it is:\n  "
                + "\n".join(str(one) for one in found).replace("\n", "\n  ")
            )
        with tempfile.NamedTemporaryFile("w", prefix="ndctl-", suffix=".sh") as file:
            file.write(self.describe(launch))
            file.flush()
            done = self.slurm.ask(["sbatch", "--test-only", file.name])
        said = (done.err or done.out).replace(file.name, "").strip()
        return "\n".join(f"sbatch --test-only: {line}" for line in said.splitlines())

    def submit(self, launch: LaunchPlan) -> None:
        if self._find(launch) is not None:
            return  # an earlier call was answered, or not heard: never a second job
        folder = render.folder(launch)
        folder.mkdir(parents=True, exist_ok=True)
        if (launch.slurm or SlurmSpec()).snapshot:
            snapshot.take(Path.cwd(), render.snapshot_path(launch), self.shell)
        self._pickle(launch)
        render.script_path(launch).write_text(self.describe(launch))
        argv = ["sbatch", "--parsable", str(render.script_path(launch))]
        try:
            done = self.slurm.ask(argv, tries=1)
        except BackendError:
            # Perhaps queued all the same: only its answer was lost. Not known: say so, loudly.
            if self._find(launch) is None:
                done = self.slurm.ask(argv, tries=1)
            else:
                return
        if done.code != 0:
            raise refusal(argv, done)
        self._record(launch, done.out.strip().split(";")[0])

    def _pickle(self, launch: LaunchPlan) -> None:
        from submitit.core.utils import DelayedSubmission

        task = AgentTask(
            run_dir=launch.run_dir,
            launch=launch.launch,
            devices=launch.devices_per_host,
            agent_timeout=launch.agent_timeout,
        )
        DelayedSubmission(task).dump(render.folder(launch) / render.TASK)

    # What Slurm has of it

    def standing(self, launch: LaunchPlan) -> str | None:
        job = self._find(launch)
        if job is None or job.is_over:
            return None
        advice = observe.advice(job) if job.meaning in ("queued", "held") else ""
        return observe.words(job) + (f": {advice}" if advice else "")

    def name_of(self, launch: LaunchPlan) -> str | None:
        job_id = self._recorded(launch)
        return job_id and f"Slurm job {job_id}"

    def _find(self, launch: LaunchPlan) -> SlurmJob | None:
        """The Slurm job of this launch; None when Slurm surely has none.

        Raises BackendError when that cannot be told.
        """
        if not render.script_path(launch).exists():
            return None  # it is written before anything is queued
        job = self._look(launch)
        if job is None:
            self.clock.sleep(LOOK_AGAIN_S)
            job = self._look(launch)
        return job

    def _look(self, launch: LaunchPlan) -> SlurmJob | None:
        recorded = self._recorded(launch)
        if recorded is not None:
            return self._show(launch, recorded)
        name = f"--name={render.job_name(launch)}"
        queue = self.slurm.told(["squeue", "-h", "-a", name, "-o", observe.SQUEUE_FORMAT])
        ours = [job for job in observe.parse_queue(queue) if _is_of(job, launch)]
        if not ours:
            return None
        self._record(launch, ours[-1].id)
        return ours[-1]

    def _show(self, launch: LaunchPlan, job_id: str, tries: int = 3) -> SlurmJob | None:
        argv = ["scontrol", "show", "job", "-o", job_id]
        done = self.slurm.ask(argv, tries=tries)
        if done.code != 0:
            if UNKNOWN_JOB.search(done.err):
                return None
            raise refusal(argv, done)
        jobs = observe.parse_jobs(done.out)
        # Job ids start again when a cluster is set up anew: another's is none of ours.
        return next((job for job in jobs if _is_of(job, launch)), None)

    def _recorded(self, launch: LaunchPlan) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads(_record_path(launch).read_text())["job_id"])
        return None

    def _record(self, launch: LaunchPlan, job_id: str) -> None:
        path = _record_path(launch)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"job_id": job_id}))
        fresh.replace(path)

    def cluster(self) -> str:
        inside = self.environ.get("SLURM_CLUSTER_NAME")
        if inside:
            return inside
        config = self.slurm.told(["scontrol", "show", "config"])
        named = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
        return named[1] if named else "slurm"

    # For the leader, inside the allocation

    def allocation(self, launch: LaunchPlan) -> Allocation | None:
        job_id = self._own_id()
        hosts = observe.expand(self.environ.get("SLURM_JOB_NODELIST", ""))
        switches, ends_at = {}, None
        with contextlib.suppress(BackendError):  # helpful, not needed
            job = self._show(launch, job_id, tries=1)
            ends_at = job.ends_at if job else None
            topology = self.slurm.told(["scontrol", "show", "topology", "-o"], tries=1)
            switches = observe.parse_switches(topology, hosts)
        return Allocation(
            id=job_id, restarts=self._restarts(), hosts=hosts, switches=switches, ends_at=ends_at
        )

    def _own_id(self) -> str:
        job_id = self.environ.get("SLURM_JOB_ID")
        if job_id is None:
            raise BackendError("there is no SLURM_JOB_ID: this is no Slurm job")
        return job_id

    def _restarts(self) -> int:
        return int(self.environ.get("SLURM_RESTART_COUNT", "0"))

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        if not hosts:
            return ()
        argv = ["scontrol", "show", "node", "-o", ",".join(hosts)]
        nodes = observe.parse_nodes(self.slurm.told(argv, tries=1))
        unfit = {
            node.name: HostNotice(host=node.name, state="+".join(node.states), reason=node.reason)
            for node in nodes
            if observe.UNFIT & set(node.states)
        }
        job = self._show(launch, self._own_id(), tries=1)
        if job is not None and job.meaning == "running" and job.nodes:
            for host in set(hosts) - set(job.nodes) - set(unfit):
                unfit[host] = HostNotice(
                    host=host, state="REMOVED", reason="Slurm took it out of the job"
                )
        return tuple(unfit[host] for host in hosts if host in unfit)

    def why_ending(self, launch: LaunchPlan) -> Cause:
        job = self._show(launch, self._own_id(), tries=1)
        if job is None:
            return "unknown"
        notice_s = (launch.slurm or SlurmSpec()).notice_s + NOTICE_SLACK_S
        return observe.cause(job, self._restarts(), self.clock.now(), notice_s)

    def replace(self, launch: LaunchPlan, host: str) -> None:
        job_id = self._own_id()
        job = self._show(launch, job_id, tries=1)
        if job is None or host not in job.nodes:
            raise BackendError(f"{host} is not in Slurm job {job_id} any more")
        argv = ["scontrol", "show", "node", "-o", host]
        for node in observe.parse_nodes(self.slurm.told(argv, tries=1)):
            if observe.DEAD & set(node.states):
                why = f": {node.reason}" if node.reason else ""
                raise BackendError(f"Slurm says that {host} is {'+'.join(node.states)}{why}")
        log = render.folder(launch) / f"replaced-{host}.srun"
        again = render.replacement(launch, job_id, host, sys.executable)
        self.steps.append(start(again, self.environ, log, START_S))

    def requeue(self, launch: LaunchPlan, exclude: Sequence[str]) -> None:
        job_id, mine = self._own_id(), self._restarts()
        job = self._show(launch, job_id)
        if job is None or job.is_over:
            raise BackendError(f"Slurm job {job_id} has ended: it cannot be queued again")
        if job.restarts > mine + 1 or (job.restarts > mine and job.meaning == "running"):
            return  # it runs again already: not ours any more
        excluded = job.excluded
        if job.restarts == mine and job.meaning == "running":
            self._await_verdict(launch, exclude)
            self.slurm.told(["scontrol", "requeue", job_id])
        names = sorted({*excluded, *exclude})
        if set(names) != set(excluded):
            self._exclude(job_id, names)

    def _await_verdict(self, launch: LaunchPlan, exclude: Sequence[str]) -> None:
        """Wait until Slurm itself has given up those hosts that do not answer.

        A job cannot complete, and so not start again, before that anyway; and 22.05 loses count of
        the GPUs of a job whose node goes down while it completes: no step can be created in its
        next run, and the GPUs stay taken until slurmctld starts again.
        """
        leader = observe.expand(self.environ.get("SLURM_JOB_NODELIST", ""))[:1]
        own = self.environ.get("SLURMD_NODENAME")
        doubtful = {*exclude, *leader} - {own}
        begun = self.clock.monotonic()
        while doubtful and self.clock.monotonic() - begun < VERDICT_S:
            given_up = {
                notice.host
                for notice in self.notices(launch, sorted(doubtful))
                if notice.state == "REMOVED" or "DOWN" in notice.state.split("+")
            }
            doubtful = {host for host in doubtful - given_up if not self._answers(host)}
            self.clock.sleep(VERDICT_POLL_S if doubtful else 0)

    def _answers(self, host: str) -> bool:
        """Whether slurmd there can start anything."""
        place = [f"--jobid={self._own_id()}", "--overlap", f"--nodelist={host}"]
        try:
            done = self.shell(["srun", *place, "--nodes=1", "--ntasks=1", "true"], timeout=ALIVE_S)
        except TimeoutError:
            return False
        return done.code == 0

    def _exclude(self, job_id: str, names: Sequence[str]) -> None:
        argv = ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(names)}"]
        begun = self.clock.monotonic()
        while True:
            done = self.slurm.ask(argv)
            if done.code == 0:
                return
            if self.clock.monotonic() - begun > EXCLUDE_S:
                raise refusal(argv, done)
            self.clock.sleep(POLL_S)

    # The end

    def clear(self, launch: LaunchPlan) -> None:
        begun = self.clock.monotonic()
        asked: float | None = None
        while (job := self._find(launch)) is not None and not job.is_over:
            now = self.clock.monotonic()
            if now - begun > CLEAR_S:
                raise _will_not_end(job)
            if asked is None or (now - asked > CANCEL_AGAIN_S and job.meaning != "leaving"):
                self.slurm.ask(["scancel", job.id])
                asked = now
            self.clock.sleep(POLL_S)


def _is_of(job: SlurmJob, launch: LaunchPlan) -> bool:
    mark = render.mark(launch)
    marked = job.comment == mark or job.comment.startswith(f"{mark};")
    return marked or job.command == str(render.script_path(launch))


def _record_path(launch: LaunchPlan) -> Path:
    return Path(launch.run_dir) / "slurm" / f"launch-{launch.launch}.json"


def _will_not_end(job: SlurmJob) -> BackendError:
    where = ",".join(job.nodes) or "its nodes"
    return BackendError(
        f"Slurm job {job.id} was cancelled {CLEAR_S:.0f} s ago and is still {job.state}",
        fix=f"`squeue -s -j {job.id}` shows what is left on {where}; when a node does not answer,"
        " an administrator ends it with `scontrol update NodeName=... State=DOWN Reason=...`",
    )
