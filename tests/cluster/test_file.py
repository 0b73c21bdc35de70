"""Inventories that a person wrote."""

from pathlib import Path

import pytest

from orchestrator.cluster.file import load_inventory, names_of, read_inventory
from orchestrator.cluster.inventory import Inventory
from orchestrator.errors import SpecError

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


def test_a_range_of_names_keeps_its_zeros() -> None:
    assert list(names_of("n[08-11]-x")) == ["n08-x", "n09-x", "n10-x", "n11-x"]
    assert list(names_of("n8")) == ["n8"]


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
        (SHORT.replace("_leaf: 16", "_spine: 16"), ["with hosts_per_leaf", "call it"]),
        (
            SHORT.replace("16}", "16, overrides: {memory_bytes: 0, intra_host: {knd: x}}}"),
            ["has 2 problems", "overrides.memory_bytes", "overrides.intra_host.knd", "kind?"],
        ),
        (SHORT.replace("h100-sxm-80gb", "no.yaml"), ["profile: must be a profile that can be"]),
        (LISTED.replace("node-11", "node-10"), ["name of one host, got 'node-10'"]),
        (LISTED.replace("[08-10]", "[10-08]"), ["a range that goes up", "node-[001-016]"]),
        (LISTED.replace("drained", "drain"), ["hosts[2].state", "did you mean drained?"]),
        (LISTED.replace("devices_per_host: 8\n", ""), ["hosts[0].devices", "devices_per_host"]),
        (
            LISTED.replace("profile: h100-sxm-80gb\n", ""),
            ["hosts[0].profile: must be given", "overrides: must be with profile"],
        ),
        (
            LISTED.replace("devices: 7", "devices: -7").replace("drained", "x"),
            ["has 2 problems", "hosts[1].devices", "hosts[2].state"],
        ),
    ],
)
def test_all_that_is_wrong_is_said_with_its_place(text: str, parts: list[str]) -> None:
    said = refused(text)
    for part in parts:
        assert part in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_inventory(tmp_path / "none.yaml")
