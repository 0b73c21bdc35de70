"""An operator acts as in the recordings of Kubeflow's training operator and of JobSet's controller.

The test checks our stand-in or, if KUBE_OPERATORS names it, the operator itself.
"""

from itertools import chain
from typing import Any

import pytest

from tests.kubernetes import real_operators
from tests.kubernetes.testbed import KubeTestbed
from tests.kubernetes.traces.compare import differences
from tests.kubernetes.traces.record import SCENARIOS, read, record
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


@pytest.mark.parametrize("scenario", [*chain(*SCENARIOS.values())], ids=lambda it: it.title)
def test_an_operator_acts_as_recorded(kube: KubeTestbed, scenario: Scenario) -> None:
    trace, steps, kind = read(scenario), record(kube, scenario), scenario.kind.kind
    if kind not in real_operators.kinds():
        trace, steps = (_without(it, NOT_IN_STANDIN[kind]) for it in (trace, steps))
    assert differences(trace, steps) == []


def _without(thing: Any, keys: set[str]) -> Any:
    if isinstance(thing, dict):
        return {key: _without(value, keys) for key, value in thing.items() if key not in keys}
    return [_without(each, keys) for each in thing] if isinstance(thing, list) else thing
