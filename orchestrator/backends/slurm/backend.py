"""The Slurm backend: submit, observe, requeue, replace agents, cancel.

`job_lookup` finds the Slurm job of a launch.
"""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.backends.slurm import job_lookup, observe, pending_hints, render
from orchestrator.backends.slurm.checks import closed, cut_short, is_never_available, problems
from orchestrator.backends.slurm.commands import FOR_GOOD, NOT_AVAILABLE, Slurm
from orchestrator.backends.slurm.detach import Detached, start
from orchestrator.backends.slurm.inventory import NODES, PARTITIONS, TOPOLOGY
from orchestrator.backends.slurm.job_lookup import Finder
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.backends.slurm.on_nodes import (
    agents_not_started,
    code_snapshot,
    program_copy,
    srun_end,
)
from orchestrator.backends.slurm.on_nodes.container_commands import check_commands
from orchestrator.backends.slurm.requeue import Requeue
from orchestrator.contract.check_results import Finding
from orchestrator.contract.files.env import ignored_slurm_options
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, Ended, JobError, Refused, Unanswered
from orchestrator.inventory.slurm.config import parse_config
from orchestrator.inventory.slurm.hostlist import expand, fold
from orchestrator.inventory.slurm.nodes import Node, parse_nodes
from orchestrator.inventory.slurm.partitions import parse_partitions
from orchestrator.inventory.slurm.reservations import parse_reservations, soon_in_maintenance
from orchestrator.inventory.slurm.standing import is_wanted_back, lets_finish
from orchestrator.inventory.slurm.topology import allocated_switches
from orchestrator.seams import (
    Clock,
    CurrentRun,
    FixedHosts,
    GrantingScheduler,
    HostNotice,
    LaunchStatus,
    Shell,
    UnattendedAllocation,
)

log = logging.getLogger(__name__)

CLEAR_S = 120.0
"""Time for all processes to end: KillWait, the epilog, and delays of a slow node."""
CANCEL_AGAIN_S = 5.0
"""Seconds after which scancel is repeated: a job that is being requeued survives it."""
LATE_S = 30.0
"""Time for a job to appear in the queue after its sbatch was not answered."""
LATE_POLL_S = 5.0
POLL_S = 0.25
CLEAR_HOST_S = 45.0
"""Timeout of a step that ends an agent and its ranks, in a container on a busy node."""
SOON_SLACK_S = 15.0
"""Seconds between two queries of the nodes."""
NOTICE_SLACK_S = 75.0
"""Slurm may warn of the time limit up to a minute early."""
PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"
"""Value `switch.switch.node` or `block.node` if there is a topology, else `node`."""
START_S = 2.0
"""A step that cannot be created fails within this time."""


