import sys
import tomllib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from orchestrator.backends.slurm.on_nodes import code_snapshot
from orchestrator.errors import Refused
from orchestrator.system import run_command
from tests.agent.world import TurnedClock


def packages(home: Path, *names: str) -> Path:
    for name in ("orchestrator/__init__.py", "trainer/__init__.py", *names):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    return home


def test_a_snapshot_holds_ndctl_and_nothing_of_the_users_directory(tmp_path: Path) -> None:
    target = tmp_path / "snapshot"
    (target / "orchestrator").mkdir(parents=True)
    (target / "orchestrator" / "of_before.py").touch()
    code_snapshot.take(code_snapshot.choose(TurnedClock()), target)
    assert {path.name for path in target.iterdir()} == {"orchestrator", "trainer", "ndctl"}
    assert (target / "trainer" / "__main__.py").exists()
    assert not list(target.rglob("__pycache__"))
    assert not (target / "orchestrator" / "of_before.py").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


def test_ndctl_runs_from_its_snapshot_alone(tmp_path: Path) -> None:
    """The snapshot has all files that ndctl needs, including data files."""
    code_snapshot.take(code_snapshot.choose(TurnedClock()), tmp_path / "code")
    told = "import orchestrator; print(orchestrator.__file__)"
    done = run_command(
        ["env", f"PYTHONPATH={tmp_path / 'code'}", sys.executable, "-P", "-c", told], timeout=60
    )
    assert done.out.strip() == str(tmp_path / "code" / "orchestrator" / "__init__.py")
    policy = [sys.executable, "-P", "-m", "orchestrator", "policy"]
    listed = run_command(["env", f"PYTHONPATH={tmp_path / 'code'}", *policy], timeout=60)
    assert (listed.code, "second-strike" in listed.out) == (0, True), listed.err


def test_every_kind_of_file_of_an_installation_is_copied() -> None:
    project = tomllib.loads((code_snapshot.HOME / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"].values()
    kinds = {Path(pattern).suffix for patterns in data for pattern in patterns}
    assert kinds | {".py"} == code_snapshot.KINDS


@pytest.mark.parametrize(
    "name", [".env", ".env.py", "id_rsa", "server.pem", "host.key", ".netrc", "core.4711", "a.log"]
)
def test_files_that_are_no_code_are_skipped_and_named(tmp_path: Path, name: str) -> None:
    home = packages(tmp_path / "home", f"trainer/{name}", "trainer/.ssh/known_hosts")
    chosen = code_snapshot.choose(TurnedClock(), home)
    code_snapshot.take(chosen, tmp_path / "code")
    assert f"trainer/{name}" in chosen.words()
    assert "trainer/.ssh/known_hosts" in chosen.words()
    taken = [path for path in (tmp_path / "code").rglob("*") if path.is_file()]
    assert {path.name for path in taken} == {"__init__.py"}


def test_only_some_of_many_skipped_files_are_named(tmp_path: Path) -> None:
    home = packages(tmp_path, *(f"trainer/{n}.log" for n in range(7)))
    assert code_snapshot.choose(TurnedClock(), home).words().endswith("trainer/4.log and 2 more")
    assert code_snapshot.choose(TurnedClock(), packages(tmp_path / "clean")).words() == ""


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("MOST_FILES", 3, "4 files"),
        ("MOST_BYTES", 30, "the limits are"),
        ("MOST_S", 2.0, "for 3 s"),
    ],
)
def test_a_folder_too_large_for_code_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: float, message: str
) -> None:
    seconds = count()

    class OneSecondPerCall(TurnedClock):
        """A clock that advances by one second per call."""

        def monotonic(self) -> float:
            return float(next(seconds))

    monkeypatch.setattr(code_snapshot, limit, most)
    home = packages(tmp_path, *(f"trainer/{n:04}.py" for n in range(50)))
    looked: list[Path] = []
    walk = code_snapshot._walk

    def counted_walk(home: Path) -> Iterator[Path]:
        for path in walk(home):
            looked.append(path)
            yield path

    monkeypatch.setattr(code_snapshot, "_walk", counted_walk)
    with pytest.raises(Refused, match=message) as failed:
        code_snapshot.choose(OneSecondPerCall() if limit == "MOST_S" else TurnedClock(), home)
    assert "nothing was written" in failed.value.fix
    assert len(looked) <= 4, "the walk must stop at the limit"


def test_an_interrupted_copy_keeps_the_former_snapshot(tmp_path: Path) -> None:
    home, target = packages(tmp_path / "home"), tmp_path / "code"
    code_snapshot.take(code_snapshot.choose(TurnedClock(), home), target)
    chosen = code_snapshot.choose(TurnedClock(), packages(home, "trainer/new.py"))
    (home / "trainer" / "new.py").unlink()
    with pytest.raises(FileNotFoundError):
        code_snapshot.take(chosen, target)
    assert (target / "trainer" / "__init__.py").read_text() == "trainer/__init__.py"
