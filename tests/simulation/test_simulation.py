"""The laws of supervision hold in a thousand histories, and whoever breaks one is found out."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.contract.actions import Action, Requeue, StartAttempt
from orchestrator.contract.events import (
    AgentRegistered,
    Event,
    HangDetected,
    HostStopped,
    LeaveAsked,
)
from orchestrator.simulation.faults import CRASHES
from orchestrator.simulation.many import command, outcomes, tally
from orchestrator.simulation.run import Outcome, Simulation, simulate
from orchestrator.simulation.scenario import KINDS, Fault, scenario
from orchestrator.simulation.storage import Crash
from orchestrator.supervise.loop import Decide
from orchestrator.supervise.state import Run, Stage
from orchestrator.supervise.step import step

Result = tuple[Run, tuple[Action, ...]]
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_every_law_holds_whatever_breaks(part: int) -> None:
    total = tally(outcomes(range(part * 100, part * 100 + 100)))
    assert [(one.broken, command(one.seed)) for one in total.broken] == []
    assert total.endings["SUCCEEDED"] > total.seeds / 2
    assert total.incidents > total.seeds / 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_law_holds_under_each_kind_of_fault(kind: str) -> None:
    total = tally(outcomes(range(5000, 5008), (kind,)))
    assert [(one.broken, command(one.seed, (kind,))) for one in total.broken] == []


def test_one_seed_is_one_history_in_every_process() -> None:
    outcome = simulate(7, kept=True)
    assert outcome == simulate(7, kept=True)
    assert len(outcome.history) > 10
    argv = [sys.executable, "-m", "orchestrator", "simulate", "--seed", "7", "--trace"]
    for hashes in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": hashes}
        said = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
        assert said.stdout.splitlines()[:-1] == "\n".join(outcome.history).splitlines()


KILLED = Fault("rank", 60.0, 0.5, 0.1)


@pytest.mark.parametrize("where", CRASHES)
def test_the_leader_may_die_at_every_line_of_the_journal(where: Crash | None) -> None:
    """Before it, within it, after it, and between two actions; the job ends all the same."""
    chosen = replace(
        scenario(3), scheduled=True, hosts=2, spares=1, max_restarts=3, faults=(KILLED,)
    )
    undisturbed = Simulation(chosen)
    undisturbed.run()
    lines = undisturbed.world.storage.journal.count(b"\n")
    assert lines > 15, "with a rank that is lost on the way"
    died = 0
    for number in range(lines):
        one = Simulation(chosen)
        one.world.crash_next = (number, where)
        one.run()
        assert one.world.run.ending == "SUCCEEDED"
        died += len(one.world.leaders) > len(undisturbed.world.leaders)
    assert died >= (lines - 2 if where else 3), "it died wherever there was something to do"


# Deliberately broken


def takes_who_comes_back_for_idle(run: Run, event: Event) -> Result:
    if isinstance(event, AgentRegistered):
        event = replace(event, running=0)
    return step(run, event)


def charges_for_a_schedulers_wish(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    asked = isinstance(event, LeaveAsked) and after is not run
    return (replace(after, fruitless=after.fruitless + 1) if asked else after), actions


def does_not_say_what_it_did(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    silent = tuple(replace(incident, action="") for incident in after.incidents)
    return replace(after, incidents=silent), actions


def starts_again_under_the_same_number(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    again = [a for a in actions if isinstance(a, StartAttempt) and a.attempt > 1]
    if not again:
        return after, actions
    start = replace(again[0], attempt=again[0].attempt - 1)
    return replace(after, attempt=start.attempt), (start,)


def counts_nothing(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, fruitless=0), actions


def forgets_whom_to_leave_out(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, exclude={}), actions


def does_not_wait_for_the_end_of_the_former(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    for host in after.placement if after.stage is Stage.STOPPING else ():
        stopped = HostStopped(at=event.at, attempt=after.attempt, host=host, finished=False)
        after, more = step(after, stopped)
        actions += more
    return after, actions


def requeues_twice(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return after, actions + tuple(a for a in actions if isinstance(a, Requeue))


def overlooks_hangs(run: Run, event: Event) -> Result:
    return (run, ()) if isinstance(event, HangDetected) else step(run, event)


def keeps_no_incidents(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, incidents=(), fruitless=0), actions


class RemembersBesideTheJournal:
    """Decides by what it saw, not by the state: a new leader does not know it."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, run: Run, event: Event) -> Result:
        after, actions = step(run, event)
        self.seen += 1
        return replace(after, reason=f"{after.reason} ({self.seen})"), actions


def first_broken(decide: Decide, kinds: Sequence[str], *, fenced: bool = True) -> Outcome:
    for seed in range(300):
        outcome = simulate(seed, kinds, decide, fenced=fenced)
        if outcome.broken:
            return outcome
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(
    ("decide", "kinds", "law"),
    [
        (counts_nothing, ("rank",), "attempts without progress"),
        (forgets_whom_to_leave_out, ("drain",), "to be left out"),
        (does_not_wait_for_the_end_of_the_former, ("hang", "stuck"), "still runs"),
        (requeues_twice, ("preemption",), "queued again twice"),
        (overlooks_hangs, ("hang",), "has not ended"),
        (keeps_no_incidents, ("rank",), "is not said"),
        (RemembersBesideTheJournal(), ("leader",), "fold is not the state"),
        (takes_who_comes_back_for_idle, ("stuck", "messages", "rank"), "still runs"),
        (charges_for_a_schedulers_wish, ("preemption",), "nothing failed"),
        (does_not_say_what_it_did, ("rank",), "has no outcome"),
        (starts_again_under_the_same_number, ("rank",), "attempt 1 after 1"),
    ],
)
def test_a_broken_supervisor_is_caught(decide: Decide, kinds: Sequence[str], law: str) -> None:
    assert law in first_broken(decide, kinds).broken


def test_a_leader_that_raises_no_fence_is_caught() -> None:
    outcome = first_broken(step, ("stuck",), fenced=False)
    assert "live and can write" in outcome.broken


# The command


def test_the_command_tells_what_came_of_the_seeds() -> None:
    done = CliRunner().invoke(cli, ["simulate", "--seeds", "10"])
    assert done.exit_code == 0, done.output
    assert "10 seeds: " in done.output
    assert "0 broke a law" in done.output


def test_the_command_shares_the_work_among_processes() -> None:
    argv = [sys.executable, "-m", "orchestrator", "simulate", "--seeds", "60", "--json"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["seeds"] == 60


def test_the_command_knows_the_kinds_of_faults() -> None:
    done = CliRunner().invoke(cli, ["simulate", "--faults", "gremlins"])
    assert done.exit_code == 2
    assert "gremlins; there are" in done.output
    assert all(kind in done.output for kind in KINDS)
