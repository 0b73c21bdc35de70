"""The file in which jobs leave their measured speed: many writers, torn and foreign lines."""

import os
import stat
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator import speed_history
from orchestrator.contract.mesh import Mesh
from orchestrator.plan.history.record import SpeedRecord
from orchestrator.plan.setup import Setup
from orchestrator.speed_history import path_of, recall, remember
from tests.plan.history.jobs import record, setup

PROCESSES, EACH = 4, 25


@pytest.fixture(scope="module")
def its_setup() -> Setup:
    return setup()


def test_a_record_is_read_as_it_was_written_and_stands_once(
    tmp_path: Path, its_setup: Setup
) -> None:
    path = path_of(tmp_path)
    one, other = record(its_setup, number=1), record(its_setup, 1.5, number=2)
    for written in (one, other, one):
        remember(path, written)
    assert recall(path) == (one, other)
    again = replace(one, submitted=one.submitted + 5)
    remember(path, again)
    assert recall(path) == (one, other, again), "the same job, submitted again"


def write_many(path: Path, first: int, made: SpeedRecord) -> None:
    for number in range(first, first + EACH):
        remember(path, replace(made, run_dir=f"/runs/job-{number}"))


def test_many_processes_write_at_once_and_every_line_is_whole(
    tmp_path: Path, its_setup: Setup
) -> None:
    path, context = path_of(tmp_path), get_context("fork")
    made = record(its_setup)
    writers = [
        context.Process(target=write_many, args=(path, EACH * n, made)) for n in range(PROCESSES)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * PROCESSES
    assert {one.run_dir for one in recall(path)} == {
        f"/runs/job-{number}" for number in range(PROCESSES * EACH)
    }


def test_torn_and_foreign_lines_are_ignored_and_spoil_no_other_line(
    tmp_path: Path, its_setup: Setup
) -> None:
    path, one = path_of(tmp_path), record(its_setup)
    remember(path, one)
    whole = msgspec.json.encode(one)
    with path.open("ab") as file:
        file.write(b"[" * 5000 + b"\n\xff\xfe\nnull\n{}\n" + b"x" * (20 << 10) + b"\n")
        file.write(whole.replace(b'"steps":200', b'"steps":"many"') + b"\n")
        file.write(whole[:-40])  # cut short by a crash
    other = replace(one, run_dir="/runs/other")
    remember(path, other)
    assert recall(path) == (one, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"step_s": 0.0},
        {"step_s": float("inf")},
        {"submitted": float("nan")},
        {"steps": 3},
        {"hosts": 2},
        {"hosts": 1 << 40, "devices_per_host": 1},
    ],
)
def test_a_record_that_cannot_be_true_is_not_read(
    tmp_path: Path, its_setup: Setup, changes: dict[str, float]
) -> None:
    path = path_of(tmp_path)
    remember(path, replace(record(its_setup), **changes))
    assert recall(path) == ()


def test_a_model_without_bounds_is_not_read(tmp_path: Path, its_setup: Setup) -> None:
    path = path_of(tmp_path)
    endless = replace(its_setup.shape, num_layers=10**12)
    remember(path, replace(record(its_setup), setup=replace(its_setup, shape=endless)))
    mesh = Mesh(dp_shard=-8, tp=-1)
    remember(path, replace(record(its_setup), setup=replace(its_setup, mesh=mesh)))
    assert recall(path) == ()


@given(st.binary(max_size=400))
def test_any_bytes_can_be_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = path_of(tmp_path_factory.mktemp("any"))
    path.parent.mkdir()
    path.write_bytes(data)
    assert recall(path) == ()


def test_a_large_file_is_cut_to_its_newest_records(
    tmp_path: Path, its_setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, one = path_of(tmp_path), record(its_setup)
    size = len(msgspec.json.encode(one)) + 1
    monkeypatch.setattr(speed_history, "READ_BYTES", 4 * size)
    monkeypatch.setattr(speed_history, "LARGE_BYTES", 10 * size)
    for number in range(10, 30):
        remember(path, replace(one, run_dir=f"/runs/job{number}"))
        assert path.stat().st_size <= 10 * size
        assert recall(path)[-1].run_dir == f"/runs/job{number}"
    assert not [*path.parent.glob("*.part")]


def test_a_folder_that_cannot_be_written_or_read_changes_nothing_else(
    tmp_path: Path, its_setup: Setup
) -> None:
    (tmp_path / speed_history.FOLDER).write_text("a file where the folder should be")
    with pytest.raises(OSError, match="speeds"):
        remember(path_of(tmp_path), record(its_setup))
    assert recall(path_of(tmp_path)) == ()


def test_the_file_has_the_permissions_of_the_run_root(tmp_path: Path, its_setup: Setup) -> None:
    tmp_path.chmod(0o2775)
    before = os.umask(0o077)
    try:
        remember(path_of(tmp_path), record(its_setup))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path_of(tmp_path).stat().st_mode) == 0o664
