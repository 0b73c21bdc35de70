"""An operator acts as in the recordings of Kubeflow's training operator and of JobSet's controller.

The test checks our stand-in or, if KUBE_OPERATORS names it, the operator itself. Of JobSets and
TrainJobs, whose stand-ins share most of their code, `make test` checks four scenarios.
"""

from itertools import chain
from typing import Any

import pytest

from tests.kubernetes import real_operators
from tests.kubernetes.testbed import KubeTestbed
from tests.kubernetes.traces.compare import differences
from tests.kubernetes.traces.record import QUIET_S, SCENARIOS, read, record
from tests.kubernetes.traces.scenarios import Scenario

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
NOT_IN_STANDIN = {
    # The operator gives its workers an init container that waits for the master's name.
    "PyTorchJob": {"initContainers"},
    # Pods of the stand-in belong to the JobSet, because old API servers have no indexed Jobs.
    "JobSet": {"owners"},
    "TrainJob": {"owners"},
}
"""Kind of job to the parts of pods and services that its stand-in has not."""
IN_EVERY_RUN = {
    "pytorchjob-master-ends-well",
    "pytorchjob-processes-are-killed",
    "pytorchjob-pods-are-deleted",
    "pytorchjob-node-is-lost",
    "pytorchjob-worker-ends-with-211",
    "trainjob-leader-ends-well",
    "jobset-processes-are-killed",
    "jobset-node-is-lost",
    "trainjob-suspended-and-resumed",
}
"""Titles of the scenarios that are not slow."""
STANDIN_QUIET_S = 0.7
"""A stand-in reacts at once, and has no queue with growing delays as an operator has."""


def is_slow(scenario: Scenario) -> bool:
    return scenario.title not in IN_EVERY_RUN


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(it, id=it.title, marks=pytest.mark.slow if is_slow(it) else ())
        for it in chain(*SCENARIOS.values())
    ],
)
def test_an_operator_acts_as_recorded(kube: KubeTestbed, scenario: Scenario) -> None:
    kind = scenario.kind.kind
    is_standin = kind not in real_operators.kinds()
    trace = read(scenario)
    steps = record(kube, scenario, STANDIN_QUIET_S if is_standin else QUIET_S)
    if is_standin:
        trace, steps = (_without(it, NOT_IN_STANDIN[kind]) for it in (trace, steps))
    assert differences(trace, steps) == []


def _without(thing: Any, keys: set[str]) -> Any:
    if isinstance(thing, dict):
        return {key: _without(value, keys) for key, value in thing.items() if key not in keys}
    return [_without(each, keys) for each in thing] if isinstance(thing, list) else thing
