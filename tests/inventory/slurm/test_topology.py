"""Trees of switches and blocks, as Slurm shows them."""

import json

import pytest

from orchestrator.contract.spec.slurm_spec import seconds
from orchestrator.inventory.slurm.partitions import parse_partitions, time_words
from orchestrator.inventory.slurm.topology import allocated_switches, parse_topology, switches_of
from tests.inventory.slurm.captured import captured


def test_a_tree_from_the_outermost_switch_down() -> None:
    found = parse_topology(captured("22.05/typed-topology.txt"))
    assert found.kind == "tree"
    assert found.switches["n05"] == ("core", "pod1", "leaf2")
    assert found.switches["a-2-4"] == ("core", "pod2", "leaf3")
    assert found.switches["c1"] == ("eth",)
    assert len(found.switches) == 18


def test_trees_and_lone_switches_of_another_site() -> None:
    found = parse_topology(captured("unstated/topology-tree.txt"))
    assert found.switches == {
        "cpu-000-109": ("cpu",),
        "cpu-002-219": ("cpu",),
        "cpu-003-040": ("cpu",),
        "h100-008-154": ("spine-use2-az3-0", "h100"),
        "h100-236-009": ("spine-use2-az3-0", "h100"),
    }


@pytest.mark.parametrize(
    ("file", "host", "block", "hosts"),
    [
        ("25.05/topology-block.txt", "node0019", "block02", 36),
        ("25.11/topology-block.txt", "10.140.93.120", "gb300_b1", 4),
        ("unstated/topology-block.txt", "g3-130-003", "block_DH1-067-US-EAST-04B", 10),
    ],
)
def test_aggregated_blocks_are_ignored(file: str, host: str, block: str, hosts: int) -> None:
    found = parse_topology(captured(file))
    assert found.kind == "block"
    assert found.blocks[host] == block
    assert len(found.blocks) == hosts


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_the_same_tree_on_three_versions(version: str) -> None:
    found = parse_topology(captured(f"{version}/topology.txt"))
    assert found.kind == "tree"
    leaves = {1: "leaf1", 2: "leaf1", 3: "leaf2", 4: "leaf2", 5: "leaf3", 6: "leaf3"}
    assert found.switches == {f"node{n}": ("spine", leaf) for n, leaf in leaves.items()}


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_the_same_blocks_on_two_versions(version: str) -> None:
    found = parse_topology(captured(f"{version}/topology-block.txt"))
    assert (found.kind, found.switches) == ("block", {})
    assert found.blocks == {
        "node1": "block1",
        "node2": "block1",
        "node3": "block2",
        "node4": "block2",
    }


def test_several_topologies_of_one_cluster() -> None:
    """A ring, a torus or no topology is treated as flat, so nothing is requested."""
    said = json.loads(captured("26.05.5/several-topologies.json"))
    found = {" ".join(one["argv"][3:]): parse_topology(one["out"]) for one in said}
    assert {name: one.kind for name, one in found.items()} == {
        "": "tree",
        "switched": "tree",
        "nvlink": "block",
        "round": "flat",
        "pod": "flat",
        "plain": "flat",
    }
    assert found[""] == found["switched"]
    assert found["nvlink"].blocks["node4"] == "b2"
    partitions = parse_partitions(captured("26.05.5/several-partitions.txt"))
    assert [one.name for one in partitions] == [one.topology for one in partitions]


def test_without_a_topology_nothing_is_known() -> None:
    assert parse_topology("No topology information available\n").kind == "flat"


def test_a_cycle_of_switches_does_not_loop() -> None:
    text = "SwitchName=a Level=0 Nodes=n1 \nSwitchName=b Switches=a,c\nSwitchName=c Switches=b\n"
    assert parse_topology(text).switches == {"n1": ("c", "b", "a")}


def test_switches_of_a_leaders_hosts() -> None:
    topology = captured("22.05/topology.txt")
    assert allocated_switches("node[2,5]", topology) == {
        "node2": ("spine", "leaf1"),
        "node5": ("spine", "leaf3"),
    }
    assert allocated_switches("elsewhere", topology) == {}


def test_a_block_is_the_innermost_switch() -> None:
    found = parse_topology(captured("25.05/topology-block.txt"))
    assert switches_of(found, ["node0001", "login"]) == {"node0001": ("block01",)}


def test_partitions() -> None:
    h100, a100, cpu = parse_partitions(captured("22.05/typed-partitions.txt"))
    assert (h100.name, h100.default, h100.state) == ("h100", True, "UP")
    assert h100.max_time_s == 172_800
    assert h100.nodes == tuple(f"n{i:02}" for i in range(1, 9))
    assert (a100.state, a100.max_nodes, a100.max_time_s) == ("DRAIN", 4, 5_400)
    assert (cpu.max_time_s, cpu.max_nodes) == (None, None)


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_the_same_partitions_on_three_versions(version: str) -> None:
    train, short = parse_partitions(captured(f"{version}/partitions.txt"))
    assert (train.name, train.default, train.state, train.max_time_s) == ("train", True, "UP", None)
    assert train.nodes == tuple(f"node{n}" for n in range(1, 7))
    assert (short.name, short.default, short.state) == ("short", False, "DRAIN")
    assert (short.nodes, short.max_nodes, short.max_time_s) == (("node5", "node6"), 1, 5_400)


@pytest.mark.parametrize(
    ("text", "secs"),
    [
        ("30", 1_800),
        ("1:30", 90),
        ("01:30:00", 5_400),
        ("2-00:00:00", 172_800),
        ("1-12", 129_600),
        ("UNLIMITED", None),
        ("NONE", None),
    ],
)
def test_times(text: str, secs: int | None) -> None:
    assert seconds(text) == secs


@pytest.mark.parametrize("text", ["UNLIMITED", "7-00:00:00", "1:00:00", "0:30:00", "10-02:03:04"])
def test_a_limit_is_written_as_it_was_read(text: str) -> None:
    assert time_words(seconds(text)) == text
