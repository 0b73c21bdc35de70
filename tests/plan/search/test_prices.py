"""What fixed keys cost."""

import pytest
from hypothesis import event, given, settings
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.plan.search.best import search
from orchestrator.plan.search.edits import Edits, apply, free_keys
from orchestrator.plan.search.prices import LEAST, price_list
from orchestrator.plan.search.search_space import Space
from tests.plan.search.spaces import DEEP, MIB, space_of, spaces


def fastest_s(space: Space, edits: Edits) -> float | None:
    """Seconds of a step of the fastest plan with `edits`, by the whole search."""
    try:
        spec = apply(space.spec, edits)
    except Invalid:
        return None
    options = search(replace(space, spec=spec), "throughput").options
    return min((option.time.step_s for option in options), default=None)


@settings(deadline=None, max_examples=20)
@given(space=spaces)
def test_a_price_is_what_a_plan_without_the_keys_gains(space: Space) -> None:
    step_s = fastest_s(space, {})
    if step_s is None:
        event("nothing fits")
        return
    found = price_list(space, step_s, 0.0)
    event(f"{len(found)} prices")
    for one in found:
        assert fastest_s(space, one.edits) == pytest.approx(one.option.time.step_s)
        assert step_s / one.option.time.step_s - 1 >= LEAST * (1 - 1e-9)
    named = [one.edits for one in found]
    for path, value in free_keys(space.spec).items():
        without = fastest_s(space, {path: value})
        if {path: value} not in named and without is not None:
            assert step_s / without - 1 < LEAST * (1 + 1e-6), path


def test_fixed_degrees_have_a_price_together() -> None:
    """Each degree alone follows from the others."""
    parallel = {"pp": 4, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    cluster = {"hosts": 2, "gpus_per_host": 4}
    space = space_of(DEEP, parallel, {"global_batch_size": 16}, cluster, 80_000 * MIB)
    step_s = fastest_s(space, {})
    assert step_s is not None
    dearest = max(price_list(space, step_s, 0.0), key=lambda one: len(one.edits))
    assert dearest.edits == {f"parallel.{axis}": "auto" for axis in parallel}


def test_float8_is_priced_but_marked_because_it_changes_the_numbers() -> None:
    model = {**DEEP, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
    train = {"global_batch_size": 16}
    cluster = {"hosts": 1, "gpus_per_host": 8}
    space = space_of(model, {}, train, cluster, 80_000 * MIB)
    space = replace(space, spec=apply(space.spec, {"data.sequence_length": 2048}))
    step_s = fastest_s(space, {})
    assert step_s is not None
    prices = price_list(space, step_s, 0.0)
    assert {"train.float8": True, "train.compile": True} in [one.edits for one in prices]
    assert all(one.changes_numbers == ("train.float8" in one.edits) for one in prices)
