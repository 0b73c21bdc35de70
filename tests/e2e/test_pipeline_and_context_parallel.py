"""Jobs that are cut along the pipeline and along the sequence, through the command line."""

from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(900),
]

AXES = {
    "parallel__pp": "2",
    "parallel__cp": "2",
    "parallel__tp": "1",
    "train__steps": "14",
    "checkpoint__every_steps": "4",
}
SAME_MODEL = 1e-4
"""Between float32 losses of two meshes in their first steps."""


def test_a_pipeline_with_context_parallel_resumes_after_a_rank_is_killed(
    ndctl: Ndctl, reference: Ndctl, tmp_path: Path
) -> None:
    whole = Ndctl(tmp_path / "whole")
    done = whole.submit("--follow", **AXES)
    assert done.code == 0, done.out + done.err
    assert_nothing_left(whole.run_dir)

    done = ndctl.submit("--follow", "--drill", "kill:rank=2@step=7", **AXES)
    assert done.code == 0, done.out + done.err
    (incident,) = ndctl.status()["incidents"]
    assert incident["culprit"] == {"host": "host-1", "rank": 2}
    assert [event["step"] for event in ndctl.events("TrainingResumed")] == [0, 4]
    assert sorted(ndctl.losses()) == list(range(1, 15))
    assert ndctl.losses() == whole.losses()

    assert whole.status()["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1}
    # The warm-up is as long in both jobs, so their first steps are the same.
    for step in range(1, 5):
        assert whole.losses()[step] == pytest.approx(reference.losses()[step], abs=SAME_MODEL)
