"""The text of a submission's files, as manifests and batch scripts hold them."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.submission_payload import LINE_CHARS, PLAN, files_of
from tests.backends.handover import handover_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)
LAUNCH = LaunchPlan(
    job="job", run_dir="/runs/job", launch=1, hosts=("a",), devices_per_host=1, agent_timeout=10.0
)


def text_of(plan: dict[str, Any]) -> str:
    return files_of(replace(handover_of(LAUNCH), plan=plan))[PLAN]


@given(st.dictionaries(st.text(max_size=9), JSON))
@example({"hosts": [f"node-{at}" for at in range(50)], "none": {}, "empty": []})
@example({"a key": {"of a key": ["x" * 200, 1]}, '"\\\n': "\u2028é"})
def test_what_is_written_is_read_back(plan: dict[str, Any]) -> None:
    assert json.loads(text_of(plan)) == plan


def test_lines_are_filled_and_nested_values_indented() -> None:
    hosts = [f"node-{at}" for at in range(20)]
    plan = {"steps": 10, "hosts": hosts, "mesh": {"tp": 2}, "new": False}
    lines = text_of(plan).splitlines()
    assert lines[0] == "{"
    assert lines[1] == ' "steps": 10,'
    assert lines[2] == ' "hosts": ['
    assert lines[3].startswith('  "node-0", "node-1", ')
    assert lines[-3:] == [" ],", ' "mesh": {"tp": 2}, "new": false', "}"]
    assert max(map(len, lines)) <= LINE_CHARS + len("  ")
