import contextlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.launch import Breakdown
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import (
    CancelRequested,
    Event,
    HangDetected,
    HangOver,
    LeaderStarted,
    ProgramRuns,
    RankExited,
    StepReached,
    StragglerGone,
    TrainingResumed,
)
from orchestrator.dashboard.time_spent.account import KINDS, TimeAccount, TimeSpent
from orchestrator.dashboard.time_spent.pauses import Pause, PauseTail
from orchestrator.errors import NdctlError
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Entry, entries_of, parse, read, to_line
from orchestrator.simulation.laws.law import LawViolated
from orchestrator.simulation.run import Simulation
from orchestrator.simulation.scenario import KINDS as FAULTS
from orchestrator.simulation.scenario import scenario
from tests.dashboard.dashboard_story import (
    PODS,
    SLOW,
    START,
    finished,
    journal,
    recovered,
    short_of_a_host,
    silent_program,
    started,
    submitted,
)

CAPTURED = Path(__file__).parents[2] / "captured" / "journals" / "quickstart-44a59389.jsonl"


def spent(entries: Sequence[Entry], until: float | None = None, *pauses: Pause) -> TimeSpent:
    account = TimeAccount()
    account.add(entries)
    return account.spent(pauses, until)


def test_a_killed_rank_costs_detection_restart_and_the_work_since_the_checkpoint() -> None:
    told = spent(journal(finished()))
    assert told.elapsed_s == pytest.approx(82)
    lost = told.lost_s
    # Submitted at 0, first step at 8; stopped at 30.21, first step of attempt 2 at 37.
    assert lost["restart"] == pytest.approx(8 + 37 - 30.21)
    assert lost["detection"] == pytest.approx(0.21)
    # Steps 2 to 24 took the 22 s from 8 to 30; those after step 20 are lost.
    assert lost["lost_work"] == pytest.approx(22 * 4 / 23)
    assert lost["queue"] == lost["slow"] == lost["checkpoint"] == 0
    assert told.effective_s == pytest.approx(82 - sum(lost.values()))


def test_pauses_of_lost_training_count_as_pauses_alone() -> None:
    before = spent(journal(recovered()))
    kept, gone = Pause(attempt=1, step=10, seconds=1.5), Pause(attempt=1, step=22, seconds=0.5)
    after = spent(journal(recovered()), None, kept, gone)
    assert after.lost_s["checkpoint"] == 2
    assert after.lost_s["lost_work"] == pytest.approx(before.lost_s["lost_work"] - 0.5)
    assert after.effective_s == pytest.approx(before.effective_s - 1.5)


def test_the_time_of_a_hang_counts_from_the_last_progress() -> None:
    hang = HangDetected(
        at=START + 60, attempt=1, phase="train", step=12, stalled_s=10, limit_s=9, behind=()
    )
    over = HangOver(at=START + 63, attempt=1, rank=3, step=12, phase="train")
    told = spent(journal([*started(), hang, over]), START + 80)
    assert told.lost_s["detection"] == pytest.approx(13)
    assert told.effective_s == pytest.approx(80 - 8 - 13)


def test_the_steps_before_a_hang_are_lost_to_a_restart_from_an_earlier_one() -> None:
    hang = HangDetected(
        at=START + 60, attempt=1, phase="train", step=43, stalled_s=10, limit_s=9, behind=()
    )
    resumed = TrainingResumed(at=START + 70, attempt=2, step=22)
    start = StartAttempt(attempt=2, hosts=("host-0", "host-1"), plan=1, drills=(), reason="")
    *before, hangs, resumes = journal([*started(), hang, resumed])
    told = spent([*before, replace(hangs, actions=(start,)), resumes])
    # It trained from 8 to 50, half of it after step 22.
    assert told.lost_s["lost_work"] == pytest.approx(21)


def test_a_straggler_costs_its_share_of_each_step() -> None:
    slow = replace(SLOW, own_s=0.9, peers_s=0.4, lost_tokens_per_second=None)
    gone = StragglerGone(at=START + 40, attempt=1, rank=3, host="host-1", own_s=0.4, peers_s=0.4)
    entries = journal([*started(), slow, gone])
    assert spent(entries, START + 50).lost_s["slow"] == pytest.approx(20 * 0.5)
    assert spent(entries[:-1], START + 30).lost_s["slow"] == pytest.approx(10 * 0.5)


