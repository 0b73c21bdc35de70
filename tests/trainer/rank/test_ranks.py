"""Timeouts of process groups, and how ranks that torchrun restarts connect."""

import json
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _world

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.mesh import Mesh
from orchestrator.detect.heartbeat_monitor import CHECKPOINT_LIMIT_S
from tests.trainer.launch import faulty_trainer
from tests.trainer.launch.tiny_runs import (
    finish,
    losses_of,
    metrics_of,
    start_ranks,
    start_torchrun,
    tiny,
    work,
)
from trainer.rank.ranks import (
    INIT_TIMEOUT,
    TRAIN_TIMEOUT,
    arrange,
    peak_memory_bytes,
    process_group,
    shorten_timeouts,
    train_timeout,
)

FAULTY = faulty_trainer.__name__


def drill(fault: str, step: int) -> str:
    return json.dumps([{"id": 1, "fault": fault, "target": "rank", "index": 1, "step": step}])


def write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


def test_every_group_has_a_long_timeout_first_and_a_shorter_one_in_training() -> None:
    with process_group(RankEnv()):
        arrange(Mesh(), RankEnv())
        assert {timeout for _, timeout in timeouts()} == {INIT_TIMEOUT}
        shorten_timeouts(timedelta(seconds=7))
        assert {timeout for _, timeout in timeouts()} == {timedelta(seconds=7)}
        late = torch.distributed.new_group(backend="gloo")
        assert dict(timeouts())[late.group_name] > timedelta(minutes=1)


def test_in_training_every_group_waits_longer_than_ndctls_hang_timeout() -> None:
    """Otherwise the watchdog of torch ends a save that ndctl still allows."""
    assert timedelta(seconds=CHECKPOINT_LIMIT_S) + timedelta(minutes=1) < TRAIN_TIMEOUT
    assert TRAIN_TIMEOUT < INIT_TIMEOUT
    assert train_timeout(0.0) == train_timeout(900.0) == TRAIN_TIMEOUT
    assert train_timeout(7200.0) == timedelta(minutes=125)


def test_every_group_waits_as_long_as_the_job_allows_for_its_start() -> None:
    with process_group(RankEnv(), 3600.0):
        assert {timeout for _, timeout in timeouts()} == {timedelta(minutes=65)}


def test_a_tensor_parallel_group_may_be_on_two_hosts(tmp_path: Path) -> None:
    """For example in an NVLink block. Each host has one rank, with the variables of torchrun."""
    losses = {}
    for hosts, env in ((1, {}), (2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})):
        out = tmp_path / f"on-{hosts}"
        work(tmp_path, 2, [{"config": tiny(out, parallel={"tp": 2}, steps=2)}], env=env)
        losses[hosts] = losses_of(out)
    assert losses[1] == losses[2]
    assert len(losses[2]) == 2


def timeouts() -> list[tuple[str, timedelta]]:
    cpu = torch.device("cpu")
    return [(g.group_name, g._get_backend(cpu).options._timeout) for g in _world.pg_map]


@pytest.mark.process
def test_a_stopped_rank_fails_the_others_after_the_timeout_of_training(tmp_path: Path) -> None:
    """A rank that starts later than this timeout is still waited for."""
    config = tiny(tmp_path / "out", parallel={"dp_shard": 2}, steps=50)
    env = {"TEST_TRAIN_TIMEOUT_S": "5", "TEST_LATE_S": "6", "NDCTL_DRILLS": drill("stop", 4)}
    ranks = start_ranks(FAULTY, write(tmp_path / "config.json", config), 2, env)
    try:
        codes = finish(ranks[:1])
    finally:
        ranks[1].kill(signal.SIGKILL)
        finish(ranks[1:])
    assert codes == [exit_codes.FAILED]
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [1, 2, 3]
    assert "drill stop" in ranks[1].output
    assert "Timed out waiting 5000ms" in ranks[0].output


@pytest.mark.process
def test_ranks_that_torchrun_restarts_connect_and_continue(tmp_path: Path) -> None:
    saving = {"every_steps": 2, "async": False}
    out = tmp_path / "out"
    config = tiny(out, parallel={"dp_shard": 2}, steps=6, checkpoint=saving)
    run = start_torchrun(
        Path(faulty_trainer.__file__),
        write(tmp_path / "config.json", config),
        "--max-restarts=1",
        "--monitor-interval=0.1",
        env={
            "TEST_FIRST_DRILLS": drill("kill", 4),
            # gloo's rank 1 reads the address of rank 0, and must not find that of the previous
            # start.
            "TEST_LATE_AGAIN_S": "2",
        },
    )
    assert finish([run]) == [0], run.output
    lines = metrics_of(out)
    assert [(line["attempt"], line["step"]) for line in lines] == [
        *[(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5), (2, 6)]
    ]
    assert lines[2]["loss"] == lines[3]["loss"]
    assert losses_of(out)[6] < losses_of(out)[1]


def test_the_peak_is_the_highest_memory_of_the_process() -> None:
    cpu = torch.device("cpu")
    before = peak_memory_bytes(cpu)
    # Allocate up to the peak of earlier tests, plus 256 MiB.
    held = torch.ones(before // 4 + 64 * 2**20)
    after = peak_memory_bytes(cpu)
    del held
    assert after - before > 100 * 2**20
    # The kernel updates its counter in batches, for each thread.
    assert peak_memory_bytes(cpu) >= after - 4 * 2**20


def test_restarts_by_torchrun_increase_the_attempt() -> None:
    assert RankEnv.from_mapping({}).attempt == 1
    assert RankEnv.from_mapping({"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 3
    assert RankEnv.from_mapping({"NDCTL_ATTEMPT": "4"}).attempt == 4
