"""The resources that pods use, computed as the scheduler does."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.inventory.kubernetes.pods import asked_for, taken
from orchestrator.inventory.kubernetes.quantities import quantity, words
from tests.inventory.kubernetes.objects import GPU, container, pod


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        (8, 8),
        ("63770m", Fraction(6377, 100)),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("2.", 2),
        ("500Gi", 500 * 2**30),
        ("1918193204Ki", 1918193204 * 2**10),
        ("1k", 1000),
        ("1M", 10**6),
        ("2Ei", 2**61),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("5n", Fraction(5, 10**9)),
        ("-1", -1),
        ("", 0),
        ("eight", 0),
        ("8x", 0),
    ],
)
def test_quantities_are_read_exactly(text: str, value: Fraction) -> None:
    assert quantity(text) == value


@given(st.integers(0, 10**12), st.sampled_from(["", "k", "M", "Ki", "Mi", "Gi"]))
def test_a_unit_multiplies(number: int, unit: str) -> None:
    assert quantity(f"{number}{unit}") == number * quantity(f"1{unit}")


def test_amounts_are_shown_with_suitable_units() -> None:
    assert words(quantity("1918193204Ki"), "memory") == "1829Gi"
    assert words(quantity("63770m"), "cpu") == "63.77"
    assert words(quantity("8"), GPU) == "8"


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        (pod("n", container(gpu="8")), 8),
        (pod("n", container(gpu="2"), container(gpu="1"), container(cpu="4")), 3),
        (pod("n", {"resources": {"limits": {GPU: "4"}}}), 4),
        (pod("n", {"resources": {"limits": {GPU: "4"}, "requests": {GPU: "2"}}}), 2),
        (pod("n", {}), 0),
        (pod("n", container(gpu="1"), init=[container(gpu="4"), container(gpu="2")]), 4),
        (pod("n", container(gpu="4"), init=[container(gpu="1")]), 4),
        # A sidecar keeps running beside later init containers and the containers.
        (pod("n", container(gpu="4"), init=[{**container(gpu="1"), **SIDECAR}]), 5),
        (
            pod(
                "n",
                container(gpu="1"),
                init=[{**container(gpu="1"), **SIDECAR}, container(gpu="6")],
            ),
            7,
        ),
        (
            pod(
                "n",
                container(gpu="1"),
                init=[container(gpu="6"), {**container(gpu="1"), **SIDECAR}],
            ),
            6,
        ),
        (pod("n", container(gpu="1"), overhead={GPU: "1"}), 2),
        (pod("n", container(gpu="1"), resources={"requests": {GPU: "3"}}), 3),
        (pod("n", container(gpu="1"), resources={"requests": {GPU: "3"}}, overhead={GPU: "1"}), 4),
    ],
)
def test_the_request_of_a_pod(spec: dict[str, Any], gpus: int) -> None:
    assert asked_for(spec["spec"], GPU) == gpus


def test_only_bound_pods_that_have_not_ended_use_resources() -> None:
    found = taken(
        [
            pod("a", container(gpu="2"), name="running"),
            pod("a", container(gpu="1"), name="starting", phase="Pending"),
            pod("a", container(gpu="8"), name="done", phase="Succeeded"),
            pod("a", container(gpu="8"), name="broke", phase="Failed"),
            pod(None, container(gpu="8"), name="waits", phase="Pending"),
            pod("b", container(cpu="3500m")),
        ],
        [GPU, "cpu"],
    )
    assert found["a"].of(GPU) == 3
    assert found["a"].by == {GPU: ["team-a/running", "team-a/starting"]}
    assert found["b"].of(GPU) == 0
    assert found["b"].of("cpu") == Fraction(7, 2)
    assert set(found) == {"a", "b"}


def test_a_pod_that_is_being_deleted_keeps_its_resources() -> None:
    leaving = pod("a", container(gpu="8"))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert taken([leaving], [GPU])["a"].of(GPU) == 8


COUNTS = st.integers(0, 8).map(str)
CONTAINERS = st.lists(COUNTS.map(lambda gpus: container(gpu=gpus)), max_size=4)
INITS = st.lists(
    st.tuples(COUNTS, st.booleans()).map(
        lambda one: {**container(gpu=one[0]), **(SIDECAR if one[1] else {})}
    ),
    max_size=4,
)
PODS = st.builds(
    lambda at, containers, init, phase: pod(at, *containers, init=init, phase=phase),
    st.sampled_from(["a", "b", None]),
    CONTAINERS,
    INITS,
    st.sampled_from(["Running", "Pending", "Succeeded", "Failed"]),
)


@given(CONTAINERS, INITS)
def test_a_pods_request_is_between_its_largest_container_and_the_sum(
    containers: list[dict[str, Any]], init: list[dict[str, Any]]
) -> None:
    asked = asked_for(pod("a", *containers, init=init)["spec"], GPU)
    alone = asked_for(pod("a", *containers)["spec"], GPU)
    most = max((asked_for(pod("a", one)["spec"], GPU) for one in init), default=Fraction(0))
    assert (
        max(alone, most)
        <= asked
        <= alone + sum(asked_for(pod("a", one)["spec"], GPU) for one in init)
    )


@given(st.lists(PODS, max_size=8))
def test_used_resources_are_the_sum_over_pods_in_any_order(pods: list[dict[str, Any]]) -> None:
    found = taken(pods, [GPU])
    held = [one for one in pods if one["status"]["phase"] in ("Running", "Pending")]
    for name in ("a", "b"):
        asked = [asked_for(one["spec"], GPU) for one in held if one["spec"].get("nodeName") == name]
        assert (found[name].of(GPU) if name in found else 0) == sum(asked)
    backwards = taken(reversed(pods), [GPU])
    assert {name: one.amounts for name, one in found.items()} == {
        name: one.amounts for name, one in backwards.items()
    }
