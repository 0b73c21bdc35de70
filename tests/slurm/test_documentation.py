"""The commands of docs/slurm.md work on a real cluster, and its tables and files are complete."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from msgspec.structs import fields

from orchestrator import host_strikes
from orchestrator.contract.spec.slurm_spec import ContainerSpec, SlurmSpec
from orchestrator.system import SystemClock
from tests.e2e.job import wait_for
from tests.site_document import ROOT, commands_in, keys_of_a_site, with_ndctl
from tests.slurm.testbed import SlurmTestbed, running_testbed

DOCUMENT = (ROOT / "docs" / "slurm.md").read_text()
COMMANDS = commands_in(DOCUMENT)
SETTINGS = "".join(re.findall(r"^```conf\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL))
"""The document's settings for slurm.conf."""

SUBMIT = "ndctl submit examples/slurm.yaml"
SAYS: Mapping[str, str] = {
    "make install": "",
    "ndctl doctor --backend slurm": r"ok  controller +cluster tb",
    "ndctl doctor examples/slurm.yaml": r"ok  partition +train is UP",
    "ndctl inventory --backend slurm": r"4 hosts free, 8 devices",
    "ndctl validate examples/slurm.yaml": r"valid; 4 ranks",
    "ndctl plan examples/slurm.yaml": r"4 ranks on 2 hosts x 2 of cpu",
    "ndctl render examples/slurm.yaml": r"#SBATCH --partition=train\n",
    "ndctl render examples/slurm.yaml"
    " --set cluster.slurm.container.image=/shared/train.sqsh"
    " --set cluster.slurm.container.mounts=[/shared:/shared]": (
        r"--container-image=/shared/train.sqsh --container-mounts=/shared:/shared "
    ),
    "ndctl submit examples/slurm.yaml --dry-run": r"# sbatch --test-only: .* to start",
    SUBMIT: r"submitted slurm-demo to slurm",
    "ndctl list": r"slurm-demo +\S+ +RUNNING",
    "ndctl status slurm-demo": r"Slurm job \d+",
    "ndctl events slurm-demo": r"attempt 1",
    "ndctl describe slurm-demo": r"node1",
    "ndctl logs slurm-demo --tail 5": r"node1",
    "ndctl dashboard slurm-demo": r"slurm-demo",
    "ndctl cancel slurm-demo": r"slurm-demo: CANCELLED",
    "ndctl submit examples/slurm.yaml --resume": r"submitted slurm-demo to slurm",
    "ndctl render examples/slurm-spare.yaml": r"--nodes=3\n(.*\n)*#SBATCH --exclude=node4\n",
    "ndctl hosts": r"node4 +2 strikes with a current weight of 2\.00, excluded until",
    "ndctl hosts clear node4": r"cleared node4 in tb",
    "sinfo -R": r"REASON",
    "scontrol update NodeName=node4 State=DRAIN Reason=bad-cable": "",
    "scontrol update NodeName=node4 State=RESUME": "",
}
"""Each command of the document, and a pattern of its output."""


@pytest.fixture
def documented_cluster(slurm_available: None) -> Iterator[SlurmTestbed]:
    """A cluster with the settings that the document asks administrators for."""
    with running_testbed(nodes=4, gpus=2, knobs={"TB_EXTRA": SETTINGS}) as testbed:
        yield testbed


@pytest.mark.slurm
@pytest.mark.process
@pytest.mark.slow
def test_the_commands_do_what_the_document_says(
    documented_cluster: SlurmTestbed, tmp_path: Path
) -> None:
    environ = with_ndctl(documented_cluster.environ, tmp_path)
    run = tmp_path / "runs" / "slurm-demo"
    _strike(tmp_path / "runs", "node4")
    output: dict[str, str] = {}
    try:
        for command in COMMANDS:
            output[command] = _run(command, environ)
            assert re.search(SAYS[command], output[command]), f"{command}:\n{output[command]}"
            if command == SUBMIT:
                wait_for((run / "checkpoints" / "step-10" / "COMPLETE").exists, "a checkpoint")
    finally:
        subprocess.run(["ndctl", "cancel", "slurm-demo"], env=environ, timeout=120, check=False)
    assert not documented_cluster.output_of("squeue", "-h")
    assert "preemption" in output["ndctl doctor --backend slurm"]
    warned = re.findall(r"^warns +(.+?)  ", output["ndctl doctor --backend slurm"], re.MULTILINE)
    assert not {"requeue", "preemption", "kill wait", "prolog"} & set(warned)
    for path in _files(run):
        assert list(run.parent.glob(path)), path


def _strike(run_root: Path, host: str) -> None:
    """Records two strikes, which exclude the host."""
    now = SystemClock().now()
    for attempt in (1, 2):
        strike = host_strikes.Strike(
            at=now, host=host, job="other", attempt=attempt, kind="host-lost", cause="silence"
        )
        host_strikes.record(host_strikes.path_of(run_root, "tb"), strike)


def _run(command: str, environ: Mapping[str, str]) -> str:
    # A dry run: `make install` would change the environment of this test.
    argv = command.replace("make ", "make --dry-run ").split()
    done = subprocess.run(
        argv, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _files(run: Path) -> list[str]:
    """Files that the document names, as patterns below the run root; without those that only exist
    after events that this test does not cause."""
    block = DOCUMENT.partition("## Where things lie")[2].partition("## ")[0]
    named = [
        line.split("  ")[0].strip() for line in re.findall(r"^    +(.+)$", block, re.MULTILINE)
    ]
    assert len(named) == 11
    found = []
    absent = ("<run root>/.history", "snapshot", "capture")
    for name in named:
        if name.startswith((*absent, "slurm/launch-<n>/replaced", "slurm/launch-<n>/srun")):
            continue
        path = name.replace("<run root>/", "").replace("<job>", run.name)
        path = path if path.startswith((".hosts", run.name)) else f"{run.name}/{path}"
        found.append(re.sub(r"<\w+>", "*", path.split(",")[0]))
    return found


def test_every_command_of_the_document_is_run() -> None:
    assert set(COMMANDS) == set(SAYS)


def test_every_key_of_a_site_is_documented() -> None:
    keys = {field.name for field in fields(SlurmSpec)} - {"container"}
    keys |= {f"container.{field.name}" for field in fields(ContainerSpec)}
    assert keys_of_a_site(DOCUMENT) == keys
