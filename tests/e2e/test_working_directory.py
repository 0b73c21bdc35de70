"""A job is submitted from a folder whose files have the names of modules that ndctl imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, Ndctl, submit_args

pytestmark = pytest.mark.process

OURS = ("trainer", "orchestrator", "ndctl")
NAMES = (
    "trainer",
    "ndctl",
    "torch",
    "yaml",
    "click",
    "aiohttp",
    "setproctitle",
    "numpy",
    "transformers",
)

CONSOLE = (sys.executable, "-P", str(ROOT / "ndctl_command.py"))
"""What the installed `ndctl` runs."""


def a_hostile_folder(folder: Path) -> Path:
    (folder / "orchestrator").mkdir(parents=True)
    for path in (*(f"{name}.py" for name in NAMES), "orchestrator/__init__.py"):
        (folder / path).write_text("raise SystemExit(f'HOSTILE: {__name__}')\n")
    return folder


def test_no_module_of_the_working_directory_is_imported(ndctl: Ndctl, tmp_path: Path) -> None:
    """Nor one on PYTHONPATH that has the name of a package of ndctl."""
    searched = tmp_path / "searched"
    searched.mkdir()
    for name in OURS:
        (searched / f"{name}.py").write_text("raise SystemExit(f'HOSTILE: {__name__}')\n")
    words = submit_args("--follow", train__steps="5", cluster__gpus_per_host="1")
    done = subprocess.run(
        [*CONSOLE, *words],
        env={**ndctl.environ, "PYTHONPATH": str(searched)},
        cwd=a_hostile_folder(tmp_path / "mine"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps       5 of 5" in done.stdout
    logs = [log.read_text() for log in ndctl.run_dir.rglob("*.log")]
    assert logs
    assert not [text for text in logs if "HOSTILE" in text]


def test_python_m_orchestrator_imports_no_library_from_there(tmp_path: Path) -> None:
    for name in ("yaml", "click", "rich"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('HOSTILE')\n")
    argv = [sys.executable, "-m", "orchestrator", "schema"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
