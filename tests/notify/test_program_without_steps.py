"""A real job of a program that reports no steps: what its receivers get."""

import json
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left, wait_for

PROGRAM = """#!/bin/sh
[ $NDCTL_ATTEMPT -gt 1 ] || exit 3
while [ ! -e {folder}/go ]; do sleep 0.2; done
"""


@pytest.mark.process
def test_a_program_without_steps_is_told_as_recovered_while_it_runs(tmp_path: Path) -> None:
    program, told = tmp_path / "program.sh", tmp_path / "told"
    program.write_text(PROGRAM.format(folder=tmp_path))
    program.chmod(0o755)
    ndctl = Ndctl(tmp_path / "runs")
    receiver = {"on": ["recovered"], "command": ["tee", str(told)]}
    setting = f"--set=notify={json.dumps([receiver])}"
    job = ndctl.start(
        "run", "--name", "e2e", "--follow", setting, "--", "--no-python", str(program)
    )
    wait_for(lambda: told.exists() and told.read_text().endswith("}"), "the notice")
    body = json.loads(told.read_text())
    assert (body["event"], body["state"], body["attempt"]) == ("recovered", "RUNNING", 2)
    assert "all ranks ran again after" in body["time"]
    status = ndctl("status", "e2e").out
    assert "recovered" not in status
    assert "all ranks ran again after" in status
    (tmp_path / "go").touch()
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, out + err
    assert "recovered from incident 1 after" in out
    assert_nothing_left(ndctl.run_dir)
