"""No seed breaks a law of the simulation, and the command `ndctl simulate`."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from orchestrator.cli import cli
from orchestrator.contract.messages.events import AgentLost, StepReached
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.journal.journal import Decided, Entry
from orchestrator.simulation.many_seeds import command, outcomes, summarise
from orchestrator.simulation.run import Simulation, simulate
from orchestrator.simulation.scenario import KINDS, Fault, scenario
from orchestrator.simulation.world.faults import CRASHES
from orchestrator.simulation.world.storage import Crash, StoredJournal

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_law_holds_with_all_kinds_of_faults(part: int) -> None:
    total = summarise(outcomes(range(part * 25, part * 25 + 25)))
    assert [(one.broken, command(one.seed)) for one in total.broken] == []
    assert total.endings["SUCCEEDED"] > total.seeds / 2
    assert total.incidents > total.seeds / 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_law_holds_under_each_kind_of_fault(kind: str) -> None:
    total = summarise(outcomes(range(5000, 5004), (kind,)))
    assert [(one.broken, command(one.seed, (kind,))) for one in total.broken] == []
    assert 3 * total.happened[kind] >= total.faults[kind], (
        "a third of the faults must have an effect"
    )


@pytest.mark.parametrize(
    ("seed", "kinds", "ending"),
    [
        # Pods of the next run connect to the leader that requeued this one. They were told to exit.
        (79, ("slow", "parting", "leader", "preemption", "drain", "stuck"), "SUCCEEDED"),
        (8333, KINDS, "SUCCEEDED"),
        # A pod is evicted, and the leader is killed before the rest of its attempt has ended.
        (1754, KINDS, "SUCCEEDED"),
        # The leader's host is paused, and its ranks too.
        (569, KINDS, "FAILED"),
        # The leader is paused while a rank fails by itself and agents stop their ranks.
        (1405, KINDS, "SUCCEEDED"),
        (8708, KINDS, "SUCCEEDED"),
        # A leader reports a host as lost before it notices that it is cut off itself.
        (31412, KINDS, "SUCCEEDED"),
        # A leader that has given up is killed before it exits.
        (6632, KINDS, "SUCCEEDED"),
        # Agents are lost and come back for 50 s while no rank runs, because messages are lost.
        (100127, KINDS, "SUCCEEDED"),
        # Peers report before the rank that knows since which step the loss is bad.
        (100689, KINDS, "SUCCEEDED"),
        # The scheduler asks for the hosts before the leader reports all that were lost together.
        (204474, KINDS, "SUCCEEDED"),
        # An agent is heard again after a network cut, while the scheduler is still down.
        (105617, KINDS, "SUCCEEDED"),
        # An agent is replaced before its loss is noticed, and later the new one is evicted.
        (108948, KINDS, "SUCCEEDED"),
        # A suspended leader is back, and requeues the job, while an agent tries to clear its host.
        (301062, KINDS, "SUCCEEDED"),
        # Storage is so slow that the line of a leader that is alive is still on its way.
        (301418, KINDS, "SUCCEEDED"),
        # All hosts are too hot. All agents but one are new, and have not noticed it yet.
        (612451, KINDS, "SUCCEEDED"),
        # A host is lost before, and one while, the scheduler takes hosts back.
        (612981, KINDS, "FAILED"),
        # A switch parts two hosts from the leader, and one of them is heard again.
        (613220, KINDS, "SUCCEEDED"),
        # A new leader hears an agent late, and the agent has never heard this leader.
        (621779, KINDS, "SUCCEEDED"),
        # A host that was cleared of a loss is lost again: the cleared incident does not count.
        (641154, KINDS, "FAILED"),
        (642016, KINDS, "SUCCEEDED"),
    ],
)
def test_every_law_holds_for_seeds_that_broke_one_before(
    seed: int, kinds: Sequence[str], ending: str
) -> None:
    outcome = simulate(seed, kinds)
    assert (outcome.broken, outcome.ending) == ("", ending)


def test_a_seed_gives_the_same_history_in_every_process() -> None:
    outcome = simulate(7, keep_history=True)
    assert outcome == simulate(7, keep_history=True)
    assert len(outcome.history) > 10
    argv = [sys.executable, "-m", "orchestrator", "simulate", "--seed", "7", "--trace"]
    for hashes in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": hashes}
        stored = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
        assert stored.stdout.splitlines()[:-1] == "\n".join(outcome.history).splitlines()


KILLED = Fault("rank", 60.0, 0.5, 0.1)


@pytest.mark.parametrize("scheduled", [True, False])
def test_no_rank_is_blamed_for_a_configuration_that_the_trainer_refuses(scheduled: bool) -> None:
    """All ranks refuse it, and it is chance which rank reports first."""
    refused = Fault("rank", 60.0, pick=0.5, size=0.98)
    chosen = replace(scenario(3), scheduled=scheduled, hosts=2, spares=0, faults=(refused,))
    one = Simulation(chosen)
    one.run()
    (incident,) = one.world.run.history.incidents
    assert (one.world.run.ending, incident.failure) == ("FAILED", "refused")
    assert incident.culprit == NOBODY


@pytest.mark.parametrize("where", CRASHES)
def test_the_job_succeeds_if_the_leader_dies_at_any_line_of_the_journal(
    where: Crash | None,
) -> None:
    """It dies before, within or after the line, or between two actions."""
    chosen = replace(
        scenario(3), scheduled=True, hosts=2, spares=1, max_restarts=3, faults=(KILLED,)
    )
    without_crash = Simulation(chosen)
    without_crash.run()
    lines = without_crash.world.storage.journal.count(b"\n")
    assert lines > 15, "the history must include a lost rank"
    died, numbers = 0, range(0, lines, 3) if where else range(8)
    for number in numbers:
        one = Simulation(chosen)
        one.world.crash_next = (number, where)
        one.run()
        assert one.world.run.ending == "SUCCEEDED"
        died += len(one.world.leaders) > len(without_crash.world.leaders)
    assert died >= (len(numbers) - 1 if where else 3), (
        "the leader must really die in almost every run"
    )


@pytest.mark.parametrize("where", CRASHES[:3])
def test_the_job_succeeds_if_the_leader_dies_within_a_batch_of_lines(
    where: Crash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk, many events arrive during a write, so the next write has many lines."""
    slow = Fault("storage-slow", 20.0, 0.5, 0.4)
    chosen = replace(
        scenario(3), scheduled=True, hosts=3, spares=1, max_restarts=3, faults=(KILLED, slow)
    )
    writes: list[int] = []
    extend = StoredJournal.extend

    def counted(journal: StoredJournal, decided: Decided) -> tuple[Entry, ...]:
        writes.append(len(decided))
        return extend(journal, decided)

    monkeypatch.setattr(StoredJournal, "extend", counted)
    Simulation(chosen).run()
    assert max(writes) > 3, "several lines must be written at once"
    for number in range(0, sum(writes), 5):
        one = Simulation(chosen)
        one.world.crash_next = (number, where)
        one.run()
        assert one.world.run.ending == "SUCCEEDED"


