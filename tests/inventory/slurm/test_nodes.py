"""Nodes, as several versions of Slurm show them, and whether they are free."""

import pytest

from orchestrator.inventory.slurm.gres import gpu_count, gpu_type, gpus_of_tres, parse_gres
from orchestrator.inventory.slurm.nodes import Node, parse_nodes, parse_state
from orchestrator.inventory.slurm.standing import is_wanted_back, standing_of
from tests.inventory.slurm.captured import captured


def test_nodes_of_a_cluster_in_every_state() -> None:
    nodes = {node.name: node for node in parse_nodes(captured("22.05/nodes.txt"))}
    assert nodes["node2"] == Node(
        name="node2",
        state="MIXED",
        cpus=2,
        memory_mib=20000,
        gpus=2,
        gpus_used=1,
        partitions=("train",),
        address="127.0.1.2",
    )
    assert {name: standing_of(node).state for name, node in nodes.items()} == {
        "node1": "drained",
        "node2": "free",
        "node3": "drained",
        "node4": "drained",
        "node5": "drained",
        "node6": "drained",
    }
    assert {name: standing_of(node).reason for name, node in nodes.items()} == {
        "node1": "drained: maintenance",
        "node2": "",
        "node3": "in maintenance",
        "node4": "not responding: Not responding",
        "node5": "drained: ECC errors on GPU 3",
        "node6": "down: kernel panic",
    }
    assert standing_of(nodes["node2"]).gpus == 1
    assert standing_of(nodes["node2"], exclusive=True).state == "busy"


def test_types_and_features() -> None:
    nodes = {node.name: node for node in parse_nodes(captured("22.05/typed-nodes.txt"))}
    assert len(nodes) == 18
    h100 = nodes["n01"]
    assert (h100.gpus, h100.gpu_type) == (8, "nvidia_h100_80gb_hbm3")
    assert h100.features == ("ib", "h100")
    assert standing_of(h100).state == "free"  # powered down in the cloud: Slurm starts it
    assert nodes["c1"].gpus == 0


@pytest.mark.parametrize(
    ("file", "name", "state", "reason", "gpus", "version"),
    [
        (
            "23.11/nodes.txt",
            "cluster-h100-9-78",
            "drained",
            "drained: Prolog error: 571 xid 13 errors",
            8,
            "23.11.0-0rc1",
        ),
        ("23.11/nodes.txt", "cluster-h100-9-69", "drained", "in maintenance", 8, "23.11.0-0rc1"),
        (
            "23.11/nodes-oneline.txt",
            "rack5n06",
            "busy",
            "other jobs use all its GPUs",
            4,
            "23.11.6",
        ),
        (
            "24.05/nodes.txt",
            "queue-on-demand-dy-compute-resource-2-2",
            "busy",
            "allocated",
            0,
            "24.05.2",
        ),
        ("24.11/nodes.txt", "slurmd-879764659-nkz29", "free", "", 0, "24.11.0"),
        ("25.05/nodes.txt", "hpc7g-1", "free", "", 0, "25.05.5"),
    ],
)
def test_nodes_as_newer_versions_show_them(
    file: str, name: str, state: str, reason: str, gpus: int, version: str
) -> None:
    node = next(node for node in parse_nodes(captured(file)) if node.name == name)
    standing = standing_of(node)
    assert (standing.state, standing.reason) == (state, reason)
    assert node.gpus == gpus
    assert f"Version={version}" in captured(file)


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "26.05.5"])
def test_the_same_nodes_on_three_versions(version: str) -> None:
    nodes = {node.name: node for node in parse_nodes(captured(f"{version}/nodes.txt"))}
    assert {node.gpu_type for node in nodes.values()} == {"h100"}
    assert {name: (node.gpus, node.gpus_used) for name, node in nodes.items()} == {
        "node1": (2, 2),
        "node2": (2, 1),
        **dict.fromkeys(("node3", "node4", "node5", "node6"), (2, 0)),
    }
    assert nodes["node1"].features == ("ib", "h100")
    assert nodes["node5"].partitions == ("train", "short")
    standings = {name: standing_of(node) for name, node in nodes.items()}
    assert {name: one.reason for name, one in standings.items()} == {
        "node1": "drained: maintenance",
        "node2": "",
        "node3": "in maintenance",
        "node4": "not responding: Not responding",
        "node5": "drained: ECC errors on GPU 3",
        "node6": "down: kernel panic",
    }
    assert [name for name, one in standings.items() if one.state == "free"] == ["node2"]
    assert standings["node2"].gpus == 1
    assert standing_of(nodes["node3"], reservation="upgrade").state == "free"
    assert not is_wanted_back(nodes["node3"], "upgrade"), "a job in that very reservation"
    assert {name for name, node in nodes.items() if is_wanted_back(node, None)} == {
        *("node1", "node3", "node4", "node5", "node6")
    }


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_gpus_without_a_type_on_newer_versions(version: str) -> None:
    nodes = parse_nodes(captured(f"{version}/untyped-nodes.txt"))
    assert {(node.gpus, node.gpu_type, node.gpus_used) for node in nodes} == {(2, None, 0)}
    assert {standing_of(node).state for node in nodes} == {"free"}


