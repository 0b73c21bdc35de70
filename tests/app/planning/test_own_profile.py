"""A profile file in the place of an inventory, and NDCTL_PROFILE."""

from pathlib import Path

import pytest

from orchestrator.app.planning.calibrations import calibrated, write
from orchestrator.app.planning.plans import Planned, plan_spec
from orchestrator.errors import SpecError
from orchestrator.inventory.profiles import load_profile
from tests.agent.world import TurnedClock
from tests.calibrate.samples import measured
from tests.calibrate.test_fit import a_cpu
from tests.plan.history.jobs import EXAMPLES

QUICK = EXAMPLES / "quickstart.yaml"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write(calibrated(measured(a_cpu()), "a-host", TurnedClock()), tmp_path / "here.yaml")
    return tmp_path / "here.yaml"


def step_s(planned: Planned) -> float:
    assert planned.plan.time is not None
    return planned.plan.time.step_s


def test_a_profile_in_the_place_of_an_inventory_gives_as_many_hosts_as_the_spec(
    here: Path,
) -> None:
    found = plan_spec(QUICK, (), {}, here, purpose="predict")
    assert found.plan.hosts == ("host-0", "host-1")
    assert found.plan.time is not None
    assert found.plan.time.certainty == "calibrated"
    assert step_s(found) != step_s(plan_spec(QUICK, (), {}, purpose="predict"))


def test_local_jobs_use_the_profile_that_the_environment_names(here: Path) -> None:
    named = plan_spec(QUICK, (), {"NDCTL_PROFILE": str(here)}, purpose="submit")
    assert step_s(named) == step_s(plan_spec(QUICK, (), {}, here, purpose="predict"))
    assert named.plan.profile == "cpu"


def test_a_profile_of_gpus_does_not_count_for_ranks_on_cpus(tmp_path: Path) -> None:
    h100 = load_profile("h100-sxm-80gb")
    path = tmp_path / "gpu.yaml"
    write(calibrated(measured(h100, ranks=8), "a-host", TurnedClock()), path)
    environ = {"NDCTL_PROFILE": str(path), "CUDA_VISIBLE_DEVICES": ""}
    assert plan_spec(QUICK, (), environ, purpose="predict").plan.profile == "cpu"


def test_a_profile_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.yaml"):
        plan_spec(QUICK, (), {"NDCTL_PROFILE": str(tmp_path / "gone.yaml")}, purpose="predict")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: cpu\ndevice: cpu\nflops: {float32: -1, bfloat16: 1e9}\n")
    with pytest.raises(SpecError, match=r"flops\.float32"):
        plan_spec(QUICK, (), {}, broken, purpose="predict")
