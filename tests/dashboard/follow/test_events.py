"""`ndctl events`: folded heartbeats, times, and following."""

import json
import os
from datetime import UTC
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, Breakdown
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    Event,
    HealthChanged,
    HostStopped,
    LeaderStarted,
    StepReached,
)
from orchestrator.dashboard.event_text import describe_event
from orchestrator.dashboard.follow.events import QuietDecisions, event_batches, event_lines
from orchestrator.dashboard.follow.follow import Printed, entry_lines
from orchestrator.dashboard.follow.log_filter import LogFilter, wanted
from orchestrator.dashboard.follow.logs import LogFile, LogLine
from orchestrator.journal.journal import Entry, read
from tests.agent.world import TurnedClock
from tests.cli.test_verbs import ndctl, run_root
from tests.dashboard.dashboard_story import START, StoryClock, journal, started
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster, lead

__all__ = ["cluster", "run_root"]
CAPTURED = Path(__file__).parents[2] / "captured" / "journals"


def late(at: float, health: str, *ranks: int, age_s: float = 2.5) -> HealthChanged:
    spans = tuple((rank, rank) for rank in ranks)
    return HealthChanged(at=at, attempt=1, ranks=spans, health=health, age_s=age_s)  # type: ignore[arg-type]


def reached(at: float, step: int) -> StepReached:
    return StepReached(at=at, attempt=1, step=step, loss=2.0, tokens_per_second=1e3)


def noisy() -> list[Entry]:
    at = START + 100
    more: list[Event] = [late(at + n, ("slow", "ok")[n % 2], n % 3, age_s=2 + n) for n in range(6)]
    ends: list[Event] = [reached(at + 10, 5), late(at + 11, "slow", 3), late(at + 12, "silent", 3)]
    return journal([*started(), *more, *ends])


def test_late_heartbeats_are_counted_between_two_other_events() -> None:
    lines = list(event_lines(noisy(), UTC, START + 99))
    assert [line.partition("  ")[2] for line in lines] == [
        "ranks 0, 1, 2: late heartbeat (3 times in 5.0 s, at most 7.0 s ago)",
        "attempt 1 reached step 5, loss 2.0000, 1,000 tokens/s",
        "rank 3: late heartbeat (last heartbeat 2.5 s ago)",
        "rank 3: no heartbeat (last heartbeat 2.5 s ago)",
    ]
    assert lines[0].startswith("2023-11-14 22:15:00 UTC")


def test_a_decision_without_an_action_is_shown_with_its_incident() -> None:
    """srun was killed, and the restart waits for the agents of the next allocation."""
    broke = Breakdown(what="SIGKILL ended srun on node1", at=START + 50)
    granted = Allocation(id="7", restarts=1, hosts=("host-0", "host-1"), broke_before=broke)
    leader = LeaderStarted(at=START + 60, host="host-0", pid=9, allocation=granted)
    entries, quiet = journal([*started(), leader]), QuietDecisions()
    assert not any("srun" in line for line in event_lines(entries[:-1], UTC, quiet=quiet))
    (line,) = event_lines(entries[-1:], UTC, quiet=quiet)
    assert line.endswith(
        " -> incident 1, allocation-broke: SIGKILL ended srun on node1; restart as attempt 2 from"
        " the beginning: no checkpoint yet (rule broken-allocation)"
    )


def test_a_host_that_is_no_culprit_any_more_is_shown_where_its_agent_registers() -> None:
    def booted(event: Event) -> Event:
        return replace(event, boot="4f1c") if isinstance(event, AgentRegistered) else event

    at = START + 50
    begun = [booted(event) for event in started()]
    (first,) = (e for e in begun if isinstance(e, AgentRegistered) and e.host == "host-0")
    lost = AgentLost(at=at, host="host-0", why="it was silent for 8.0 s", silent_s=8.0)
    gone = HostStopped(at=at + 1, host="host-1", attempt=1, finished=False, why="told to stop")
    again = replace(first, at=at + 5, pid=9, incarnation="9", former_stopped=True)
    entries = journal([*begun, lost, gone, again])
    (line,) = [*event_lines(entries, UTC, quiet=QuietDecisions())][-1:]
    assert "(pid 9); a signal had stopped its former agent, which it killed" in line
    assert " -> host-0 is cleared: its next agent found the former one stopped by" in line
    printed, told = Printed(), list[str]()
    for entry in entries:
        printed, lines = entry_lines(printed, entry, UTC)
        told += lines
    assert sum("host-0 is cleared: its next agent found" in line for line in told) == 1


def test_each_late_heartbeat_is_shown_on_request() -> None:
    assert len(list(event_lines(noisy(), UTC, START + 99, heartbeats=True))) == 9


def test_only_events_since_a_time_are_shown() -> None:
    assert len(list(event_lines(noisy(), UTC, START + 109))) == 3


@pytest.mark.parametrize("path", sorted(CAPTURED.glob("*.jsonl")), ids=lambda path: path.stem)
def test_captured_journals_lose_no_other_event(path: Path) -> None:
    entries = read(path)
    other = [one for one in entries if not isinstance(one.event, HealthChanged)]
    lines = list(event_lines(entries, UTC))
    assert len(other) <= len(lines) <= len(entries)
    assert [line[:19] for line in lines] == sorted(line[:19] for line in lines)


