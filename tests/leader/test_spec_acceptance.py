"""spec.yaml is the spec of a launch that trained. A spec that ranks refuse does not replace it."""

import asyncio
from pathlib import Path

import pytest

from orchestrator.contract.files.fence import GivenUp
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import StepReached
from orchestrator.leader.spec_acceptance import SpecAcceptance
from tests.agent.world import until
from tests.job.job_driver import Job
from tests.leader.leader_world import Led, play


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.spec.write_text("the good one")
    run_dir.spec_of(2).write_text("the new one")
    return run_dir


def accept(accepting: SpecAcceptance) -> None:
    """As the leader does between two decisions."""
    if accepting.is_due():
        asyncio.run(accepting.accept())


def test_the_new_spec_counts_when_its_ranks_train_and_not_before(run_dir: RunDir) -> None:
    job = Job().starts()
    accepting = SpecAcceptance(lambda: job.run, run_dir, 2, lambda: None)
    accept(accepting)
    assert run_dir.spec.read_text() == "the good one"
    job.trains()
    accept(accepting)
    assert run_dir.spec.read_text() == "the new one"
    assert not accepting.is_due()


def test_a_leader_that_was_given_up_changes_nothing(run_dir: RunDir) -> None:
    def guard() -> None:
        raise GivenUp("another leads")

    job = Job().running()
    accept(SpecAcceptance(lambda: job.run, run_dir, 2, guard))
    assert run_dir.spec.read_text() == "the good one"


def test_a_launch_without_a_spec_of_its_own_is_none_the_worse(run_dir: RunDir) -> None:
    job = Job().running()
    accept(SpecAcceptance(lambda: job.run, run_dir, 3, lambda: None))
    assert run_dir.spec.read_text() == "the good one"


def test_a_leader_accepts_beside_its_decisions(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        job.run_dir.spec.write_text("the good one")
        job.run_dir.spec_of(job.leader.spec_acceptance.launch).write_text("the new one")
        await job.started()
        now = job.clock.now()
        step = StepReached(at=now, attempt=1, step=1, loss=1.0, tokens_per_second=1.0)
        job.leader._happened(step)
        await until(lambda: job.run_dir.spec.read_text() == "the new one", "the spec to count")

    play(tmp_path, script)
