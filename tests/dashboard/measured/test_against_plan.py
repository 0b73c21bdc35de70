"""The lines and the JSON that show a plan beside what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.app.planning.plans import plan_spec
from orchestrator.contract.codec import decode
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import ScriptSpec
from orchestrator.dashboard.describe import describe_text
from orchestrator.dashboard.measured.against_plan import measured_json, measured_rows
from orchestrator.dashboard.measured.steady import Steady
from orchestrator.dashboard.status import status_json, status_text
from orchestrator.inventory.local import local_inventory
from orchestrator.plan.program import plan_program
from tests.dashboard.dashboard_story import metrics, started, submitted
from tests.dashboard.test_status import snapshot

ROOT = Path(__file__).parents[3]


def planned(spec: str, *settings: str) -> Plan:
    return plan_spec(ROOT / "examples" / spec, settings, {}, purpose="predict").plan


@pytest.fixture(scope="module")
def on_h100() -> Plan:
    return planned("llama3-8b.yaml", "cluster.gpu=h100-sxm-80gb")


@pytest.fixture(scope="module")
def on_cpu() -> Plan:
    return planned("quickstart.yaml")


def steady(step_s: float, **more: Any) -> Steady:
    return Steady(steps=200, step_s=step_s, step_s_range=(0.9 * step_s, 1.2 * step_s), **more)


def test_a_calibrated_plan_is_compared_in_percent_and_with_its_range(on_h100: Plan) -> None:
    assert on_h100.time is not None
    slow = steady(1.01 * on_h100.time.step_s)
    ((label, said),) = measured_rows(on_h100, slow)
    assert label == "step time"
    assert "(median of 200 steady steps), planned" in said
    assert said.endswith("1.0% slower, inside the plan's range")
    ((_, said),) = measured_rows(on_h100, steady(0.5 * on_h100.time.step_s, data_share=0.2))
    assert "50.0% faster, outside the plan's range; 20% of a step is waiting for data" in said


def test_the_memory_of_tensors_is_compared_with_the_memory_of_tensors(on_h100: Plan) -> None:
    memory = on_h100.needs
    assert memory.tensor_bytes < memory.peak_bytes
    measured = steady(9.0, memory_bytes=round(1.1 * memory.tensor_bytes), memory_rank=3)
    _, (label, said) = measured_rows(on_h100, measured)
    assert label == "memory"
    assert "on the fullest rank, 3, planned" in said
    assert said.endswith("of tensors: 10.0% more")
    body = measured_json(on_h100, measured)
    assert body is not None
    assert body["memory_above"] == pytest.approx(0.1)
    assert body["planned_memory_bytes"] == memory.tensor_bytes


def test_guessed_constants_of_a_cpu_give_no_percentage(on_cpu: Plan) -> None:
    measured = steady(0.4, memory_bytes=600 << 20, memory_rank=1)
    (_, time), (_, memory) = measured_rows(on_cpu, measured)
    assert "%" not in time + memory
    assert "the constants of cpu are guesses: `ndctl calibrate`" in time
    assert "of the process with Python and torch" in memory
    body = measured_json(on_cpu, measured)
    assert body is not None
    assert (body["calibrated"], body["slower"], body["memory_above"]) == (False, None, None)
    assert body["planned_step_s"] > 0


def test_a_plan_of_an_older_ndctl_does_not_say_how_certain_it_is(on_h100: Plan) -> None:
    assert on_h100.time is not None
    old = replace(on_h100, time=replace(on_h100.time, certainty=None))
    body = measured_json(old, steady(9.0))
    assert body is not None
    assert body["slower"] is None


def test_the_users_own_program_and_too_few_steps_show_nothing(on_h100: Plan) -> None:
    spec: ScriptSpec = decode(ScriptSpec, {"name": "mine", "run": {"script": "train.py"}})
    own = plan_program(spec, local_inventory(spec.cluster))
    assert measured_json(own, steady(9.0)) is None
    assert not [*measured_rows(own, steady(9.0))]
    assert measured_json(on_h100, None) is None
    assert not [*measured_rows(on_h100, None)]


def test_status_and_describe_show_it(on_h100: Plan) -> None:
    events = started()
    events[0] = replace(submitted(), plan=replace(on_h100, hosts=("host-0", "host-1")))
    measured = steady(10.0, memory_bytes=64 << 30, memory_rank=2)
    shown = replace(snapshot(events, metrics(1, 24)), steady=measured)
    text = status_text(shown, None)
    assert "  step time   10.0 s (median of 200 steady steps), planned" in text
    assert "  memory      64.0 GiB on the fullest rank, 2, planned" in text
    assert "  steps       8 of 10 steady steps take 9.00 s to 12.0 s" in describe_text(shown, None)
    body = status_json(shown)
    assert json.loads(json.dumps(body["measured"])) == body["measured"]
    assert body["measured"]["step_s"] == 10.0


def test_what_is_many_times_as_planned_has_no_percentage(on_h100: Plan) -> None:
    assert on_h100.time is not None
    far = steady(
        55 * on_h100.time.step_s, memory_bytes=262 * on_h100.needs.tensor_bytes, memory_rank=0
    )
    (_, time), (_, memory) = measured_rows(on_h100, far)
    assert ": 55.0 times as long, outside the plan's range" in time
    assert memory.endswith("of tensors: 262 times as much")
