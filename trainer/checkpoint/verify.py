"""Compares the files of a checkpoint with their checksums, each rank a part of them."""

import heapq
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from orchestrator.contract.files.checkpoint_names import damage, read_marker
from orchestrator.contract.files.env import RankEnv
from trainer.rank.ranks import shared_from_first


def verify_together(folder: Path, env: RankEnv) -> str | None:
    """What is wrong with a file of the complete checkpoint `folder`, the same on every rank.

    One that was written before there were checksums has none to be compared with.
    """
    marker = shared_from_first(lambda: read_marker(folder))
    checksums: dict[str, str] = marker.get("sha256", {})
    sizes = {name: marker["files"][name] for name in checksums}
    found = damage(folder, checksums, shares(sizes, env.world_size)[env.rank])
    told: list[str | None] = [None] * env.world_size
    dist.all_gather_object(told, found)
    return next((defect for defect in told if defect), None)


def shares(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Which files each rank reads: the largest first, each by whoever has least to read."""
    given: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        given[rank].append(name)
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return given