def test_the_wait_for_an_allocation_is_queue_time() -> None:
    job = replace(submitted(), backend="slurm")
    told = spent(journal([job, replace(PODS, at=START + 600)]), START + 605)
    assert told.lost_s["queue"] == 600
    assert told.lost_s["restart"] == 5
    assert told.effective_s == 0
    assert told.ratio == 0


def test_the_time_without_a_leader_is_not_training() -> None:
    takes_over = LeaderStarted(at=START + 100, host="host-1", pid=7, former="was killed")
    new = replace(PODS, at=START + 100)
    for leader, cause in ((takes_over, "detection"), (new, "queue")):
        told = spent(journal([*started(), leader]))
        assert told.lost_s[cause] == pytest.approx(92)  # type: ignore[index]


def test_a_program_without_steps_trains_until_its_leader_or_its_allocation_is_lost() -> None:
    runs = silent_program(ProgramRuns(at=START + 60, attempt=2))
    former = LeaderStarted(
        at=START + 100, host="host-1", pid=7, former="was killed", heard=START + 96
    )
    broke = Breakdown(what="srun was killed", at=START + 96)
    assert PODS.allocation is not None
    granted = replace(PODS.allocation, broke_before=broke)
    new = replace(PODS, at=START + 100, allocation=granted)
    for leader, cause in ((former, "detection"), (new, "queue")):
        told = spent(journal([*runs, leader]))
        assert told.lost_s[cause] == pytest.approx(4)  # type: ignore[index]


def test_training_without_an_answering_leader_counts_until_the_cancel() -> None:
    """The journal has the first step only. The leader was stopped by SIGSTOP, for example."""
    reached = Reached(attempt=1, step=93, at=START + 100)
    end = CancelRequested(at=START + 110, by="ann", led=False, reached=reached)
    told = spent(journal([*started(), end]), START + 500)
    assert told.lost_s["detection"] == pytest.approx(10)
    assert told.effective_s == pytest.approx(110 - 8 - 10)


def test_the_time_between_two_launches_does_not_count() -> None:
    late = START + 1000
    again = replace(submitted(at=late, resume=True), launch=submitted().launch)
    told = spent(journal([*finished(), again]), late + 5)
    assert told.elapsed_s == pytest.approx(82 + 5)


def entries_of_seed(seed: int) -> list[Entry]:
    """The journal of a simulated job with faults."""
    simulation = Simulation(scenario(seed, tuple(FAULTS)), step)
    # The account of what happened until then must be right too.
    with contextlib.suppress(LawViolated, NdctlError):
        simulation.run()
    return list(parse(bytes(simulation.world.storage.journal)))


def check_law(entries: Sequence[Entry]) -> None:
    """Every second has one use, and lost time never becomes less."""
    account, told = TimeAccount(), []
    for entry in entries:
        account.add([entry])
        told.append(account.spent())
    for one in told:
        assert one.elapsed_s == pytest.approx(one.effective_s + sum(one.lost_s.values()))
        assert min(one.lost_s.values()) >= 0
    for before, after in pairwise(told):
        assert after.elapsed_s >= before.elapsed_s
        assert all(after.lost_s[c] >= before.lost_s[c] - 1e-9 for c in before.lost_s)


@pytest.mark.parametrize(
    "entries",
    [journal(finished()), journal(short_of_a_host()), list(read(CAPTURED))],
    ids=["killed", "short", "captured"],
)
def test_the_uses_add_up(entries: list[Entry]) -> None:
    check_law(entries)


