"""A scheduler that behaves like Slurm: queue, allocation, notices, requeue and its own faults.

It also replaces `backends/slurm`: a request without an answer raises Unanswered, and excluded
hosts are set with the requeue. Times are shorter than Slurm's.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.contract.launch import Allocation, Cause
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.seams import CurrentRun, HostNotice
from orchestrator.simulation.clock import EPOCH
from orchestrator.simulation.laws.law import require
from orchestrator.simulation.world.network import SCHEDULER

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.world.hosts import Host
    from orchestrator.simulation.world.world import World

QUEUE_S = 20.0
"""Longest time from eligible to started."""
NODE_CHECK_S = 10.0
SLURMD_TIMEOUT_S = 30.0
"""SlurmdTimeout: a node that is unreachable for this long is down."""
NEW_NODE_S = 120.0
"""Seconds in the queue without enough nodes after which an administrator adds a node."""
KILL_WAIT_S = 5.0
NOTICE_S = 40.0
VERDICT_S = 330.0
VERDICT_POLL_S = 2.0
LIMIT_MARGIN_S = 30.0
START_S = 2.0


@dataclass(slots=True, eq=False)
class Job:
    launch: int
    restarts: int = 0
    state: str = "queued"
    """`queued`, `running`, `leaving`, `ended`."""
    queued_at: float = 0.0
    excluded: set[str] = field(default_factory=set)
    allocated: tuple[str, ...] = ()
    """Nodes at the start of the run."""
    nodes: list[str] = field(default_factory=list)
    """Nodes that the job still has."""
    starting: int = 0
    """Number of tasks that have not started yet."""
    agents: list["AgentProcess"] = field(default_factory=list)
    ends_at: float | None = None
    preempted: bool = False
    cancelled: bool = False
    timed_out: bool = False
    requeue: bool = True
    """Whether the job returns to the queue when its processes have ended."""


class Scheduler:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.job: Job | None = None
        self.down_until = 0.0
        self.submissions: list[int] = []

    def _now(self) -> float:
        return self.world.timeline.now

    def _check_reachable(self, asker: str) -> None:
        if self._now() < self.down_until or not self.world.network.reaches(asker, SCHEDULER):
            raise Unanswered("the scheduler is unreachable")

    def _reaches(self, host: "Host") -> bool:
        return host.up and self.world.network.reaches(host.name, SCHEDULER)

    # Submission and queue

    def submit(self, launch: int) -> None:
        self.submissions.append(launch)
        self.job = Job(launch, queued_at=self._now())
        self._queue(self.job)

    @property
    def has_job(self) -> bool:
        return self.job is not None and self.job.state != "ended"

    def _queue(self, job: Job) -> None:
        job.state, job.queued_at = "queued", self._now()
        self._after(5.0 + QUEUE_S * self.world.random.random(), partial(self._try_start, job))

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self.world.timeline.after(seconds, do)

    def _try_start(self, job: Job) -> None:
        if self.job is not job or job.state != "queued":
            return
        wanted = self.world.scenario.hosts + self.world.scenario.spares
        free = [host for host in self.world.hosts.values() if self._may_run(job, host)]
        if self._now() < self.down_until or len(free) < wanted:
            if self._now() - job.queued_at > NEW_NODE_S and len(free) < wanted:
                self.world.add_host()
            self._after(NODE_CHECK_S, partial(self._try_start, job))
            return
        self._start(job, [host.name for host in self.world.random.sample(free, wanted)])

    def _may_run(self, job: Job, host: "Host") -> bool:
        idle = not host.ranks and not any(agent.alive for agent in host.agents)
        known_good = host.down_since is None and not host.draining
        return self._reaches(host) and known_good and idle and host.name not in job.excluded

    def _start(self, job: Job, nodes: list[str]) -> None:
        nodes.sort()
        job.allocated, job.nodes, job.state, job.agents = tuple(nodes), list(nodes), "running", []
        job.preempted, job.requeue, job.starting = False, True, len(nodes)
        job.ends_at = None
        self.world.history.note("scheduler", f"run {job.restarts} starts on {', '.join(nodes)}")
        for number, name in enumerate(nodes):
            start = partial(self._start_task, job, job.restarts, name, number == 0)
            self._after(START_S * self.world.random.random(), start)
        self._after(NODE_CHECK_S, partial(self._check_nodes, job, job.restarts))

    def _is_current(self, job: Job, restarts: int) -> bool:
        return self.job is job and job.restarts == restarts and job.state == "running"

    def still_has_hosts(self, agent: "AgentProcess") -> bool:
        """Whether the run that the agent belongs to still has its hosts."""
        job = self.job
        same = job is not None and job.launch == agent.launch
        return same and job is not None and self._is_current(job, agent.restarts)

    def has_requeued(self, agent: "AgentProcess") -> bool:
        """Whether the job was requeued after the agent's run."""
        job = self.job
        same = job is not None and job.launch == agent.launch and job.restarts > agent.restarts
        return same and job is not None and job.state != "ended" and job.requeue

    def _start_task(self, job: Job, restarts: int, name: str, lead: bool) -> None:
        if not self._is_current(job, restarts):
            return
        job.starting -= 1
        host = self.world.hosts[name]
        if host.agent_never_starts or not self._reaches(host):
            return
        self._add(job, self.world.start_agent(self.world, host, job.launch, restarts, lead), host)

    def _add(self, job: Job, agent: "AgentProcess", host: "Host") -> None:
        job.agents.append(agent)
        host.agents.append(agent)

    def allocation(self, agent: "AgentProcess") -> Allocation:
        """Raises Unanswered."""
        self._check_reachable(agent.host.name)
        job = self.job
        assert job is not None
        switches = {name: self.world.switches_of(name) for name in job.allocated}
        return Allocation(
            id="7",
            restarts=agent.restarts,
            hosts=job.allocated,
            switches=switches,
            names_resolve=False,  # a simulated cluster has no name service
        )

    # While it runs

    def _check_nodes(self, job: Job, restarts: int) -> None:
        """Remove unreachable nodes from the job. If the first node is lost, requeue the job."""
        if not self._is_current(job, restarts):
            return
        self._after(NODE_CHECK_S, partial(self._check_nodes, job, restarts))
        if self._now() < self.down_until:
            return
        for name in list(job.nodes):
            host = self.world.hosts[name]
            if not self.world.is_unreachable_for(host, SLURMD_TIMEOUT_S):
                continue
            host.down_since = self._now()
            job.nodes.remove(name)
            self.world.history.note("scheduler", f"{name} is down")
            if name == job.allocated[0]:
                self._end_run(job, KILL_WAIT_S, requeue=True)
                return
        self._end_if_idle(job)

    def agent_left(self, agent: "AgentProcess", code: int) -> None:
        """The job ends with the last of its tasks."""
        if self.job is not None and agent in self.job.agents:
            self._end_if_idle(self.job)

    def _end_if_idle(self, job: Job) -> None:
        """End the job if no task runs. Tasks on a host without power count until it is down."""
        if job.state != "running" or job.starting:
            return
        doubtful = [name for name in job.nodes if not self.world.hosts[name].up]
        if not doubtful and not any(one.alive for one in job.agents):
            job.state = "ended"
            self.world.history.note("scheduler", "all tasks have ended, so the job ends")

    def notices(self, asker: str, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        self._check_reachable(asker)
        job = self.job
        if job is None or job.state == "ended":
            raise BackendError("the job is not known")
        found = []
        for name in (name for name in job.allocated if name in hosts):
            if name not in job.nodes and job.state == "running":
                down = not self.world.hosts[name].up
                state = "DOWN" if down else "REMOVED"
                found.append(HostNotice(name, state, "Slurm took it out of the job", down=down))
            elif self.world.hosts[name].draining:
                found.append(HostNotice(name, "DRAINING", self.world.hosts[name].draining))
        return tuple(found)

    def standing(self, asker: str) -> str | None:
        """Raises Unanswered."""
        self._check_reachable(asker)
        return None if self.job is None else f"the job is {self.job.state}"

    def own_run(self, agent: "AgentProcess") -> CurrentRun:
        """Raises Unanswered."""
        self._check_reachable(agent.host.name)
        job = self.job
        if job is None or job.launch != agent.launch or job.state == "ended":
            return CurrentRun(phase="over", words="the job is not known")
        if job.restarts > agent.restarts or job.state == "queued":
            return CurrentRun(phase="queued again", words=f"the job is {job.state}")
        if job.state == "leaving":
            return CurrentRun(phase="ending", words="the job is being ended")
        gone = {
            name: "it was taken out of the job" for name in job.allocated if name not in job.nodes
        }
        ends_at = None if job.ends_at is None else EPOCH + job.ends_at
        return CurrentRun(
            phase="running", words="it runs", hosts=job.allocated, given_up=gone, ends_at=ends_at
        )

    def clear_host(self, agent: "AgentProcess", name: str) -> str:
        """Raises BackendError if no process starts there or ranks do not exit."""
        self._check_reachable(agent.host.name)
        job, host = self.job, self.world.hosts[name]
        if job is None or not self._is_current(job, agent.restarts) or name not in job.nodes:
            raise BackendError(f"{name} is not in the job any more")
        if not self._reaches(host) or not self.world.storage.reachable_from(name):
            raise BackendError(f"no process can be started on {name}")
        for one in [one for one in host.agents if one.alive]:
            one.die()
        if host.ranks:
            raise BackendError(f"ranks on {name} do not exit")
        return "its process had ended, or was killed"

    def why_ending(self, agent: "AgentProcess") -> Cause:
        self._check_reachable(agent.host.name)
        job = self.job
        if job is None or job.launch != agent.launch:
            return "unknown"
        causes: list[tuple[bool, Cause]] = [
            (job.preempted, "preempted"),
            (job.restarts > agent.restarts, "requeued"),
            (job.timed_out, "time-limit"),
            (job.cancelled, "cancelled"),
        ]
        near = job.ends_at is not None and job.ends_at - self._now() <= 2 * NOTICE_S
        causes.append((near, "time-limit"))
        return next((cause for holds, cause in causes if holds), "unknown")

    def replace(self, agent: "AgentProcess", name: str, *, elsewhere: bool) -> None:
        """Raises BackendError if no agent can be started on the host, and Ended if the run is
        over."""
        require(
            not elsewhere, f"another host is requested instead of {name}, which Slurm cannot do"
        )
        self._check_reachable(agent.host.name)
        job, host = self.job, self.world.hosts[name]
        if job is None or not self._is_current(job, agent.restarts) or job.launch != agent.launch:
            raise Ended("this run of the job is over")
        if name not in job.nodes:
            raise BackendError(f"{name} is not in the job any more")
        if host.down_since is not None:
            raise BackendError(f"Slurm says that {name} is down")
        if self._reaches(host) and not host.agent_never_starts:
            again = self.world.start_agent(self.world, host, job.launch, job.restarts, lead=False)
            self._add(job, again, host)

    # Requeue

    async def requeue(
        self, mine: "AgentProcess", exclude: Sequence[str], *, again: Sequence[str], whole: bool
    ) -> None:
        """Return when the job is requeued, whichever agent requested it. Raises Unanswered, and
        Ended if the job cannot be requeued."""
        require(whole, "only a part of the allocation is released")
        asker, begun = mine.host.name, self._now()
        while True:
            self._check_reachable(asker)
            job = self.job
            if job is None or job.state == "ended" or job.launch != mine.launch:
                raise Ended("the job has ended")
            if job.state == "leaving" and not job.requeue:
                raise Ended("the job is being ended")
            if job.restarts > mine.restarts and not mine.requested_requeue:
                return  # another agent requested it and chose the hosts
            if job.restarts > mine.restarts + (job.state != "running"):
                return
            doubtful = {*exclude, *job.allocated[:1]} - {asker}
            waits = [name for name in doubtful if self._is_unreachable_node(job, name)]
            late = job.ends_at is not None and self._now() > job.ends_at - LIMIT_MARGIN_S
            asks = job.restarts == mine.restarts and job.state == "running"
            if not asks or not waits or late or self._now() - begun >= VERDICT_S:
                break
            await asyncio.sleep(VERDICT_POLL_S)
        if asks:
            self.world.history.note("scheduler", f"{asker} requeues the job")
            mine.requested_requeue = True
            self._end_run(job, KILL_WAIT_S, requeue=True)
        job.excluded = (job.excluded - {*again}) | {*exclude}
        self._drop_useless_exclusions(job, exclude)

    def _drop_useless_exclusions(self, job: Job, exclude: Sequence[str]) -> None:
        """If too few other hosts exist, do not list hosts that are down or drained anyway."""
        hosts, scenario = self.world.hosts, self.world.scenario
        if len(hosts.keys() - job.excluded) >= scenario.hosts + scenario.spares:
            return
        there = [hosts[name] for name in exclude if name in hosts]
        job.excluded -= {host.name for host in there if host.down_since or host.draining}

    def _is_unreachable_node(self, job: Job, name: str) -> bool:
        host = self.world.hosts.get(name)
        return host is not None and name in job.nodes and not self._reaches(host)

    def _end_run(self, job: Job, grace_s: float, *, requeue: bool) -> None:
        """Signal all processes, kill the rest after the grace period, requeue or end the job."""
        job.state, job.requeue = "leaving", requeue
        if requeue:
            job.restarts += 1
        self.signal_all(job, "SIGTERM")
        self._after(grace_s, partial(self._kill, job))

    def signal_all(self, job: Job, signal_name: str) -> None:
        """Slurm signals every process of the job, ranks as well."""
        for agent in job.agents:
            if agent.alive and self._reaches(agent.host):
                ranks = agent.ranks
                agent.receive_signal(signal_name)
                if ranks is not None:
                    ranks.request_exit()

    def _kill(self, job: Job) -> None:
        """Kill all processes. The job can start again when each node is free of it or down."""
        if self.job is not job or job.state != "leaving":
            return
        left = False
        for agent in list(job.agents):
            if agent.alive and self._reaches(agent.host):
                agent.die()
            left = left or self._holds_node(agent)
        if left:
            self._after(VERDICT_POLL_S, partial(self._kill, job))
            return
        job.agents = []
        if job.requeue:
            self._queue(job)
        else:
            job.state = "ended"

    def _holds_node(self, agent: "AgentProcess") -> bool:
        host = agent.host
        if not self._reaches(host):
            if self.world.is_unreachable_for(host, SLURMD_TIMEOUT_S):
                host.down_since = host.down_since or self._now()
            return host.down_since is None
        return agent.alive or bool(host.ranks)

    def node_back(self, host: "Host") -> None:
        """A down node is reachable again. Kill its agents, which belong to an earlier run."""
        if host.down_since is None:
            return
        host.down_since = None
        host.end_agents()

    # Faults of the scheduler

    def preempt(self, grace_s: float) -> bool:
        """Preempt the job. False: no job runs."""
        job = self.job
        if job is None or job.state != "running":
            return False
        job.preempted = True
        self.signal_all(job, "SIGTERM")
        self._after(grace_s, partial(self._end_preempted, job, job.restarts))
        return True

    def _end_preempted(self, job: Job, restarts: int) -> None:
        if self._is_current(job, restarts):
            self._end_run(job, 0.0, requeue=True)

    def reach_time_limit(self) -> bool:
        job = self.job
        if job is None or job.state != "running" or job.ends_at is not None:
            return False
        job.ends_at = self._now() + NOTICE_S
        self.signal_all(job, "SIGUSR2")
        self._after(NOTICE_S, partial(self._end_timed_out, job, job.restarts))
        return True

    def _end_timed_out(self, job: Job, restarts: int) -> None:
        if self._is_current(job, restarts):
            job.timed_out = True
            self._end_run(job, KILL_WAIT_S, requeue=False)

    def cancel(self) -> None:
        job = self.job
        if job is None or job.state not in ("running", "queued"):
            return
        job.cancelled = True
        if job.state == "queued":
            job.state = "ended"
        else:
            self._end_run(job, KILL_WAIT_S, requeue=False)

    def forget(self, *, everything: bool) -> None:
        """The scheduler restores an old state: it forgets the excluded nodes, or the whole job."""
        job = self.job
        if job is None:
            return
        job.excluded.clear()
        if everything and job.state == "running":
            self._end_run(job, KILL_WAIT_S, requeue=False)
