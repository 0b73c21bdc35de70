"""An inventory as a tree."""

import json
from pathlib import Path

import pytest

from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.inventory.file import load_inventory
from orchestrator.inventory.generate import regular, worn
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.local import gpu_of_ranks, local_inventory, this_machine
from orchestrator.inventory.show import describe_inventory, inventory_json
from tests.inventory.test_file import BLOCKS, LISTED, LISTED_BLOCKS, SHORT


def test_equal_switches_share_one_line() -> None:
    deep = SHORT.replace("16}", "16, hosts_per_spine: 256}")
    assert describe_inventory(load_inventory(deep, "x")).splitlines() == [
        "2048 hosts free, 16384 devices; each host has 8 x h100-sxm-80gb",
        "spine-1 … spine-8 (8)  256 hosts free each",
        "  leaf-1 … leaf-16 (16)  16 hosts free each  host-0001 … host-0256",
    ]


def test_nvlink_blocks_are_below_their_leaf_with_their_link() -> None:
    assert describe_inventory(load_inventory(BLOCKS, "x")).splitlines() == [
        "72 hosts free, 288 devices; each host has 4 x b200-sxm-180gb",
        "NVLink blocks: nvlink5, 900 GB/s per device and direction, 3.4 us",
        "leaf-1 … leaf-2 (2)  36 hosts free each",
        "  nvlink-block-1 … nvlink-block-2 (2)  18 hosts free each  host-01 … host-36",
    ]
    first = inventory_json(load_inventory(LISTED_BLOCKS, "x"))["hosts"][0]
    assert (first["switches"], first["nvlink_block"]) == (["leaf-1"], "rack-1")


def test_odd_hosts_are_named() -> None:
    assert describe_inventory(load_inventory(LISTED, "x")).splitlines() == [
        "6 hosts: 5 free, 1 drained, 47 devices; most hosts have 8 x h100-sxm-80gb",
        "spine-1  6 hosts: 5 free, 1 drained",
        "  leaf-1  4 hosts free  node-08 … node-11",
        "    node-11  7 x h100-sxm-80gb",
        "  leaf-2  2 hosts: 1 drained, 1 free  node-12 … node-13",
        "    node-12  drained",
        "    node-13  8 x a100-sxm-80gb",
    ]


def test_many_odd_hosts_are_counted() -> None:
    hosts = [
        Host(name=f"n{i}", devices=8, state="busy" if i < 10 else "free", switches=("leaf",))
        for i in range(30)
    ]
    said = describe_inventory(Inventory(hosts=tuple(hosts)))
    assert "n7  busy" in said
    assert "n8  busy" not in said
    assert "and 2 more that are not free or differ" in said


def test_a_large_worn_cluster_stays_readable_and_json_has_it_all() -> None:
    inventory = worn(regular(None, 4096, 8, (16, 256)), seed=1, share=0.002)
    assert len(describe_inventory(inventory).splitlines()) < 100
    found = json.loads(json.dumps(inventory_json(inventory)))
    assert len(found["hosts"]) == 4096
    assert sum(found["states"].values()) == 4096
    assert found["devices"] == sum(host.devices for host in inventory.hosts)
    assert found["hosts"][0]["switches"] == ["spine-1", "leaf-1"]


def test_json_has_the_hardware_and_leaves_out_how_it_is_calibrated() -> None:
    (profile,) = inventory_json(load_inventory(SHORT, "x"))["profiles"].values()
    assert profile["inter_host"]["bytes_per_s"] == 50e9
    assert "calibration" not in profile


def test_an_inventory_without_hosts_is_shown() -> None:
    assert describe_inventory(Inventory(hosts=())) == "no hosts"


def driver(folder: Path, *models: str) -> Path:
    for number, model in enumerate(models):
        (folder / str(number)).mkdir()
        (folder / str(number) / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 16\nGPU UUID: \t GPU-0\n"
        )
    return folder


def test_this_machine_is_identified_by_its_driver(tmp_path: Path) -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1"}
    found = this_machine(gpus, driver(tmp_path, *["NVIDIA H100 80GB HBM3"] * 2)).hosts[0]
    assert found.profile is not None
    assert (found.profile.name, found.devices) == ("h100-sxm-80gb", 2)
    assert found.device_bytes == found.profile.memory_bytes


def test_devices_that_differ_or_are_unknown_have_no_profile(tmp_path: Path) -> None:
    mixed = driver(tmp_path, "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")
    assert this_machine({"CUDA_VISIBLE_DEVICES": "0"}, mixed).hosts[0].profile is None


def test_a_machine_without_gpus_has_its_cpu_cores_as_places() -> None:
    found = this_machine({"CUDA_VISIBLE_DEVICES": ""}).hosts[0]
    assert found.profile is not None
    assert (found.profile.name, found.device_bytes) == ("cpu", None)
    assert found.devices >= 1


def test_ranks_on_gpus_of_this_machine_are_planned_for_these(tmp_path: Path) -> None:
    """Otherwise they are planned as CPU ranks, with micro batches of one sequence."""
    cluster = ClusterSpec(hosts=2, gpus_per_host=1)
    two = driver(tmp_path, *["NVIDIA H100 80GB HBM3"] * 2)
    gpu = gpu_of_ranks(cluster, {"CUDA_VISIBLE_DEVICES": "0,1"}, two)
    assert gpu is not None
    hosts = local_inventory(cluster, gpu=gpu).hosts
    assert [host.profile for host in hosts] == [gpu, gpu]
    assert [host.device_bytes for host in hosts] == [gpu.memory_bytes] * 2


@pytest.mark.parametrize("visible", ["", "0"])
def test_ranks_beyond_the_gpus_of_this_machine_run_on_cpus(tmp_path: Path, visible: str) -> None:
    cluster = ClusterSpec(hosts=1, spare_hosts=1, gpus_per_host=1)
    one = driver(tmp_path, "NVIDIA H100 80GB HBM3")
    assert gpu_of_ranks(cluster, {"CUDA_VISIBLE_DEVICES": visible}, one) is None
