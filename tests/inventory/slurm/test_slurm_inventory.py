"""Slurm's nodes as an inventory."""

from pathlib import Path

import pytest

from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.errors import SpecError
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.slurm.gpus import gpu_table
from orchestrator.inventory.slurm.inventory import Use, inventory_of, use_of
from orchestrator.inventory.slurm.nodes import Node, parse_nodes
from orchestrator.inventory.slurm.topology import Topology, parse_topology
from tests.inventory.slurm.captured import captured


def typed(use: Use | None = None) -> Inventory:
    nodes = parse_nodes(captured("22.05/typed-nodes.txt"))
    topology = parse_topology(captured("22.05/typed-topology.txt"))
    return inventory_of(nodes, topology, gpu_table({}), use or Use())


def test_hosts_have_devices_profiles_and_switches() -> None:
    hosts = {host.name: host for host in typed().hosts}
    h100, a100, cpu = hosts["n01"], hosts["a-1-1"], hosts["c1"]
    assert h100.profile is not None
    assert a100.profile is not None
    assert (h100.devices, h100.profile.name) == (8, "h100-sxm-80gb")
    assert h100.device_bytes == h100.profile.memory_bytes
    assert a100.profile.name == "a100-sxm-80gb"
    assert h100.switches == ("core", "pod1", "leaf1")
    assert (cpu.devices, cpu.profile) == (0, None)


def test_a_job_gets_hosts_of_one_kind() -> None:
    found = typed().with_devices(8)
    assert len(found) == 8
    assert len({host.profile.name for host in found if host.profile}) == 1


def test_the_spec_excludes_hosts_with_a_reason() -> None:
    slurm = SlurmSpec(exclude="n[01-02]", nodelist="n[01-04]", constraint="ib")
    found = typed(use_of(ClusterSpec(backend="slurm", hosts=2, gpus_per_host=8, slurm=slurm)))
    reasons = {host.name: host.reason for host in found.hosts}
    assert reasons["n01"] == "by the spec"
    assert reasons["n03"] == ""
    assert reasons["n05"] == "not in the spec's nodelist"
    assert [host.name for host in found.with_devices(8)] == ["n03", "n04"]
    assert found.left_out(8)["n01"] == "is excluded (by the spec)"
    assert found.left_out(8)["n05"] == "is not selected (not in the spec's nodelist)"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"constraint": "ib"}, "is not selected (without the feature ib)"),
        ({"gpu_type": "b200"}, "is not selected (has GPUs of type "),
    ],
)
def test_a_node_that_does_not_fit_is_not_called_drained(keys: dict[str, str], said: str) -> None:
    found = typed(use_of(ClusterSpec(backend="slurm", slurm=SlurmSpec(**keys))))  # type: ignore[arg-type]
    assert any(why.startswith(said) for why in found.left_out(8).values())


def test_hosts_with_other_devices_than_the_spec_names_are_not_selected() -> None:
    found = typed(use_of(ClusterSpec(backend="slurm", gpu="a100-sxm-80gb")))
    assert {host.profile.name for host in found.with_devices(8) if host.profile} == {
        "a100-sxm-80gb"
    }
    assert found.left_out(8)["n01"] == (
        "is not selected (is h100-sxm-80gb, but cluster.gpu is a100-sxm-80gb)"
    )


def test_if_slurm_does_not_name_the_gpus_the_spec_decides() -> None:
    untyped = [node for node in parse_nodes(captured("22.05/nodes.txt")) if node.gpus]
    assert untyped

    def kinds(use: Use) -> set[str | None]:
        hosts = inventory_of(untyped, Topology(), gpu_table({}), use).hosts
        return {host.profile.name if host.profile else None for host in hosts}

    assert kinds(Use()) == {None}
    assert kinds(Use(profile="l40s-48gb")) == {"l40s-48gb"}


def test_an_excluded_host_is_excluded_even_if_drained() -> None:
    use = Use(excluded={"n02": "until tomorrow: 2 strikes"})
    assert typed(use).left_out(8)["n02"] == "is excluded (until tomorrow: 2 strikes)"


