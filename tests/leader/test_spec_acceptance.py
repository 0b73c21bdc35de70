"""spec.yaml is the spec of a launch that trained. A spec that ranks refuse does not replace it."""

import asyncio
from pathlib import Path

import pytest

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import StepReached
from orchestrator.leader.spec_acceptance import SpecAcceptance
from tests.agent.world import until
from tests.job.job_driver import Job
from tests.leader.leader_world import LedJob, run_script


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.spec.write_text("the old spec")
    run_dir.spec_of(2).write_text("the new spec")
    return run_dir


def accept(acceptance: SpecAcceptance) -> None:
    """Do what the leader does between two decisions."""
    if acceptance.is_due():
        asyncio.run(acceptance.accept())


def test_a_new_spec_is_accepted_when_its_ranks_train_and_not_before(run_dir: RunDir) -> None:
    job = Job().starts()
    acceptance = SpecAcceptance(lambda: job.run, run_dir, 2, lambda: None)
    accept(acceptance)
    assert run_dir.spec.read_text() == "the old spec"
    job.trains()
    accept(acceptance)
    assert run_dir.spec.read_text() == "the new spec"
    assert not acceptance.is_due()


def test_a_replaced_leader_accepts_nothing(run_dir: RunDir) -> None:
    def guard() -> None:
        raise GivenUp("another leader has the fence")

    job = Job().running()
    accept(SpecAcceptance(lambda: job.run, run_dir, 2, guard))
    assert run_dir.spec.read_text() == "the old spec"


def test_a_launch_without_its_own_spec_keeps_the_old_one(run_dir: RunDir) -> None:
    job = Job().running()
    accept(SpecAcceptance(lambda: job.run, run_dir, 3, lambda: None))
    assert run_dir.spec.read_text() == "the old spec"


def test_a_leader_accepts_a_spec_in_the_background(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        job.run_dir.spec.write_text("the old spec")
        job.run_dir.spec_of(job.leader.spec_acceptance.launch).write_text("the new spec")
        await job.start_both()
        now = job.clock.now()
        step = StepReached(at=now, attempt=1, step=1, loss=1.0, tokens_per_second=1.0)
        job.leader._happened(step)
        await until(
            lambda: job.run_dir.spec.read_text() == "the new spec", "the new spec to be accepted"
        )

    run_script(tmp_path, script)
