"""Inventories in files of users."""

from pathlib import Path

import pytest

from orchestrator.errors import SpecError
from orchestrator.inventory.file import load_inventory, read_inventory
from orchestrator.inventory.hosts import Inventory, mean_price, tree_of

SHORT = "{profile: h100-sxm-80gb, hosts: 2048, devices_per_host: 8, hosts_per_leaf: 16}"
LISTED = """\
profile: h100-sxm-80gb
devices_per_host: 8
overrides: {inter_host: {bytes_per_s: 25e9}}
hosts:
  - {name: "node-[08-10]", switches: [spine-1, leaf-1]}
  - {name: node-11, switches: [spine-1, leaf-1], devices: 7}
  - {name: node-12, switches: [spine-1, leaf-2], state: drained}
  - {name: node-13, switches: [spine-1, leaf-2], profile: a100-sxm-80gb}
"""


def read(text: str) -> Inventory:
    return load_inventory(text, "hosts.yaml")


def refused(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        read(text)
    assert "fix: " in str(caught.value)
    return str(caught.value)


def test_the_short_form() -> None:
    inventory = read(SHORT)
    assert len(inventory.hosts) == 2048
    first, last = inventory.hosts[0], inventory.hosts[-1]
    assert (first.name, first.switches) == ("host-0001", ("leaf-1",))
    assert (last.name, last.switches) == ("host-2048", ("leaf-128",))
    fabric = inventory.fabric()
    assert fabric is not None
    assert (fabric.hosts, fabric.devices_per_host, fabric.hosts_per_leaf) == (2048, 8, 16)
    assert fabric.profile.name == "h100-sxm-80gb"


def test_a_deeper_tree() -> None:
    deep = SHORT.replace("16}", "16, hosts_per_spine: 256, hosts_per_core: 1024}")
    assert read(deep).hosts[300].switches == ("core-1", "spine-2", "leaf-19")


def test_a_list_of_hosts_that_differ() -> None:
    inventory = read(LISTED)
    assert [host.name for host in inventory.with_devices(8)] == ["node-08", "node-09", "node-10"]
    assert inventory.left_out(8) == {
        "node-11": "has 7 of the 8 devices needed",
        "node-12": "is drained",
        "node-13": "is a100-sxm-80gb, and 3 others are h100-sxm-80gb",
    }
    assert "node-11" not in inventory.left_out(4), "it is as good as any for 4 ranks"
    fabric = inventory.fabric(8)
    assert fabric is not None
    assert (fabric.hosts, fabric.profile.inter_host.bytes_per_s) == (3, 25e9)


def test_a_profile_beside_the_inventory(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ndevice: cuda\nmemory_bytes: 1000\nflops: {float32: 1.0, bfloat16: 2.0}\n"
        "memory_bytes_per_s: 1.0\n"
        "intra_host: {kind: pcie5, bytes_per_s: 1.0, latency_s: 1e-6}\n"
        "inter_host: {kind: ethernet, bytes_per_s: 1.0, latency_s: 1e-6}\n"
    )
    path = tmp_path / "hosts.yaml"
    path.write_text("{profile: mine.yaml, hosts: 1, devices_per_host: 2}")
    assert read_inventory(path).hosts[0].device_bytes == 1000


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("n[08-11]-x", ["n08-x", "n09-x", "n10-x", "n11-x"]),
        ("n8", ["n8"]),
        # What sinfo prints.
        ("node[1-4,7]", ["node1", "node2", "node3", "node4", "node7"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1-2],b07", ["a1", "a2", "b07"]),
    ],
)
def test_names_are_read_as_slurm_writes_them(name: str, names: list[str]) -> None:
    text = f'{{profile: h100-sxm-80gb, devices_per_host: 8, hosts: [{{name: "{name}"}}]}}'
    assert [host.name for host in read(text).hosts] == names


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["must be a mapping", "an empty file", "h100-sxm-80gb"]),
        (SHORT.replace("hosts:", "host:"), ["hosts.yaml:1: host", "did you mean hosts?"]),
        (SHORT.replace("2048", "0"), ["hosts: must be at least 1, got 0"]),
        (SHORT.replace("h100-sxm-80gb", "h100-sxm-80g"), ["did you mean h100-sxm-80gb?"]),
        (
            SHORT.replace("16}", "16, hosts_per_spine: 100}"),
            ["hosts_per_spine: must be a multiple of hosts_per_leaf (16), got 100", "to 96"],
        ),
        (SHORT.replace("_leaf: 16", "_spine: 16"), ["with hosts_per_leaf", "rename this key"]),
        (
            SHORT.replace("16}", "16, overrides: {memory_bytes: 0, intra_host: {knd: x}}}"),
            ["has 2 problems", "overrides.memory_bytes", "overrides.intra_host.knd", "kind?"],
        ),
        (SHORT.replace("h100-sxm-80gb", "no.yaml"), ["profile: must be a profile that can be"]),
        (LISTED.replace("node-11", "node-10"), ["name of one host, got 'node-10'"]),
        (LISTED.replace("[08-10]", "[10-08]"), ["hosts[0].name", "an ascending range", "n[001-"]),
        (LISTED.replace("[08-10]", "[8"), ["hosts[0].name", "a closing bracket for each opening"]),
        (LISTED.replace("[08-10]", "8]"), ["hosts[0].name", "matching brackets"]),
        (LISTED.replace("[08-10]", "[a-b]"), ["hosts[0].name", "ranges of numbers in brackets"]),
        (LISTED.replace("[08-10]", "[1-9999][1-9999]"), ["hosts[0].name", "at most 1,000,000"]),
        (LISTED.replace("node-[08-10]", ""), ["hosts[0].name", "a name, or a list of names"]),
        (LISTED.replace("drained", "drain"), ["hosts[2].state", "did you mean drained?"]),
        (LISTED.replace("devices_per_host: 8\n", ""), ["hosts[0].devices", "devices_per_host"]),
        (
            LISTED.replace("profile: h100-sxm-80gb\n", ""),
            ["hosts[0].profile: must be given", "overrides: must be given with profile"],
        ),
        (
            LISTED.replace("devices: 7", "devices: -7").replace("drained", "x"),
            ["has 2 problems", "hosts[1].devices", "hosts[2].state"],
        ),
        (
            LISTED.replace("25e9}", "25e9}, memory_bytes: 400e9").replace(
                "devices: 7", "price_per_gpu_hour: -1"
            ),
            [
                "has 2 problems",
                "hosts[1].price_per_gpu_hour: must be at least 0, got -1",
                "overrides.memory_bytes: must be a whole number (at least 1), got 400000000000.0",
                "set memory_bytes to 400000000000",
            ],
        ),
        (
            SHORT.replace("profile", "gpu").replace("devices_per_host", "gpus"),
            ["did you mean profile?", "did you mean devices_per_host?"],
        ),
        (
            "{profile: h100-sxm-80gb, hosts: [n1, {name: n2, gpus: 8, rack: r1}]}",
            [
                "hosts[0]: must be key: value pairs, got 'n1'\n    fix: write it as {name: n1}",
                "did you mean hosts[1].devices?",
                "did you mean hosts[1].switches?",
            ],
        ),
        (
            SHORT.replace("16}", "16, memory_bytes: 400e9, intra_host: {kind: pcie5}}"),
            [
                "memory_bytes: belongs to the profile\n",
                "fix: write overrides: {memory_bytes: 400000000000}",
                "fix: write overrides: {intra_host: {…}}",
            ],
        ),
        (
            LISTED.replace("devices: 7", "power_w: 500"),
            ["hosts[1].power_w: belongs to the profile of the host", "in hosts[1].profile"],
        ),
    ],
)
def test_all_problems_are_reported_with_their_place(text: str, parts: list[str]) -> None:
    said = refused(text)
    for part in parts:
        assert part in said


