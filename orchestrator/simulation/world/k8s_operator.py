"""Kubernetes pods and an operator that recreates them.

A pod runs the agent of its node; the pod of rank 0 leads. If one pod ends, the others stay, and its
successor may run on any node. This module also replaces `backends/kubernetes`. Two things differ
from a real cluster: times are shorter, and the user creates the journal, not the first pod.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.contract.files import exit_codes
from orchestrator.contract.launch import Allocation, Cause
from orchestrator.errors import BackendError, Unanswered
from orchestrator.seams import HostNotice
from orchestrator.simulation.laws.law import require
from orchestrator.simulation.world.network import SCHEDULER

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.world.hosts import Host
    from orchestrator.simulation.world.world import World

RECONCILE_S = 3.0
START_S = 8.0
"""Longest time from the binding of a pod to the start of its agent."""
GRACE_S = 30.0
FORCE_S = 20.0
"""`force_delete_after`: a pod on an unreachable node is force-deleted after this time."""
DRAIN_S = 20.0
"""Seconds from a cordon to the eviction of the pods on the node."""
NEW_NODE_S = 120.0
"""Seconds without a fitting node after which the cluster gets a new node."""
SUSPENDED_S = 40.0
LIMIT_S = 40.0
CLOCK_TOLERANCE_S = 5.0
LEADER_START_S = 30.0
"""How long the leader's pod may take to start before it moves to another node."""
LEADER_REPORT_S = 100.0
"""How long a running leader pod may take until agents hear it."""
MOST_MOVES = 3
UNREACHABLE_GONE_S = 60.0
"""Seconds after the end of a job until pods on an unreachable node count as gone."""


@dataclass(slots=True, eq=False)
class Pod:
    rank: int
    made_at: float
    host: str = ""
    """Empty until the pod is bound."""
    bound_at: float = 0.0
    agent: "AgentProcess | None" = None
    deleting: bool = False
    cause: Cause = "requeued"
    """Why the pod is deleted."""


