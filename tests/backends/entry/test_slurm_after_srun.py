"""The end of the batch script where srun did not end well."""

from pathlib import Path

import pytest

from orchestrator.backends.entry.slurm_after_srun import LOOK_S, await_agents, parse_steps
from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.render import script
from orchestrator.contract.spec.slurm_spec import ContainerSpec, SlurmSpec
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock
from tests.backends.handed import handed
from tests.backends.slurm.slurm_launch import DOWN, a_launch

STEPS = "7.0\n7.3\n7.batch\n7.extern\n7.interactive\n"
"""As squeue of 22.05 prints them, but for the last."""
INSIDE = {"SLURM_JOB_ID": "7"}


def test_steps_are_what_srun_started() -> None:
    assert parse_steps(STEPS, own="") == ("step 7.0", "step 7.3")
    assert parse_steps(STEPS, own="3") == ("step 7.0",), "in a container this is a step itself"
    assert parse_steps("7.batch\n", own="") == parse_steps("", own="") == ()


def awaited(answers: list[Completed]) -> TurnedClock:
    clock = TurnedClock()
    await_agents(Slurm(lambda argv, *, timeout: answers.pop(0), clock), INSIDE, 137)
    assert not answers
    return clock


def test_a_step_that_is_being_ended_is_waited_for_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    awaited([Completed(0, STEPS, ""), Completed(0, "7.batch\n", "")])
    assert not caplog.messages


def test_agents_that_live_on_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Also while slurmctld cannot be asked, as often as a question is asked again by itself."""
    running, gone = Completed(0, STEPS, ""), Completed(0, "7.batch\n", "")
    begun = TurnedClock().time
    clock = awaited([*[running] * 20, *[DOWN] * 3, *[running] * 20, gone])
    told = [line for line in caplog.messages if "continues without it" in line]
    assert told == ["srun exited with code 137, but step 7.0 continues without it"]
    assert clock.time - begun > 30 * LOOK_S


def test_a_container_has_what_the_script_needs_at_its_end(tmp_path: Path) -> None:
    container = ContainerSpec(image="an:image", mounts=("/a:/a",), python="python3")
    launch = a_launch(tmp_path, slurm=SlurmSpec(container=container))
    said = script(handed(launch), "/venv/bin/python", tmp_path)
    after = said.splitlines()[-1]
    assert after.startswith("srun --container-image=an:image --container-mounts=/a:/a --overlap ")
    assert " --nodes=1 --ntasks=1 " in after
    assert after.rstrip().endswith(" --launch=1 --code=$?")
    assert "/venv/bin/python" not in said, "nothing of the submitter's need be on the node"
