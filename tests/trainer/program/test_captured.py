"""A rank runs the copy of the program, in the user's working directory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.run_module import command
from tests.trainer.launch.forked_ranks import start_forked

pytestmark = pytest.mark.process
SHOW = """
import os, sys, own
print(own.VERSION, os.getcwd(), sys.argv, sys.path[0], os.environ.get("PYTHONPATH"), sep="|")
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The user's folder, edited since it was copied."""
    home, copy = tmp_path / "home", tmp_path / "capture-1"
    for name in ("own.py", "tools/own.py", "src/late.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("VERSION = 1\n")
    for name in ("train.py", "tools/train.py"):
        (home / name).write_text(SHOW)
    shutil.copytree(home, copy)
    for path in home.rglob("*.py"):
        path.write_text("VERSION = 2\n")
    return home


def run(home: Path, *words: str, cwd: str = ".", **environ: str) -> tuple[list[str], str]:
    """What the program printed, and its errors. The rank is forked, as an agent forks its ranks."""
    log = home.parent / "rank.log"
    log.unlink(missing_ok=True)
    arguments = [str(home / cwd), "--capture", str(home), str(home.parent / "capture-1"), *words]
    rank = start_forked("trainer.program", arguments, {**environment(home), **environ}, log)
    rank.join(60)
    assert rank.exitcode is not None, "the rank still runs"
    said = log.read_text()
    return parts(home, *((said, "") if rank.exitcode == 0 else ("", said)))


def run_alone(home: Path, *words: str, **environ: str) -> list[str]:
    """What the program printed in a process of its own, which reads PYTHONPATH itself."""
    program = [*command(sys.executable, "trainer.program"), str(home)]
    done = subprocess.run(
        [*program, "--capture", str(home), str(home.parent / "capture-1"), *words],
        env={**environment(home), **environ},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return parts(home, done.stdout, done.stderr)[0]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "NDCTL_RUN_DIR": str(home.parent)}


def parts(home: Path, out: str, err: str) -> tuple[list[str], str]:
    copy = str(home.parent / "capture-1")
    return out.strip().replace(copy, "COPY").split("|"), err.replace(copy, "COPY")


def test_a_script_of_the_copy_runs_in_the_users_folder(home: Path) -> None:
    out, _ = run(home, "train.py", "--lr", "1")
    assert out == ["1", str(home), "['COPY/train.py', '--lr', '1']", "COPY", "None"]
    out, _ = run(home, "tools/train.py")
    assert out[3] == "COPY/tools"
    out, _ = run(home, "../train.py", cwd="tools")
    assert out[:4] == ["1", str(home / "tools"), "['COPY/train.py']", "COPY"]


def test_a_module_is_found_in_the_copy(home: Path) -> None:
    out, _ = run(home, "-m", "train", "--lr", "1")
    assert out[0] == "1"
    assert out[2:4] == ["['COPY/train.py', '--lr', '1']", "COPY"]


def test_search_paths_lead_to_the_copy_except_to_what_it_does_not_have(home: Path) -> None:
    (home.parent / "capture-1" / "train.py").write_text(SHOW.replace("own", "late"))
    (home / "venv").mkdir()
    (home.parent / "link").symlink_to(home)
    given = [str(home / "venv"), "src", str(home.parent / "link" / "src"), "/elsewhere"]
    out = run_alone(home, "train.py", PYTHONPATH=os.pathsep.join(given[::2]))
    assert out[0] == "1"
    everything = os.pathsep.join([f"{home}/src", *given])
    out, _ = run(home, "tools/train.py", PYTHONPATH=everything)
    assert out[4].split(os.pathsep) == ["COPY/src", given[0], "COPY/src", "COPY/src", "/elsewhere"]


def test_a_module_that_was_not_copied_is_explained(home: Path) -> None:
    (home.parent / "capture-1" / "own.py").unlink()
    _, err = run(home, "train.py")
    advice, traceback = err.split("Traceback")
    assert advice.startswith(f"ndctl: {home}/own was not copied with the program: an ignore file")
    assert traceback.rstrip().endswith("ModuleNotFoundError: No module named 'own'")
    (home / "own.py").rename(home / "own_tools.py")
    _, err = run(home, "train.py")
    assert err.startswith("Traceback")


def test_a_copy_that_is_gone_is_not_replaced_by_the_folder(home: Path) -> None:
    shutil.rmtree(home.parent / "capture-1")
    _, err = run(home, "train.py")
    assert err == "ndctl: the copy of the program is not there: COPY\n"
