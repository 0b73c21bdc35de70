"""Jobs with pipeline and context parallelism, through the command line."""

from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(900),
]

OPTIONS = {
    "parallel__pp": "2",
    "parallel__cp": "2",
    "parallel__tp": "1",
    "train__steps": "14",
    "checkpoint__every_steps": "4",
    "checkpoint__async": "false",  # step 4 is on the disk before step 5 begins
}
LOSS_TOLERANCE = 1e-4
"""Tolerance between float32 losses of two meshes in their first steps."""


def test_a_pipeline_with_context_parallel_resumes_after_a_rank_is_killed(
    ndctl: Ndctl, reference: Ndctl, tmp_path: Path
) -> None:
    uninterrupted = Ndctl(tmp_path / "whole")
    done = uninterrupted.submit("--follow", **OPTIONS)
    assert done.code == 0, done.out + done.err
    assert_nothing_left(uninterrupted.run_dir)

    done = ndctl.submit("--follow", "--drill", "kill:rank=2@step=7", **OPTIONS)
    assert done.code == 0, done.out + done.err
    (incident,) = ndctl.status()["incidents"]
    assert incident["culprit"] == {"host": "host-1", "rank": 2}
    assert [event["step"] for event in ndctl.events("TrainingResumed")] == [0, 4]
    assert sorted(ndctl.losses()) == list(range(1, 15))
    assert ndctl.losses() == uninterrupted.losses()

    assert uninterrupted.status()["mesh"] == {
        "pp": 2,
        "dp_replicate": 1,
        "dp_shard": 1,
        "cp": 2,
        "tp": 1,
    }
    # Both jobs have the same warm-up, so their first steps are equal.
    for step in range(1, 5):
        assert uninterrupted.losses()[step] == pytest.approx(
            reference.losses()[step], abs=LOSS_TOLERANCE
        )
