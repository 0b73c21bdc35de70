"""Each framework's script resumes from its newest complete checkpoint with the same losses."""

from pathlib import Path

import pytest

from tests.e2e.frameworks.script_job import (
    Script,
    example,
    steps_trained_twice,
    uninterrupted_losses,
)
from tests.e2e.job import Ndctl, assert_nothing_left, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.xdist_group("frameworks"),
    pytest.mark.timeout(900),
]
SCRIPTS = [
    example("ddp.py"),
    example("fsdp2.py"),
    example("transformers_trainer.py", preload=("transformers.trainer",)),
    example("lightning_fit.py", preload=("lightning.pytorch",), needs="lightning"),
    example("accelerate_loop.py", preload=("accelerate",), needs="accelerate"),
    # `make test` does not install torchtitan, which needs other versions of some packages.
    example("torchtitan_on_cpu.py", preload=("torchtitan.trainer",), needs="torchtitan"),
]
EVERY_RUN = {"ddp.py", "fsdp2.py", "transformers_trainer.py"}
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.path.name)
RESTART = "restart as attempt 2 from where your program resumes: its newest checkpoint is step-5"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            it, id=it.path.name, marks=() if it.path.name in EVERY_RUN else pytest.mark.slow
        )
        for it in SCRIPTS
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    script: Script, ndctl: Ndctl
) -> None:
    # Most scripts have two hosts only in the test below, because imports take most of the time.
    hosts = 2 if script.path.name == "fsdp2.py" else 1
    drill = ("--drill", "kill:rank=1@step=9")
    done = script.submit(ndctl, "--follow", *drill, steps=12, hosts=hosts)
    assert done.code == 0, done.out + done.err
    # This fails if the loss of a step that was trained twice has changed.
    assert sorted(ndctl.losses()) == list(range(1, 13))
    assert {6, 7} <= steps_trained_twice(ndctl) <= {6, 7, 8, 9, 10}
    (incident,) = ndctl.status()["incidents"]
    assert (incident["kind"], incident["culprit"]["rank"]) == ("rank-killed", 1)
    assert incident["action"] == RESTART
    assert_nothing_left(ndctl.run_dir)


@pytest.mark.slow
@every_script
def test_a_kill_a_hang_and_a_cancellation_leave_the_losses_of_an_undisturbed_job(
    script: Script, ndctl: Ndctl, tmp_path: Path
) -> None:
    expected = uninterrupted_losses(script, tmp_path / "undisturbed", steps=60)
    drills = ("--drill", "kill:rank=1@step=9", "--drill", "stop:rank=2@step=18")
    done = script.submit(ndctl, *drills, steps=60)
    assert done.code == 0, done.out + done.err
    wait_for(lambda: len(ndctl.events("TrainingResumed")) == 3, "attempt 3")
    before = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > before, "a step of attempt 3")
    done = ndctl("cancel", "e2e")
    assert done.code == 0, done.out + done.err
    assert_nothing_left(ndctl.run_dir)

    status = ndctl.status()
    kinds = [(one["kind"], one["culprit"]["rank"]) for one in status["incidents"]]
    assert kinds == [("rank-killed", 1), ("hang", 2)]
    # All ranks have saved in the same step, and no step was done after it.
    stopped_at = ndctl.metrics()[-1]["step"]
    assert status["checkpoint"]["step"] == stopped_at < 60

    done = script.submit(ndctl, "--resume", "--follow", steps=60)
    assert done.code == 0, done.out + done.err
    assert ndctl.events("TrainingResumed")[-1]["step"] == stopped_at
    assert ndctl.losses() == expected


@pytest.mark.slow
def test_a_checkpoint_of_transformers_whose_rank_was_killed_while_saving_is_skipped(
    ndctl: Ndctl,
) -> None:
    path = Path(__file__).parent / "killed_while_saving.py"
    script = Script(path, preload=("transformers.trainer",))
    done = script.submit(ndctl, "--follow", steps=12)
    assert done.code == 0, done.out + done.err
    (incident,) = ndctl.status()["incidents"]
    assert (incident["kind"], incident["culprit"]["rank"]) == ("rank-killed", 3)
    assert incident["action"] == RESTART
    resumed = ndctl.events("TrainingResumed")[-1]
    assert resumed["step"] == 5
    skipped = {"name": "checkpoint-10", "why": "its write was interrupted"}
    assert resumed["passed_over"] == [skipped]
    assert sorted(ndctl.losses()) == list(range(1, 13))
    assert steps_trained_twice(ndctl) == {6, 7, 8, 9, 10}
