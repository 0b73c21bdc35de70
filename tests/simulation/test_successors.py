"""If the scheduler replaces single hosts, the pods on the other hosts stay in place."""

from functools import partial

import pytest
from msgspec.structs import replace

from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    HostFlagged,
    LeaderStarted,
)
from orchestrator.simulation.processes.agent_process import AgentProcess
from orchestrator.simulation.run import Simulation
from orchestrator.simulation.scenario import Fault, scenario
from orchestrator.simulation.world.hosts import Host
from orchestrator.simulation.world.k8s_operator import KubernetesOperator
from orchestrator.simulation.world.world import World

AT = 60.0
CHOSEN = replace(
    scenario(3),
    scheduled=True,
    successor_s=150.0,
    hosts=3,
    spares=0,
    steps=40,
    step_s=3.0,
    policy=(),
    pinned={},
    resubmitted=False,
)


def agents(world: World) -> dict[str, AgentProcess]:
    return {host.name: host.agent for host in world.hosts.values() if host.agent is not None}


def run_with_fault(
    kind: str, pick: float, allowed: int = 1
) -> tuple[Simulation, dict[str, AgentProcess], dict[str, AgentProcess]]:
    """Returns the simulation, the agents before the fault, and the agents one minute after it."""
    fault = Fault(kind, AT, pick, 0.5)
    one = Simulation(replace(CHOSEN, max_restarts=allowed, faults=(fault,)))
    before: dict[str, AgentProcess] = {}
    after: dict[str, AgentProcess] = {}
    one.world.timeline.after(AT - 0.1, lambda: before.update(agents(one.world)))
    one.world.timeline.after(AT + 60.0, lambda: after.update(agents(one.world)))
    one.run()
    return one, before, after


@pytest.mark.parametrize("pick", [0.1, 0.5, 0.9])
def test_an_eviction_spends_no_budget_and_moves_no_other_pod(pick: float) -> None:
    """The evicted pod may be the leader's. `max_restarts` is 0, so a spent budget fails the job."""
    one, before, after = run_with_fault("eviction", pick, allowed=0)
    run = one.world.run
    assert (run.ending, one.launch) == ("SUCCEEDED", 1)
    assert (run.history.incidents, run.history.fruitless, run.attempt.number) == ((), 0, 2)
    assert len(after) == len(before) == 3
    unmoved = [agent for agent in before.values() if agent in after.values()]
    assert len(unmoved) == 2
    events = [entry.event for entry in one.world.storage.read_entries()]
    losses = AgentLost | AgentRegistered | LeaderStarted
    assert [event.taken for event in events if isinstance(event, losses) and event.taken]


@pytest.mark.parametrize("seed", range(3))
def test_a_rolling_node_upgrade_excludes_no_node_permanently(seed: int) -> None:
    """Each of four nodes is drained and opened again later; the job needs three."""
    chosen = replace(
        CHOSEN, seed=seed, max_restarts=0, enforces_exclusions=True, steps=400, faults=()
    )
    one = Simulation(chosen)
    world = one.world
    nodes = list(world.hosts.values())[:4]
    for host in list(world.hosts.values())[4:]:
        host.draining = "not of this pool"

    def set_drained(host: Host, why: str) -> None:
        host.draining, host.drained_at = why, world.timeline.now

    for number, host in enumerate(nodes * 2):
        at = AT + 150.0 * number
        world.timeline.after(at, partial(set_drained, host, "an upgrade"))
        world.timeline.after(at + 100.0, partial(set_drained, host, ""))
    one.run()
    run = world.run
    assert (run.ending, one.launch, run.history.incidents) == ("SUCCEEDED", 1, ())
    events = [entry.event for entry in world.storage.read_entries()]
    left = [event.host for event in events if isinstance(event, HostFlagged)]
    assert len(left) > len(nodes) > len(set(left)) - 1, "some nodes must be drained twice"
    assert isinstance(world.scheduler, KubernetesOperator)
    assert world.scheduler.excluded == set()


def test_a_waiting_agent_replaces_the_leaders_pod_on_a_lost_node() -> None:
    _, before, _ = run_with_fault("host", 0.0)
    (leader,) = (number for number, agent in enumerate(before.values()) if agent.lead)
    one, before, after = run_with_fault("host", (leader + 0.5) / len(before))
    lost = list(before)[leader]
    assert one.world.run.ending == "SUCCEEDED"
    assert one.launch == 1, "the user must not have to resubmit"
    assert lost not in after
    assert sum(agent in after.values() for agent in before.values()) == 2, (
        "the two other agents must stay"
    )
    assert [incident.kind for incident in one.world.run.history.incidents] == ["leader-lost"]


def test_a_leaders_pod_that_cannot_start_moves_to_another_node() -> None:
    """No free node can start the pod until one is repaired. The other pods wait in place."""
    one = Simulation(replace(CHOSEN, enforces_exclusions=True, max_restarts=1, faults=()))
    world = one.world
    assert isinstance(world.scheduler, KubernetesOperator)
    stuck: list[str] = []

    def break_nodes() -> None:
        (leader,) = (agent for agent in agents(world).values() if agent.lead)
        for host in world.hosts.values():
            host.agent_never_starts = host.agent is None or host is leader.host
        leader.die()

    def repair_nodes() -> None:
        assert isinstance(world.scheduler, KubernetesOperator)
        stuck.extend(world.scheduler.failed_nodes)
        for host in world.hosts.values():
            host.agent_never_starts = host.name in stuck

    world.timeline.after(AT, break_nodes)
    world.timeline.after(AT + 100.0, repair_nodes)
    one.run()
    run = world.run
    assert (run.ending, one.launch) == ("SUCCEEDED", 1), "the user must not have to resubmit"
    assert stuck, "the pod must have moved"
    assert run.scheduler.leader not in stuck
    assert [incident.kind for incident in run.history.incidents] == ["leader-lost"]
