"""Rollback after bad losses and replanning after out-of-memory, in real processes."""

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left
from trainer.data.ledger_check import first_mistake, replay

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(600)]

SMALL = {"cluster__gpus_per_host": "1"}
AT_ONCE = {"checkpoint__async": "false"}
"""The files of step 8 are complete before step 9, however busy the machine is."""


def test_a_bad_weight_costs_one_checkpoint_and_the_data_since(ndctl: Ndctl) -> None:
    faults = ("--drill", "nan:rank=1@step=13")
    keys = {"resilience__on_nan": "rollback", "train__max_bad_steps": "2", **AT_ONCE}
    done = ndctl.submit("--follow", *faults, **SMALL, **keys)
    assert done.code == 0, done.out + done.err
    (incident,) = ndctl.status()["incidents"]
    assert (incident["failure"], incident["remedy"]) == ("nan-loss", "rollback")
    assert "rollback to checkpoint step-8 as attempt 2, skipping batches 9 to 14" in done.out
    standing = replay((ndctl.run_dir / "samples.jsonl").read_text().splitlines())
    assert standing is not None
    assert first_mistake(standing, saved=standing.steps) is None
    assert [str(window) for window in standing.skipped] == ["9 to 14"]
    assert_nothing_left(ndctl.run_dir)


@pytest.mark.slow
def test_a_job_out_of_memory_gets_a_plan_that_needs_less(ndctl: Ndctl) -> None:
    keys = {"resilience__on_oom": "replan"}
    done = ndctl.submit("--follow", "--drill", "oom:rank=0@step=5", **SMALL, **keys)
    assert done.code == 0, done.out + done.err
    (incident,) = ndctl.status()["incidents"]
    assert (incident["failure"], incident["remedy"]) == ("host-out-of-memory", "replan")
    (answer,) = ndctl.events("Replanned")
    (submitted,) = ndctl.events("JobSubmitted")
    before, after = submitted["plan"]["memory"]["peak_bytes"], answer["plan"]["memory"]
    assert after["peak_bytes"] <= answer["device_bytes"] < before
    assert_nothing_left(ndctl.run_dir)
