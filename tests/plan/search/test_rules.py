"""Search and refusal agree on the table of rules, and every rule names its keys and a fix."""

import re
from typing import Any

import pytest
from hypothesis import event, given, settings
from msgspec.structs import replace

from orchestrator.contract.mesh import AXES
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.planner import plan
from orchestrator.plan.search.admitted import checkpointings, micro_sizes, pipelines, reshardings
from orchestrator.plan.search.edits import value_at
from orchestrator.plan.search.meshes import meshes
from orchestrator.plan.search.rule import Hosts, Request, Rule
from orchestrator.plan.search.rules import RULES, first_refusal, refusals
from orchestrator.plan.search.search_space import Space
from orchestrator.plan.setup import setup_of
from tests.plan.search.spaces import DEEP, hosts_of, space_of, spaces

NAMES = {rule.name for rule in RULES}


def asked(spec: JobSpec, shape: ModelShape, inventory: Inventory) -> Request:
    return Request(spec, shape, Hosts.of(spec, inventory))


@settings(deadline=None, max_examples=30)
@given(space=spaces)
def test_a_mesh_that_the_table_admits_can_be_set_up(space: Space) -> None:
    """For at least one schedule and micro batch, memory and time can be computed with every choice
    of recomputation and resharding."""
    for mesh in meshes(space.spec, space.world):
        if first_refusal(space.request, mesh) is not None:
            continue
        able = pipelines(space.request, mesh)
        assert able
        for pipeline in able:
            sizes = micro_sizes(space.spec, mesh, pipeline)
            assert sizes
            kind = checkpointings(space.spec, mesh, pipeline)[0]
            setup = setup_of(space.spec, space.shape, mesh, sizes[0], kind, pipeline)
            for reshard in reshardings(space.spec, mesh, pipeline):
                option = space.option(space.peak(replace(setup, reshard=reshard)))
                assert option.memory.peak_bytes > 0
                assert option.time.step_s > 0
                assert option.setup.global_batch_size == space.spec.train.global_batch_size


@settings(deadline=None, max_examples=30)
@given(space=spaces)
def test_a_mesh_is_pruned_if_and_only_if_it_is_refused_with_a_rule_of_the_table(
    space: Space,
) -> None:
    inventory = hosts_of(space)
    for mesh in meshes(space.spec, space.world):
        fixed: dict[str, Any] = dict(zip(AXES, mesh.degrees, strict=True))
        spec = replace(space.spec, parallel=replace(space.spec.parallel, **fixed))
        found = refusals(asked(spec, space.shape, inventory), mesh)
        pruned = first_refusal(space.request, mesh)
        wide = ", tp wider than a host" if mesh.tp > spec.cluster.gpus_per_host else ""
        event(("refused" if found else "admitted") + wide)
        assert (pruned is not None) == bool(found), mesh
        assert {one.rule for one in found} <= NAMES
        if pruned is not None:
            assert pruned[0].name in {one.rule for one in found}


@settings(deadline=None, max_examples=20)
@given(space=spaces)
def test_a_spec_of_one_refused_mesh_has_no_plan_and_names_the_rules(space: Space) -> None:
    inventory = hosts_of(space)
    for mesh in list(meshes(space.spec, space.world))[:3]:
        fixed: dict[str, Any] = dict(zip(AXES, mesh.degrees, strict=True))
        spec = replace(space.spec, parallel=replace(space.spec.parallel, **fixed))
        broken = refusals(asked(spec, space.shape, inventory), mesh)
        if not broken:
            continue
        assert spec.model.config is not None
        with pytest.raises(PlanError) as caught:
            plan(spec, inventory, spec.model.config)
        assert re.findall(r"\[([\w-]+)\]$", caught.value.message, re.MULTILINE) == [
            one.rule for one in broken
        ]
        assert caught.value.fix


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_names_keys_of_the_spec_and_a_fix(rule: Rule) -> None:
    space = space_of(DEEP, {}, {"global_batch_size": 8}, {"hosts": 1, "gpus_per_host": 4}, 1)
    spec = replace(space.spec, model=replace(space.spec.model, lora=LoraSpec()))
    for path in rule.reads:
        value_at(spec, path)
    assert rule.fix
    assert bool(rule.axis) == (rule.scope != "job")


def test_no_two_rules_have_one_name() -> None:
    assert len(NAMES) == len(RULES)


def test_a_schedule_that_auto_cannot_choose_is_refused() -> None:
    """With three stages per rank, only interleaved 1F1B is possible, which needs equal rounds."""
    parallel = {"pp": 2, "dp_replicate": 1, "cp": 1, "tp": 1, "pipeline": {"stages_per_rank": 3}}
    train = {"global_batch_size": 7, "micro_batch_size": 1}
    space = space_of(DEEP, parallel, train, {"hosts": 1, "gpus_per_host": 2}, 1 << 40)
    with pytest.raises(PlanError, match="interleaved_1f1b cannot run the micro batches") as caught:
        plan(space.spec, hosts_of(space), DEEP)
    assert "[pp-micro-batches]" in caught.value.message
