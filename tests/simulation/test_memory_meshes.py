"""Checkpoints in memory of another mesh: a job goes on with fewer hosts, and with more again."""

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.skipped_batches import Window
from orchestrator.job.transitions import step
from orchestrator.simulation.laws.law import LawViolated
from orchestrator.simulation.run import Simulation
from orchestrator.simulation.scenario import Fault
from orchestrator.simulation.world import host_memory, training
from orchestrator.simulation.world.faults import start_fault
from orchestrator.simulation.world.host_memory import Copy, Memories
from tests.simulation.test_memory_partners import LOST, remembering


def shrinking(seed: int) -> tuple[Simulation, LawViolated | None]:
    drawn = remembering(seed, LOST)
    drawn = replace(drawn, shrink=True, min_hosts=1, hosts=4, spares=0, scheduled=False)
    simulation = Simulation(replace(drawn, successor_s=None), step)
    try:
        simulation.run()
    except LawViolated as exc:
        return simulation, exc
    return simulation, None


def test_fewer_hosts_resume_from_what_more_hosts_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    resume = Memories.resume

    def noted(own: Memories, found: Sequence[Copy], num_slots: int) -> None:
        if found and found[0].place.config != own.config:
            made.append(found[0].place.nodes)
        resume(own, found, num_slots)

    monkeypatch.setattr(Memories, "resume", noted)
    for seed in range(12):
        _, broken = shrinking(seed)
        assert broken is None, f"seed {seed}: {broken}"
    assert made, "no attempt resumed from slots of another mesh"


def test_a_law_finds_ranks_that_read_an_incomplete_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_any(own: Memories) -> Mapping[Made, Sequence[Copy]]:
        found: dict[Made, dict[int, Copy]] = {}
        for copy in (copy for host in own.hosts for copy in host.all()):
            if copy.lineage == own.lineage and copy.place.config != own.config:
                found.setdefault(copy.made, {})[copy.place.node_rank] = copy
        return {made: [copies[n] for n in sorted(copies)] for made, copies in found.items()}

    monkeypatch.setattr(Memories, "_of_other_plans", of_any)
    found = (shrinking(seed)[1] for seed in range(20))
    assert "not from those of all" in str(next(filter(None, found)))


def test_a_law_finds_hosts_that_load_different_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = Memories.newest

    def mixed(own: Memories, skip: Sequence[Window]) -> tuple[Copy, ...]:
        found = newest(own, skip)
        older = [copy for copy in own.hosts[0].complete if copy not in found]
        return (older[0], *found[1:]) if found and older else found

    monkeypatch.setattr(Memories, "newest", mixed)
    found = (shrinking(seed)[1] for seed in range(20))
    assert "several checkpoints in memory at once" in str(next(filter(None, found)))


@pytest.mark.parametrize("looks_at_history", [True, False])
def test_a_law_finds_slots_of_steps_that_were_trained_again(
    monkeypatch: pytest.MonkeyPatch, looks_at_history: bool
) -> None:
    """Hosts are cut off with the newest slots while attempt 2 resumes from older ones, and return
    with them before attempt 2 has done a step. Random faults almost never come in this order."""
    monkeypatch.setattr(training, "NO_ROOM_AT_START", 0.0)
    monkeypatch.setattr(training, "NO_ROOM_AT_STEP", 0.0)
    drawn = replace(remembering(1, LOST), faults=(Fault("rank", 60.0, 0.0, 0.0),), scheduled=False)
    simulation = Simulation(replace(drawn, successor_s=None), step)
    newest, away = Memories.newest, list[Copy]()

    def cut_off(own: Memories, skip: Sequence[Window]) -> tuple[Copy, ...]:
        if own.attempt == 2:
            away.extend(newest(own, skip))
            for host in own.hosts:
                host.complete = [copy for copy in host.complete if copy.made < away[0].made]
                host.held.clear()
            world = simulation.world
            world.timeline.after(1.0, lambda: start_fault(world, Fault("rank", 0.0, 0.0, 0.0)))
        if own.attempt == 3:
            for host, copy in zip(own.hosts, away, strict=True):
                host.complete.append(copy)
        return newest(own, skip)

    monkeypatch.setattr(Memories, "newest", cut_off)
    if looks_at_history:
        simulation.run()
        assert away
        assert simulation.world.trainings[3].from_memory
        return
    monkeypatch.setattr(host_memory, "is_history", lambda *_: True)
    with pytest.raises(LawViolated, match="started again from step"):
        simulation.run()
