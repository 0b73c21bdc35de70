"""The Slurm backend: submit once, observe, ask for nodes again, give them back, clear.

`find` says what Slurm has of it.
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
from orchestrator.backends.slurm.on_nodes import agents_not_started, code_snapshot, srun_end
from orchestrator.backends.slurm.on_nodes.container_commands import check_commands
from orchestrator.backends.slurm.requeue import Requeue
from orchestrator.contract.check_results import Finding
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
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
    FixedHosts,
    GrantingScheduler,
    HostNotice,
    OwnRun,
    Shell,
    Sighting,
    UnattendedAllocation,
)

log = logging.getLogger(__name__)

CLEAR_S = 120.0
"""For all processes to end: KillWait, the epilog, and what a slow node adds."""
CANCEL_AGAIN_S = 5.0
"""A job that is being queued again survives scancel."""
LATE_S = 30.0
"""For a job to be in the queue whose sbatch was not answered."""
LATE_POLL_S = 5.0
POLL_S = 0.25
CLEAR_HOST_S = 45.0
"""For a step that ends an agent and its ranks, in a container and on a busy node."""
SOON_SLACK_S = 15.0
"""Between two questions about the nodes."""
NOTICE_SLACK_S = 75.0
"""Slurm may warn of the time limit up to a minute early."""
PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"
"""What lies above a node, as `switch.switch.node` or `block.node`; nothing where it is `node`."""
START_S = 2.0
"""A step that cannot be created says so by then."""


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
        """Of agents that were started again."""
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
        if unheard := sorted(name for name in self.environ if name.startswith("SBATCH_")):
            names = ", ".join(unheard)
            log.warning("%s: not heard; what sbatch is asked is in cluster.slurm alone", names)
        if short := cut_short(launch, handover.job.stop_grace):
            log.warning("%s", short)
        code = self._code(launch)
        if code is not None and code.left_out:
            log.warning("files left out of the snapshot of %s: %s", code.home, code.words())
        partitions = parse_partitions(self.slurm.told(PARTITIONS))
        nodes = parse_nodes(self.slurm.told(NODES))
        found = problems(launch, sys.executable, partitions, nodes)
        if found:
            raise BackendError(
                "Slurm could not run this job as it is:\n  "
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
                    fix="change what it names below cluster.slurm; nothing was written or queued",
                )
            away = closed(launch, partitions, nodes)
            log.warning(
                "%ssbatch --test-only: %s",
                f"the job may wait for {fold(away)}, which is down, drained or reserved; "
                if away
                else "",
                said,
            )
        return tuple(
            Finding(what="sbatch --test-only", verdict="ok", found=line)
            for line in said.splitlines()
        )

    def _code(self, launch: LaunchPlan) -> code_snapshot.Chosen | None:
        """What a snapshot would take; None without one. Raises Refused."""
        return code_snapshot.choose(self.clock) if launch.slurm and launch.slurm.snapshot else None

    def submit(self, handover: Handover) -> None:
        launch = handover.launch
        if self.finder.find(launch) is not None:
            return  # an earlier call was answered, or not heard: never a second job
        self.make_folder(launch)
        render.script_path(launch).write_text(self.describe(handover))
        argv = render.submission(launch)
        try:
            done = self.slurm.ask(argv, tries=1)
        except Unanswered as exc:
            # Perhaps queued all the same, or soon: a slow slurmctld works off what it was sent long
            # after sbatch has given up. To say it twice would make two jobs.
            if self._comes_late(launch):
                return
            raise _not_known(launch, exc) from exc
        if done.code != 0:
            raise Refused(
                f"Slurm refuses this job: {' '.join((done.err or done.out).split())}",
                fix="change what it names below cluster.slurm and submit it again; nothing was"
                " queued",
            )
        job_id = done.out.strip().split(";")[0]
        try:
            job_lookup.record(launch, job_id)
        except OSError as exc:  # Slurm has the job, which is found by its comment as well
            log.warning("Slurm job %s is queued, but its number was not written: %s", job_id, exc)

    def _comes_late(self, launch: LaunchPlan) -> bool:
        begun = self.clock.monotonic()
        while self.clock.monotonic() - begun < LATE_S:
            with contextlib.suppress(Unanswered):
                if self.finder.find(launch) is not None:
                    return True
            self.clock.sleep(LATE_POLL_S)
        return False

    def make_folder(self, launch: LaunchPlan) -> None:
        """Where the script and what tasks say first is kept, with the snapshot beside it; once."""
        folder = render.folder(launch)
        if folder.exists():
            return
        if (chosen := self._code(launch)) is not None:
            code_snapshot.take(chosen, render.snapshot_path(launch))
        folder.mkdir(parents=True)  # last: it says that the rest is there

    # At the start of the batch script

    def take_allocation(self, launch: LaunchPlan) -> None:
        """Have Slurm's own record of this job say that it is the launch's, also where its script
        does not: of an element of an array, or with another comment.

        Raises JobError in an allocation that has no batch script to run again.
        """
        if render.script_path(launch).exists():
            return  # submitted by ndctl, or taken before
        job = self.batch_job()
        if not job_lookup.is_marked(job, launch):
            comment = render.marked(launch, job.comment)
            self.slurm.told(["scontrol", "update", f"JobId={job.id}", f"Comment={comment}"])

    def batch_job(self) -> SlurmJob:
        """The Slurm job in which this runs. Raises JobError where it has no batch script."""
        job_id = self._own_id()
        done = self.slurm.told(["scontrol", "show", "job", "-a", "-o", job_id])
        job = next((one for one in observe.parse_jobs(done) if one.id == job_id), None)
        if job is None:
            raise BackendError(f"Slurm does not know {job_id}, the job in which this runs")
        if not job.is_batch:
            raise JobError(
                f"Slurm job {job_id} is an allocation of yours and no batch job, which ndctl could"
                " have queued again",
                fix="`ndctl submit SPEC --here` trains in it; or give the script to sbatch",
            )
        return job

    def is_recorded(self, launch: LaunchPlan) -> bool:
        """Whether this Slurm job is known to be the launch's."""
        return job_lookup.recorded(launch) == self._own_id()

    def record(self, launch: LaunchPlan, step: str = "") -> None:
        job_lookup.record(launch, self._own_id(), step)

    # What Slurm has of it

    def standing(self, launch: LaunchPlan) -> str | None:
        job = self.finder.find(launch)
        return None if job is None or job.is_over else pending_hints.standing_words(job)

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[Sighting]:
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
        if launch.slurm is not None and launch.slurm.container is not None:
            check_commands(self.shell)
        nodelist = self.environ.get("SLURM_JOB_NODELIST", "")
        ends_at = None
        try:
            job = self.finder.show(launch, job_id)
            ends_at = job.ends_at if job else None
        except BackendError as exc:
            log.warning("when the allocation ends is not known: %s", exc)
        return Allocation(
            id=job_id,
            restarts=self._restarts(),
            hosts=expand(nodelist),
            switches=self._switches(nodelist),
            ends_at=ends_at,
            notice_s=(launch.slurm or SlurmSpec()).notice_s,
            broke_before=srun_end.breakdown(launch, self._restarts() - 1),
        )

    def _switches(self, nodelist: str) -> dict[str, tuple[str, ...]]:
        """Above each node. Raises Unanswered where there are some and Slurm does not say which:
        ranks are bound by them for as long as the allocation lasts, so that is worth a wait."""
        try:
            topology = self.slurm.told((*TOPOLOGY, *self._own_topology()))
        except BackendError as exc:
            if isinstance(exc, Unanswered) and "." in self.environ.get(PATTERN, ""):
                raise
            log.warning("which switches are above the nodes is not known: %s", exc)
            return {}
        return allocated_switches(nodelist, topology)

    def _own_topology(self) -> tuple[str, ...]:
        """The name of the partition's, where the cluster has several."""
        own = self.environ.get("SLURM_JOB_PARTITION")
        try:
            found = parse_partitions(self.slurm.told(PARTITIONS))
        except Unanswered:
            raise
        except BackendError as exc:
            log.warning("whether the partition has a topology of its own is not known: %s", exc)
            return ()
        return tuple(one.topology for one in found if one.name == own and one.topology)

    def _own_id(self) -> str:
        """As scontrol and squeue take it."""
        job_id = job_lookup.own_id(self.environ)
        if job_id is None:
            raise BackendError("there is no SLURM_JOB_ID: this is no Slurm job")
        return job_id

    def _own_number(self) -> str:
        """As srun takes it, which does not know `12_3`."""
        return self.environ.get("SLURM_JOB_ID", "")

    def _restarts(self) -> int:
        return int(self.environ.get("SLURM_RESTART_COUNT", "0"))

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        if not hosts:
            return ()
        reservation = (launch.slurm or SlurmSpec()).reservation
        unfit = {
            node.name: HostNotice(
                host=node.name,
                state=node.words,
                reason=node.reason,
                lets_finish=lets_finish(node, reservation),
            )
            for node in self.nodes(hosts)
            if is_wanted_back(node, reservation)
        }
        for host, reason in self._in_maintenance(launch, hosts).items():
            if host not in unfit or unfit[host].lets_finish:
                unfit[host] = HostNotice(host=host, state="MAINTENANCE", reason=reason)
        job = self.finder.show(launch, self._own_id(), tries=1)
        if job is not None and job.nodes and observe.phase(job, self._restarts()) == "running":
            for host in set(hosts) - set(job.nodes) - set(unfit):
                unfit[host] = HostNotice(
                    host=host, state="REMOVED", reason="Slurm took it out of the job"
                )
        return tuple(unfit[host] for host in hosts if host in unfit)

    def _in_maintenance(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        """Soon, so that ranks have as long for a checkpoint as before a time limit. Slurm starts no
        job whose limit reaches into a reservation, but one may be made over a job that runs."""
        spec, now = launch.slurm or SlurmSpec(), self.clock.now()
        try:
            said = self.slurm.told(["scontrol", "-o", "show", "reservations"], tries=1)
        except BackendError as exc:
            log.warning("which maintenance is planned is not known: %s", exc)
            return {}
        soon = soon_in_maintenance(
            parse_reservations(said), hosts, now, spec.notice_s + SOON_SLACK_S, spec.reservation
        )
        return {host: f"reservation {one.name}" for host, one in soon.items()}

    def nodes(self, hosts: Sequence[str]) -> tuple[Node, ...]:
        """As Slurm sees them at this moment."""
        argv = ["scontrol", "show", "node", "-a", "-o", fold(hosts)]
        return parse_nodes(self.slurm.told(argv, tries=1))

    def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        return agents_not_started.found(launch, self.environ, hosts)

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> OwnRun:
        given = expand(self.environ.get("SLURM_JOB_NODELIST", ""))
        job = self.finder.show(launch, self._own_id(), tries=1)
        if job is None:
            words = f"Slurm knows no job {self._own_id()} any more"
            return OwnRun(phase="over", words=words, hosts=given)
        phase, words = observe.phase(job, self._restarts()), pending_hints.words(job)
        if phase != "running":
            return OwnRun(phase=phase, words=words, hosts=given)
        gone = {node.name: f"Slurm says that it is {node.words}" for node in self._dead(hosts)}
        removed = {*hosts} - {*job.nodes} if job.nodes else ()
        gone |= dict.fromkeys(removed, "Slurm took it out of the job")
        return OwnRun(phase=phase, words=words, hosts=given, given_up=gone, ends_at=job.limit_at)

    def _dead(self, hosts: Sequence[str]) -> tuple[Node, ...]:
        """Not those that do not respond yet: slurmd may be stopped for an upgrade."""
        return tuple(node for node in self.nodes(hosts) if node.is_gone) if hosts else ()

    def why_ending(self, launch: LaunchPlan) -> Cause:
        job = self.finder.show(launch, self._own_id(), tries=1)
        if job is None:
            return "unknown"
        notice_s = (launch.slurm or SlurmSpec()).notice_s + NOTICE_SLACK_S
        return observe.cause(job, self._restarts(), self.clock.now(), notice_s)

    def clear_host(self, launch: LaunchPlan, host: str) -> str:
        argv = render.clearing(launch, self._own_number(), host, sys.executable)
        try:
            done = self.shell(argv, timeout=CLEAR_HOST_S)
        except TimeoutError as exc:
            raise BackendError(f"nothing could be started on {host}: {exc}") from exc
        if done.code != 0:
            # srun says besides what it thinks of its options.
            errors = [line for line in done.err.splitlines() if "error:" in line]
            said = " ".join(" ".join(errors or done.err.splitlines()).split())
            raise BackendError(f"{host} could not be cleared: {said or f'code {done.code}'}")
        return " ".join(done.out.split())

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
            raise BackendError(f"{host} is not in Slurm job {job_id} any more")
        for node in self.nodes([host]):
            if node.is_dead:
                why = f": {node.reason}" if node.reason else ""
                raise BackendError(f"Slurm says that {host} is {node.words}{why}")
        log = render.folder(launch) / f"replaced-{host}.srun"
        again = render.replacement(launch, self._own_number(), host, sys.executable)
        try:
            self.steps.append(start(again, self.environ, log, START_S))
        except BackendError:
            self._running(launch)  # or else it was the end of the run that srun met
            raise

    def _running(self, launch: LaunchPlan) -> SlurmJob:
        """The job, in this very run. Raises Ended where Slurm has ended that or queued it again: a
        job that is not running has no nodes, which says nothing against any of them."""
        job = self.finder.show(launch, self._own_id(), tries=1)
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
        """A Slurm job ends with its batch script. Where the node of that was lost, and the job went
        on without it, the nodes would be held to the time limit."""
        job = self.finder.show(launch, self._own_id(), tries=1)
        first = expand(self.environ.get("SLURM_JOB_NODELIST", ""))[:1]
        if job is None or observe.phase(job, self._restarts()) != "running" or not job.nodes:
            return
        if first and first[0] not in job.nodes:
            log.info("Slurm job %s has lost its batch script with %s: ending it", job.id, first[0])
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


def _not_known(launch: LaunchPlan, exc: Unanswered) -> Unanswered:
    return Unanswered(
        f"whether Slurm has taken {launch.job} is not known: {exc.message}; {LATE_S:.0f} s later"
        " it is not in the queue",
        fix="once `scontrol ping` answers, type `ndctl submit SPEC --resume`: it finds the job by"
        " its comment if Slurm took it after all, and submits it if not",
    )


def _will_not_end(job: SlurmJob) -> BackendError:
    where = ",".join(job.nodes) or "its nodes"
    return BackendError(
        f"Slurm job {job.id} was cancelled {CLEAR_S:.0f} s ago and is still {job.state}",
        fix=f"`squeue -s -j {job.id}` shows what is left on {where}; when a node does not answer,"
        " an administrator ends it with `scontrol update NodeName=... State=DOWN Reason=...`",
    )
