"""Fixtures: a job, and an uninterrupted run whose losses other runs must equal bit by bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left, processes_of, uninterrupted


@pytest.fixture
def ndctl(tmp_path: Path) -> Iterator[Ndctl]:
    command = Ndctl(tmp_path / "runs")
    yield command
    if command.run_dir.exists():
        if processes_of(command.run_dir):
            command("cancel", "e2e")
        assert_nothing_left(command.run_dir)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Ndctl:
    """The finished, uninterrupted run."""
    return uninterrupted(tmp_path_factory)
