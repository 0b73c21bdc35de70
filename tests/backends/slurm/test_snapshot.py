from pathlib import Path

import pytest

from orchestrator.backends.slurm import snapshot
from orchestrator.errors import BackendError
from orchestrator.system import run_command
from tests.backends.slurm.slurm_launch import FakeSlurm


def a_tree(folder: Path) -> Path:
    for name in ("mine.py", "pack/inner.py", ".venv/lib.py", "ndctl-runs/job/journal.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")
    return folder


def names(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(("orchestrator/", "trainer/"))}


def test_without_git_all_but_junk_is_copied_and_ndctl_itself(tmp_path: Path) -> None:
    tree, target = a_tree(tmp_path / "tree"), tmp_path / "tree" / "runs" / "job" / "snapshot"
    snapshot.take(tree, target, FakeSlurm())
    snapshot.take(tree, target, FakeSlurm())
    assert names(target) == {"mine.py", "pack/inner.py"}
    assert (target / "orchestrator" / "agent" / "__main__.py").exists()
    assert (target / "trainer" / "__main__.py").exists()


@pytest.mark.process
def test_with_git_what_it_does_not_ignore_is_copied(tmp_path: Path) -> None:
    tree = a_tree(tmp_path / "tree")
    (tree / ".gitignore").write_text("ndctl-runs\n.venv\npack\n")
    assert run_command(["git", "init", "-q", str(tree)], timeout=240).code == 0
    snapshot.take(tree, tmp_path / "snapshot", run_command)
    assert names(tmp_path / "snapshot") == {"mine.py", ".gitignore"}


def test_a_tree_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "LIMIT_BYTES", 3)
    with pytest.raises(BackendError, match=r"a snapshot may have .* the largest file is mine\.py"):
        snapshot.take(a_tree(tmp_path / "tree"), tmp_path / "snapshot", FakeSlurm())
    assert not (tmp_path / "snapshot").exists()
