"""The Slurm backend: submit once, observe, ask for nodes again, give them back, clear.

`find` says what Slurm has of it.
"""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence

from orchestrator.backends.slurm import advice, find, observe, render, snapshot
from orchestrator.backends.slurm.checks import cut_short, problems
from orchestrator.backends.slurm.commands import FOR_GOOD, Slurm, refusal
from orchestrator.backends.slurm.detached import Detached, start
from orchestrator.backends.slurm.find import Finder
from orchestrator.backends.slurm.inside import check_commands
from orchestrator.backends.slurm.inventory import NODES, PARTITIONS, TOPOLOGY
from orchestrator.backends.slurm.leaving_out import left_out
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.backends.slurm.task import AgentTask
from orchestrator.cluster.slurm.config import parse_config
from orchestrator.cluster.slurm.hostlist import expand, fold
from orchestrator.cluster.slurm.nodes import Node, parse_nodes
from orchestrator.cluster.slurm.partitions import parse_partitions
from orchestrator.cluster.slurm.standing import is_wanted_back
from orchestrator.cluster.slurm.topology import allocated_switches
from orchestrator.contract.handover import Handover
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.slurm import SlurmSpec
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.seams import Clock, HostNotice, Shell, Sighting
from orchestrator.supervise.leaving import ASK_S

log = logging.getLogger(__name__)

CLEAR_S = 120.0
"""For all processes to end: KillWait, the epilog, and what a slow node adds."""
CANCEL_AGAIN_S = 5.0
"""A job that is being queued again survives scancel."""
LATE_S = 30.0
"""For a job to be in the queue whose sbatch was not answered."""
LATE_POLL_S = 5.0
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
PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"
"""What lies above a node, as `switch.switch.node` or `block.node`; nothing where it is `node`."""
START_S = 2.0
"""A step that cannot be created says so by then."""


