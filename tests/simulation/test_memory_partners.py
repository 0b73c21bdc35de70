"""Copies of checkpoints in memory on partner hosts, with the real leader and agents."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan
from orchestrator.contract.messages.actions import Action, StartAttempt
from orchestrator.contract.messages.events import Event
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.supervisor import Decide
from orchestrator.leader.attempt import start
from orchestrator.leader.attempt.slot_offers import copy_plans
from orchestrator.simulation.laws.law import LawViolated
from orchestrator.simulation.run import Simulation
from orchestrator.simulation.scenario import Scenario, scenario
from orchestrator.simulation.world.host_memory import Copy, HostMemory, Place

LOST = ("agent", "host", "rank")
CUT = ("partition", "switch", "agent", "rank", "messages")


def remembering(seed: int, kinds: Sequence[str]) -> Scenario:
    """A job that keeps copies on one or two partners, and saves on the disk only rarely."""
    drawn = scenario(seed, kinds)
    return replace(
        drawn,
        remembers=True,
        copies=1 + seed % 2,
        hosts=3 + seed % 2,
        spares=2,
        steps=60,
        step_s=3.0,
        save_every=25,
        auto_interval=False,
        max_restarts=9,
        policy=(),
        resubmitted=False,
    )


def run(
    seed: int, kinds: Sequence[str], decide: Decide = step
) -> tuple[Simulation, LawViolated | None]:
    simulation = Simulation(remembering(seed, kinds), decide)
    try:
        simulation.run()
    except LawViolated as exc:
        return simulation, exc
    return simulation, None


def test_after_lost_hosts_and_agents_most_attempts_resume_from_partners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[Copy] = []
    put = HostMemory.put

    def counted(own: HostMemory, copy: Copy) -> None:
        fetched.append(copy)
        put(own, copy)

    monkeypatch.setattr(HostMemory, "put", counted)
    in_memory = again = 0
    for seed in range(12):
        simulation, broken = run(seed, LOST)
        assert broken is None, f"seed {seed}: {broken}"
        trainings = [one for one in simulation.world.trainings.values() if one.begun]
        again += len(trainings) - 1
        in_memory += sum(one.from_memory for one in trainings)
    assert len(fetched) >= 6
    assert in_memory > again / 2


# In the last one a host cannot reach a leader that has just taken over.
@pytest.mark.parametrize("seed", [*range(6), 421])
def test_laws_hold_while_partners_are_cut_off(seed: int) -> None:
    assert run(seed, CUT)[1] is None


@pytest.mark.slow
def test_laws_hold_for_many_seeds() -> None:
    for seed in range(500):
        assert run(seed, CUT if seed % 2 else LOST)[1] is None, seed


def keeps_the_lineage_after_reading_the_disk(
    run: Run, event: Event
) -> tuple[Run, tuple[Action, ...]]:
    after, actions = step(run, event)
    first = min(1, after.progress.lineage)
    starts = [replace(a, lineage=first) if isinstance(a, StartAttempt) else a for a in actions]
    return after, tuple(starts)


def test_a_law_finds_a_supervisor_that_mixes_attempts() -> None:
    """Partners still have copies of steps that were trained again from the disk."""
    decide = keeps_the_lineage_after_reading_the_disk
    found = (run(seed, (*CUT, "host"), decide)[1] for seed in range(171, 176))
    assert "started again from step" in str(next(filter(None, found)))


def test_a_law_finds_ranks_that_use_slots_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_anybody(
        own: HostMemory, lineage: int, place: Place, resumed: Sequence[Made]
    ) -> dict[Made, Copy]:
        return {copy.made: copy for copy in own.all()}

    monkeypatch.setattr(HostMemory, "usable", of_anybody)
    found = (run(seed, LOST)[1] for seed in range(20))
    assert "slots of other ranks, or not from those of all" in str(next(filter(None, found)))


def test_a_law_finds_a_leader_that_tells_no_host_whose_copies_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_holds(*args: object, **more: object) -> list[CopyPlan]:
        return [replace(plan, holds=()) for plan in copy_plans(*args, **more)]  # type: ignore[arg-type]

    monkeypatch.setattr(start, "copy_plans", without_holds)
    found = (run(seed, ("rank",))[1] for seed in range(20))
    assert "no step was copied to all partners" in str(next(filter(None, found)))


def test_a_host_that_warns_is_replaced_without_a_write_to_the_disk() -> None:
    """In nearly all jobs with partners and a spare; then the next attempt starts from memory at the
    step that the ranks stopped after."""
    stops = in_memory = 0
    for seed in range(16):
        drawn = replace(remembering(seed, ("warning",)), replace_warned=True, save_every=50)
        simulation = Simulation(drawn, step)
        simulation.run()
        trainings = simulation.world.trainings
        saved = {(one.attempt, one.step) for one in simulation.world.storage.checkpoints}
        for number, one in trainings.items():
            after = trainings.get(number + 1)
            if one.exit_requested and not one.exit_on_disk and after is not None:
                stops += 1
                if (number, one.step) not in saved and after.from_memory:
                    in_memory += 1
                    assert simulation.world.laws.memory.resumed_at[number + 1] == one.step
    assert stops >= 4
    assert in_memory >= stops / 2
