"""Any mesh beside the plan."""

from typing import Any

import pytest

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.plan.beside import Beside, beside, time_items
from orchestrator.plan.planner import plan
from orchestrator.plan.search.edits import apply
from orchestrator.plan.show.beside import beside_json, describe_beside
from tests.plan.search.spaces import DEEP, inventory_of, space_of

CLUSTER = {"hosts": 2, "gpus_per_host": 4}


def spec_of(parallel: Any) -> JobSpec:
    return space_of(DEEP, parallel, {"global_batch_size": 16}, CLUSTER, 1 << 40).spec


def asked(**degrees: int) -> Beside:
    spec = spec_of({})
    inventory = inventory_of(spec, None)
    fixed = apply(spec, {f"parallel.{axis}": degree for axis, degree in degrees.items()})
    return beside(plan(spec, inventory, DEEP), fixed, inventory, DEEP)


def test_a_mesh_that_can_run_has_its_best_settings_and_no_reason() -> None:
    found = asked(pp=2, tp=2)
    assert (found.mesh.pp, found.mesh.tp, found.reasons) == (2, 2, ())
    fixed = spec_of({"pp": 2, "tp": 2})
    best = plan(fixed, inventory_of(fixed, None), DEEP)
    assert found.time == best.time
    assert found.memory == best.memory


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [({"tp": 8}, "tp-near"), ({"pp": 3}, "world-size"), ({"dp_replicate": 8, "pp": 1}, "")],
)
def test_a_refused_mesh_has_every_reason_and_numbers_if_it_fills_the_hosts(
    degrees: dict[str, int], reason: str
) -> None:
    found = asked(**degrees)
    assert any(f"[{reason}]" in one for one in found.reasons) == bool(reason)
    assert (found.time is not None) == (found.mesh.world_size == 8)


def test_the_items_add_up_to_the_step() -> None:
    for degrees in ({"pp": 2, "tp": 2}, {"dp_shard": 8}, {"cp": 2, "tp": 4}):
        found = asked(**degrees)
        assert found.time is not None
        items = time_items(found.time, found.communication)
        assert sum(items.values()) == pytest.approx(found.time.step_s, rel=1e-3)


def test_text_and_json_name_the_reason_and_both_meshes() -> None:
    spec = spec_of({})
    inventory = inventory_of(spec, None)
    made = plan(spec, inventory, DEEP)
    other = beside(made, apply(spec, {"parallel.tp": 8}), inventory, DEEP)
    text = describe_beside(made, other)
    assert "cannot run" in text
    assert "[tp-near]" in text
    assert "peak" in text
    body = beside_json(made, other)
    assert body["beside"]["mesh"]["tp"] == Mesh(tp=8).tp
    assert set(body["items"]) == {"seconds", "bytes"}