class SlurmBackend:
    def __init__(self, environ: Mapping[str, str], clock: Clock, shell: Shell) -> None:
        self.environ = environ
        self.clock = clock
        self.shell = shell
        self.slurm = Slurm(shell, clock)
        self.finder = Finder(self.slurm)
        self.steps: list[Detached] = []
        """Of agents that were started again."""

    # Before and at submission

    def describe(self, handover: Handover) -> str:
        return render.script(handover.launch, sys.executable)

    def check(self, handover: Handover) -> str:
        launch = handover.launch
        if unheard := sorted(name for name in self.environ if name.startswith("SBATCH_")):
            names = ", ".join(unheard)
            log.warning("%s: not heard; what sbatch is asked is in cluster.slurm alone", names)
        if short := cut_short(launch, handover.job.stop_grace):
            log.warning("%s", short)
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
        if done.code != 0 and FOR_GOOD.search(said):
            raise BackendError(
                f"Slurm would refuse this job: {said}",
                fix="change what it names below cluster.slurm; nothing was written or queued",
            )
        return "\n".join(f"sbatch --test-only: {line}" for line in said.splitlines())

    def submit(self, handover: Handover) -> None:
        launch = handover.launch
        if self.finder.find(launch) is not None:
            return  # an earlier call was answered, or not heard: never a second job
        folder = render.folder(launch)
        folder.mkdir(parents=True, exist_ok=True)
        if (launch.slurm or SlurmSpec()).snapshot:
            snapshot.take(render.snapshot_path(launch))
        self._pickle(launch)
        render.script_path(launch).write_text(self.describe(handover))
        argv = ["sbatch", "--parsable", str(render.script_path(launch))]
        try:
            done = self.slurm.ask(argv, tries=1)
        except Unanswered as exc:
            # Perhaps queued all the same, or soon: a slow slurmctld works off what it was sent long
            # after sbatch has given up. To say it twice would make two jobs.
            if self._comes_late(launch):
                return
            raise _not_known(launch, exc) from exc
        if done.code != 0:
            fix = "once that is mended, `ndctl submit SPEC --resume` submits it; --new starts over"
            raise refusal(argv, done, fix=fix)
        find.record(launch, done.out.strip().split(";")[0])

    def _comes_late(self, launch: LaunchPlan) -> bool:
        begun = self.clock.monotonic()
        while self.clock.monotonic() - begun < LATE_S:
            with contextlib.suppress(Unanswered):
                if self.finder.find(launch) is not None:
                    return True
            self.clock.sleep(LATE_POLL_S)
        return False

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
        job = self.finder.find(launch)
        return None if job is None or job.is_over else advice.standing_words(job)

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[Sighting]:
        return self.finder.glance(launches)

    def name_of(self, launch: LaunchPlan) -> str | None:
        return find.name_of(launch)

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
        noted = find.claim(launch, own)
        if noted == own:
            return None
        job = self.finder.show(launch, noted)
        if job is not None and not job.is_over:
            return advice.standing_words(job)
        find.record(launch, own)
        return None

    # For the leader

    def allocation(self, launch: LaunchPlan) -> Allocation | None:
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
        job_id = self.environ.get("SLURM_JOB_ID")
        if job_id is None:
            raise BackendError("there is no SLURM_JOB_ID: this is no Slurm job")
        return job_id

    def _restarts(self) -> int:
        return int(self.environ.get("SLURM_RESTART_COUNT", "0"))

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        if not hosts:
            return ()
        reservation = (launch.slurm or SlurmSpec()).reservation
        unfit = {
            node.name: HostNotice(host=node.name, state=node.words, reason=node.reason)
            for node in self._nodes(hosts)
            if is_wanted_back(node, reservation)
        }
        job = self.finder.show(launch, self._own_id(), tries=1)
        if job is not None and job.meaning == "running" and job.nodes:
            for host in set(hosts) - set(job.nodes) - set(unfit):
                unfit[host] = HostNotice(
                    host=host, state="REMOVED", reason="Slurm took it out of the job"
                )
        return tuple(unfit[host] for host in hosts if host in unfit)

    def _nodes(self, hosts: Sequence[str]) -> tuple[Node, ...]:
        argv = ["scontrol", "show", "node", "-a", "-o", fold(hosts)]
        return parse_nodes(self.slurm.told(argv, tries=1))

    def why_ending(self, launch: LaunchPlan) -> Cause:
        job = self.finder.show(launch, self._own_id(), tries=1)
        if job is None:
            return "unknown"
        notice_s = (launch.slurm or SlurmSpec()).notice_s + NOTICE_SLACK_S
        return observe.cause(job, self._restarts(), self.clock.now(), notice_s)

    def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        """Slurm takes an allocation as a whole, and says so by a signal."""
        return {}

    def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        raise BackendError("Slurm starts no agent of its own again", fix="have the job requeued")

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
        job = self.finder.show(launch, job_id, tries=1)
        if job is None or host not in job.nodes:
            raise BackendError(f"{host} is not in Slurm job {job_id} any more")
        for node in self._nodes([host]):
            if node.is_dead:
                why = f": {node.reason}" if node.reason else ""
                raise BackendError(f"Slurm says that {host} is {node.words}{why}")
        log = render.folder(launch) / f"replaced-{host}.srun"
        again = render.replacement(launch, job_id, host, sys.executable)
        self.steps.append(start(again, self.environ, log, START_S))

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        job_id, mine = self._own_id(), self._restarts()
        job = self.finder.show(launch, job_id)
        if job is None or job.is_over:
            raise Ended(f"Slurm job {job_id} has ended")
        if job.restarts == mine and job.meaning == "leaving":
            raise Ended(f"Slurm job {job_id} is {job.state}: it is being ended")
        if job.restarts > mine + 1 or (job.restarts > mine and job.meaning == "running"):
            return  # it runs again already: not ours any more
        running = job.restarts == mine and job.meaning == "running"
        if running:
            self._await_verdict(launch, exclude, job.ends_at)
        asked_for = expand((launch.slurm and launch.slurm.exclude) or "")
        standing = {*job.excluded} - ({*again} - {*asked_for})
        nodes = parse_nodes(self.slurm.told(NODES))
        out = left_out(launch, standing, exclude, nodes, self.environ.get("SLURM_JOB_PARTITION"))
        for host, why in out.dropped.items():
            log.warning("Slurm is not asked to leave %s out: %s", host, why)
        if running:
            self.slurm.told(["scontrol", "requeue", job_id])
        if {*out.names} != {*job.excluded}:
            self._exclude(job_id, out.names)

    def _await_verdict(
        self, launch: LaunchPlan, exclude: Sequence[str], ends_at: float | None
    ) -> None:
        """Wait until Slurm itself has given up those hosts that do not answer.

        A job cannot complete, and so not start again, before that anyway; and 22.05 loses count of
        the GPUs of a job whose node goes down while it completes: no step can be created in its
        next run, and the GPUs stay taken until slurmctld starts again. But a job that comes to its
        time limit meanwhile is lost: Slurm never queues it again.
        """
        given = expand(self.environ.get("SLURM_JOB_NODELIST", ""))
        own = self.environ.get("SLURMD_NODENAME")
        doubtful = ({*exclude} & {*given} | {*given[:1]}) - {own}
        left_s = VERDICT_S if ends_at is None else ends_at - self.clock.now() - ASK_S
        until = self.clock.monotonic() + min(VERDICT_S, left_s)
        while doubtful and self.clock.monotonic() < until:
            given_up: set[str] = set()
            with contextlib.suppress(BackendError):  # it is asked again, as long as it takes
                given_up = {
                    notice.host
                    for notice in self.notices(launch, sorted(doubtful))
                    if notice.state == "REMOVED" or "DOWN" in notice.state.split("+")
                }
            doubtful -= given_up
            for host in sorted(doubtful):
                if self.clock.monotonic() < until and self._answers(host):
                    doubtful.remove(host)
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
        argv = ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={fold(names)}"]
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
