"""Plans for hosts in NVLink blocks, which allow tensor-parallel groups of several hosts."""

from typing import Any

import pytest

from orchestrator.contract.codec import decode
from orchestrator.contract.plan import Plan, places
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.errors import PlanError
from orchestrator.inventory.file import load_inventory
from orchestrator.inventory.hosts import Inventory, tree_of
from orchestrator.plan.planner import plan
from orchestrator.plan.show.explain import describe_plan, plan_json

MODEL = PRESETS["llama3-8b"]


def hosts(*, per_block: int | None = 3, count: int = 12, **more: Any) -> Inventory:
    """Hosts of two devices each, six hosts per leaf."""
    blocks = f", hosts_per_nvlink_block: {per_block}" if per_block else ""
    keys = f"hosts: {count}, devices_per_host: 2, hosts_per_leaf: 6{blocks}"
    return load_inventory(f"{{profile: b200-sxm-180gb, {keys}}}", "a test")


def job(count: int = 4, **parallel: Any) -> JobSpec:
    spec: JobSpec = decode(
        JobSpec,
        {
            "name": "wide",
            "model": {"preset": "llama3-8b"},
            "data": {"files": "x", "sequence_length": 8192},
            "train": {"steps": 1, "global_batch_size": 16, "dtype": "bfloat16"},
            "parallel": parallel,
            "cluster": {"hosts": count, "gpus_per_host": 2},
        },
    )
    return spec


def refusal(spec: JobSpec, inventory: Inventory) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(spec, inventory, MODEL)
    return caught.value


def levels(found: Plan) -> dict[str, str]:
    return {one.axis: one.level for one in found.communication}


def test_tp_is_as_wide_as_a_block_holds_and_its_groups_stay_in_one() -> None:
    inventory = hosts()
    found = plan(job(tp=4), inventory, MODEL)
    blocks = tree_of(inventory.hosts)
    groups: dict[int, set[Any]] = {}
    for one in places(found, found.hosts):
        groups.setdefault(one.rank // 4, set()).add(blocks[one.host])
    assert [len(those) for those in groups.values()] == [1, 1]
    assert levels(found)["tp"] == "nvlink block"
    assert found.placement is not None
    assert found.placement.levels == ("host", "nvlink block", "leaf")
    assert plan_json(found)["placement"]["levels"] == ["host", "nvlink block", "leaf"]
    shown = describe_plan(found)
    assert "out of an NVLink block" in shown
    assert "each group takes 2 hosts of one NVLink block" in shown


def test_a_search_also_tries_wide_groups() -> None:
    """For meshes without pp and cp, the search tries four degrees of tp. Without blocks it tries
    two."""
    fixed = {"pp": 1, "cp": 1, "dp_replicate": 1}
    inside, wide = (
        {found.mesh.tp, *(other.mesh.tp for other in found.alternatives)}
        for found in (plan(job(**fixed), hosts(per_block=n), MODEL) for n in (None, 6))
    )
    assert (inside, wide) == ({1, 2}, {1, 2, 4, 8})


def test_without_blocks_groups_of_several_hosts_are_refused() -> None:
    said = refusal(job(tp=4), hosts(per_block=None)).message
    assert "tp=4: must divide the 2 ranks of a host, so that no tensor-parallel group spans" in said


def test_groups_larger_than_a_block_are_refused_with_the_size_of_a_block() -> None:
    said = refusal(job(tp=8), hosts())
    assert (
        "parallel.tp=8: must divide the 2 ranks of a host, or be a multiple of them that takes"
        " whole hosts of one NVLink block, at most 3 hosts x 2 devices; a group takes 4 hosts, the"
        " blocks have room for 0, 1 needed [tp-near]"
    ) in said.message
    assert "--set parallel.tp=4" in said.fix
    few = refusal(job(10, tp=4, dp_replicate=1), hosts()).message
    assert "room for 4, 5 needed" in few, "a host of each block is left over"
    uneven = refusal(job(6, tp=3), hosts()).message
    assert "tp=3: must divide the 2 ranks of a host, or be a multiple of them" in uneven


def test_the_reason_against_wider_groups_is_shown() -> None:
    found = plan(job(8), hosts(per_block=2), MODEL)
    (why,) = [one for one in found.rejected if one.family.startswith("tp=8")]
    assert "one NVLink block, at most 2 hosts x 2 devices" in why.constraint


@pytest.mark.parametrize("parallel", [{"tp": 1}, {"tp": 2, "cp": 4}, {"tp": 2, "pp": 2}])
def test_traffic_that_stays_in_a_block_is_faster(parallel: dict[str, int]) -> None:
    """Sharded weights, keys and values, and hidden states use NVLink."""
    fixed = {"dp_replicate": 1, "pp": 1, "cp": 1} | parallel
    near, far = (plan(job(**fixed), hosts(per_block=n), MODEL) for n in (6, None))
    assert set(levels(near).values()) <= {"host", "nvlink block"}
    assert "leaf" in levels(far).values()
    assert near.time is not None
    assert far.time is not None
    assert near.time.step_s < far.time.step_s
