"""Plans that use the measured speed of earlier jobs: which jobs, in which commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.speed_history import path_of, remember
from tests.plan.history.jobs import EXAMPLES, record, setup

H100 = (
    str(EXAMPLES / "llama3-8b.yaml"),
    "--inventory",
    str(EXAMPLES / "inventories" / "h100.yaml"),
)
CPUS = Fabric(profile=load_profile("cpu"), hosts=2, devices_per_host=2)


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    for number in range(3):
        remember(path_of(tmp_path), record(setup(), 1.25, number))
    return tmp_path


def planned(run_root: Path, *words: str) -> dict[str, Any]:
    runner = CliRunner(env={"NDCTL_RUN_ROOT": str(run_root)})
    done = runner.invoke(cli, ["plan", *words, "--json"])
    assert done.exit_code == 0, done.output
    body: dict[str, Any] = json.loads(done.output)
    return body


def test_a_plan_uses_earlier_jobs_of_its_run_root_unless_asked_not_to(run_root: Path) -> None:
    used, plain = planned(run_root, *H100), planned(run_root, *H100, "--no-history")
    assert plain["time"]["correction"] is None
    assert used["time"]["correction"] == {
        "factor": pytest.approx(1 / 1.25, rel=0.1),
        "jobs": 3,
        "family": "llama",
        "profile": "h100-sxm-80gb",
    }
    assert used["mesh"] == plain["mesh"]
    elsewhere = planned(run_root / "elsewhere", *H100)
    assert elsewhere["time"] == plain["time"]


def test_compared_plans_use_them_too(run_root: Path) -> None:
    words = (*H100, "--compare", "parallel.tp=1,2")
    used, plain = planned(run_root, *words), planned(run_root, *words, "--no-history")
    for one, other in zip(used["plans"], plain["plans"], strict=True):
        assert one["plan"]["time"]["step_s"] > 1.05 * other["plan"]["time"]["step_s"]


def test_jobs_of_this_machine_count_for_plans_of_this_machine_alone(tmp_path: Path) -> None:
    quick = setup("train.dtype=float32", spec="quickstart.yaml")
    for number, backend in enumerate(("local", "slurm")):
        made = record(quick, 4.0, number, CPUS, backend=backend)
        remember(path_of(tmp_path), made)
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text("{profile: cpu, hosts: 2, devices_per_host: 2}")
    spec = str(EXAMPLES / "quickstart.yaml")
    for words in ((spec,), (spec, "--inventory", str(inventory))):
        assert planned(tmp_path, *words)["time"]["correction"]["jobs"] == 1


def test_a_file_that_cannot_be_read_changes_no_plan(run_root: Path) -> None:
    plain = planned(run_root, *H100, "--no-history")
    path_of(run_root).write_bytes(b"\x00\xff[[[[\n" * 1000)
    assert planned(run_root, *H100) == plain
    path_of(run_root).unlink()
    path_of(run_root).mkdir()
    assert planned(run_root, *H100) == plain