@pytest.mark.parametrize(
    ("constraint", "free"),
    [("h100&ib", 8), ("h100|a100", 16), ("a100&ib", 0), ("80gb,a100", 8), ("[a|b]", 18)],
)
def test_constraints_of_features(constraint: str, free: int) -> None:
    found = typed(Use(constraint=constraint))
    assert sum(host.state == "free" for host in found.hosts) == free


def test_without_gpus_hosts_have_as_many_places_as_cpus() -> None:
    nodes = parse_nodes(captured("25.05/nodes.txt"))
    (host,) = inventory_of(nodes, Topology(), gpu_table({}), Use()).hosts
    assert host.profile is not None
    assert (host.devices, host.profile.name, host.device_bytes) == (64, "cpu", None)


def test_ranks_on_cpus_of_hosts_that_have_gpus() -> None:
    host = typed(Use(on_cpus=True)).hosts[0]
    assert host.profile is not None
    assert (host.devices, host.profile.name) == (64, "cpu")


def test_fake_gpus_are_places_for_ranks_on_cpus() -> None:
    node = Node(name="n", state="IDLE", cpus=2, gpus=4, gpu_type="fake", gpus_used=0)
    (host,) = inventory_of([node], Topology(), gpu_table({}), Use()).hosts
    assert host.profile is not None
    assert (host.devices, host.profile.name, host.device_bytes) == (4, "cpu", None)


@pytest.mark.parametrize(
    ("kind", "features", "profile"),
    [
        ("h100", (), "h100-sxm-80gb"),
        ("NVIDIA_H100_80GB_HBM3", (), "h100-sxm-80gb"),
        ("nvidia_h100_pcie", (), "h100-pcie-80gb"),
        ("nvidia_h100_nvl", (), None),
        ("nvidia_gb200", (), "gb200-186gb"),
        ("nvidia_b300_sxm6_ac", (), "b300-sxm-270gb"),
        ("amd_instinct_mi300x_oam", (), "mi300x-192gb"),
        ("mi300x", (), "mi300x-192gb"),
        ("nvidia_a100-sxm4-40gb", (), "a100-sxm-40gb"),
        ("nvidia_a100_80gb_pcie", (), None),
        ("a100", ("a100", "80gb"), "a100-sxm-80gb"),
        ("a100", (), None),
        (None, ("gpu", "h100"), "h100-sxm-80gb"),
        ("nvidia_geforce_rtx_4090", (), "rtx4090-24gb"),
        ("mi250", (), None),
        (None, (), None),
    ],
)
def test_profiles_by_type_and_feature(
    kind: str | None, features: tuple[str, ...], profile: str | None
) -> None:
    found = gpu_table({}).profile_of(kind, features)
    assert (found.name if found else None) == profile


def test_a_sites_own_table_is_tried_first(tmp_path: Path) -> None:
    table = tmp_path / "gpus.yaml"
    table.write_text("gpus: [{type: h100, profile: h200-sxm-141gb}]")
    found = gpu_table({"NDCTL_SLURM_GPUS": str(table)})
    assert (profile := found.profile_of("h100", ())) is not None
    assert profile.name == "h200-sxm-141gb"
    assert (other := found.profile_of("l40s", ())) is not None
    assert other.name == "l40s-48gb"


def test_a_mistake_in_the_table_has_its_place(tmp_path: Path) -> None:
    table = tmp_path / "gpus.yaml"
    table.write_text("gpus:\n  - {type: '(', profile: h100-sxm-80gb}\n  - {profile: h100}\n")
    with pytest.raises(SpecError) as caught:
        gpu_table({"NDCTL_SLURM_GPUS": str(table)})
    said = str(caught.value)
    assert f"{table}:2: gpus[0].type" in said
    assert f"{table}:3: gpus[1]" in said
    assert "h100-sxm-80gb" in said
