"""A copy of ndctl's code in the run directory: a job that is queued again runs what was submitted.

Of the user's working directory nothing is copied: the copy comes first on the path of all that the
job runs, and a `torch.py` among a user's files would be imported instead of torch.
"""

import shutil
from pathlib import Path

PACKAGES = ("orchestrator", "trainer")


def take(target: Path) -> None:
    """Put what this process runs itself under `target`."""
    shutil.rmtree(target, ignore_errors=True)
    home = Path(__file__).resolve().parents[3]
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(home / package, target / package, ignore=ignored)
