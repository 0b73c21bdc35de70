"""Programs that ndctl starts import this copy of ndctl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator
import trainer
from orchestrator import run_module

pytestmark = pytest.mark.process

PROGRAM = """
import json, sys
import orchestrator.errors, trainer.listing
print(json.dumps([orchestrator.__file__, trainer.__file__, __name__, sys.argv]))
"""


def test_a_program_imports_this_copy_of_ndctl_even_if_others_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages with the same names exist in the working directory and on PYTHONPATH."""
    for folder in ("here", "there"):
        for name in ("orchestrator", "trainer"):
            (tmp_path / folder / name).mkdir(parents=True)
            (tmp_path / folder / name / "__init__.py").write_text("raise SystemExit('HOSTILE')\n")
    (tmp_path / "there" / "program.py").write_text(PROGRAM)
    (tmp_path / "here" / "json.py").write_text("raise SystemExit('HOSTILE')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    argv = [*run_module.command(sys.executable, "program"), "--now"]
    done = subprocess.run(
        argv, cwd=tmp_path / "here", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = orchestrator.__file__, trainer.__file__
    argv_seen = [str(tmp_path / "there" / "program.py"), "--now"]
    assert json.loads(done.stdout) == [ours, theirs, "__main__", argv_seen]
