"""One rank of `python -m benchmarks.checkpoint`: trains, and saves in each way in turn."""

import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

from benchmarks.trainer.contestants import LR, MODEL
from orchestrator.agent.memory.slots import ALONE, new_file
from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.memory.peers import HostMemory
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from trainer.checkpoint import resume
from trainer.checkpoint.memory.opened import Digests, OpenMemory
from trainer.checkpoint.memory.saves import start_saving
from trainer.checkpoint.memory.slot import Slot, shard_of
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.state import TrainingState
from trainer.checkpoint.verify import verify_on_all_ranks
from trainer.config import complete
from trainer.loop import Training
from trainer.main import assemble, at_once
from trainer.rank.ranks import arrange, process_group
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime
from trainer.rank.signals import StopRequest

BATCH, LENGTH = 2, 64
"""Short steps: several end while a checkpoint is written."""
BEFORE = 10
"""Steps before each save that it is compared with."""

Save = Callable[[int], Callable[[], bool]]
"""Saves the state after a step. Returns when training may go on, with a function that says whether
the checkpoint is complete."""


def training(folder: Path, env: RankEnv) -> Training:
    config: TrainingConfig = decode(
        TrainingConfig,
        {
            "model": {"config": MODEL},
            "data": {"files": "{stdlib}/*.py", "sequence_length": LENGTH},
            "parallel": {"tp": 1, "dp_shard": env.world_size},
            "micro_batch_size": BATCH // env.world_size,
            "checkpoint": {"every_steps": 1_000_000, "keep": 1},
            "train": {
                "steps": 1_000_000,
                "global_batch_size": BATCH,
                "optimizer": {"lr": LR},
                "schedule": {"kind": "constant"},
            },
            "out": str(folder / "ours"),
        },
    )
    config = complete(config, env.world_size)
    runtime = Runtime(
        env=env, reporter=Reporter(env), drills=(), stop=StopRequest(), clock=time.time
    )
    job, _ = assemble(arrange(config.mesh, env), config, runtime)
    return job


def ours(checkpoints: Checkpoints) -> Save:
    def save(step: int) -> Callable[[], bool]:
        checkpoints.save(step)
        return partial(is_complete, checkpoints, step)

    return save


def is_complete(checkpoints: Checkpoints, step: int) -> bool:
    if checkpoints.failed:
        raise RuntimeError(f"the save of step {step} failed")
    return checkpoints.last is not None and checkpoints.last.step == step


def from_slots(job: Training) -> Save:
    """As `ours`, with checkpoints in memory: the disk is written from one of their slots."""
    paths = tuple(f"/proc/{os.getpid()}/fd/{new_file()}" for _ in range(ALONE))
    opened = OpenMemory(
        memory=HostMemory(lineage=1, slots=(paths,)),
        slots=tuple(Slot(path) for path in paths),
        spec=MemoryCheckpointSpec(every=1, copies=0),
        digests=Digests("benchmark", "benchmark"),
        others=[],
    )
    checkpoints = job.checkpoints
    memory = start_saving(opened, checkpoints.state, at_once, None, job.runtime.reporter)
    assert memory is not None

    def save(step: int) -> Callable[[], bool]:
        checkpoints.memory = memory
        checkpoints.save(step)
        checkpoints.memory = None
        return partial(is_complete, checkpoints, step)

    return save


