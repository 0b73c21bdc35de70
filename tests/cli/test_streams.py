"""Standard streams that are closed or full, and words that no file can be named after."""

import subprocess
import sys

import pytest

from orchestrator.contract.files import exit_codes
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


def test_a_name_that_is_too_long_for_a_file_is_unknown() -> None:
    code, err = shell(f"status {'a' * 5000}")
    assert code == exit_codes.BAD_JOB_STATE
    assert err.startswith("error: no job 'aaa")
