"""Ranks hang in real jobs: the incident names the culprit and no other rank.

`tests/agent/test_injections.py` tests every fault on every axis without a whole job.
"""

import json

import pytest

from tests.e2e.job import TP, Ndctl, assert_nothing_left

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(900),
]

AXES = {
    "fsdp-tp": TP,
    "hsdp": {"parallel__dp_replicate": "2", "parallel__tp": "1"},
    "pp-cp": {"parallel__pp": "2", "parallel__cp": "2", "parallel__tp": "1"},
}
ONCE = {
    "train__steps": "16",
    "checkpoint__every_steps": "100",
    "resilience__max_restarts": "0",
}
SAVES = {"checkpoint__every_steps": "4", "resilience__checkpoint_timeout": "8"}
RANK = 2
CASES = [
    ("busy", "fsdp-tp"),
    ("stop", "hsdp"),
    ("data", "pp-cp"),
    ("write", "hsdp"),
    ("skip", "fsdp-tp"),
    ("order", "pp-cp"),
]


@pytest.mark.parametrize(("fault", "axes"), CASES)
def test_a_rank_that_hangs_is_named(ndctl: Ndctl, fault: str, axes: str) -> None:
    saves = SAVES if fault == "write" else {}
    more = {**ONCE, **AXES[axes], **saves}
    ndctl.submit("--follow", "--drill", f"{fault}:rank={RANK}@step=6", **more)
    (incident,) = ndctl.status()["incidents"]
    assert incident["kind"] == "hang", incident
    (hang,) = ndctl.events("HangDetected")
    assert hang["phase"] == ("checkpoint" if fault == "write" else "train")
    blamed = None if fault in ("skip", "order") else "host-1"
    assert incident["culprit"] == {"host": blamed, "rank": RANK}, incident
    (judged,) = ndctl.events("HangJudged")
    diagnosis = json.loads(ndctl("diagnose", "e2e", "--json").out)
    assert diagnosis["cause"] == judged["cause"], "the same evidence, the same verdict"
    assert_nothing_left(ndctl.run_dir)


def test_differing_sizes_end_the_ranks_on_gloo_and_are_the_programs_fault(ndctl: Ndctl) -> None:
    ndctl.submit("--follow", "--drill", f"shape:rank={RANK}@step=6", **ONCE, **AXES["hsdp"])
    (incident,) = ndctl.status()["incidents"]
    assert incident["kind"] != "hang"
    assert (incident["failure"], incident["scope"]) == ("collective-mismatch", "user"), incident
    assert incident["culprit"] == {"host": None, "rank": RANK}, incident
    assert_nothing_left(ndctl.run_dir)