def test_a_reservation_is_free_for_the_jobs_that_run_in_it() -> None:
    node = parse_nodes(captured("23.11/nodes.txt"))[1]
    idle = Node(name="n", state="IDLE", flags=node.flags, reservation=node.reservation, gpus=8)
    assert standing_of(idle, reservation="example").state == "free"
    assert standing_of(idle, reservation="another").state == "drained"
    reserved = Node(name="n", state="IDLE", flags=frozenset({"RESERVED"}), reservation="other")
    assert standing_of(reserved).reason == "reserved: other"
    assert standing_of(reserved).state == "busy"


@pytest.mark.parametrize(
    ("text", "base", "flags"),
    [
        ("IDLE*+DRAIN", "IDLE", {"DRAIN", "NOT_RESPONDING"}),
        ("MIXED+CLOUD", "MIXED", {"CLOUD"}),
        ("DOWN*", "DOWN", {"NOT_RESPONDING"}),
        ("MIXED-", "MIXED", {"PLANNED"}),
        ("idle~", "IDLE", {"POWERED_DOWN"}),
        ("mix$", "MIXED", {"MAINTENANCE"}),
        ("DRAINED", "IDLE", {"DRAIN"}),
        ("drng", "DRNG", set()),
        ("RESERVED", "IDLE", {"RESERVED"}),
        ("MAINT", "IDLE", {"MAINTENANCE"}),
        ("ALLOCATED+BRAND_NEW", "ALLOCATED", {"BRAND_NEW"}),
        ("", "UNKNOWN", set()),
    ],
)
def test_a_state_and_its_flags(text: str, base: str, flags: set[str]) -> None:
    assert parse_state(text) == (base, frozenset(flags))


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("IDLE", "free"),
        ("IDLE+PLANNED", "busy"),
        ("IDLE+COMPLETING", "busy"),
        ("IDLE+BLOCKED", "busy"),
        ("ALLOCATED", "busy"),
        ("IDLE+CLOUD+POWERED_DOWN", "free"),
        ("IDLE+CLOUD+POWERING_DOWN", "drained"),
        ("IDLE+REBOOT_ISSUED", "drained"),
        ("IDLE+REBOOT_REQUESTED", "busy"),
        ("IDLE+DRAIN+REBOOT_REQUESTED", "drained"),
        ("IDLE+DYNAMIC_NORM+INVALID_REG", "drained"),
        ("IDLE+SOMETHING_NEW", "free"),
        ("DRNG", "drained"),
        ("", "drained"),
        ("UNKNOWN", "drained"),
        ("FUTURE", "drained"),
    ],
)
def test_only_what_is_known_to_be_free_is_free(text: str, state: str) -> None:
    base, flags = parse_state(text)
    assert standing_of(Node(name="n", state=base, flags=flags, gpus=8)).state == state


def test_a_mixed_node_with_unknown_use_is_busy() -> None:
    assert standing_of(Node(name="n", state="MIXED", gpus=8)).state == "busy"


