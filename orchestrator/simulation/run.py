"""One seed, one history: from the submission to the end of the job, or to a broken law."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.job.transitions import step
from orchestrator.journal.supervisor import Decide
from orchestrator.simulation.agents import Agent
from orchestrator.simulation.laws.law import Violated
from orchestrator.simulation.real.process import AgentProcess
from orchestrator.simulation.scenario import KINDS, Fault, Scenario, scenario
from orchestrator.simulation.world import faults
from orchestrator.simulation.world.world import World

PERSON_S = 60.0
"""Between two looks of a person at a job that nobody leads any more."""
BOUND_S = 4 * 3600.0
"""Virtual time after the last fault is over, by which a job must have ended."""
AFTER_S = 1200.0
"""After the end, for everything to be gone."""
MOST_EVENTS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    ending: str
    """`SUCCEEDED`, `FAILED`, `CANCELLED`; or nothing, where a law was broken."""
    broken: str
    """Which law, in words."""
    events: int
    lines: int
    """Of the journal."""
    attempts: int
    incidents: int
    resumed: int
    """How often a person had to submit the job again."""
    virtual_s: float
    faults: Mapping[str, int]
    """By kind, those that were to happen …"""
    happened: Mapping[str, int]
    """… and that did."""
    history: tuple[str, ...] = ()


class Simulation:
    def __init__(
        self,
        chosen: Scenario,
        decide: Decide = step,
        *,
        fenced: bool = True,
        kept: bool = False,
        real: bool = False,
    ) -> None:
        """`real`: the agents run the real code; so far where no scheduler chooses the hosts."""
        self.scenario = chosen
        starts = AgentProcess if real else Agent
        self.world = World(chosen, decide, fenced=fenced, kept=kept, starts=starts)
        self.launch = 0
        self.resubmitted = False
        self.whole_at = 0.0
        self.ended_at: float | None = None

    def run(self) -> None:
        """Raises Violated."""
        world = self.world
        world.history.note("seed", f"{self.scenario.seed}: {self.scenario.words}")
        for fault in self.scenario.faults:
            world.timeline.after(fault.at, partial(self._strike, fault))
        self.whole_at = max([f.at for f in self.scenario.faults], default=0.0) + faults.LONGEST_S
        self._person()
        try:
            while world.timeline.turn():
                if self._finished():
                    break
            world.witness.at_the_end()
        finally:
            for loop in world.loops:
                loop.bury()

    def _strike(self, fault: Fault) -> None:
        if not self.world.ended:
            faults.strike(self.world, fault)

    def _finished(self) -> bool:
        world = self.world
        for loop in world.loops:
            if loop.defects:
                raise loop.defects[0]
        if world.timeline.happened > MOST_EVENTS:
            raise Violated("the job goes round in circles")
        if not world.ended:
            self.ended_at = None
            if world.timeline.now > self.whole_at + BOUND_S:
                raise Violated(
                    f"the job has not ended {BOUND_S / 3600:.0f} h after the last fault:"
                    f" {world.run.stage.title}, {world.run.stage.reason}"
                )
            return False
        if self.ended_at is None:
            self.ended_at = world.timeline.now
        return world.timeline.now > self.ended_at + AFTER_S

    def _person(self) -> None:
        """Submits the job, again where nobody leads it any more, and once more if it failed."""
        world = self.world
        world.timeline.after(PERSON_S, self._person)
        if self.launch and not world.abandoned:
            return
        again = world.run.ending == "FAILED" and self.scenario.resubmitted and not self.resubmitted
        if world.ended and not again:
            return
        if world.submits(self.launch + 1):
            self.launch += 1
            self.resubmitted = self.resubmitted or again


def simulate(
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
    decide: Decide = step,
    *,
    fenced: bool = True,
    kept: bool = False,
    real: bool = False,
) -> Outcome:
    chosen = scenario(seed, kinds)
    if real:
        chosen = replace(chosen, scheduled=False, successor_s=None, preflight=False)
    simulation = Simulation(chosen, decide, fenced=fenced, kept=kept, real=real)
    world, broken = simulation.world, ""
    try:
        simulation.run()
    except Violated as exc:
        broken = str(exc)
    except Exception as exc:  # noqa: BLE001 - ndctl's own defects are what seeds are for
        world.history.note("defect", traceback.format_exc())
        broken = f"ndctl itself failed: {type(exc).__name__}: {' '.join(str(exc).split())}"
    if broken:
        world.history.note("BROKEN", broken)
    run = world.run
    return Outcome(
        seed=seed,
        ending="" if broken else str(run.ending),
        broken=broken,
        events=world.timeline.happened,
        lines=world.storage.journal.count(b"\n"),
        attempts=run.attempt.number,
        incidents=len(run.history.incidents),
        resumed=max(0, simulation.launch - 1),
        virtual_s=world.timeline.now,
        faults=dict(world.faults),
        happened=dict(world.happened),
        history=tuple(world.history.lines),
    )
