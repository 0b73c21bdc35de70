"""The limit of open files, in separate processes because a hard limit cannot be raised again."""

import subprocess
import sys

import pytest

from orchestrator.posix.fd_limit import OWN, files_needed

LIMITED = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from orchestrator.posix.fd_limit import allow_files
print(allow_files())
code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
subprocess.run([sys.executable, "-c", code], check=True)
"""


def limited(soft: int, hard: int) -> list[str]:
    code = LIMITED.format(soft=soft, hard=hard)
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(("soft", "hard"), [(256, 2000), (2000, 2000)])
def test_the_soft_limit_is_raised_for_the_process_and_its_children(soft: int, hard: int) -> None:
    assert limited(soft, hard) == [str(hard), f"({hard}, {hard})"]


def test_open_files_of_the_first_host_grow_with_hosts_and_ranks() -> None:
    assert files_needed(2, 2) == OWN + 8
    assert files_needed(2048, 2048) == OWN + 8192
    assert files_needed(2048, 16_384) == OWN + 49_152
