"""Trainings whose disk is slow: the files of a save are written some steps after it began.

From a slot, a save would take longer than any test, if nothing made it hurry.

A case is `{"config": …, "slow": steps}`. Each rank plays the only rank of its own host. The answer
has `code`, `buffered` (copies into a buffer for the disk, on rank 0) and `copies` (copies in memory
that rank 0 made while each save was written).
"""

import threading
from collections.abc import Mapping
from typing import Any
from unittest import mock

from msgspec import json
from msgspec.structs import replace

from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.memory.peers import CopyPlan
from tests.agent.processes.test_torchrun import START
from tests.trainer.launch import training_worker
from trainer import main as main_module
from trainer.checkpoint import pace
from trainer.checkpoint.buffers import HostBuffers
from trainer.checkpoint.memory.saves import MemoryCheckpoints
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.writer import WatchedFiles


class Slow:
    """The gate of the disk: open, except for some steps after each save has begun."""

    def __init__(self, steps: int) -> None:
        self.steps, self.opens_at = steps, 0
        self.gate = threading.Event()
        self.gate.set()
        self.buffered, self.copies = 0, [0]

    def checkpoints(self) -> type[Checkpoints]:
        slow = self

        class SlowCheckpoints(Checkpoints):
            def save(self, step: int) -> None:
                self.wait()  # else the save before could find its gate closed again
                slow.gate.clear()
                slow.opens_at = step + slow.steps
                super().save(step)
                slow.copies.append(0)

            def after_step(
                self, step: int, step_s: float, some_failed: bool, every: int = 0
            ) -> None:
                super().after_step(step, step_s, some_failed, every)
                if step >= slow.opens_at and not slow.gate.is_set():
                    slow.gate.set()

            def save_or_raise(self, step: int) -> None:
                slow.gate.set()
                super().save_or_raise(step)

        return SlowCheckpoints


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    owner = MemorySlots()
    memory = owner.of_attempt(replace(START, ranks_per_host=1), CopyPlan())
    env = replace(env, local_rank=0, memory=json.encode(memory).decode())
    slow = Slow(case["slow"])
    copy, save, create = HostBuffers.copy, MemoryCheckpoints.save, WatchedFiles.create_stream

    def counted_copy(self: HostBuffers, state: Mapping[str, Any]) -> dict[str, Any]:
        slow.buffered += 1
        return copy(self, state)

    def counted_save(self: MemoryCheckpoints, step: int) -> bool:
        slow.copies[-1] += not slow.gate.is_set()
        return save(self, step)

    def waiting(self: WatchedFiles, path: Any, mode: str) -> Any:
        assert slow.gate.wait(60)
        return create(self, path, mode)

    with (
        mock.patch.object(HostBuffers, "copy", counted_copy),
        mock.patch.object(MemoryCheckpoints, "save", counted_save),
        mock.patch.object(WatchedFiles, "create_stream", waiting),
        mock.patch.object(main_module, "Checkpoints", slow.checkpoints()),
        mock.patch.object(pace, "SHARE", 1e-9),
        mock.patch.object(pace, "FREE_S", 0.0),
    ):
        code = training_worker.run_case({"config": case["config"]}, env)["code"]
    owner.close()
    return {"code": code, "buffered": slow.buffered, "copies": slow.copies[1:]}
