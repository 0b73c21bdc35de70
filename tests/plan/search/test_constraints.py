"""The quick constraints rule out what `refusals` refuses, and no more."""

from dataclasses import replace
from typing import Any

from hypothesis import event, given, settings

from orchestrator.contract.mesh import AXES
from orchestrator.plan.search.constraints import barrier, pipelines
from orchestrator.plan.search.degrees import meshes
from orchestrator.plan.search.refusals import refusals
from orchestrator.plan.search.search_space import Space
from tests.plan.search.spaces import hosts_of, spaces


@settings(deadline=None, max_examples=30)
@given(space=spaces)
def test_a_mesh_is_barred_if_it_is_refused_with_every_schedule(space: Space) -> None:
    spec, shape = space.spec, space.shape
    inventory = hosts_of(space)
    for mesh in meshes(spec, space.world):
        fixed: dict[str, Any] = dict(zip(AXES, mesh.degrees, strict=True))
        refused = all(
            refusals(
                replace(spec, parallel=replace(spec.parallel, **fixed, pipeline=pipeline)),
                inventory,
                shape,
                mesh,
            )
            for pipeline in pipelines(spec, shape, mesh.pp) or [spec.parallel.pipeline]
        )
        wide = ", tp wider than a host" if mesh.tp > spec.cluster.gpus_per_host else ""
        event(("refused" if refused else "taken") + wide)
        assert (barrier(spec, shape, mesh, space.fabric.blocks) is not None) == refused, mesh
