"""Binds a rank to the processors next to its GPU.

On a machine with several NUMA nodes, a rank on the wrong one copies all batches, and all offloaded
weights, over the link between the sockets. `torchrun --numa-binding` does the same, but asks CUDA
for the GPU's address before it forks the ranks, and a fork cannot use CUDA after that. So each rank
binds itself.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LOG = logging.getLogger("trainer")

SYSFS = Path("/sys")


def bind_to_node(device: torch.device) -> None:
    """Run the threads of this process, and those that they will start, on processors of the GPU's
    node. Memory that they touch first is then of that node too."""
    if device.type != "cuda":
        return
    gpu: Any = torch.cuda.get_device_properties(device)  # torch has no types for `pci_*`
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = cpus_near(address, allowed, sysfs_text)
    if near is None:
        return
    for thread in Path("/proc/self/task").iterdir():
        try:
            # A library may have bound a thread of its own. That choice stays.
            if os.sched_getaffinity(int(thread.name)) == allowed:
                os.sched_setaffinity(int(thread.name), near)
        except OSError as exc:  # the thread has ended, or a sandbox forbids it
            LOG.info("failed to bind thread %s to the node of GPU %s: %s", thread, address, exc)
    LOG.info("bound to %d of %d processors, next to GPU %s", len(near), len(allowed), address)


def sysfs_text(path: str) -> str:
    """The content of a file of sysfs; empty if it does not exist."""
    try:
        return (SYSFS / path).read_text()
    except OSError:
        return ""


def cpus_near(address: str, allowed: set[int], read: Callable[[str], str]) -> set[int] | None:
    """The `allowed` processors on the NUMA node of a PCI device; None if they are all of `allowed`,
    none of it, or unknown.

    Args:
        address: as sysfs has it: `0000:3b:00.0`.
        allowed: those that the scheduler has given to this process.
        read: the content of a file of sysfs, from its path below `/sys`; empty if there is none.
    """
    node = read(f"bus/pci/devices/{address}/numa_node").strip()
    if not node.isdecimal():  # -1: the firmware does not say
        return None
    near = cpus_of(read(f"devices/system/node/node{node}/cpulist")) & allowed
    return near if near and near != allowed else None


def cpus_of(text: str) -> set[int]:
    """The processors in a list of the kernel, such as `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
