from pathlib import Path

from orchestrator.backends.slurm import snapshot


def test_a_snapshot_holds_ndctl_and_nothing_of_the_users_directory(tmp_path: Path) -> None:
    target = tmp_path / "snapshot"
    (target / "orchestrator").mkdir(parents=True)
    (target / "orchestrator" / "of_before.py").touch()
    snapshot.take(target)
    assert {path.name for path in target.iterdir()} == {"orchestrator", "trainer"}
    assert (target / "trainer" / "__main__.py").exists()
    assert not list(target.rglob("__pycache__"))
    assert not (target / "orchestrator" / "of_before.py").exists()
