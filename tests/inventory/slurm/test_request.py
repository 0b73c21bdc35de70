"""The topology that a job requests from Slurm."""

import pytest

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory, Plan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.profiles import load_profile
from orchestrator.inventory.slurm.request import TopologyRequest, request_of, requested
from orchestrator.inventory.slurm.topology import Topology

PROFILE = load_profile("h100-sxm-80gb")
LEAVES = {f"n{i}": ("core", f"leaf{i // 4}") for i in range(16)}
BLOCKS = {f"n{i}": f"block{i // 8}" for i in range(16)}
TREE = Topology(kind="tree", switches=LEAVES)
BLOCK = Topology(kind="block", blocks=BLOCKS)


def inventory(**of: object) -> Inventory:
    """16 hosts x 8 devices; `of` has some that are not free, by name."""
    return Inventory(
        hosts=tuple(
            Host(name=name, devices=8, profile=PROFILE, state="busy" if name in of else "free")
            for name in LEAVES
        )
    )


def plan(*hosts: str, profile: str | None = PROFILE.name) -> Plan:
    return Plan(
        mesh=Mesh(dp_shard=8 * len(hosts)),
        micro_batch_size=1,
        gradient_accumulation=1,
        hosts=hosts,
        ranks_per_host=8,
        memory=Memory(peak_bytes=1, items={}),
        profile=profile,
    )


@pytest.mark.parametrize(
    ("hosts", "spares", "switches"),
    [
        (("n0", "n1"), 0, 1),
        (("n0", "n1", "n2", "n3"), 0, 1),
        (("n0", "n1", "n2", "n3"), 1, 2),
        (("n0", "n1", "n2", "n3", "n4", "n5"), 2, 2),
        (("n0", "n4"), 0, 2),
        (("n0", "n4", "n8", "n12"), 0, None),
        (tuple(f"n{i}" for i in range(13)), 0, None),
    ],
)
def test_the_request_has_as_many_leaves_as_plan_and_spares_need(
    hosts: tuple[str, ...], spares: int, switches: int | None
) -> None:
    found = request_of(plan(*hosts), inventory(), TREE, spares)
    assert found == TopologyRequest(switches=switches)


def test_leaves_whose_hosts_are_busy_hold_no_spares() -> None:
    busy = inventory(n4=1, n5=1, n6=1, n8=1, n9=1, n10=1)
    assert request_of(plan("n0", "n1", "n2", "n3"), busy, TREE, 4).switches == 2
    assert request_of(plan("n0", "n1", "n2", "n3"), busy, TREE, 5).switches == 3


def test_hosts_without_a_known_switch_request_no_topology() -> None:
    partly = Topology(kind="tree", switches={"n0": ("leaf0",), "n1": ("leaf0",)})
    assert request_of(plan("n0", "n1"), inventory(), partly, 0).switches is None
    assert request_of(plan("n0", "n1"), inventory(), Topology(), 0) == TopologyRequest()


@pytest.mark.parametrize(
    ("hosts", "spares", "segment"),
    [
        (("n0", "n1", "n2", "n3"), 0, 4),
        (("n0", "n1", "n2", "n3"), 2, 6),
        (("n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"), 1, None),
        (("n0", "n1", "n2", "n3", "n8", "n9"), 0, 2),
        (("n0", "n1", "n8", "n9"), 1, None),
        (("n0",), 0, None),
        (("n0", "elsewhere"), 0, None),
    ],
)
def test_a_segment_divides_the_hosts_and_every_block_of_the_plan(
    hosts: tuple[str, ...], spares: int, segment: int | None
) -> None:
    found = request_of(plan(*hosts), inventory(), BLOCK, spares)
    assert found == TopologyRequest(segment=segment)


def test_hosts_of_another_kind_are_excluded() -> None:
    other = Host(name="a1", devices=8, profile=load_profile("a100-sxm-80gb"))
    small = Host(name="a2", devices=4, profile=load_profile("a100-sxm-80gb"))
    unknown = Host(name="a3", devices=8)
    mixed = Inventory(hosts=(*inventory().hosts, other, small, unknown))
    found = request_of(plan("n0", "n1"), mixed, Topology(), 0)
    assert found.exclude == ("a1", "a3")
    assert request_of(plan("n0", profile=None), mixed, Topology(), 0).exclude == ()


def test_options_in_the_spec_win() -> None:
    asks = TopologyRequest(switches=2, segment=None, exclude=("n5", "n6"))
    assert requested(SlurmSpec(), asks) == SlurmSpec(switches="2", exclude="n[5-6]")
    assert requested(SlurmSpec(exclude="n[1-2],n6"), asks).exclude == "n[1-2,5-6]"
    assert requested(SlurmSpec(switches="1@10:00"), asks).switches == "1@10:00"
    assert requested(SlurmSpec(nodelist="n[1-4]"), asks).switches is None
    assert requested(SlurmSpec(sbatch_args=("--switches=4",)), asks).switches is None
    segment = TopologyRequest(segment=4)
    assert requested(SlurmSpec(), segment).segment == 4
    assert requested(SlurmSpec(segment=2), segment).segment == 2
    assert requested(SlurmSpec(sbatch_args=("--segment=8",)), segment).segment is None
    assert requested(SlurmSpec(), TopologyRequest()) == SlurmSpec()