def test_a_reason_may_contain_any_text() -> None:
    line = (
        "NodeName=n1 Gres=gpu:8 State=DOWN Version=24.05.1 "
        "Reason=Xid=79 State=IDLE Gres=gpu:0, see [ticket 7] [root@2026-01-01T00:00:00] Comment=x"
    )
    (node,) = parse_nodes(line)
    assert (node.state, node.gpus) == ("DOWN", 8)
    assert node.reason == "Xid=79 State=IDLE Gres=gpu:0, see [ticket 7]"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("Not responding : Not responding", "Not responding"),  # seen with Slurm 24.11.5
        ("bad fan : Not responding : bad fan", "bad fan : Not responding"),
        ("Epilog error", "Epilog error"),
    ],
)
def test_what_slurm_says_twice_is_kept_once(said: str, kept: str) -> None:
    (node,) = parse_nodes(f"NodeName=n1 State=DOWN* Reason={said} [slurm@2026-11-28T04:25:01]")
    assert node.reason == kept


def test_other_records_than_nodes_are_ignored() -> None:
    assert parse_nodes("No nodes in the system\n") == ()


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("gpu:8", 8, None),
        ("gpu", 1, None),
        ("gpu:h100:8(S:0-1),nvme:2", 8, "h100"),
        ("gpu:(null):2(IDX:0-1)", 2, None),
        ("gpu:a100:3(IDX:0,2-3),mps:a100:0(IDX:N/A)", 3, "a100"),
        ("gpu:a100:2,gpu:v100:6", 8, "v100"),
        ("gpu:no_consume:4", 4, None),
        ("craynetwork:4", 0, None),
        ("(null)", 0, None),
    ],
)
def test_gres(text: str, count: int, kind: str | None) -> None:
    entries = parse_gres(text)
    assert (gpu_count(entries), gpu_type(entries)) == (count, kind)


def test_counts_with_units() -> None:
    assert parse_gres("bandwidth:lustre:no_consume:4G")[0].count == 4 * 1024**3


def test_gpus_among_tres() -> None:
    assert gpus_of_tres("cpu=8,gres/gpu=4,gres/gpu:a100=4") == 4
    assert gpus_of_tres("cpu=8,gres/gpu:a100=3,gres/gpu:v100=1") == 4
    assert gpus_of_tres("cpu=8,mem=1G") is None


@pytest.mark.parametrize(
    ("state", "words", "dead", "wanted_back"),
    [
        ("ALLOCATED", "ALLOCATED", False, False),
        ("MIXED+PLANNED", "MIXED+PLANNED", False, False),
        ("ALLOCATED+DRAIN", "ALLOCATED+DRAIN", False, True),
        ("DOWN*+DRAIN", "DOWN+DRAIN+NOT_RESPONDING", True, True),
        ("DOWN", "DOWN", True, True),
        ("ALLOCATED*", "ALLOCATED+NOT_RESPONDING", True, False),  # slurmd alone may be gone
        ("ALLOCATED*+DRAIN", "ALLOCATED+DRAIN+NOT_RESPONDING", True, True),
        ("DOWN*", "DOWN+NOT_RESPONDING", True, True),
        ("IDLE+POWERED_DOWN", "IDLE+POWERED_DOWN", True, True),
        ("ALLOCATED%", "ALLOCATED+POWERING_DOWN", True, True),
        ("ALLOCATED@", "ALLOCATED+REBOOT_REQUESTED", False, False),  # once no job is there
        ("MIXED+DRAIN+REBOOT_REQUESTED", "MIXED+DRAIN+REBOOT_REQUESTED", False, True),  # ASAP
        ("ALLOCATED+REBOOT_ISSUED", "ALLOCATED+REBOOT_ISSUED", False, True),
        ("UNKNOWN", "UNKNOWN", False, False),
    ],
)
def test_a_host_of_a_running_job_may_be_taken_back_or_dead(
    state: str, words: str, dead: bool, wanted_back: bool
) -> None:
    (node,) = parse_nodes(f"NodeName=n1 State={state} Reason=bad fan [root@2026-11-22T02:23:08]")
    assert (node.words, node.is_dead, node.reason) == (words, dead, "bad fan")
    assert is_wanted_back(node, None) == wanted_back


def test_a_maintenance_that_the_job_is_part_of_does_not_end_it() -> None:
    (node,) = parse_nodes("NodeName=n1 State=ALLOCATED+MAINTENANCE ReservationName=upgrade")
    assert is_wanted_back(node, None)
    assert not is_wanted_back(node, "upgrade")
