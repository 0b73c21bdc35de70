"""Standard streams that are closed or full, and words that no file can be named after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.journal import to_line
from tests.dashboard.dashboard_story import finished, journal
from tests.e2e.job import ROOT

pytestmark = pytest.mark.process
RUN = f"cd {ROOT} && {sys.executable} -m orchestrator"


def shell(words: str) -> tuple[int, str]:
    """Exit code and errors of a command in a shell."""
    done = subprocess.run(
        ["bash", "-c", f"{RUN} {words}"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_as_good_as_dev_null(closed: str) -> None:
    assert shell(f"policy {closed}") == (0, "")


def test_output_that_cannot_be_written_is_an_error_in_one_sentence() -> None:
    code, err = shell("policy > /dev/full")
    assert code == exit_codes.FAILED
    assert err == (
        "error: cannot write standard output: No space left on device\n"
        "  fix: write it to a file on a disk with free space\n"
    )


def test_a_current_folder_that_was_removed_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    leave = f"cd {gone} && rmdir {gone} && {sys.executable} {ROOT}/ndctl_command.py"
    done = subprocess.run(
        ["bash", "-c", f"{leave} list --run-root relative"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == exit_codes.FAILED
    assert done.stderr == (
        "error: the current folder was removed, and a relative path needs it\n"
        "  fix: change to another folder (cd), and run the command again\n"
    )


def test_a_name_that_is_too_long_for_a_file_is_unknown() -> None:
    code, err = shell(f"status {'a' * 5000}")
    assert code == exit_codes.BAD_JOB_STATE
    assert err.startswith("error: no job 'aaa")


@pytest.mark.parametrize("encoding", ["iso-8859-1", "euc-jp", "ascii", "ascii:surrogateescape"])
def test_a_character_that_the_encoding_lacks_is_replaced(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "rank.log").write_text("torch.OutOfMemoryError: CUDA out of memory ⠿ ü\n")
    run_dir = RunDir(tmp_path / "quickstart")
    run_dir.path.mkdir()
    run_dir.journal.write_bytes(b"".join(map(to_line, journal(finished()))))
    for words in (f"classify {tmp_path}/rank.log", f"dashboard quickstart --run-root {tmp_path}"):
        done = subprocess.run(
            ["bash", "-c", f"{RUN} {words}"],
            capture_output=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding, "XDG_STATE_HOME": str(tmp_path)},
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"CUDA out of memory" in done.stdout or b"quickstart" in done.stdout