def test_the_price_of_a_host_has_priority_over_that_of_all() -> None:
    priced = LISTED.replace("devices_per_host: 8", "devices_per_host: 8\nprice_per_gpu_hour: 2.5")
    hosts = read(priced.replace("devices: 7", "price_per_gpu_hour: 4"))
    prices = {host.name: host.price_per_gpu_hour for host in hosts.hosts}
    assert (prices["node-08"], prices["node-11"]) == (2.5, 4)
    assert mean_price(hosts, ["node-10", "node-11"]) == 3.25
    assert mean_price(read(LISTED), ["node-10"]) is None
    assert mean_price(read(LISTED.replace("devices: 7", "price_per_gpu_hour: 4")), prices) is None
    short = read(SHORT.replace("16}", "16, price_per_gpu_hour: 2}"))
    assert mean_price(short, ["host-0001"]) == 2


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_inventory(tmp_path / "none.yaml")


BLOCKS = """\
{profile: b200-sxm-180gb, hosts: 72, devices_per_host: 4, hosts_per_nvlink_block: 18,
 hosts_per_leaf: 36}
"""
LISTED_BLOCKS = """\
profile: b200-sxm-180gb
devices_per_host: 4
hosts:
  - {name: "a[1-3]", switches: [leaf-1], nvlink_block: rack-1}
  - {name: a4, switches: [leaf-1], nvlink_block: rack-1, devices: 3}
  - {name: "b[1-2]", switches: [leaf-2], nvlink_block: rack-2}
  - {name: c1, switches: [leaf-2]}
"""


