"""A job of the user's own script, which is on a volume of the pods."""

import json
from pathlib import Path

import pytest

from tests.kubernetes.e2e.kube_job import AGENT_TIMEOUT_S, JOB, KubeNdctl

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.timeout(900)]
SCRIPT = """
import os
from pathlib import Path
import trainer
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has {trainer.MINE} in {Path.cwd()}")
"""


def test_pods_run_what_their_volume_has_and_submit_says_so(job: KubeNdctl, tmp_path: Path) -> None:
    home = job.testbed.runs / "code"
    home.mkdir()
    (home / "train.py").write_text(SCRIPT)
    (home / "trainer.py").write_text("MINE = 'its own trainer'\n")
    words = [word.removeprefix("--set=") for word in job.words() if word.startswith("--set=")]
    given = [word for word in words if not word.startswith("parallel.")]
    spec = {
        "name": JOB,
        "run": {"script": "train.py", "workdir": str(home)},
        "cluster": {"backend": "kubernetes", "hosts": 2, "gpus_per_host": 1},
        "resilience": {"agent_timeout": float(AGENT_TIMEOUT_S)},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec))
    done = job("submit", str(path), *(f"--set={one}" for one in given))
    assert done.code == 0, done.out + done.err
    assert f"pods run train.py in `{home}` of their image or a volume" in done.err
    job.wait_for_end()
    logs = job.output_of("logs", JOB)
    for rank in range(2):
        assert f"rank {rank} of 2 has its own trainer in {home}" in logs
    assert not list(job.run_dir.glob("capture-*"))
