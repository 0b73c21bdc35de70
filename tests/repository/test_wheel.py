"""The wheel has what a user without the repository needs."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
PACKAGES = ("ndctl", "orchestrator", "trainer")
COMMAND = "ndctl_command.py"


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build writes into the source tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "examples"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", COMMAND):
        shutil.copy(ROOT / name, copy)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", out, copy, cwd=copy)
    (path,) = out.glob("*.whl")
    return path


def files_below(folder: Path, relative_to: Path) -> set[str]:
    return {
        path.relative_to(relative_to).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_packages_and_every_example(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        assert files_below(ROOT / package, ROOT) <= names
    assert {"ndctl/py.typed", COMMAND} <= names
    stem = wheel.name.removesuffix("-py3-none-any.whl") + ".data/data/share/ndctl/"
    examples = {name.removeprefix(stem) for name in names if name.startswith(stem)}
    assert examples == files_below(ROOT / "examples", ROOT)


def test_an_installed_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    venv, python = tmp_path / "venv", tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=tmp_path)
    # The packages that ndctl needs are those of this interpreter. Python ignores .pth files in a
    # folder that a .pth file names, so the repository itself is not on the path.
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    where = "import ndctl, orchestrator, trainer; print(ndctl.__file__, orchestrator.__file__)"
    assert run(python, "-c", where, cwd=tmp_path).count(str(site)) == 2
    example = venv / "share" / "ndctl" / "examples" / "quickstart.yaml"
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for package in PACKAGES:
        (hostile / f"{package}.py").write_text("raise SystemExit('HOSTILE')\n")
    # `PYTHONPATH=.` is common, and comes before what is installed.
    command = ("env", "PYTHONPATH=.", venv / "bin" / "ndctl", "validate", example)
    assert "quickstart.yaml: valid; 4 ranks" in run(*command, cwd=hostile)
    # PyPI's `trainer` overwrites this file. Commands work nevertheless, and `doctor` names it.
    (site / "trainer" / "__init__.py").write_text("raise SystemExit('HOSTILE')\n")
    assert "quickstart.yaml: valid; 4 ranks" in run(*command, cwd=hostile)
