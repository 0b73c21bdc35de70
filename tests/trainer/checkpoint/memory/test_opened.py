"""Whether a rank opens its memory, by the spec, its device and what its agent says."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch._C._distributed_c10d import HashStore

from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.codec import encode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.memory.peers import CopyPlan, HostMemory
from orchestrator.contract.messages.events import MemoryCheckpointsSet
from orchestrator.contract.messages.rank_messages import CopiesEnded, Datagram, from_bytes
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from tests.agent.processes.test_torchrun import START
from trainer.checkpoint.memory.opened import Digests, open_memory
from trainer.rank.ranks import Ranks
from trainer.rank.reporter import Reporter


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    owner = MemorySlots()
    yield owner.of_attempt(replace(START, ranks_per_host=1), CopyPlan())
    owner.close()


def opens(
    every: Any, device: str, memory: HostMemory | None, folder: Path
) -> tuple[bool, list[Datagram]]:
    """Whether the rank has its memory then, and what it tells its agent."""
    text = "" if memory is None else json.dumps(encode(memory))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(folder / "agent"))
        agent.setblocking(False)
        env = RankEnv(attempt=2, memory=text, heartbeat_socket=str(folder / "agent"))
        no_mesh: Any = None
        ranks = Ranks(env=env, device=torch.device(device), mesh=no_mesh, data_rank=0)
        reporter = Reporter(env)
        opened = open_memory(MemoryCheckpointSpec(every=every), ranks, Digests("c", "h"), reporter)
        reporter.close()
        told = []
        while True:
            try:
                told.append(from_bytes(agent.recv(65_536)))
            except BlockingIOError:
                break
    (folder / "agent").unlink()
    if opened is not None:
        opened.close()
    return opened is not None, told


def test_memory_is_used_by_default_on_cpus_and_on_request_on_gpus(
    memory: HostMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainer")
    for every, device in (("auto", "cpu"), ("on", "cpu"), ("on", "cuda"), (4, "cuda")):
        assert opens(every, device, memory, tmp_path) == (True, [])
    assert opens("off", "cpu", memory, tmp_path) == (False, []), "the user said so"
    why = "no GPU has run them yet; checkpoint.memory.every=on turns them on"
    said = MemoryCheckpointsSet(attempt=2, copies=None, why=why)
    assert opens("auto", "cuda", memory, tmp_path) == (
        False,
        [said, CopiesEnded(attempt=2, rank=0)],
    )
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"no checkpoints in memory: {why}")
    ]


@pytest.mark.parametrize(("every", "level"), [("auto", "INFO"), (1, "WARNING")])
def test_an_agent_without_memory_is_named(
    every: Any, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainer")
    none = HostMemory(lineage=0, slots=(), why="its agent has no memory for them: no file is free")
    for memory, why in ((none, none.why), (None, "which did not start these ranks")):
        found, (said, _) = opens(every, "cpu", memory, tmp_path)
        assert not found
        assert isinstance(said, MemoryCheckpointsSet)
        assert said.why.endswith(why)
    assert {record.levelname for record in caplog.records} == {level}
