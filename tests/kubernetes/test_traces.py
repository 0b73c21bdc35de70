"""Pods of a PyTorchJob are made as recorded from Kubeflow's training operator. Checked are our
stand-in and, where KUBE_OPERATORS has it, that operator itself."""

from typing import Any

import pytest

from tests.kubernetes import real_operators
from tests.kubernetes.testbed import KubeTestbed
from tests.kubernetes.traces.compare import differences
from tests.kubernetes.traces.record import read, record
from tests.kubernetes.traces.scenarios import SCENARIOS, Scenario

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
LEFT_OUT = "initContainers"
"""Workers of the operator's have one that waits for the master's name; those of the stand-in
have not."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda it: it.name)
def test_an_operator_acts_as_recorded(kube: KubeTestbed, scenario: Scenario) -> None:
    trace, steps = read(scenario), record(kube, scenario)
    if "PyTorchJob" not in {project.kind for project in real_operators.available()}:
        trace, steps = _without(trace), _without(steps)
    assert differences(trace, steps) == []


def _without(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: _without(value) for key, value in thing.items() if key != LEFT_OUT}
    return [_without(each) for each in thing] if isinstance(thing, list) else thing