def test_nvlink_blocks_in_the_short_form() -> None:
    inventory = read(BLOCKS)
    assert (inventory.hosts[17].nvlink_block, inventory.hosts[18].nvlink_block) == (
        "nvlink-block-1",
        "nvlink-block-2",
    )
    fabric = inventory.fabric()
    assert fabric is not None
    assert (fabric.blocks, fabric.hosts_per_block) == ((18,) * 4, 18)
    assert fabric.block_link == fabric.profile.intra_host, "NVSwitch gives the whole rate"
    assert tree_of(inventory.hosts)["host-37"] == ("leaf-2", "nvlink-block-3")


def test_nvlink_blocks_in_a_list() -> None:
    inventory = read(LISTED_BLOCKS)
    assert inventory.blocks(4) == (3, 2, 1), "a4 lost a device, and c1 is in none"
    assert inventory.blocks(3) == (4, 2, 1)
    assert tree_of(inventory.hosts)["c1"] == ("leaf-2", "c1")


def test_the_link_of_a_block_can_be_overridden() -> None:
    slower = "hosts_per_leaf: 36, overrides: {intra_block: {bytes_per_s: 450e9}}}"
    fabric = read(BLOCKS.replace("hosts_per_leaf: 36}", slower)).fabric()
    assert fabric is not None
    near, wide = fabric.profile.intra_host, fabric.block_link
    assert (wide.kind, wide.latency_s) == (near.kind, near.latency_s), "as it was"
    assert (near.bytes_per_s, wide.bytes_per_s) == (900e9, 450e9)
    assert fabric.profile.sources["intra_block.bytes_per_s"] == "overridden in hosts.yaml"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (BLOCKS.replace(": 18", ": 0"), ["hosts_per_nvlink_block: must be at least 1, got 0"]),
        (
            BLOCKS.replace("leaf: 36", "leaf: 32"),
            ["hosts.yaml:2: hosts_per_leaf", "a multiple of hosts_per_nvlink_block (18)", "to 18"],
        ),
        (
            BLOCKS.replace("b200-sxm-180gb", "l40s-48gb"),
            ["hosts.yaml:1: hosts_per_nvlink_block", "l40s-48gb has pcie4", "remove it"],
        ),
        (
            LISTED_BLOCKS.replace("leaf-2], nvlink_block: rack-2", "leaf-2], nvlink_block: rack-1"),
            ["hosts.yaml:6: hosts[2].nvlink_block", "hosts[0], which is in the same", "[leaf-1]"],
        ),
        (
            LISTED_BLOCKS.replace("devices: 3", "profile: h200-sxm-141gb"),
            ["hosts.yaml:5: hosts[1].nvlink_block", "with the devices of hosts[0]", "b200-sxm"],
        ),
        (
            LISTED_BLOCKS.replace("devices: 3", "profile: l40s-48gb"),
            ["has 2 problems", "l40s-48gb has pcie4 inside a host", "with the devices of hosts[0]"],
        ),
    ],
)
def test_impossible_blocks_are_reported_with_their_place(text: str, parts: list[str]) -> None:
    said = refused(text)
    for part in parts:
        assert part in said
