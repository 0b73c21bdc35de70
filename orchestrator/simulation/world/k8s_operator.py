"""Pods and an operator that makes each anew, as Kubernetes has them.

A pod is the agent of its node; the one of rank 0 leads. Where one goes the others stay, and what
takes its place may be on whatever node. What `backends/kubernetes` makes of the API's words is
played as well. It differs in times, which are shorter, and in who begins the journal: the person,
not the first pod.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.contract.files import exit_codes
from orchestrator.contract.launch import Allocation, Cause
from orchestrator.errors import BackendError, Unanswered
from orchestrator.seams import HostNotice
from orchestrator.simulation.laws.law import hold
from orchestrator.simulation.world.network import SCHEDULER

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.world.hosts import Host
    from orchestrator.simulation.world.world import World

TURN_S = 3.0
START_S = 8.0
"""At most, from a pod that is bound to the agent in it."""
GRACE_S = 30.0
FORCE_S = 20.0
"""`force_delete_after`: a pod whose node does not answer is deleted all the same."""
DRAIN_S = 20.0
"""From a cordon to the eviction of what runs there."""
FRESH_S = 120.0
"""After which the cluster grows by a node, where none fits."""
SUSPENDED_S = 40.0
LIMIT_S = 40.0
CLOCKS_S = 5.0
BEGIN_S = 30.0
"""For the leader's pod to begin on its node, before it is taken elsewhere."""
YOUNG_S = 100.0
"""For one that runs to be heard."""
MOST_MOVES = 3
OVER_S = 60.0
"""After which what ran on a node that is not heard counts as gone at the end of a job."""


@dataclass(slots=True, eq=False)
class Pod:
    rank: int
    made_at: float
    host: str = ""
    """Once it is bound."""
    bound_at: float = 0.0
    agent: "AgentProcess | None" = None
    deleting: bool = False
    cause: Cause = "requeued"
    """Why it is being ended."""