@dataclass(slots=True)
class KubernetesOperator:
    world: "World"
    state: str = ""
    """`running`, `suspended`, `leaving`, `ended`; nothing before a submission."""
    launch: int = 0
    pods: dict[int, Pod] = field(default_factory=dict)
    """Node rank -> pod. A pod that must be recreated is missing."""
    done: set[int] = field(default_factory=set)
    """Node ranks whose pod has succeeded."""
    excluded: set[str] = field(default_factory=set)
    failed_nodes: list[str] = field(default_factory=list)
    """Nodes on which the leader's pod did not start, in this launch."""
    no_fit_since: float | None = None
    """Since when no allowed node fits. Recreating pods does not reset it, because a cluster that
    adds nodes does not start again for that."""
    evicted: dict[str, float] = field(default_factory=dict)
    """Host -> when its kubelet last evicted the pod there."""
    down_until: float = 0.0
    cancelled: bool = False
    submissions: list[int] = field(default_factory=list)
    ending_since: float = 0.0

    # The cluster

    def _now(self) -> float:
        return self.world.timeline.now

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self.world.timeline.after(seconds, do)

    def _check_reachable(self, asker: str) -> None:
        if self._now() < self.down_until or not self.world.network.reaches(asker, SCHEDULER):
            raise Unanswered("the API server is unreachable")

    def _reaches(self, host: "Host") -> bool:
        return host.up and self.world.network.reaches(host.name, SCHEDULER)

    @property
    def has_job(self) -> bool:
        return self.state not in ("", "ended")

    def submit(self, launch: int) -> None:
        self.submissions.append(launch)
        self.launch, self.state, self.cancelled = launch, "running", False
        self.pods, self.done, self.failed_nodes = {}, set(), []
        self._reconcile(launch)

    def _reconcile(self, launch: int) -> None:
        """One reconcile loop of the controllers and the scheduler."""
        if launch != self.launch or not self.has_job:
            return
        self._after(RECONCILE_S, partial(self._reconcile, launch))
        if self._now() < self.down_until:
            return
        if self.state == "leaving":
            self._end_if_no_pods()
        elif self.state == "running":
            self._make_pods()
            for pod in list(self.pods.values()):
                self._bind(pod)
                self._drain(pod)
            if all(pod.host not in ("", *self.excluded) for pod in self.pods.values()):
                self.no_fit_since = None

    def _make_pods(self) -> None:
        wanted = self.world.scenario.hosts + self.world.scenario.spares
        for rank in range(wanted):
            if rank not in self.pods and rank not in self.done:
                self.pods[rank] = Pod(rank, self._now())

    def _bind(self, pod: Pod) -> None:
        if pod.host or pod.deleting:
            return
        used = {other.host for other in self.pods.values()}
        free = [h for h in self.world.hosts.values() if self._fits(h) and h.name not in used]
        if all(host.name in self.excluded for host in free):
            self._add_node_if_short()
        if not free:
            return
        pod.host, pod.bound_at = self.world.random.choice(free).name, self._now()
        self._after(START_S * self.world.random.random(), partial(self._start_agent, pod))

    def _add_node_if_short(self) -> None:
        """No allowed node fits. Add a node after FRESH_S seconds."""
        if self.no_fit_since is None:
            self.no_fit_since = self._now()
        elif self._now() - self.no_fit_since > NEW_NODE_S:
            self.no_fit_since = None
            self.world.add_host()

    def _fits(self, host: "Host") -> bool:
        idle = not host.ranks and not any(agent.alive for agent in host.agents)
        kept_off = self.world.scenario.enforces_exclusions and host.name in self.excluded
        return self._reaches(host) and idle and not host.draining and not kept_off

    def _start_agent(self, pod: Pod) -> None:
        host = self.world.hosts[pod.host]
        if self.pods.get(pod.rank) is not pod or pod.deleting or not self._reaches(host):
            return
        if host.agent_never_starts:  # the kubelet keeps trying
            self._after(RECONCILE_S, partial(self._start_agent, pod))
            return
        pod.agent = self.world.start_agent(
            self.world, host, self.launch, 0, pod.rank == 0, turn=max(1, pod.rank)
        )
        host.agents.append(pod.agent)

    def _drain(self, pod: Pod) -> None:
        host = self.world.hosts.get(pod.host)
        if host is not None and host.draining and self._now() - host.drained_at > DRAIN_S:
            self._delete(pod, "drained")

    # Pods end

    def _delete(self, pod: Pod, cause: Cause, grace_s: float = GRACE_S) -> None:
        """SIGTERM, and SIGKILL after the grace period, if the kubelet is reachable."""
        if pod.deleting:
            return
        pod.deleting, pod.cause = True, cause
        agent = pod.agent
        if agent is None or not agent.alive:
            if not pod.host or self._reaches(self.world.hosts[pod.host]):
                self._remove(pod)
            return
        if self._reaches(agent.host):
            agent.receive_signal("SIGTERM")  # to its first process, which is the agent
        self._after(grace_s, partial(self._kill, pod))

    def _kill(self, pod: Pod) -> None:
        if self.pods.get(pod.rank) is not pod:
            return
        host = self.world.hosts[pod.host]
        if self._reaches(host):
            if pod.agent is not None and pod.agent.alive:
                pod.agent.die()
                return
            if not host.ranks:  # otherwise the kernel cannot kill the ranks yet
                self._remove(pod)
                return
        self._after(RECONCILE_S, partial(self._kill, pod))

    def _force_delete(self, pod: Pod) -> None:
        """Force-delete a pod that may still run. The fence keeps it from writing."""
        if self.pods.get(pod.rank) is pod:
            self._remove(pod)

    def _remove(self, pod: Pod) -> None:
        if self.pods.get(pod.rank) is pod:
            del self.pods[pod.rank]

    def agent_left(self, agent: "AgentProcess", code: int) -> None:
        pod = next((pod for pod in self.pods.values() if pod.agent is agent), None)
        if pod is None:
            return
        if code == exit_codes.OK and not pod.deleting:
            self.done.add(pod.rank)
        if code in (exit_codes.OK, exit_codes.FAILED) and not pod.deleting and pod.rank == 0:
            self.world.history.note(
                "operator", f"the first pod exited with {code}, so the job ends"
            )
            self._end()
        if agent.host.ranks:
            self._kill(pod)  # after the kernel has killed the ranks
        else:
            self._remove(pod)

    def node_back(self, host: "Host") -> None:
        """The kubelet is reachable again. It kills agents without a pod and reports pods that
        ended."""
        mine = {pod.agent for pod in self.pods.values() if not pod.deleting}
        for agent in [agent for agent in host.agents if agent.alive and agent not in mine]:
            agent.die()
        for pod in [pod for pod in self.pods.values() if pod.host == host.name]:
            if pod.agent is None or not pod.agent.alive:
                self._remove(pod)

    # The end

    def _end(self) -> None:
        self.state, self.ending_since = "leaving", self._now()
        for pod in list(self.pods.values()):
            self._delete(pod, "cancelled" if self.cancelled else "unknown")

    def _end_if_no_pods(self) -> None:
        over = self._now() - self.ending_since > UNREACHABLE_GONE_S
        for pod in list(self.pods.values()):
            if not pod.host or (over and not self._reaches(self.world.hosts[pod.host])):
                self._remove(pod)
        if not self.pods:
            self.state = "ended"
            self.world.history.note("operator", "no pod of the job is left")

    # Requests of the leader

    def standing(self, asker: str) -> str | None:
        """Raises Unanswered."""
        self._check_reachable(asker)
        return self.state or None

    def allocation(self, agent: "AgentProcess") -> Allocation:
        """Raises Unanswered."""
        self._check_reachable(agent.host.name)
        hosts = tuple(pod.host for pod in self.pods.values() if pod.agent and pod.agent.alive)
        return Allocation(
            id="simulated",
            restarts=0,
            hosts=hosts or (agent.host.name,),
            switches={name: self.world.switches_of(name) for name in self.world.hosts},
            successor_s=self.world.scenario.successor_s,
            names_resolve=False,
        )

    def notices(self, asker: str, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        self._check_reachable(asker)
        found = [host for name in hosts if (host := self.world.hosts[name]).draining]
        return tuple(HostNotice(host.name, "CORDONED", host.draining) for host in found)

    def why_ending(self, agent: "AgentProcess") -> Cause:
        self._check_reachable(agent.host.name)
        if self.cancelled or self.launch != agent.launch:
            return "cancelled"
        pod = next((pod for pod in self.pods.values() if pod.agent is agent), None)
        return "requeued" if pod is None else pod.cause

    def taken(self, asker: str, hosts: Mapping[str, float]) -> dict[str, str]:
        """Hosts whose pod was evicted since their agent was last heard -> reason."""
        self._check_reachable(asker)
        return {
            host: "Evicted: the node was low on memory"
            for host, silent_s in hosts.items()
            if self.evicted.get(host, -1e9) >= self._now() - silent_s - CLOCK_TOLERANCE_S
        }

    def replace(
        self, agent: "AgentProcess", name: str, *, elsewhere: bool, shut: bool, silent_s: float
    ) -> None:
        """Raises BackendError."""
        self._check_reachable(agent.host.name)
        if not self.has_job or self.launch != agent.launch:
            raise BackendError("the job does not exist any more")
        if elsewhere and not shut:
            self.excluded.add(name)
        for pod in list(self.pods.values()):
            young = self._now() - pod.bound_at < silent_s + CLOCK_TOLERANCE_S
            if pod.host != name or pod.agent is agent or (young and not elsewhere):
                continue
            self._delete(pod, "requeued")
            if not self._reaches(self.world.hosts[name]):
                self._after(FORCE_S, partial(self._force_delete, pod))

    def revive_leader(self, agent: "AgentProcess", silent_s: float | None) -> None:
        """Raises BackendError. `silent_s`: None if the leader has not started yet."""
        asker = agent.host.name
        self._check_reachable(asker)
        pod = self.pods.get(0)
        if not self.has_job or self.launch != agent.launch:
            raise BackendError("the job does not exist any more")
        if pod is None or not pod.host:
            return
        age_s = self._now() - pod.bound_at
        if pod.agent is not None:
            if silent_s is None or age_s < min(silent_s + CLOCK_TOLERANCE_S, LEADER_REPORT_S):
                return
        elif not pod.deleting:
            fails = self.world.hosts[pod.host].agent_never_starts
            if age_s < LEADER_START_S or not (
                fails or not self._reaches(self.world.hosts[pod.host])
            ):
                return
            if len(self.failed_nodes) >= MOST_MOVES:
                raise BackendError("the pod did not start on other nodes either")
            self.failed_nodes.append(pod.host)
            self.excluded.add(pod.host)
            self.world.history.note("operator", f"{asker} moves the leader's pod from {pod.host}")
        self._delete(pod, "requeued")
        if not self._reaches(self.world.hosts[pod.host]):
            self._after(FORCE_S, partial(self._force_delete, pod))

    def requeue(
        self, mine: "AgentProcess", exclude: Sequence[str], *, again: Sequence[str], whole: bool
    ) -> None:
        """Delete all pods, or only the leader's own. Raises Unanswered."""
        require(not again, "hosts are allowed again, although the operator replaces them")
        asker = mine.host.name
        self._check_reachable(asker)
        self.excluded |= set(exclude)
        self.world.history.note("operator", f"{asker} deletes {'all pods' if whole else 'its pod'}")
        for pod in list(self.pods.values()):
            if whole or pod.agent is mine:
                self._delete(pod, "requeued")

    def has_ended(self, asker: str) -> bool:
        """Raises Unanswered."""
        self._check_reachable(asker)
        return not self.has_job

    # Faults of the cluster

    def evict(self, pick: float) -> bool:
        """A kubelet evicts a pod because the node is low on memory. False: no pod runs."""
        running = [pod for pod in self.pods.values() if pod.agent is not None and pod.agent.alive]
        running = [pod for pod in running if self._reaches(self.world.hosts[pod.host])]
        if self.state != "running" or not running:
            return False
        pod = running[int(pick * len(running))]
        self.evicted[pod.host] = self._now()
        self.world.history.note("operator", f"the pod on {pod.host} is evicted")
        assert pod.agent is not None
        pod.agent.die()
        return True

    def preempt(self, grace_s: float) -> bool:
        """Suspend the whole job for a while, as Kueue does."""
        if self.state != "running":
            return False
        self.state = "suspended"
        for pod in list(self.pods.values()):
            self._delete(pod, "preempted", grace_s)
        self._after(SUSPENDED_S, partial(self._resume, self.launch))
        return True

    def _resume(self, launch: int) -> None:
        if self.state == "suspended" and launch == self.launch:
            self.state = "running"

    def reach_time_limit(self) -> bool:
        """`activeDeadlineSeconds`: the job fails. SIGTERM is the first warning."""
        self._after(LIMIT_S, partial(self._end_at_deadline, self.launch))
        return self.has_job

    def _end_at_deadline(self, launch: int) -> None:
        if launch == self.launch and self.state in ("running", "suspended"):
            self._end()

    def cancel(self) -> None:
        if self.state in ("running", "suspended"):
            self.cancelled = True
            self._end()

    def forget(self, *, everything: bool) -> None:
        """The cluster restores an old state: it forgets the excluded nodes, or the whole job."""
        self.excluded.clear()
        if everything and self.state == "running":
            self._end()
