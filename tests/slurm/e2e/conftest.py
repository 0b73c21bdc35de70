"""One uninterrupted run on Slurm, which every interrupted one must equal bit by bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import processes_of
from tests.slurm.e2e.slurm_job import SlurmNdctl
from tests.slurm.testbed import SlurmTestbed


@pytest.fixture
def ndctl(slurm: SlurmTestbed, tmp_path: Path) -> Iterator[SlurmNdctl]:
    command = SlurmNdctl(tmp_path / "runs", slurm)
    yield command
    if command.run_dir.exists():
        if processes_of(command.run_dir):
            command("cancel", "e2e")
        command.assert_nothing_left()


@pytest.fixture(scope="session")
def finished(_shared: SlurmTestbed, tmp_path_factory: pytest.TempPathFactory) -> SlurmNdctl:
    """The finished, uninterrupted run."""
    _shared.restore()
    command = SlurmNdctl(tmp_path_factory.mktemp("finished") / "runs", _shared)
    done = command.submit("--follow")
    assert done.code == 0, done.out + done.err
    return command
