"""A rank that runs out of GPU memory writes the state of the allocator."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_messages import RankRaised, from_bytes, to_bytes
from orchestrator.diagnosis.cause.exits import exited_verdict
from trainer.measure.oom_snapshot import (
    MOST_EVENTS,
    MOST_RANKS,
    bounded,
    write_if_out_of_memory,
    write_snapshot,
)
from trainer.rank.reporter import raised_of

SEGMENT = {"address": 1, "total_size": 20 << 20, "blocks": [{"size": 20 << 20}]}


def taken(events: int = 3) -> dict[str, Any]:
    traces = [[{"action": "alloc", "addr": number} for number in range(events)], []]
    return {"segments": [SEGMENT], "device_traces": traces}


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_the_path_is_in_the_datagram_and_in_the_incident(tmp_path: Path) -> None:
    exc = out_of_memory()
    write_snapshot(exc, tmp_path / "profiles", 3, taken)
    path = tmp_path / "profiles" / "rank-3.oom.pickle"
    assert pickle.loads(path.read_bytes()) == taken()
    raised = from_bytes(to_bytes(raised_of(exc, RankEnv(rank=3), step=7)))
    assert isinstance(raised, RankRaised)
    assert raised.error.memory_snapshot == str(path)
    exited = RankExited(attempt=1, rank=3, host="a", exit_code=1, signal=None, error=raised.error)
    notes = exited_verdict(exited, None).evidence.notes
    assert f"GPU memory of rank 3, for pytorch.org/memory_viz: {path}" in notes


def test_other_exceptions_and_ranks_without_a_gpu_write_nothing(tmp_path: Path) -> None:
    for exc in (ValueError("out of memory"), out_of_memory()):
        write_if_out_of_memory(exc, tmp_path, 0)
        assert raised_of(exc, RankEnv(), step=1).error.memory_snapshot == ""
    assert [*tmp_path.iterdir()] == []


def test_only_some_ranks_write_and_the_others_name_the_folder(tmp_path: Path) -> None:
    for rank in range(MOST_RANKS + 2):
        exc = out_of_memory()
        write_snapshot(exc, tmp_path, rank, taken)
    assert len([*tmp_path.iterdir()]) == MOST_RANKS
    assert raised_of(exc, RankEnv(), step=1).error.memory_snapshot == str(tmp_path)


def test_a_snapshot_that_cannot_be_written_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    exc = out_of_memory()
    write_snapshot(exc, tmp_path / "file", 0, taken)
    assert "rank 0: failed to write the memory snapshot" in caplog.text
    assert raised_of(exc, RankEnv(), step=1).error.memory_snapshot == ""


def test_the_newest_events_are_kept_and_the_size_is_bounded() -> None:
    whole = pickle.loads(bounded(taken(MOST_EVENTS + 5)))
    assert [event["addr"] for event in whole["device_traces"][0]][:2] == [5, 6]
    assert len(whole["device_traces"][0]) == MOST_EVENTS
    most = 10_000
    data = bounded(taken(5_000), most)
    assert len(data) <= most
    kept = pickle.loads(data)["device_traces"][0]
    assert kept[-1]["addr"] == 4_999
    assert pickle.loads(bounded(taken(5_000), 130))["device_traces"] == [[], []]
    with pytest.raises(ValueError, match="more than 20"):
        bounded(taken(), 20)


@pytest.mark.gpu
def test_a_gpu_without_memory_writes_its_blocks(tmp_path: Path) -> None:
    held = torch.empty(1 << 20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
    write_if_out_of_memory(caught.value, tmp_path, 0)
    snapshot = pickle.loads((tmp_path / "rank-0.oom.pickle").read_bytes())
    assert sum(one["allocated_size"] for one in snapshot["segments"]) >= held.nbytes
