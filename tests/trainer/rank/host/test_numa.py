"""Which processors are next to a GPU, on machines that were recorded for the tests of hwloc.

`recorded_sysfs.json` has the files of tests/hwloc/linux/*.tar.bz2 of open-mpi/hwloc that are read
here: a server with two sockets and a coprocessor, one with four nodes whose firmware names the node
of one device only, and NVIDIA's DGX GB10 with one node.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from trainer.rank.host.numa import bind_to_node, cpus_near, cpus_of, sysfs_text

MACHINES = json.loads(Path(__file__).with_name("recorded_sysfs.json").read_text())
TWO_SOCKETS, FOUR_NODES, ONE_NODE = MACHINES


def near(machine: str, address: str, allowed: set[int]) -> set[int] | None:
    files = MACHINES[machine]
    return cpus_near(address, allowed, lambda path: files.get(path, ""))


@pytest.mark.parametrize(
    ("machine", "address", "allowed", "expected"),
    [
        (TWO_SOCKETS, "0000:83:00.0", range(16), range(8, 16)),
        (TWO_SOCKETS, "0000:05:00.0", range(16), range(8)),
        (FOUR_NODES, "0000:43:00.0", range(40), range(2, 40, 4)),
        # A scheduler gave the process some processors of both sockets.
        (TWO_SOCKETS, "0000:83:00.0", (0, 1, 9, 10), (9, 10)),
    ],
)
def test_a_rank_runs_on_the_node_of_its_device(
    machine: str, address: str, allowed: range, expected: range
) -> None:
    assert near(machine, address, set(allowed)) == set(expected)


@pytest.mark.parametrize(
    ("machine", "address", "allowed"),
    [
        (FOUR_NODES, "0000:09:03.0", range(40)),  # the firmware does not name its node
        (ONE_NODE, "0000:01:00.0", range(20)),
        (TWO_SOCKETS, "0000:ff:00.0", range(16)),  # no such device
        (TWO_SOCKETS, "0000:83:00.0", range(8)),  # the scheduler gave the other socket alone
        (TWO_SOCKETS, "0000:83:00.0", range(8, 16)),  # it is bound already
    ],
)
def test_a_rank_is_not_bound_without_a_reason(machine: str, address: str, allowed: range) -> None:
    assert near(machine, address, set(allowed)) is None


def test_lists_of_processors_are_read_as_the_kernel_writes_them() -> None:
    assert cpus_of(sysfs_text("devices/system/cpu/online")) >= os.sched_getaffinity(0)
    assert cpus_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpus_of("\n") == set(), "a node with memory alone"


def test_a_rank_without_a_gpu_is_not_bound() -> None:
    before = os.sched_getaffinity(0)
    bind_to_node(torch.device("cpu"))
    assert os.sched_getaffinity(0) == before
