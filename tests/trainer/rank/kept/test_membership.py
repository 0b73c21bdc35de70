"""A rank leaves an attempt: only if it is sound, and even if a peer does not answer any more."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from orchestrator.agent.rank_socket import free_port
from orchestrator.contract.messages.rank_orders import LeaveAttempt, socket_path, to_bytes
from trainer.rank.kept.membership import may_leave

CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def in_a_stage(cause: Exception) -> Exception:
    """As torch's pipeline stages raise it."""
    exc = RuntimeError("\n            [Stage 0] failed to run forward:\n            args: ()")
    exc.__cause__ = cause
    return exc


@pytest.mark.parametrize(
    ("exc", "leaves"),
    [
        (in_a_stage(RuntimeError(CLOSED)), True),
        (in_a_stage(RuntimeError("expected a matrix")), False),
        (RuntimeError(CLOSED), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError(CLOSED), False),
    ],
)
def test_only_a_broken_collective_lets_a_rank_leave_by_itself(exc: Exception, leaves: bool) -> None:
    orders: Any = SimpleNamespace(leaving=False)
    assert may_leave(exc, orders) is leaves
    orders.leaving = True
    assert may_leave(exc, orders), "whatever a collective that was broken off leads to"


RANK = """
import sys, time
from orchestrator.contract.files.env import Place, RankEnv
from trainer.rank.kept.orders import Orders, forget_groups
import torch, torch.distributed as dist

rank, port, agent = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
place = Place(node_rank=rank, nodes=2, address="127.0.0.1", port=port)
env = RankEnv(rank=rank, local_rank=rank, world_size=2, heartbeat_socket=agent, place=place)
orders = Orders(env)
for attempt in (1, 2):
    where = f"tcp://127.0.0.1:{port + attempt}"
    if rank == 1 and attempt == 2:
        break
    size = 2 if attempt == 1 else 1
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1))
    print("connected", flush=True)
    if attempt == 1:
        time.sleep(600 if rank == 1 else 0)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            print("left" if orders.leaving else "failed", flush=True)
        forget_groups()
"""


@pytest.mark.process
@pytest.mark.timeout(300)
def test_an_order_breaks_off_a_collective_whose_peer_is_stopped(tmp_path: Path) -> None:
    agent, port = tmp_path / "ranks.sock", free_port("127.0.0.1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(port), str(agent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (rank.stdout for rank in ranks)
    assert first is not None
    assert second is not None
    try:
        assert first.readline() == second.readline() == "connected\n"
        os.kill(ranks[1].pid, signal.SIGSTOP)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(to_bytes(LeaveAttempt(attempt=1)), str(socket_path(agent, 0)))
        assert first.readline() == "left\n"
        assert first.readline() == "connected\n", "new groups can be made in the same process"
        assert ranks[0].wait(60) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