def test_a_given_up_host_requeues_the_job_wherever_the_leader_died() -> None:
    """The leader gives up its only other host. It dies at any line between this and the first step
    on one host. The user never has to resubmit the job."""
    cut_off = Fault("partition", 60.0, pick=0.506, size=0.57)
    chosen = replace(
        scenario(3), scheduled=True, hosts=2, spares=0, step_s=3.0, steps=20, faults=(cut_off,)
    )
    chosen = replace(chosen, agent_timeout=10.0, shrink=True, min_hosts=1, preflight=False)
    chosen = replace(chosen, max_restarts=3, policy=(), pinned={}, resubmitted=False)
    without_crash = Simulation(chosen)
    without_crash.run()
    events = [entry.event for entry in without_crash.world.storage.read_entries()]
    first = next(number for number, event in enumerate(events) if isinstance(event, AgentLost))
    trains = [n for n, event in enumerate(events) if isinstance(event, StepReached) and n > first]
    assert trains, "the job must continue on one host"
    for where in CRASHES[:3]:
        for number in range(first, trains[0] + 1):
            one = Simulation(chosen)
            one.world.crash_next = (number, where)
            one.run()
            assert one.world.run.ending == "SUCCEEDED"
            assert one.launch == 1, f"the user had to resubmit: died {where}, {events[number]}"


# The command


def test_the_command_prints_a_summary_of_the_seeds() -> None:
    done = CliRunner().invoke(cli, ["simulate", "--seeds", "4"])
    assert done.exit_code == 0, done.output
    assert "4 seeds: " in done.output
    assert "0 broke a law" in done.output


def test_the_command_runs_seeds_in_several_processes() -> None:
    argv = [sys.executable, "-m", "orchestrator", "simulate", "--seeds", "20", "--json"]
    stored = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(stored.stdout)["seeds"] == 20


@pytest.mark.parametrize("more", ["--seeds", "--from"])
def test_one_seed_and_many_are_refused_together(more: str) -> None:
    done = CliRunner().invoke(cli, ["simulate", "--seed", "1", more, "4"])
    assert done.exit_code == 2
    assert "--seed cannot be combined with --seeds or --from" in done.output


def test_the_command_refuses_an_unknown_kind_of_fault() -> None:
    done = CliRunner().invoke(cli, ["simulate", "--faults", "gremlins"])
    assert done.exit_code == 2
    assert "unknown: gremlins" in done.output
    assert all(kind in done.output for kind in KINDS)
