"""Counts the TCP connections of ranks; see `test_gloo.py`."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.mesh import Mesh
from trainer.rank.ranks import arrange, broadcast_from_rank0, on_all_ranks

ESTABLISHED = "01"


def run_case(case: dict[str, Any], env: RankEnv) -> list[list[int]]:
    """Of each rank: connections once all groups of a job are there, and after they were used."""
    mesh: Mesh = decode(Mesh, case["mesh"])
    arrange(mesh, env)
    checkpoints = dist.new_group(backend="gloo")
    first = connections()
    # A rank that is ahead connects to one that has not counted yet.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"counted-{env.rank}", "")
    store.wait([f"counted-{rank}" for rank in range(env.world_size)])
    # What ranks exchange at the start of a job, and for a checkpoint.
    broadcast_from_rank0(lambda: "x")
    on_all_ranks(lambda: None)
    files: list[Any] | None = [None] * env.world_size if env.rank == 0 else None
    dist.gather_object(env.rank, files, dst=0, group=checkpoints)
    dist.broadcast_object_list([files], src=0, group=checkpoints)
    counts: list[Any] = [None] * env.world_size
    dist.all_gather_object(counts, [first, connections()])
    return counts


def connections() -> int:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(fd.readlink().name)
        except OSError:  # the descriptor of this listing itself
            continue
    tables = (Path("/proc/self/net") / name for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    open_ones = {f"socket:[{line[9]}]" for line in lines if line[3] == ESTABLISHED}
    return sum(link in open_ones for link in links)
