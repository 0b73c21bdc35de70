"""The loader prefetches micro batches without changing them."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from orchestrator.errors import TrainingError
from tests.agent.world import WAIT_S
from tests.trainer.data.data_files import packed, sequences, write_texts
from tests.trainer.data.test_batches import batches_of, rows_of
from trainer.data.batches import Batches, StepBatches
from trainer.data.loader import Loader


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    text = "".join(chr(32 + i * i % 90) for i in range(4000))
    file = packed(write_texts(tmp_path / "texts", text), tmp_path / "x.tokens")
    return batches_of(sequences([file]))


def test_any_step_can_be_read_and_equals_that_of_the_batches(batches: Batches) -> None:
    with Loader(batches) as loader:
        for step in (5, 6, 7, 3, 4, 9):
            assert rows_of(loader.of_step(step)) == rows_of(batches.of_step(step))
            assert loader.read == batches.read_step(step).read


class Watched:
    """Batches that can be read only while the gate is open. They record the steps that were
    read."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.device = batches.device
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.read: list[int] = []

    def read_step(self, step: int) -> StepBatches:
        self.begun.append(step)
        assert self.gate.wait(WAIT_S)
        found = self.batches.read_step(step)
        self.read.append(step)
        return found


def wait_for(steps: list[int], num: int) -> None:
    """Wait until there are `num` steps in `steps`."""
    deadline = time.monotonic() + WAIT_S
    while len(steps) < num:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_step_that_takes_longer_than_reading_does_not_wait(batches: Batches) -> None:
    watched = Watched(batches)
    watched.gate.clear()

    def one_second_per_read() -> float:
        """A clock that advances by one second for each step that was read."""
        now = float(len(watched.read))
        watched.gate.set()
        return now

    with Loader(watched, clock=one_second_per_read) as loader:  # type: ignore[arg-type]
        loader.of_step(1)
        assert loader.wait_s >= 1
        wait_for(watched.read, 3)
        loader.of_step(2)
        assert loader.wait_s == 0


def test_the_number_of_prefetched_steps_is_limited(batches: Batches) -> None:
    watched = Watched(batches)
    with Loader(watched, depth=3) as loader:  # type: ignore[arg-type]
        for step in (1, 2):
            loader.of_step(step)
            wait_for(watched.begun, step + 3)
            threading.Event().wait(0.05)
            assert watched.begun == [*range(1, step + 4)]


def test_an_error_of_reading_is_raised_by_the_step_that_needs_it(
    batches: Batches, tmp_path: Path
) -> None:
    with Loader(batches, depth=1) as loader:
        loader.of_step(1)
        expected = rows_of(batches.of_step(2))
        assert loader._ahead[0][1].result()
        os.truncate(tmp_path / "x.tokens", 5000)
        assert rows_of(loader.of_step(2)) == expected
        with pytest.raises(TrainingError, match=r"x\.tokens was truncated"):
            loader.of_step(3)
        with pytest.raises(TrainingError, match=r"x\.tokens was truncated"):
            loader.of_step(4)


def test_the_thread_of_a_loader_ends_with_it(batches: Batches) -> None:
    before = set(threading.enumerate())
    with Loader(Watched(batches)) as loader:  # type: ignore[arg-type]
        loader.of_step(1)
        (its_own,) = set(threading.enumerate()) - before
    assert not its_own.is_alive()
    with pytest.raises(RuntimeError, match="after shutdown"):
        loader.of_step(2)


@pytest.mark.gpu
def test_on_a_gpu_batches_arrive_from_pinned_memory(batches: Batches) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    there = batches_of(batches.train, device=device)
    with Loader(there) as loader:
        micro = loader.of_step(1)
        assert all(m.inputs_BT.device == device for m in micro)
        assert loader._ahead[0][1].result().micro_batches[0].inputs_BT.is_pinned()
        assert rows_of(micro) == rows_of(batches.of_step(1))
