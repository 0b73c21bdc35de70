"""Helpers for tests of checkpoints: train in this process, save on several ranks, receive reports
as an agent does, and compare tensors.
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.contract.codec import decode
from orchestrator.contract.files.checkpoint_names import newest_complete
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.fence import Fence, write_fence
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.messages.rank_messages import Datagram, from_bytes
from tests.trainer.launch.tiny_runs import work
from tests.trainer.launch.training_worker import StopAfter
from trainer.checkpoint.read import CheckpointReader
from trainer.config import complete
from trainer.main import train_on
from trainer.rank.ranks import arrange, process_group
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime


def with_fence(config: dict[str, Any]) -> dict[str, Any]:
    """Write the fence of the run as a leader does. Without a fence, ranks write no checkpoint."""
    run = RunDir(Path(config["out"]))
    run.path.mkdir(parents=True, exist_ok=True)
    write_fence(run.fence, Fence(leader="a", attempt=1))
    return config


def save_on(folder: Path, num_ranks: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run `cases` of `checkpoint_worker.py` in order on the same ranks."""
    return work(folder, num_ranks, cases, worker="tests.trainer.checkpoint.checkpoint_worker")


def tensors_of(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Unsharded weights and moments of the newest complete checkpoint."""
    newest, _ = newest_complete(checkpoints)
    assert newest is not None
    reader = CheckpointReader(newest)
    return reader.tensors(name for name in reader.shapes if not name.startswith("rng."))


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in a bit, or that only one of the two has."""
    alone = first.keys() ^ second.keys()
    return sorted(alone) + [
        name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])
    ]


def train_alone(config: dict[str, Any], env: RankEnv | None = None) -> int:
    """Train as the only rank, in this process; returns the exit code."""
    env = env or RankEnv()
    full = complete(decode(TrainingConfig, config), env.world_size)
    try:
        with process_group(env), closing(Reporter(env)) as reporter:
            stop: Any = StopAfter(None, reporter)
            runtime = Runtime(env=env, reporter=reporter, drills=(), stop=stop, clock=lambda: 0.0)
            return train_on(arrange(full.mesh, env), full, runtime)
    finally:
        # `process_group` keeps its group after an error, because a rank ends then. This process
        # runs further tests.
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def listening(path: Path) -> Iterator[list[Datagram]]:
    """The datagrams sent to an agent at `path`. A thread receives them, because the kernel queues
    only ten."""
    told: list[Datagram] = []

    def listen(agent: socket.socket) -> None:
        while data := agent.recv(1 << 16):
            told.append(from_bytes(data))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(path))
        listener = threading.Thread(target=listen, args=(agent,))
        listener.start()
        try:
            yield told
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(b"", str(path))
            listener.join()
