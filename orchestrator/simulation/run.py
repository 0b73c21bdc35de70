"""Run one seed from the submission to the end of the job, or to the first broken law."""

import traceback
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct

from orchestrator.job.transitions import step
from orchestrator.journal.supervisor import Decide
from orchestrator.simulation.laws.law import LawViolated
from orchestrator.simulation.processes.agent_process import AgentProcess
from orchestrator.simulation.processes.defects import collect_defects
from orchestrator.simulation.processes.loop import cancel_leftovers, unretrieved_exceptions
from orchestrator.simulation.scenario import KINDS, Fault, Scenario, scenario
from orchestrator.simulation.world import faults
from orchestrator.simulation.world.world import StartAgent, World

USER_CHECK_S = 60.0
"""Seconds between two checks of the user whether the job has lost its leader."""
END_WITHIN_S = 4 * 3600.0
"""Virtual seconds after the end of the last fault within which the job must end."""
EXIT_WITHIN_S = 1200.0
"""Virtual seconds after the end within which all processes must exit."""
MOST_EVENTS = 1_000_000


class Outcome(Struct, frozen=True, kw_only=True):
    seed: int
    ending: str
    """`SUCCEEDED`, `FAILED`, `CANCELLED`; empty if a law was broken."""
    broken: str
    """The broken law as text; empty: none."""
    events: int
    lines: int
    """Lines of the journal."""
    attempts: int
    incidents: int
    resumed: int
    """How often the user had to resubmit the job."""
    virtual_s: float
    faults: Mapping[str, int]
    """Number of faults that were started, by kind."""
    happened: Mapping[str, int]
    """Number of faults that had an effect, by kind."""
    history: tuple[str, ...] = ()


class Simulation:
    def __init__(
        self,
        chosen: Scenario,
        decide: Decide = step,
        *,
        start_agent: StartAgent = AgentProcess,
        keep_history: bool = False,
    ) -> None:
        """Tests pass defective versions of `decide` and `starts` to check that a law finds the
        defect."""
        self.scenario = chosen
        self.world = World(chosen, decide, start_agent=start_agent, keep_history=keep_history)
        self.launch = 0
        self.resubmitted = False
        self.faults_end_at = 0.0
        self.ended_at: float | None = None

    def run(self) -> None:
        """Raises LawViolated."""
        world = self.world
        world.history.note("seed", f"{self.scenario.seed}: {self.scenario.summary}")
        for fault in self.scenario.faults:
            world.timeline.after(fault.at, partial(self._start_fault, fault))
        self.faults_end_at = (
            max([f.at for f in self.scenario.faults], default=0.0) + faults.LONGEST_S
        )
        self._user()
        with collect_defects(world.defects):
            try:
                while world.timeline.run_next():
                    if self._finished():
                        break
                for defect in unretrieved_exceptions(world.loops):
                    raise defect
                world.laws.at_end()
            finally:
                cancel_leftovers(world.loops)

    def _start_fault(self, fault: Fault) -> None:
        if not self.world.ended:
            faults.start_fault(self.world, fault)

    def _finished(self) -> bool:
        world = self.world
        if world.defects:
            raise world.defects[0]
        if world.timeline.callbacks_run > MOST_EVENTS:
            raise LawViolated(f"the job has not ended after {MOST_EVENTS} events")
        if not world.ended:
            self.ended_at = None
            if world.timeline.now > self.faults_end_at + END_WITHIN_S:
                raise LawViolated(
                    f"the job has not ended {END_WITHIN_S / 3600:.0f} h after the last fault:"
                    f" {world.run.stage.title}, {world.run.stage.reason}"
                )
            return False
        if self.ended_at is None:
            self.ended_at = world.timeline.now
        return world.timeline.now > self.ended_at + EXIT_WITHIN_S

    def _user(self) -> None:
        """Submit the job. Resubmit it if no process leads it, and once if it failed."""
        world = self.world
        world.timeline.after(USER_CHECK_S, self._user)
        if self.launch and not world.needs_resubmission:
            return
        again = world.run.ending == "FAILED" and self.scenario.resubmitted and not self.resubmitted
        if world.ended and not again:
            return
        if world.submit_job(self.launch + 1):
            self.launch += 1
            self.resubmitted = self.resubmitted or again


def simulate(
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
    decide: Decide = step,
    *,
    start_agent: StartAgent = AgentProcess,
    keep_history: bool = False,
) -> Outcome:
    simulation = Simulation(
        scenario(seed, kinds), decide, start_agent=start_agent, keep_history=keep_history
    )
    world, broken = simulation.world, ""
    try:
        simulation.run()
    except LawViolated as exc:
        broken = str(exc)
    except Exception as exc:  # noqa: BLE001 - seeds must find any defect of ndctl
        world.history.note("defect", traceback.format_exc())
        broken = f"ndctl itself failed: {type(exc).__name__}: {' '.join(str(exc).split())}"
    if broken:
        world.history.note("BROKEN", broken)
    run = world.run
    return Outcome(
        seed=seed,
        ending="" if broken else str(run.ending),
        broken=broken,
        events=world.timeline.callbacks_run,
        lines=world.storage.journal.count(b"\n"),
        attempts=run.attempt.number,
        incidents=len(run.history.incidents),
        resumed=max(0, simulation.launch - 1),
        virtual_s=world.timeline.now,
        faults=dict(world.faults),
        happened=dict(world.happened),
        history=tuple(world.history.lines),
    )
