"""`ndctl run -- train.py` with a script that knows nothing of ndctl."""

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
WORLD = ("--hosts", "2", "--gpus-per-host", "1")


@pytest.fixture
def ndctl(tmp_path: Path) -> Ndctl:
    return Ndctl(tmp_path / "runs")


def losses(run: Path) -> dict[int, str]:
    """Step -> loss as rank 0 printed it, of all attempts."""
    texts = [log.read_text() for log in sorted(run.glob("logs/attempt-*/host-0/rank-0.log"))]
    return {
        int(n): loss for text in texts for n, loss in re.findall(r"step (\d+) loss (\S+)", text)
    }


def train(ndctl: Ndctl, out: Path, name: str, *more: str) -> str:
    script = str(HERE / "plain_ddp.py")
    words = ("run", "--name", name, *WORLD, "--follow", *more, "--", script, "--out", str(out))
    done = ndctl(*words)
    assert done.code == 0, done.out + done.err
    assert_nothing_left(ndctl.run_root / name)
    return done.out


@pytest.mark.slow
def test_a_killed_rank_and_a_hang_cost_only_steps_since_the_scripts_own_checkpoint(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    train(ndctl, tmp_path / "whole.pt", "whole")
    drills = ("--drill", "kill:rank=1@step=15", "--drill", "stop:rank=0@step=12")
    shown = train(ndctl, tmp_path / "broken.pt", "broken", *drills)

    assert "rank 1 was killed by SIGKILL" in shown
    assert re.search(r"stopped \(\d+% sure\): rank 0 is stopped by a signal", shown)
    assert "ndctl knows no checkpoint of it" in shown
    # The first kill costs the steps after 10, so the hang is in the second attempt.
    assert losses(ndctl.run_root / "broken") == losses(ndctl.run_root / "whole")
    last = (ndctl.run_root / "broken" / "logs" / "attempt-3" / "host-1" / "rank-1.log").read_text()
    assert f"argv ['--out', '{tmp_path / 'broken.pt'}'] cwd {Path.cwd()} WORLD_SIZE 2" in last
    # Hosts have learned what the script imports: torch's own modules are among it.
    assert "torch.optim" in (ndctl.run_root / "broken" / "imports.json").read_text()


def test_a_program_of_any_kind_is_supervised_by_exit_and_output(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    program = tmp_path / "work.sh"
    program.write_text("#!/bin/sh\necho rank $RANK of $WORLD_SIZE; exit $((RANK == 1 ? $1 : 0))\n")
    program.chmod(0o755)

    words = ("run", "--name", "works", "--gpus-per-host", "2", "--follow", "--", "--no-python")
    done = ndctl(*words, str(program), "0")
    assert done.code == 0, done.out + done.err
    log = ndctl.run_root / "works" / "logs" / "attempt-1" / "host-0" / "rank-1.log"
    assert log.read_text() == "rank 1 of 2\n"

    broken = ("run", "--name", "broken", "--gpus-per-host", "2", "--follow")
    limit = ("--set", "resilience.max_restarts=1")
    done = ndctl(*broken, *limit, "--", "--no-python", str(program), "7")
    assert done.code == 1, done.out + done.err
    assert "rank 1 exited with code 7" in done.out


def test_a_scripts_error_is_the_cause_and_its_folder_is_searched(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "train.py"
    begin = f"import beside, sys\nassert sys.path[0] == {str(tmp_path)!r}\n"
    script.write_text(f"{begin}raise RuntimeError(beside.VALUE)\n")
    words = ("run", "--follow", "--set", "resilience.max_restarts=0", "--", str(script))
    done = ndctl(*words)
    assert done.code == 1
    assert "RuntimeError: 7" in done.out + done.err
    log = (ndctl.run_root / "train" / "logs" / "attempt-1" / "host-0" / "rank-0.log").read_text()
    # The traceback begins in the script, as with `python train.py`.
    assert f'Traceback (most recent call last):\n  File "{script}", line 3' in log
    assert sys.executable not in log
