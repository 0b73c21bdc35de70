"""Steps of a script that reports no metrics, in `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

import pytest

from ndctl.rank.link import Link
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.fence import Fence, write_fence
from orchestrator.contract.files.run_dir import RunDir
from tests.agent.world import TurnedClock
from trainer.program.step_log import EVERY_S, StepLog

BEGIN = 1_800_000_000.0


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock(BEGIN)


def log_of(folder: Path, clock: TurnedClock, rank: int = 0) -> StepLog:
    write_fence(RunDir(folder).fence, Fence(leader="one", attempt=2))
    environ = {"RANK": str(rank), "NDCTL_ATTEMPT": "2", "NDCTL_HEARTBEAT_SOCKET": "/no/agent"}
    env = RankEnv.from_mapping({**environ, "NDCTL_RUN_DIR": str(folder)})
    return StepLog(Link({}), RunDir(folder), env, clock.now)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    path = RunDir(folder).metrics
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_line_is_written_twice_a_second_and_at_the_end(
    tmp_path: Path, clock: TurnedClock
) -> None:
    log = log_of(tmp_path, clock)
    log.link.use = {"peak_memory_bytes": 7}
    for step in range(1, 12):
        log.stepped(step)
        clock.time += EVERY_S / 4
    log.close()
    found = lines_in(tmp_path)
    assert [line["step"] for line in found] == [2, 6, 10, 11]
    assert found[0] == {
        "attempt": 2,
        "step": 2,
        "loss": None,
        "time": BEGIN + EVERY_S / 4,
        "peak_memory_bytes": 7,
    }


def test_the_only_step_is_written_at_the_end(tmp_path: Path, clock: TurnedClock) -> None:
    log = log_of(tmp_path, clock)
    log.stepped(1)
    assert lines_in(tmp_path) == []
    log.close()
    log.close()
    assert [line["step"] for line in lines_in(tmp_path)] == [1]


def test_a_script_that_logs_after_its_first_step_writes_all_lines_itself(
    tmp_path: Path, clock: TurnedClock
) -> None:
    log = log_of(tmp_path, clock)
    log.stepped(1)
    log.link.logged = True
    log.close()
    assert lines_in(tmp_path) == []


def test_ranks_of_an_earlier_attempt_write_nothing(tmp_path: Path, clock: TurnedClock) -> None:
    log = log_of(tmp_path, clock)
    write_fence(RunDir(tmp_path).fence, Fence(leader="one", attempt=3))
    log.stepped(1)
    log.stepped(2)
    log.stepped(3)
    log.close()
    assert lines_in(tmp_path) == []


def test_other_ranks_write_nothing(tmp_path: Path, clock: TurnedClock) -> None:
    log = log_of(tmp_path, clock, rank=1)
    for step in (1, 2, 3):
        clock.time += 1.0
        log.stepped(step)
    log.close()
    assert lines_in(tmp_path) == []
