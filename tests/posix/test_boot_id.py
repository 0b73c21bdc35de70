"""What the system says of itself."""

from pathlib import Path

from orchestrator.system import boot_id


def test_the_id_of_the_boot_stays_while_the_machine_runs(tmp_path: Path) -> None:
    assert len(boot_id()) == 36
    assert boot_id() == boot_id()
    assert boot_id(tmp_path / "missing") == ""
