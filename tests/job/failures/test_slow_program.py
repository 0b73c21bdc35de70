"""The longer limit that a user's own program gets as advice, if it may have been only slow."""

import pytest
from msgspec.structs import replace

from orchestrator.contract.messages.events import HangDetected
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.next_steps import _resume_after_failure
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.hang_verdict import hang_verdict
from orchestrator.job.failures.slow_program import longer_limit
from tests.job.job_driver import Job

HANG = HangDetected(
    at=0.0, attempt=1, phase="train", step=10, stalled_s=40.0, limit_s=31.25, behind=()
)
SLOW = "--set resilience.hang_timeout=60"


@pytest.mark.parametrize("verdict", ["together", "not-known"])
def test_a_program_that_may_have_been_only_slow_gets_a_longer_limit(verdict: str) -> None:
    job = Job(run=RunSpec(script="train.py"), max_restarts=1).running()
    for restarts in range(2):
        job.hangs()
        job.judged(None, verdict=verdict)
        job.stops("host-0", "host-1")
        incident = job.run.history.incidents[-1]
        assert f"if the program was slow and not stuck, submit it with {SLOW}" in incident.advice
        if not restarts:
            assert incident.edits == ()
            job.trains()
    assert job.run.state == "FAILED"
    assert incident.edits == (SLOW,)
    said = _resume_after_failure(job.run, Commands(job="mine", spec="spec.yaml"))
    command = f"ndctl submit spec.yaml --resume {SLOW}"
    assert said == f"if the program was slow and not stuck: {command}"


def test_the_longer_limit_follows_from_the_one_that_was_too_short() -> None:
    run = Job(run=RunSpec(script="train.py")).running().run
    found = Findings(opened_at=0.0, hang=HANG)
    option = longer_limit(run, found, hang_verdict(found))
    assert option == "--set resilience.hang_timeout=313"


def test_no_longer_limit_is_advised_for_an_explained_hang_or_a_limit_that_is_another_key() -> None:
    own = Job(run=RunSpec(script="train.py")).running()
    own.hangs()
    own.judged(2)
    own.stops("host-0", "host-1")
    ours = Job().running()
    ours.hangs()
    ours.judged(None)
    ours.stops("host-0", "host-1")
    for job in (own, ours):
        assert "hang_timeout" not in job.run.history.incidents[-1].advice
    found = Findings(opened_at=0.0, hang=replace(HANG, phase="init"))
    assert longer_limit(own.run, found, hang_verdict(found)) == ""