def torchs(folder: Path, state: TrainingState, kind: AsyncCheckpointerType) -> Save:
    """torch's own, as its documentation and source say that it is fastest on this device."""
    cuda = state.ranks.device.type == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=kind is AsyncCheckpointerType.PROCESS,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
    )
    group = dist.new_group(backend="gloo")

    def save(step: int) -> Callable[[], bool]:
        if state.ranks.env.rank == 0:
            shutil.rmtree(folder / f"step-{step - 1}", ignore_errors=True)
        answer = async_save(
            state.snapshot(step),
            storage_writer=FileSystemWriter(folder / f"step-{step}", sync_files=True),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=group,
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        done: Future[Any] = (
            answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
        )
        return partial(has_ended, done)

    return save


def has_ended(done: "Future[Any]") -> bool:
    """Raises what the save raised."""
    ended = done.done()
    if ended:
        done.result()
    return ended


class Bench:
    def __init__(self, folder: Path, job: Training) -> None:
        self.job, self.folder = job, folder
        self.stop = StopRequest()
        self.step = 0
        self.state = job.checkpoints.state
        self.copies = {
            name: shard_of(tensor).clone() for name, tensor in self.state.tensors().items()
        }

    def train(self) -> float:
        """Seconds of one step."""
        self.step += 1
        begun = time.perf_counter()
        self.job.stepper.run(self.step, LR, self.stop)
        return time.perf_counter() - begun

    def copy(self) -> float:
        """Seconds of a copy of this rank's state into memory that was used before."""
        dist.barrier()
        begun = time.perf_counter()
        for name, tensor in self.state.tensors().items():
            self.copies[name].copy_(shard_of(tensor))
        return time.perf_counter() - begun

    def turn(self, save: Save) -> dict[str, float]:
        before = [self.train() for _ in range(BEFORE)]
        copy_s = self.copy()
        dist.barrier()
        begun = time.perf_counter()
        is_done = save(self.step)
        wait_s = time.perf_counter() - begun
        during = []
        while not self.on_all_ranks(is_done()):
            during.append(self.train())
        step_s = statistics.median(before)
        more_s = sum(during) - step_s * len(during)
        return {
            "wait": wait_s / copy_s,
            "slowdown": sum(during) / len(during) / step_s,
            "steps": (wait_s + more_s) / step_s,
            "write_s": time.perf_counter() - begun,
            "step_s": step_s,
        }

    def on_all_ranks(self, done: bool) -> bool:
        total = torch.tensor(float(done))
        dist.all_reduce(total, op=dist.ReduceOp.MIN)
        return bool(total)


def main(folder: Path, alternations: int) -> None:
    env = RankEnv.from_mapping(os.environ)
    with process_group(env):
        bench = Bench(folder, training(folder, env))
        state = bench.state
        kinds = AsyncCheckpointerType
        ways: dict[str, tuple[Path, Save]] = {
            "ours": (folder / "ours/checkpoints", ours(bench.job.checkpoints)),
            "ours, from a slot": (folder / "ours/checkpoints", from_slots(bench.job)),
            "torch, thread": (folder / "a", torchs(folder / "a", state, kinds.THREAD)),
            "torch, process": (folder / "b", torchs(folder / "b", state, kinds.PROCESS)),
        }
        saves: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(-1, alternations):
            names = list(ways)
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                path, save = ways[name]
                measured = bench.turn(save)
                # The first turn touches new memory and starts processes.
                if turn >= 0:
                    saves[name].append({**measured, "num_bytes": size_of(path)})
        loads = loaded(ways, state, alternations)
        if env.rank == 0:
            write(folder, bench, saves, loads)


def newest_in(folder: Path) -> Path:
    """Not by its time: an older one that is being removed changes, and so does one that failed."""
    named = {re.fullmatch(r"step-(\d+)", path.name): path for path in folder.iterdir()}
    return max((int(match[1]), path) for match, path in named.items() if match)[1]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in newest_in(folder).iterdir())


def loaded(
    ways: dict[str, tuple[Path, Save]], state: TrainingState, alternations: int
) -> dict[str, list[float]]:
    """Seconds to load the newest checkpoint of ours, with its checksums, and of torch's."""
    newest = {
        name: newest_in(path)
        for name, (path, _) in ways.items()
        if name in ("ours", "torch, thread")
    }
    loads: dict[str, list[float]] = {name: [] for name in newest}
    for _ in range(alternations):
        for name, path in newest.items():
            dist.barrier()
            begun = time.perf_counter()
            if name == "ours":
                assert verify_on_all_ranks(path, state.ranks.env) is None
                resume.load(path, state)
            else:
                load({**state.tensors(), **state.random()}, checkpoint_id=path)
            loads[name].append(time.perf_counter() - begun)
    return loads


def write(
    folder: Path,
    bench: Bench,
    saves: dict[str, list[dict[str, float]]],
    loads: dict[str, list[float]],
) -> None:
    mib = sum(copy.nbytes for copy in bench.copies.values()) / (1 << 20)
    steps = [turn["step_s"] for turns in saves.values() for turn in turns]
    result = {"saves": saves, "loads": loads, "mib": mib, "step_s": steps}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
