"""A user's script resumes from the memory of its hosts, with the losses of an undisturbed run."""

from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("ddp_in_memory.py")
WORLD = ("--hosts", "2", "--gpus-per-host", "1", "--name", "e2e")


def train(ndctl: Ndctl, *more: str) -> None:
    done = ndctl("run", *WORLD, "--follow", *more, "--", str(SCRIPT))
    assert done.code == 0, done.out + done.err
    assert_nothing_left(ndctl.run_dir)


# In every run kills/test_memory_checkpoints.py has these faults, and tests/ndctl the functions.
@pytest.mark.slow
def test_a_killed_rank_and_a_lost_host_resume_from_memory_with_equal_losses(
    tmp_path: Path,
) -> None:
    alone, ndctl = Ndctl(tmp_path / "alone"), Ndctl(tmp_path / "runs")
    train(alone)
    train(ndctl, "--drill", "kill:rank=1@step=9", "--drill", "kill:host=1@step=20")

    assert sorted(ndctl.losses()) == list(range(1, 31))
    assert ndctl.losses() == alone.losses()
    first, second, third = ndctl.events("TrainingResumed")
    assert (first["step"], first.get("in_memory", False)) == (0, False)
    # A killed rank costs at most the step that it was in.
    assert second["in_memory"]
    assert 7 <= second["step"] <= 8
    # A lost host costs the steps since its partner got a copy. The drill kills it a moment later.
    assert third["in_memory"]
    before = [metric["step"] for metric in ndctl.metrics() if metric["attempt"] == 2]
    assert before[0] < third["step"] <= before[-1]
    assert [one["copies"] for one in ndctl.events("MemoryCheckpointsSet")] == [1, 1, 1]
    killed, lost = ndctl.status()["incidents"]
    assert (killed["kind"], lost["kind"]) == ("rank-killed", "host-lost")
    assert killed["lost_steps"] <= 1
    assert not (ndctl.run_dir / "checkpoints").exists(), "nothing was read from the disk"