@pytest.mark.parametrize("seed", range(6))
def test_the_uses_add_up_whatever_fails(seed: int) -> None:
    check_law(entries_of_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_the_uses_add_up_whatever_fails_many(seed: int) -> None:
    check_law(entries_of_seed(seed))


def test_the_other_entries_make_no_difference(tmp_path: Path) -> None:
    for number, entries in enumerate([list(read(CAPTURED)), entries_of_seed(3)]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"".join(map(to_line, entries)))
        few = list(entries_of(path, *KINDS))
        assert len(few) < len(entries)
        told, whole = spent(few), spent(entries)
        assert told.lost_s == pytest.approx(whole.lost_s, abs=1e-6)


def test_pauses_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = PauseTail(path)
    assert tail.more() == ()
    path.write_text(
        '{"attempt":1,"step":1,"loss":2.0,"checkpoint_s":0.0,"time":1.0}\n'
        '{"attempt":1,"step":2,"loss":2.0,"checkpoint_s":0.012,"time":2.0}\n'
        '{"attempt":1,"step":3,"loss":"checkpoint_s","checkpoint_s":null}\n'
        '{"attempt":1,"step":4,"checkpoint_s":"\\u0000"}\nnot json "checkpoint_s":7}\n'
        '{"attempt":1,"step":5,"checkpoint_s":0'
    )
    assert tail.more() == (Pause(attempt=1, step=2, seconds=0.012),)
    with path.open("a") as file:
        file.write(".5}\n")
    assert tail.more() == (Pause(attempt=1, step=5, seconds=0.5),)


def test_a_program_without_steps_loses_no_time_while_its_ranks_run() -> None:
    runs, again = (
        ProgramRuns(at=START + at, attempt=attempt) for at, attempt in ((12, 1), (60, 2))
    )
    before, after = silent_program()[:-3], silent_program()[-3:]
    told = spent(journal([*before, runs, *after, again]), START + 500)
    # Submitted at 0, it runs from 12 until it breaks at 30, and again from 60.
    assert told.effective_s == pytest.approx(18 + 440)
    assert told.lost_s["restart"] + told.lost_s["detection"] == pytest.approx(12 + 30)


def test_a_program_without_steps_may_report_one_later() -> None:
    runs = ProgramRuns(at=START + 12, attempt=1)
    first = StepReached(at=START + 20, attempt=1, step=3, loss=None, tokens_per_second=None)
    told = spent(journal([*silent_program()[:-3], runs, first]), START + 29)
    assert told.effective_s == pytest.approx(17)


def test_until_its_first_step_a_program_starts() -> None:
    """It loads a model, for example, and its ranks count as running after 10 s."""
    runs = ProgramRuns(at=START + 12, attempt=1)
    told = spent(journal([*silent_program()[:-3], runs, stepped(27, 1, 1)]), START + 29)
    assert told.lost_s["restart"] == pytest.approx(27)
    assert told.effective_s == pytest.approx(2)


def stepped(at: float, attempt: int, number: int) -> StepReached:
    return StepReached(
        at=START + at, attempt=attempt, step=number, loss=None, tokens_per_second=None
    )


def repeating(*more: Event) -> list[Event]:
    """A program without a checkpoint breaks after 20 s of steps 2 to 21."""
    before, after = silent_program()[:-3], silent_program()[-3:]
    broken, *stopped = after
    assert isinstance(broken, RankExited)
    return [*before, stepped(10, 1, 1), replace(broken, step=21), *stopped, *more]


@pytest.mark.parametrize("first", [1, 6, 22])
def test_the_first_step_of_a_program_does_not_tell_which_training_is_lost(first: int) -> None:
    """It may count from 1 in each attempt."""
    entries = journal(repeating(stepped(40, 2, first), stepped(43, 2, first + 3)))
    assert spent(entries, START + 45).lost_s["lost_work"] == 0
    check_law(entries)


def test_a_program_that_tells_where_it_resumed_is_believed() -> None:
    resumed = TrainingResumed(at=START + 39, attempt=2, step=11)
    told = spent(journal(repeating(resumed, stepped(40, 2, 1))))
    assert told.lost_s["lost_work"] == pytest.approx(10)


def test_a_program_with_steps_starts_until_its_next_step() -> None:
    """It loads its checkpoint, for example."""
    runs = ProgramRuns(at=START + 36, attempt=2)
    told = spent(journal(repeating(runs, stepped(40, 2, 1))), START + 45)
    assert told.lost_s["restart"] + told.lost_s["detection"] == pytest.approx(10 + 10)


def test_training_until_the_leader_died_counts_also_after_a_new_submission() -> None:
    """The journal has the first step only."""
    reached = Reached(attempt=1, step=93, at=START + 100)
    again = submitted(at=START + 1000, resume=True, reached=reached)
    told = spent(journal([*started(), again]), START + 1005)
    assert told.elapsed_s == pytest.approx(100 + 5)
    assert told.effective_s == pytest.approx(100 - 8)


def test_a_step_that_arrives_while_ranks_stop_is_no_training() -> None:
    late = StepReached(at=START + 30.5, attempt=1, step=25, loss=3.0, tokens_per_second=None)
    events = recovered()
    at = next(n for n, one in enumerate(events) if one.at == START + 31)
    told = spent(journal([*events[:at], late, *events[at:]]))
    assert told.lost_s["restart"] == pytest.approx(spent(journal(events)).lost_s["restart"])