def test_following_prints_what_is_added_until_the_end(cluster: NoCluster, run_root: Path) -> None:
    assert ndctl("submit", str(SPEC)).exit_code == 0
    clock = StoryClock()
    turns = iter((False, False, True))

    def ended() -> bool:
        over = next(turns)
        if over:
            lead(run_root, CancelRequested(at=TurnedClock().now(), by="alice"))
        return over

    batches = event_batches(RunDir(run_root / JOB), clock, ended, follow=True)
    seen = [[type(entry.event).__name__ for entry in entries] for entries in batches]
    assert seen[0] == ["JobSubmitted"]
    assert seen[1:3] == [[], []]
    assert seen[3] == ["LeaderStarted", "CancelRequested"]


def test_the_command_line(cluster: NoCluster, run_root: Path) -> None:
    assert ndctl("submit", str(SPEC)).exit_code == 0
    lead(run_root, CancelRequested(at=TurnedClock().now(), by="alice"))
    whole = ndctl("events", JOB)
    assert ndctl("events", JOB, "-f").output == whole.output
    assert ndctl("events", JOB, "--since", "52000w").output == whole.output
    assert ndctl("events", JOB, "--since", "2 h").exit_code == exit_codes.USAGE
    lines = ndctl("events", JOB, "-f", "--json").output.splitlines()
    assert len([json.loads(line) for line in lines]) == len(whole.output.splitlines())


def test_logs_are_chosen_by_host_time_and_pattern(cluster: NoCluster, run_root: Path) -> None:
    assert ndctl("submit", str(SPEC)).exit_code == 0
    run_dir = RunDir(run_root / JOB)
    for host, rank in (("host-0", 0), ("host-1", 2)):
        folder = run_dir.attempt_logs(1, host)
        folder.mkdir(parents=True)
        first, second = f"2000-01-02 03:04:05 old {rank}", f"2000-12-31 23:59:58 NaN loss {rank}"
        text = f"{first}\n  at home\n{second}\n  at end\n"
        (folder / f"rank-{rank}.log").write_text(text)
    stampless = run_dir.attempt_logs(1, "host-0") / "rank-1.log"
    stampless.write_text("no time here\n")
    os.utime(stampless, (1e9, 1e9))

    def said(*options: str) -> list[str]:
        done = ndctl("logs", JOB, *options)
        assert done.exit_code == 0, done.output
        return [line.partition("] ")[2] for line in done.output.splitlines()]

    assert said("--host", "host-1") == [
        "2000-01-02 03:04:05 old 2", "  at home", "2000-12-31 23:59:58 NaN loss 2", "  at end",
    ]  # fmt: skip
    assert said("--grep", "nan|home", "--host", "host-1") == [
        "  at home",
        "2000-12-31 23:59:58 NaN loss 2",
    ]
    assert "no time here" not in said("--since", "1h")
    done = ndctl("logs", JOB, "--host", "node7")
    assert done.exit_code == exit_codes.BAD_JOB_STATE
    assert "host node7" in done.stderr
    assert ndctl("logs", JOB, "--grep", "(").exit_code == exit_codes.USAGE
    assert ndctl("logs", JOB, "--agents", "--host", "a").exit_code == exit_codes.USAGE


def test_a_line_without_a_time_belongs_to_the_line_before_it(tmp_path: Path) -> None:
    file = LogFile(path=tmp_path / "gone", host="host-0", rank=0)
    texts = ["first", "2023-11-14 22:13:00 a", "  a2", "2023-11-14 22:13:21 b", "  b2"]
    lines = [LogLine(file=file, text=text) for text in texts]
    given = LogFilter(now=START + 60, since=START, zone=UTC)  # 22:13:20
    assert [line.text for line in wanted(lines, given)] == ["2023-11-14 22:13:21 b", "  b2"]


def test_the_last_hours_around_new_year() -> None:
    new_year = 1_704_067_200.0  # 2024-01-01 00:00:00 UTC
    file = LogFile(path=Path("/gone"), host="host-0", rank=0)
    texts = ["2023-12-31 21:00:00 a", "2023-12-31 23:59:00 b", "2024-01-01 00:01:00 c"]
    lines = [LogLine(file=file, text=text) for text in texts]
    given = LogFilter(now=new_year + 3600, since=new_year - 3600, zone=UTC)
    assert [line.text[-1] for line in wanted(lines, given)] == ["b", "c"]
    old = LogFilter(now=new_year + 86_400 * 9, since=new_year + 86_400 * 8, zone=UTC)
    assert list(wanted(lines, old)) == []


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("", ""),
        ("torchrun ended with code -9", ": torchrun ended with code -9"),
        # The event of the rank that failed says why.
        (
            "torchrun ended with code 1\n  raise ChildFailedError(\nx.ChildFailedError:\n=====\n",
            ": torchrun ended with code 1",
        ),
        (
            "torchrun ended with code 1\n  import x\nModuleNotFoundError: No module named 'x'\n",
            ": torchrun ended with code 1: ModuleNotFoundError: No module named 'x'",
        ),
    ],
)
def test_how_torchrun_ended_is_told_without_its_frames(why: str, said: str) -> None:
    stopped = HostStopped(at=1.0, attempt=1, host="node1", finished=False, why=why)
    assert describe_event(stopped) == f"all ranks on node1 stopped{said}"
