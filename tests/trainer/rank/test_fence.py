"""A rank of a superseded attempt writes nothing."""

from pathlib import Path

import pytest

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.fence import Fence, write_fence
from orchestrator.contract.files.run_dir import RunDir
from tests.ndctl.rank.test_line_file import METRICS
from trainer.measure.metrics import MetricsFile
from trainer.rank.fence import admit_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    write_fence(run.fence, Fence(leader="a", attempt=2))
    return run


def test_a_superseded_attempt_writes_no_metrics(run: RunDir) -> None:
    for attempt in (2, 1):
        env = RankEnv(attempt=attempt, heartbeat_socket="/tmp/ranks.sock")
        file = MetricsFile(run.metrics, admit_of(run, env))
        if attempt == 2:
            file.append(METRICS)
            continue
        with pytest.raises(GivenUp, match="attempt 1 was given up"):
            file.append(METRICS)
    assert len(run.metrics.read_text().splitlines()) == 1


def test_under_plain_torchrun_attempts_are_not_counted(run: RunDir) -> None:
    MetricsFile(run.metrics, admit_of(run, RankEnv(attempt=1))).append(METRICS)
    assert run.metrics.read_text()


def test_a_metric_waits_while_the_fence_cannot_be_read(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    file = MetricsFile(run.metrics, admit_of(run, RankEnv(attempt=2, heartbeat_socket="/tmp/r")))
    unreadable(run)
    file.append(METRICS)
    assert run.metrics.read_text() == ""
    assert "failed to write a line" in caplog.text
    run.fence.rmdir()
    write_fence(run.fence, Fence(leader="a", attempt=2))
    file.append(METRICS)
    assert len(run.metrics.read_text().splitlines()) == 2


def unreadable(run: RunDir) -> None:
    run.fence.unlink()
    run.fence.mkdir()
