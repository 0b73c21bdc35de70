"""The end of the batch script if srun failed."""

from pathlib import Path

import pytest

from orchestrator.backends.entry.slurm_after_srun import LOOK_S, await_agents, parse_steps
from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.render import script
from orchestrator.contract.spec.slurm_spec import ContainerSpec, SlurmSpec
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import DOWN, a_launch

SQUEUE_STEPS = "7.0\n7.3\n7.batch\n7.extern\n7.interactive\n"
"""Output of squeue 22.05, with an interactive step added."""
ENVIRON = {"SLURM_JOB_ID": "7"}


def test_steps_are_what_srun_started() -> None:
    assert parse_steps(SQUEUE_STEPS, own="") == ("step 7.0", "step 7.3")
    assert parse_steps(SQUEUE_STEPS, own="3") == ("step 7.0",), (
        "step 7.3 is the step that runs this command in a container"
    )
    assert parse_steps("7.batch\n", own="") == parse_steps("", own="") == ()


def run_await_agents(answers: list[Completed]) -> TurnedClock:
    clock = TurnedClock()
    await_agents(Slurm(lambda argv, *, timeout: answers.pop(0), clock), ENVIRON, 137)
    assert not answers
    return clock


def test_a_step_that_ends_soon_is_awaited_without_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_await_agents([Completed(0, SQUEUE_STEPS, ""), Completed(0, "7.batch\n", "")])
    assert not caplog.messages


def test_agents_that_outlive_srun_are_awaited(caplog: pytest.LogCaptureFixture) -> None:
    """Also while slurmctld is down, for as many retries as a query makes by itself."""
    running, gone = Completed(0, SQUEUE_STEPS, ""), Completed(0, "7.batch\n", "")
    begun = TurnedClock().time
    clock = run_await_agents([*[running] * 20, *[DOWN] * 3, *[running] * 20, gone])
    found = [line for line in caplog.messages if "continues without it" in line]
    assert found == ["srun exited with code 137, but step 7.0 continues without it"]
    assert clock.time - begun > 30 * LOOK_S


def test_the_last_line_of_the_script_runs_in_the_container(tmp_path: Path) -> None:
    container = ContainerSpec(image="an:image", mounts=("/a:/a",), python="python3")
    launch = a_launch(tmp_path, slurm=SlurmSpec(container=container))
    text = script(handover_of(launch), "/venv/bin/python", tmp_path)
    after = text.splitlines()[-1]
    assert after.startswith("srun --container-image=an:image --container-mounts=/a:/a --overlap ")
    assert " --nodes=1 --ntasks=1 " in after
    assert after.rstrip().endswith(
        ' --launch=1 --code=$? --batch-output="$(readlink /proc/self/fd/2)"'
    ), "the code comes first, because readlink changes it"
    assert "/venv/bin/python" not in text, "the node may lack the submitter's Python"