class SlurmBackend:
    successors = None
    """Slurm starts no agent again by itself."""

    def __init__(self, environ: Mapping[str, str], clock: Clock, shell: Shell) -> None:
        self.environ = environ
        self.clock = clock
        self.shell = shell
        self.slurm = Slurm(shell, clock)
        self.finder = Finder(self.slurm)
        self.steps: list[Detached] = []
        """Steps of restarted agents."""
        self.requeuing: Requeue | None = None

    @property
    def granted(self) -> GrantingScheduler:
        return self

    @property
    def fixed_hosts(self) -> FixedHosts:
        return self

    @property
    def unattended(self) -> UnattendedAllocation:
        return self

    # Before and at submission

    def describe(self, handover: Handover) -> str:
        return render.script(handover, sys.executable, Path.cwd())

    def check(self, handover: Handover) -> tuple[Finding, ...]:
        launch = handover.launch
        if ignored := ignored_slurm_options(self.environ):
            names = ", ".join(ignored)
            log.warning("ignoring environment, set cluster.slurm instead: %s", names)
        if short := cut_short(launch, handover.job.stop_grace):
            log.warning("%s", short)
        code = self._code(launch)
        if code is not None and code.left_out:
            log.warning("the snapshot of %s excludes: %s", code.home, code.words())
        program = program_copy.look(launch, handover.job.run, self.clock)
        partitions = parse_partitions(self.slurm.told(PARTITIONS))
        nodes = parse_nodes(self.slurm.told(NODES))
        found = problems(launch, sys.executable, partitions, nodes)
        if found:
            raise BackendError(
                "Slurm cannot run this job:\n  "
                + "\n".join(str(one) for one in found).replace("\n", "\n  ")
            )
        with tempfile.NamedTemporaryFile("w", prefix="ndctl-", suffix=".sh") as file:
            file.write(self.describe(handover))
            file.flush()
            done = self.slurm.ask(["sbatch", "--test-only", file.name])
        said = (done.err or done.out).replace(file.name, "").strip()
        if done.code != 0:
            never = NOT_AVAILABLE.search(said) and is_never_available(launch, partitions, nodes)
            if never or FOR_GOOD.search(said):
                raise BackendError(
                    f"Slurm would refuse this job: {said}",
                    fix="correct cluster.slurm; nothing was written or queued",
                )
            away = closed(launch, partitions, nodes)
            log.warning(
                "%ssbatch --test-only: %s",
                f"the job may wait for nodes that are down, drained or reserved: {away}; "
                if away
                else "",
                said,
            )
        tested = (
            Finding(what="sbatch --test-only", verdict="ok", found=line)
            for line in said.splitlines()
        )
        return (*program, *tested)

    def _code(self, launch: LaunchPlan) -> code_snapshot.Chosen | None:
        """The files of the snapshot; None without a snapshot. Raises Refused."""
        return code_snapshot.choose(self.clock) if launch.slurm_spec.snapshot else None

    def submit(self, handover: Handover) -> None:
        launch = handover.launch
        if self.finder.find(launch) is not None:
            return  # an earlier call submitted it; its answer may have been lost
        self.make_folder(launch)
        render.script_path(launch).write_text(self.describe(handover), encoding="utf-8")
        argv = render.submission(launch)
        try:
            done = self.slurm.ask(argv, tries=1)
        except Unanswered as exc:
            # The job may be queued now or later, because a slow slurmctld handles requests after
            # sbatch has timed out. A second sbatch would create a second job.
            if self._comes_late(launch):
                return
            raise _unknown_outcome(launch, exc) from exc
        if done.code != 0:
            raise Refused(
                f"Slurm refused this job: {' '.join((done.err or done.out).split())}",
                fix="correct cluster.slurm and submit the job again; nothing was queued",
            )
        job_id = done.out.strip().split(";")[0]
        try:
            job_lookup.record(launch, job_id)
        except OSError as exc:  # the job is queued, and its comment also identifies it
            log.warning("failed to write the id of queued Slurm job %s: %s", job_id, exc)

    def _comes_late(self, launch: LaunchPlan) -> bool:
        begun = self.clock.monotonic()
        while self.clock.monotonic() - begun < LATE_S:
            with contextlib.suppress(Unanswered):
                if self.finder.find(launch) is not None:
                    return True
            self.clock.sleep(LATE_POLL_S)
        return False

    def make_folder(self, launch: LaunchPlan) -> None:
        """Create the folder for the script and the output of tasks, the snapshot, and the copy of
        the user's program, once."""
        folder = render.folder(launch)
        if folder.exists():
            return
        if (chosen := self._code(launch)) is not None:
            code_snapshot.take(chosen, render.snapshot_path(launch))
        program_copy.make(launch, self.clock)
        folder.mkdir(parents=True)  # last, because it marks the rest as complete

    # At the start of the batch script

    def take_allocation(self, launch: LaunchPlan) -> None:
        """Mark this Slurm job as the job of the launch by its comment.

        The script sets the comment, but not for an array task or if the user set another comment.

        Raises:
            JobError: the allocation has no batch script to run again.
        """
        if render.script_path(launch).exists():
            return  # submitted by ndctl, or marked before
        job = self.batch_job()
        if not job_lookup.is_marked(job, launch):
            comment = render.marked(launch, job.comment)
            self.slurm.told(["scontrol", "update", f"JobId={job.id}", f"Comment={comment}"])

    def batch_job(self) -> SlurmJob:
        """The Slurm job of this process. Raises JobError if it has no batch script."""
        job_id = self._own_id()
        done = self.slurm.told(["scontrol", "show", "job", "-a", "-o", job_id])
        job = next((one for one in observe.parse_jobs(done) if one.id == job_id), None)
        if job is None:
            raise BackendError(f"Slurm does not know job {job_id}, in which this process runs")
        if not job.is_batch:
            raise JobError(
                f"Slurm job {job_id} is not a batch job, so it cannot be requeued",
                fix="run `ndctl submit SPEC --here` in it, or give the script to sbatch",
            )
        return job

    def is_recorded(self, launch: LaunchPlan) -> bool:
        """Whether this Slurm job is recorded as the job of the launch."""
        return job_lookup.recorded(launch) == self._own_id()

    def record(self, launch: LaunchPlan, step: str = "") -> None:
        job_lookup.record(launch, self._own_id(), step)

    # State at Slurm

    def standing(self, launch: LaunchPlan) -> str | None:
        job = self.finder.find(launch)
        return None if job is None or job.is_over else pending_hints.standing_words(job)

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[LaunchStatus]:
        return self.finder.glance(launches)

    def name_of(self, launch: LaunchPlan) -> str | None:
        return job_lookup.name_of(launch)

    def cluster(self) -> str:
        inside = self.environ.get("SLURM_CLUSTER_NAME")
        if inside:
            return inside
        config = parse_config(self.slurm.told(["scontrol", "show", "config"]))
        return config.get("ClusterName", "slurm")

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        there = {node.name for node in parse_nodes(self.slurm.told(NODES))}
        return tuple(host for host in hosts if host in there)

    # For the agents, inside the allocation

    def rival(self, launch: LaunchPlan) -> str | None:
        own = self._own_id()
        noted = job_lookup.claim(launch, own)
        if noted == own:
            return None
        job = self.finder.show(launch, noted)
        if job is not None and not job.is_over:
            return pending_hints.standing_words(job)
        job_lookup.record(launch, own)
        return None

    # For the leader

    def allocation(self, launch: LaunchPlan) -> Allocation:
        job_id = self._own_id()
        if launch.slurm_spec.container is not None:
            check_commands(self.shell)
        nodelist = self.environ.get("SLURM_JOB_NODELIST", "")
        ends_at = None
        try:
            job = self.finder.show(launch, job_id)
            ends_at = job.ends_at if job else None
        except BackendError as exc:
            log.warning("failed to read the end of the allocation: %s", exc)
        return Allocation(
            id=job_id,
            restarts=self._restarts(),
            hosts=expand(nodelist),
            switches=self._switches(nodelist),
            ends_at=ends_at,
            notice_s=launch.slurm_spec.notice_s,
            broke_before=srun_end.breakdown(launch, self._restarts() - 1),
        )

    def _switches(self, nodelist: str) -> dict[str, tuple[str, ...]]:
        """The switches above each node.

        Raises:
            Unanswered: there are switches but slurmctld does not answer. The caller retries,
                because the placement of ranks depends on them for the whole allocation.
        """
        try:
            topology = self.slurm.told((*TOPOLOGY, *self._own_topology()))
        except BackendError as exc:
            if isinstance(exc, Unanswered) and "." in self.environ.get(PATTERN, ""):
                raise
            log.warning("failed to read the switches of the nodes: %s", exc)
            return {}
        return allocated_switches(nodelist, topology)

    def _own_topology(self) -> tuple[str, ...]:
        """The name of the partition's topology, if the cluster has several topologies."""
        own = self.environ.get("SLURM_JOB_PARTITION")
        try:
            found = parse_partitions(self.slurm.told(PARTITIONS))
        except Unanswered:
            raise
        except BackendError as exc:
            log.warning("failed to read the topology of the partition: %s", exc)
            return ()
        return tuple(one.topology for one in found if one.name == own and one.topology)

    def _own_id(self) -> str:
        """In the form that scontrol and squeue take."""
        job_id = job_lookup.own_id(self.environ)
        if job_id is None:
            raise BackendError("SLURM_JOB_ID is not set, so this process is not in a Slurm job")
        return job_id

    def _own_job(self, launch: LaunchPlan) -> SlurmJob | None:
        """None: Slurm no longer knows it. Asks once: the callers ask again later."""
        return self.finder.show(launch, self._own_id(), tries=1)

    def _own_number(self) -> str:
        """In the form that srun takes, which does not accept `12_3`."""
        return self.environ.get("SLURM_JOB_ID", "")

    def _restarts(self) -> int:
        return int(self.environ.get("SLURM_RESTART_COUNT", "0"))

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        if not hosts:
            return ()
        reservation = launch.slurm_spec.reservation
        unfit = {
            node.name: HostNotice(
                host=node.name,
                state=node.words,
                reason=node.reason,
                lets_finish=lets_finish(node, reservation),
                down=node.state == "DOWN",
            )
            for node in self.nodes(hosts)
            if is_wanted_back(node, reservation)
        }
        for host, reason in self._in_maintenance(launch, hosts).items():
            if host not in unfit or unfit[host].lets_finish:
                unfit[host] = HostNotice(host=host, state="MAINTENANCE", reason=reason)
        job = self._own_job(launch)
        if job is not None and job.nodes and observe.phase(job, self._restarts()) == "running":
            for host in set(hosts) - set(job.nodes) - set(unfit):
                unfit[host] = HostNotice(
                    host=host, state="REMOVED", reason="Slurm removed it from the job"
                )
        return tuple(unfit[host] for host in hosts if host in unfit)

    def _in_maintenance(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        """Hosts with a maintenance reservation that starts soon, so that ranks get as much time for
        a checkpoint as before a time limit. Slurm starts no job that overlaps a reservation, but
        an administrator can create one over a running job."""
        spec, now = launch.slurm_spec, self.clock.now()
        try:
            said = self.slurm.told(["scontrol", "-o", "show", "reservations"], tries=1)
        except BackendError as exc:
            log.warning("failed to read maintenance reservations: %s", exc)
            return {}
        soon = soon_in_maintenance(
            parse_reservations(said), hosts, now, spec.notice_s + SOON_SLACK_S, spec.reservation
        )
        return {host: f"reservation {one.name}" for host, one in soon.items()}

    def nodes(self, hosts: Sequence[str]) -> tuple[Node, ...]:
        argv = ["scontrol", "show", "node", "-a", "-o", fold(hosts)]
        return parse_nodes(self.slurm.told(argv, tries=1))

    def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        return agents_not_started.found(launch, self.environ, hosts)

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        given = expand(self.environ.get("SLURM_JOB_NODELIST", ""))
        job = self._own_job(launch)
        if job is None:
            words = f"Slurm no longer knows job {self._own_id()}"
            return CurrentRun(phase="over", words=words, hosts=given)
        phase, words = observe.phase(job, self._restarts()), pending_hints.words(job)
        if phase != "running":
            return CurrentRun(phase=phase, words=words, hosts=given)
        gone = {node.name: f"Slurm reports it as {node.words}" for node in self._dead(hosts)}
        removed = {*hosts} - {*job.nodes} if job.nodes else ()
        gone |= dict.fromkeys(removed, "Slurm removed it from the job")
        return CurrentRun(
            phase=phase, words=words, hosts=given, given_up=gone, ends_at=job.limit_at
        )

    def _dead(self, hosts: Sequence[str]) -> tuple[Node, ...]:
        """Nodes that Slurm gave up. A node that only does not respond may be upgrading slurmd."""
        return tuple(node for node in self.nodes(hosts) if node.is_gone) if hosts else ()

    def why_ending(self, launch: LaunchPlan) -> Cause:
        job = self._own_job(launch)
        if job is None:
            return "unknown"
        notice_s = launch.slurm_spec.notice_s + NOTICE_SLACK_S
        return observe.cause(job, self._restarts(), self.clock.now(), notice_s)

    def clear_host(self, launch: LaunchPlan, host: str) -> str:
        argv = render.clearing(launch, self._own_number(), host, sys.executable)
        try:
            done = self.shell(argv, timeout=CLEAR_HOST_S)
        except TimeoutError as exc:
            raise BackendError(f"failed to start a step on {host}: {exc}") from exc
        if done.code != 0:
            # srun also prints warnings about its options.
            errors = [line for line in done.err.splitlines() if "error:" in line]
            said = " ".join(" ".join(errors or done.err.splitlines()).split())
            raise BackendError(f"failed to clear {host}: {said or f'exit code {done.code}'}")
        step = srun_end.step_end(Path(launch.run_dir), launch.launch, self.environ)
        return " ".join(done.out.split()) + (f"; {step}" if step else "")

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        job_id = self._own_id()
        if host not in self._running(launch).nodes:
            raise BackendError(f"{host} is no longer in Slurm job {job_id}")
        for node in self.nodes([host]):
            if node.is_dead:
                why = f": {node.reason}" if node.reason else ""
                raise BackendError(f"Slurm reports {host} as {node.words}{why}")
        log = render.folder(launch) / f"replaced-{host}.srun"
        again = render.replacement(launch, self._own_number(), host, sys.executable)
        try:
            self.steps.append(start(again, self.environ, log, START_S))
        except BackendError:
            self._running(launch)  # raises Ended if srun failed because the run is ending
            raise

    def _running(self, launch: LaunchPlan) -> SlurmJob:
        """The job in its current run. Raises Ended if Slurm ended or requeued it. Such a job has no
        nodes, so the caller must not take a missing node for a failed one."""
        job = self._own_job(launch)
        if job is None or observe.phase(job, self._restarts()) != "running":
            words = (
                pending_hints.words(job) if job else f"Slurm knows no job {self._own_id()} any more"
            )
            raise Ended(f"this run of the job is over: {words}")
        return job

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        if self.requeuing is None:
            self.requeuing = Requeue(
                slurm=self.slurm,
                finder=self.finder,
                environ=self.environ,
                job_id=self._own_id(),
                restarts=self._restarts(),
                notices=self.notices,
            )
        self.requeuing(launch, exclude, again)

    # The end

    def release(self, launch: LaunchPlan) -> None:
        """End a job that lost its batch script. A Slurm job ends with its batch script, so without
        it the nodes would stay allocated until the time limit."""
        job = self._own_job(launch)
        first = expand(self.environ.get("SLURM_JOB_NODELIST", ""))[:1]
        if job is None or observe.phase(job, self._restarts()) != "running" or not job.nodes:
            return
        if first and first[0] not in job.nodes:
            log.info(
                "cancelling Slurm job %s, whose batch script was on lost node %s", job.id, first[0]
            )
            self.slurm.told(["scancel", job.id])

    def clear(self, launch: LaunchPlan) -> None:
        begun = self.clock.monotonic()
        asked: dict[str, float] = {}
        while jobs := self.finder.find_all(launch):
            now = self.clock.monotonic()
            if now - begun > CLEAR_S:
                raise _will_not_end(jobs[0])
            for job in jobs:
                since = asked.get(job.id)
                if since is None or (now - since > CANCEL_AGAIN_S and job.meaning != "leaving"):
                    self.slurm.ask(["scancel", job.id])
                    asked[job.id] = now
            self.clock.sleep(POLL_S)


def _unknown_outcome(launch: LaunchPlan, exc: Unanswered) -> Unanswered:
    return Unanswered(
        f"it is unknown whether Slurm accepted {launch.job}: {exc.message}; {LATE_S:.0f} s later"
        " it is not in the queue",
        fix="when `scontrol ping` works, run `ndctl submit SPEC --resume`: it finds the job by its"
        " comment if Slurm accepted it, and submits it if not",
    )


def _will_not_end(job: SlurmJob) -> BackendError:
    where = ",".join(job.nodes) or "its nodes"
    return BackendError(
        f"Slurm job {job.id} was cancelled {CLEAR_S:.0f} s ago and is still {job.state}",
        fix=f"`squeue -s -j {job.id}` shows the steps left on {where}; if a node is unreachable, an"
        " administrator ends the job with `scontrol update NodeName=... State=DOWN Reason=...`",
    )
