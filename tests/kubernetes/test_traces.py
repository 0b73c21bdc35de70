"""An operator acts as in the recordings of Kubeflow's training operator.

The test checks our stand-in or, if KUBE_OPERATORS names it, the training operator itself.
"""

from typing import Any

import pytest

from tests.kubernetes import real_operators
from tests.kubernetes.testbed import KubeTestbed
from tests.kubernetes.traces.compare import differences
from tests.kubernetes.traces.record import read, record
from tests.kubernetes.traces.scenarios import SCENARIOS, Scenario

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
NOT_IN_STANDIN = "initContainers"
"""The operator gives its workers an init container that waits for the master's name; the stand-in
does not."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda it: it.name)
def test_an_operator_acts_as_recorded(kube: KubeTestbed, scenario: Scenario) -> None:
    trace, steps = read(scenario), record(kube, scenario)
    if "PyTorchJob" not in {operator.kind for operator in real_operators.available()}:
        trace, steps = _without(trace), _without(steps)
    assert differences(trace, steps) == []


def _without(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: _without(value) for key, value in thing.items() if key != NOT_IN_STANDIN}
    return [_without(each) for each in thing] if isinstance(thing, list) else thing