@dataclass(slots=True)
class Operators:
    world: "World"
    state: str = ""
    """`running`, `suspended`, `leaving`, `ended`; nothing before a submission."""
    launch: int = 0
    pods: dict[int, Pod] = field(default_factory=dict)
    """By node rank; of one that is to be made anew there is none."""
    done: set[int] = field(default_factory=set)
    """Ranks whose pod has succeeded."""
    excluded: set[str] = field(default_factory=set)
    never_began: list[str] = field(default_factory=list)
    """Nodes that the leader's pod was taken away from, in this launch."""
    short_since: float | None = None
    """No host fits any more that the job would have: also while its pods are made anew, for a
    cluster that grows does not start over for that."""
    evicted: dict[str, float] = field(default_factory=dict)
    """Host -> when its kubelet last killed the pod there, without a warning."""
    down_until: float = 0.0
    cancelled: bool = False
    submissions: list[int] = field(default_factory=list)
    ending_since: float = 0.0

    # The cluster

    def _now(self) -> float:
        return self.world.timeline.now

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self.world.timeline.after(seconds, do)

    def _answers(self, asker: str) -> None:
        if self._now() < self.down_until or not self.world.network.reaches(asker, SCHEDULER):
            raise Unanswered("the API server does not answer")

    def _hears(self, host: "Host") -> bool:
        return host.up and self.world.network.reaches(host.name, SCHEDULER)

    @property
    def stands(self) -> bool:
        return self.state not in ("", "ended")

    def submit(self, launch: int) -> None:
        self.submissions.append(launch)
        self.launch, self.state, self.cancelled = launch, "running", False
        self.pods, self.done, self.never_began = {}, set(), []
        self._turn(launch)

    def _turn(self, launch: int) -> None:
        """Controllers and the scheduler look at the job once more."""
        if launch != self.launch or not self.stands:
            return
        self._later(TURN_S, partial(self._turn, launch))
        if self._now() < self.down_until:
            return
        if self.state == "leaving":
            self._end_if_gone()
        elif self.state == "running":
            self._make_pods()
            for pod in list(self.pods.values()):
                self._bind(pod)
                self._drain(pod)
            if all(pod.host not in ("", *self.excluded) for pod in self.pods.values()):
                self.short_since = None

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
            self._run_short()
        if not free:
            return
        pod.host, pod.bound_at = self.world.random.choice(free).name, self._now()
        self._later(START_S * self.world.random.random(), partial(self._begin, pod))

    def _run_short(self) -> None:
        """None fits that the job would have: after a while there is a fresh one."""
        if self.short_since is None:
            self.short_since = self._now()
        elif self._now() - self.short_since > FRESH_S:
            self.short_since = None
            self.world.add_host()

    def _fits(self, host: "Host") -> bool:
        idle = not host.ranks and not any(agent.alive for agent in host.agents)
        kept_off = self.world.scenario.keeps_off and host.name in self.excluded
        return self._hears(host) and idle and not host.draining and not kept_off

    def _begin(self, pod: Pod) -> None:
        host = self.world.hosts[pod.host]
        if self.pods.get(pod.rank) is not pod or pod.deleting or not self._hears(host):
            return
        if host.dead_on_arrival:  # the kubelet tries again and again
            self._later(TURN_S, partial(self._begin, pod))
            return
        pod.agent = self.world.starts(
            self.world, host, self.launch, 0, pod.rank == 0, turn=max(1, pod.rank)
        )
        host.agents.append(pod.agent)

    def _drain(self, pod: Pod) -> None:
        host = self.world.hosts.get(pod.host)
        if host is not None and host.draining and self._now() - host.drained_at > DRAIN_S:
            self._delete(pod, "drained")

    # Pods go

    def _delete(self, pod: Pod, cause: Cause, grace_s: float = GRACE_S) -> None:
        """SIGTERM, and after the grace SIGKILL, where the kubelet hears of it."""
        if pod.deleting:
            return
        pod.deleting, pod.cause = True, cause
        agent = pod.agent
        if agent is None or not agent.alive:
            if not pod.host or self._hears(self.world.hosts[pod.host]):
                self._gone(pod)
            return
        if self._hears(agent.host):
            agent.signalled("SIGTERM")  # to its first process, which is the agent
        self._later(grace_s, partial(self._kill, pod))

    def _kill(self, pod: Pod) -> None:
        if self.pods.get(pod.rank) is not pod:
            return
        host = self.world.hosts[pod.host]
        if self._hears(host):
            if pod.agent is not None and pod.agent.alive:
                pod.agent.die()
                return
            if not host.ranks:  # else the kernel cannot end them yet
                self._gone(pod)
                return
        self._later(TURN_S, partial(self._kill, pod))

    def _force(self, pod: Pod) -> None:
        """Nobody knows whether it still runs; the fence keeps it from writing."""
        if self.pods.get(pod.rank) is pod:
            self._gone(pod)

    def _gone(self, pod: Pod) -> None:
        if self.pods.get(pod.rank) is pod:
            del self.pods[pod.rank]

    def agent_left(self, agent: "AgentProcess", code: int) -> None:
        pod = next((pod for pod in self.pods.values() if pod.agent is agent), None)
        if pod is None:
            return
        if code == exit_codes.OK and not pod.deleting:
            self.done.add(pod.rank)
        if code in (exit_codes.OK, exit_codes.FAILED) and not pod.deleting and pod.rank == 0:
            self.world.history.note("operator", f"the first pod ended with {code}: the job is over")
            self._end()
        if agent.host.ranks:
            self._kill(pod)  # once the kernel has let go of them
        else:
            self._gone(pod)

    def node_back(self, host: "Host") -> None:
        """Its kubelet ends what has no pod any more, and tells of pods that ended."""
        mine = {pod.agent for pod in self.pods.values() if not pod.deleting}
        for agent in [agent for agent in host.agents if agent.alive and agent not in mine]:
            agent.die()
        for pod in [pod for pod in self.pods.values() if pod.host == host.name]:
            if pod.agent is None or not pod.agent.alive:
                self._gone(pod)

    # The end

    def _end(self) -> None:
        self.state, self.ending_since = "leaving", self._now()
        for pod in list(self.pods.values()):
            self._delete(pod, "cancelled" if self.cancelled else "unknown")

    def _end_if_gone(self) -> None:
        over = self._now() - self.ending_since > OVER_S
        for pod in list(self.pods.values()):
            if not pod.host or (over and not self._hears(self.world.hosts[pod.host])):
                self._gone(pod)
        if not self.pods:
            self.state = "ended"
            self.world.history.note("operator", "no pod of the job is left")

    # What the leader asks

    def standing(self, asker: str) -> str | None:
        """Raises Unanswered."""
        self._answers(asker)
        return self.state or None

    def allocation(self, agent: "AgentProcess") -> Allocation:
        """Raises Unanswered."""
        self._answers(agent.host.name)
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
        self._answers(asker)
        found = [host for name in hosts if (host := self.world.hosts[name]).draining]
        return tuple(HostNotice(host.name, "CORDONED", host.draining) for host in found)

    def why_ending(self, agent: "AgentProcess") -> Cause:
        self._answers(agent.host.name)
        if self.cancelled or self.launch != agent.launch:
            return "cancelled"
        pod = next((pod for pod in self.pods.values() if pod.agent is agent), None)
        return "requeued" if pod is None else pod.cause

    def taken(self, asker: str, hosts: Mapping[str, float]) -> dict[str, str]:
        """Whose pod was evicted since it was last heard."""
        self._answers(asker)
        return {
            host: "Evicted: the node was low on memory"
            for host, silent_s in hosts.items()
            if self.evicted.get(host, -1e9) >= self._now() - silent_s - CLOCKS_S
        }

    def replace(
        self, agent: "AgentProcess", name: str, *, elsewhere: bool, shut: bool, silent_s: float
    ) -> None:
        """Raises BackendError."""
        self._answers(agent.host.name)
        if not self.stands or self.launch != agent.launch:
            raise BackendError("there is no such job any more")
        if elsewhere and not shut:
            self.excluded.add(name)
        for pod in list(self.pods.values()):
            young = self._now() - pod.bound_at < silent_s + CLOCKS_S
            if pod.host != name or pod.agent is agent or (young and not elsewhere):
                continue
            self._delete(pod, "requeued")
            if not self._hears(self.world.hosts[name]):
                self._later(FORCE_S, partial(self._force, pod))

    def revive_leader(self, agent: "AgentProcess", silent_s: float | None) -> None:
        """Raises BackendError. `silent_s`: None where the leader has not started yet."""
        asker = agent.host.name
        self._answers(asker)
        pod = self.pods.get(0)
        if not self.stands or self.launch != agent.launch:
            raise BackendError("there is no such job any more")
        if pod is None or not pod.host:
            return
        age_s = self._now() - pod.bound_at
        if pod.agent is not None:
            if silent_s is None or age_s < min(silent_s + CLOCKS_S, YOUNG_S):
                return
        elif not pod.deleting:
            fails = self.world.hosts[pod.host].dead_on_arrival
            if age_s < BEGIN_S or not (fails or not self._hears(self.world.hosts[pod.host])):
                return
            if len(self.never_began) >= MOST_MOVES:
                raise BackendError("it does not begin elsewhere either")
            self.never_began.append(pod.host)
            self.excluded.add(pod.host)
            self.world.history.note("operator", f"{asker} has the leader's pod leave {pod.host}")
        self._delete(pod, "requeued")
        if not self._hears(self.world.hosts[pod.host]):
            self._later(FORCE_S, partial(self._force, pod))

    def requeue(
        self, mine: "AgentProcess", exclude: Sequence[str], *, again: Sequence[str], whole: bool
    ) -> None:
        """All pods go, or the leader's own. Raises Unanswered."""
        hold(not again, "hosts are allowed again where others come in their places")
        asker = mine.host.name
        self._answers(asker)
        self.excluded |= set(exclude)
        self.world.history.note(
            "operator", f"{asker} gives {'all pods' if whole else 'its pod'} up"
        )
        for pod in list(self.pods.values()):
            if whole or pod.agent is mine:
                self._delete(pod, "requeued")

    def has_ended(self, asker: str) -> bool:
        """Raises Unanswered."""
        self._answers(asker)
        return not self.stands

    # Its own moods

    def evict(self, pick: float) -> bool:
        """A kubelet is short of memory: it kills, and says so afterwards. Whether there was one."""
        running = [pod for pod in self.pods.values() if pod.agent is not None and pod.agent.alive]
        running = [pod for pod in running if self._hears(self.world.hosts[pod.host])]
        if self.state != "running" or not running:
            return False
        pod = running[int(pick * len(running))]
        self.evicted[pod.host] = self._now()
        self.world.history.note("operator", f"the pod on {pod.host} is evicted")
        assert pod.agent is not None
        pod.agent.die()
        return True

    def preempt(self, grace_s: float) -> bool:
        """The whole job is suspended for a while, as a queue of jobs does it."""
        if self.state != "running":
            return False
        self.state = "suspended"
        for pod in list(self.pods.values()):
            self._delete(pod, "preempted", grace_s)
        self._later(SUSPENDED_S, partial(self._resume, self.launch))
        return True

    def _resume(self, launch: int) -> None:
        if self.state == "suspended" and launch == self.launch:
            self.state = "running"

    def limit(self) -> bool:
        """`activeDeadlineSeconds`: the job fails, without a warning before SIGTERM."""
        self._later(LIMIT_S, partial(self._limited, self.launch))
        return self.stands

    def _limited(self, launch: int) -> None:
        if launch == self.launch and self.state in ("running", "suspended"):
            self._end()

    def cancel(self) -> None:
        if self.state in ("running", "suspended"):
            self.cancelled = True
            self._end()

    def forget(self, *, everything: bool) -> None:
        """Its saved state was old: whom to leave out is forgotten, or the whole job."""
        self.excluded.clear()
        if everything and self.state == "running":
            self._end()
