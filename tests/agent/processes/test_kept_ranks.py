"""Ranks that outlive an attempt, as their agent sees them."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.agent.processes.kept_ranks import KeptRanks
from orchestrator.agent.processes.torchrun import environment, render
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_messages import Beat, RankStarted
from orchestrator.contract.messages.rank_orders import LeaveAttempt, from_bytes, socket_path
from tests.agent.processes.test_torchrun import PLACE, START

BIRTH = replace(START, keep_ranks=True)
NEXT = replace(BIRTH, attempt=3, node_rank=2)


@pytest.fixture
def torchrun() -> Any:
    return SimpleNamespace(ended=None)


@pytest.fixture
def kept(torchrun: Any, tmp_path: Path) -> KeptRanks:
    return KeptRanks(torchrun, BIRTH, tmp_path / "ranks.sock")


def test_a_watcher_reports_about_the_attempt_that_its_rank_has_joined(kept: KeptRanks) -> None:
    # Ranks 8 to 15 at first, 16 to 23 now.
    exited = RankExited(attempt=2, rank=9, exit_code=None, signal=9, step=4)
    assert kept.as_in(NEXT, exited) == replace(exited, attempt=3, rank=17)
    own = Beat(attempt=3, rank=17, step=5, phase="train")
    assert kept.as_in(NEXT, own) == own
    started = RankStarted(attempt=3, rank=17, local_rank=1, pid=12)
    assert kept.as_in(NEXT, started) == started, "the rank itself says that it has joined"
    assert kept.as_in(BIRTH, exited) == exited


def test_only_as_many_ranks_as_before_can_join_while_torchrun_lives(
    kept: KeptRanks, torchrun: Any
) -> None:
    assert kept.can_join(NEXT)
    assert not kept.can_join(replace(NEXT, ranks_per_host=4))
    assert not kept.can_join(replace(NEXT, keep_ranks=False))
    torchrun.ended = "ended"
    assert not kept.can_join(NEXT)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(socket_path(tmp_path / "ranks.sock", 1)))
        yield sock


def test_an_order_reaches_the_rank_or_fails(kept: KeptRanks, listening: socket.socket) -> None:
    kept.order(1, LeaveAttempt(attempt=2))
    assert from_bytes(listening.recv(1000)) == LeaveAttempt(attempt=2)
    with pytest.raises(OSError, match="No such file"):
        kept.order(0, LeaveAttempt(attempt=2))


def test_torchrun_of_each_host_is_alone_and_its_ranks_know_their_place() -> None:
    words = render(BIRTH, PLACE, 23_456)
    assert {"--nnodes=1", "--rdzv-endpoint=10.0.0.2:23456", "--rdzv-conf=rank=0"} <= {*words}
    # What torchrun sets for the second of its eight ranks.
    of_torchrun = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    env = RankEnv.from_mapping({**environment(BIRTH, PLACE, {}), **of_torchrun})
    assert (env.rank, env.world_size, env.local_world_size) == (9, 32, 8)
    assert env.place is not None
    assert (env.place.address, env.place.port) == ("10.0.0.1", 20_123)
    alone = RankEnv.from_mapping({**environment(START, PLACE, {}), **of_torchrun})
    assert (alone.rank, alone.place) == (1, None)
