"""Slurm takes the nodes of a user's own script, which saves, leaves, and goes on later."""

import json
from pathlib import Path

import pytest

from tests.e2e.job import ROOT
from tests.slurm.e2e.slurm_job import SlurmNdctl

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 60


def test_all_ranks_save_in_the_same_step_and_go_on_in_the_next_allocation(
    ndctl: SlurmNdctl, tmp_path: Path
) -> None:
    run = {
        "script": "ddp.py",
        "args": ["--steps", str(STEPS), "--save-every", "1000", "--pause", "0.2"],
        "workdir": str(ROOT / "examples" / "scripts"),
    }
    cluster = {"backend": "slurm", "hosts": 2, "gpus_per_host": 2}
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({"name": "e2e", "run": run, "cluster": cluster}))
    done = ndctl("submit", str(spec))
    assert done.code == 0, done.out + done.err
    ndctl.wait_for_step(5)
    ndctl.testbed.output_of("scancel", "--signal=USR1", ndctl.job_id)
    ndctl.wait_for_end()

    assert ndctl.slurm_job()["Restarts"] == "1"
    first, second = ndctl.events("TrainingResumed")[0], ndctl.events("TrainingResumed")[-1]
    stopped_at = max(ndctl.losses_of(1))
    assert (first["step"], second["step"]) == (0, stopped_at), "no step is lost or repeated"
    assert sorted(ndctl.losses()) == list(range(1, STEPS + 1))
    assert ndctl.status()["incidents"] == []
