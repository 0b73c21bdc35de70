"""Collectives by size, inside a host and across hosts."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from trainer.calibrate.repeat import Run, Task

KIB, MIB = 1 << 10, 1 << 20
ON_GPU = (64 * KIB, 1 * MIB, 16 * MIB, 128 * MIB, 512 * MIB)
ON_CPU = (16 * KIB, 256 * KIB, 2 * MIB, 8 * MIB)
"""Bytes of the whole buffer."""
CALLS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def collective_tasks(device: torch.device, ranks_per_host: int) -> Iterator[Task]:
    """All ranks must call it, because it creates process groups."""
    hosts = dist.get_world_size() // ranks_per_host
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    for across, group, ranks in _groups(hosts, ranks_per_host):
        for call in CALLS:
            for size in sizes:
                yield Task(
                    what=call,
                    make=partial(collective, call, device, size, group, ranks),
                    size={"bytes": size},
                    ranks=ranks,
                    across=across,
                )


def _groups(
    hosts: int, ranks_per_host: int
) -> Iterator[tuple[bool, dist.ProcessGroup | None, int]]:
    """The ranks of each host; and the ranks that have the same place on their hosts, all of these
    groups at once, as FSDP across hosts does."""
    if ranks_per_host > 1:
        groups = [
            [host * ranks_per_host + place for place in range(ranks_per_host)]
            for host in range(hosts)
        ]
        yield False, _own(groups), ranks_per_host
    if hosts > 1:
        groups = [
            [host * ranks_per_host + place for host in range(hosts)]
            for place in range(ranks_per_host)
        ]
        yield True, _own(groups), hosts


def _own(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """The group of this rank. All ranks create all groups."""
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own


def collective(
    call: str, device: torch.device, size: int, group: dist.ProcessGroup | None, ranks: int
) -> Run:
    """`size`: bytes of the whole buffer, in bfloat16."""
    values = size // 2 // ranks * ranks
    whole = torch.zeros(values, dtype=torch.bfloat16, device=device)
    part = torch.zeros(values // ranks, dtype=torch.bfloat16, device=device)
    match call:
        case "all-gather":
            return lambda: dist.all_gather_single(whole, part, group=group)
        case "reduce-scatter":
            return lambda: dist.reduce_scatter_single(part, whole, group=group)
        case "all-reduce":
            return lambda: dist.all_reduce(whole, group=group)
    other = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(other, whole, group=group)
