"""A job in the local queue, with real processes: it starts after another one, or never."""

import json
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
LIMIT_S = 120.0


def spec(tmp_path: Path, name: str, script: str) -> str:
    run = {"program": "sh", "args": ["-c", script]}
    path = tmp_path / f"{name}.yaml"
    path.write_text(json.dumps({"name": name, "run": run, "resilience": {"max_restarts": 0}}))
    return str(path)


def state(ndctl: Ndctl, name: str) -> str:
    found: str = json.loads(ndctl("status", name, "--json").out)["state"]
    return found


def test_a_job_waits_for_another_one_and_falls_with_it(ndctl: Ndctl, tmp_path: Path) -> None:
    order, go = tmp_path / "order", tmp_path / "go"
    waits = f"while [ ! -e {go} ]; do sleep 0.1; done; echo first >> {order}"
    for name, script, after in (
        ("first", waits, ()),
        ("second", f"echo second >> {order}; exit 1", ("--after", "first")),
        ("third", f"echo third >> {order}", ("--after", "second")),
        ("fourth", f"echo fourth >> {order}", ("--after", "first")),
    ):
        done = ndctl("submit", spec(tmp_path, name, script), *after)
        assert done.code == 0, done.out + done.err
    wait_for(
        lambda: [state(ndctl, name) for name in ("second", "third")] == ["PENDING"] * 2,
        "two jobs to wait",
        LIMIT_S,
    )
    assert "starts when second has succeeded" in ndctl("status", "third").out
    again = ndctl("submit", spec(tmp_path, "second", "true"), "--new")
    assert again.code == 5, "a waiting job is not submitted twice"

    assert ndctl("cancel", "fourth").code == 0
    assert state(ndctl, "fourth") == "CANCELLED"
    go.touch()
    assert ndctl("wait", "third").code == 7
    told = ndctl("status", "third").out
    assert "cancelled by ndctl, because second ended as FAILED" in told, told
    assert order.read_text() == "first\nsecond\n"
    assert state(ndctl, "first") == "SUCCEEDED"
