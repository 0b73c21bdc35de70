"""`ndctl run` with a script whose DataLoader spawns its workers in each epoch."""

from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left
from tests.e2e.own_program.epochs import EPOCHS, STEPS

pytestmark = [pytest.mark.process, pytest.mark.slow]
SCRIPT = str(Path(__file__).parent / "epochs.py")
WORDS = ("run", "--name", "e2e", "--gpus-per-host", "1", "--follow")


@pytest.fixture
def ndctl(tmp_path: Path) -> Ndctl:
    return Ndctl(tmp_path / "runs")


def test_the_start_and_the_end_of_workers_are_no_hang(ndctl: Ndctl) -> None:
    done = ndctl(*WORDS, "--", SCRIPT)
    assert done.code == 0, done.out + done.err
    status = ndctl.status()
    assert status["incidents"] == []
    assert status["step"] == EPOCHS * STEPS
    assert_nothing_left(ndctl.run_dir)


def test_a_hang_in_the_steps_of_such_a_script_is_found_after_a_few_of_them(ndctl: Ndctl) -> None:
    # In the second epoch, so that the limit is one that was learned after the workers' first end.
    done = ndctl(*WORDS, "--drill", f"stop:rank=0@step={STEPS + STEPS // 2}", "--", SCRIPT)
    assert done.code == 0, done.out + done.err
    (incident,) = ndctl.status()["incidents"]
    assert (incident["kind"], incident["phase"]) == ("hang", "train")
    assert incident["detected_after_s"] < 60, "not the limit of the phase `data`"
    assert_nothing_left(ndctl.run_dir)
