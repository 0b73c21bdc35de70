import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm.exclude_nodes import left_out
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.inventory.slurm.nodes import Node, parse_state
from tests.backends.slurm.slurm_launch import a_launch


def cluster(**states: str) -> tuple[Node, ...]:
    """Nodes with two GPUs each in partition `train`."""
    found = []
    for name, words in states.items():
        state, flags = parse_state(words)
        node = Node(name=name, state=state, flags=flags, gpus=2, partitions=("train",))
        found.append(node)
    return tuple(found)


@pytest.mark.parametrize(
    ("excluded", "requested", "states", "expected"),
    [
        ((), ("b",), {"a": "IDLE", "b": "DOWN", "c": "IDLE"}, ("b",)),  # two other nodes are left
        ((), ("b",), {"a": "IDLE", "b": "DOWN*"}, ()),
        ((), ("b",), {"a": "IDLE", "b": "ALLOCATED+DRAIN"}, ()),
        ((), ("b",), {"a": "IDLE", "b": "IDLE*+POWERED_DOWN", "c": "IDLE"}, ("b",)),
        ((), ("b",), {"a": "IDLE", "b": "ALLOCATED+DRAIN", "c": "ALLOCATED"}, ("b",)),
        # Two nodes are drained. The job can run as soon as either of them is repaired.
        ((), ("b",), {"a": "IDLE", "b": "ALLOCATED+DRAIN", "c": "IDLE+DRAIN"}, ()),
        # The node is back. If it stayed in ExcNodeList, the job could never run.
        ((), ("b",), {"a": "IDLE", "b": "IDLE"}, ()),
        ((), ("b",), {"a": "IDLE", "b": "ALLOCATED"}, ()),
        ((), ("b", "c"), {"a": "IDLE", "b": "IDLE", "c": "IDLE"}, ("c",)),  # one of them is enough
        ((), ("b",), {"a": "IDLE", "b": "IDLE", "c": "DOWN"}, ("b",)),  # c may return
        ((), ("b", "c"), {"a": "IDLE", "b": "DOWN", "c": "IDLE", "d": "IDLE"}, ("b", "c")),
        ((), ("b", "c"), {"a": "IDLE", "b": "DOWN", "c": "IDLE"}, ("c",)),
        (("c",), ("b",), {"a": "IDLE", "b": "DOWN", "c": "DOWN"}, ("c",)),  # c was excluded before
        (("b",), ("b",), {"a": "IDLE", "b": "DOWN"}, ("b",)),
        (("gone",), (), {"a": "IDLE", "b": "IDLE"}, ()),
        ((), ("b",), {"a": "IDLE", "b": "MIXED+PLANNED"}, ()),
    ],
)
def test_a_requeue_excludes_only_nodes_that_the_job_can_do_without(
    excluded: tuple[str, ...],
    requested: tuple[str, ...],
    states: dict[str, str],
    expected: tuple[str, ...],
) -> None:
    out = left_out(a_launch(), excluded, requested, cluster(**states), "train")
    assert out.names == expected
    assert {*out.dropped} == {*requested} - {*expected}


def test_a_node_that_the_next_leader_would_reject_stays_excluded() -> None:
    """Otherwise each run of the job would be requeued at once."""
    nodes = cluster(a="IDLE", b="IDLE")
    out = left_out(a_launch(), (), ("b",), nodes, "train", unusable={"b"})
    assert (out.names, out.dropped) == (("b",), {})


def test_only_nodes_that_match_the_request_count() -> None:
    nodes = cluster(a="IDLE", b="DOWN", c="IDLE")
    few = (*nodes[:2], replace(nodes[2], gpus=1))
    other = (*nodes[:2], replace(nodes[2], partitions=("debug",)))
    wide = (*other[:2], replace(nodes[2], partitions=("debug",)), replace(nodes[0], name="d"))
    fast = tuple(replace(n, features=("slow" if n.name == "c" else "fast",)) for n in nodes)
    typed = tuple(replace(n, gpu_type="a100" if n.name == "c" else "h100") for n in nodes)
    theirs = {"a": "ours", "b": "ours", "c": "theirs"}
    held = cluster(a="ALLOCATED+RESERVED", b="DOWN+RESERVED", c="IDLE+RESERVED")
    reserved = tuple(replace(n, reservation=theirs[n.name]) for n in held)
    unnamed = held  # Slurm 22.05 does not name the reservation
    for there, partition, spec, expected in (
        (nodes, "train", SlurmSpec(), ("b",)),
        (few, "train", SlurmSpec(), ()),
        (few, "train", SlurmSpec(gpus="none"), ("b",)),
        (other, "train", SlurmSpec(), ()),
        (other, "train", SlurmSpec(partition="train,debug"), ()),  # a job runs in one partition
        (wide, "train", SlurmSpec(partition="train,debug"), ("b",)),
        (other, None, SlurmSpec(), ("b",)),
        (fast, "train", SlurmSpec(constraint="fast"), ()),
        (fast, "train", SlurmSpec(constraint="fast|slow"), ("b",)),
        (typed, "train", SlurmSpec(gpu_type="h100"), ()),
        (typed, "train", SlurmSpec(gpu_type="h100", gpus="none"), ("b",)),
        (reserved, "train", SlurmSpec(reservation="ours"), ()),
        (unnamed, "train", SlurmSpec(reservation="ours"), ("b",)),
        (reserved, "train", SlurmSpec(), ("b",)),
        (nodes, "train", SlurmSpec(nodelist="b"), ()),
    ):
        assert left_out(a_launch(slurm=spec), (), ("b",), there, partition).names == expected
