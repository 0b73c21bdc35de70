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
from orchestrator.contract.actions import Action, Requeue
from orchestrator.contract.events import Event, HangDetected, HostStopped
from orchestrator.simulation.many import command, outcomes, tally
from orchestrator.simulation.run import Outcome, simulate
from orchestrator.simulation.scenario import KINDS
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


# Deliberately broken


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
    return replace(after, incidents=()), actions


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
