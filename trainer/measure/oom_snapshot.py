"""Writes the state of the GPU's allocator when a rank runs out of GPU memory.

It shows which blocks of which sizes were in use and which were free. Who allocated them is known
only while a profile is recorded (`train.profile`), because recording a stack at each allocation
costs time at every step.
"""

import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ndctl.rank.link import MEMORY_SNAPSHOT
from orchestrator.contract.files.atomic_write import write_whole

LOG = logging.getLogger("trainer")

MOST_RANKS = 8
"""Snapshots of an attempt. A plan that does not fit fails on all ranks alike."""
MOST_EVENTS = 20_000
MOST_BYTES = 64 << 20
SUFFIX = ".oom.pickle"

Snapshot = dict[str, Any]


def write_if_out_of_memory(exc: BaseException, folder: Path, rank: int) -> None:
    """Write `rank-<r>.oom.pickle` into `folder` if `exc` is a GPU that is out of memory, and attach
    its path to `exc`. It raises nothing, because the rank is about to report `exc`."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(exc, torch.OutOfMemoryError):
        return
    if torch.cuda.is_initialized():
        write_snapshot(exc, folder, rank, torch.cuda.memory._snapshot)


def write_snapshot(
    exc: BaseException, folder: Path, rank: int, take: Callable[[], Snapshot]
) -> None:
    """`write_if_out_of_memory` for a snapshot of any device."""
    path = folder / f"rank-{rank}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob(f"*{SUFFIX}"))) >= MOST_RANKS:
            path = folder  # with the snapshots of other ranks
        else:
            write_whole(path, bounded(take()))
    except Exception as failed:  # noqa: BLE001 (must not hide the exception that ends the rank)
        LOG.warning("rank %d: failed to write the memory snapshot %s: %s", rank, path, failed)
        return
    setattr(exc, MEMORY_SNAPSHOT, str(path))
    LOG.info("rank %d: the memory of its GPU is in %s", rank, path)


def bounded(snapshot: Snapshot, most_bytes: int = MOST_BYTES) -> bytes:
    """`snapshot` as memory_viz reads it, with so many of the newest allocations and frees that it
    has at most `most_bytes`.

    Raises:
        ValueError: it is larger without any.
    """
    kept = MOST_EVENTS
    while True:
        traces = [trace[-kept:] if kept else [] for trace in snapshot.get("device_traces", [])]
        data = pickle.dumps({**snapshot, "device_traces": traces})
        if len(data) <= most_bytes:
            return data
        if not kept:
            raise ValueError(f"it has {len(data)} bytes, more than {most_bytes}")
        kept //= 2
