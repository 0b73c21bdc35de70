"""`ndctl.checkpoint`: complete on all ranks, or it does not exist."""

import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ndctl
from ndctl.rank.agreement import Ranks
from ndctl.rank.checkpoint_files import MARKER, newest_complete
from ndctl.rank.fence import GivenUp, admit_attempt
from ndctl.rank.saving import CheckpointError, written_files
from tests.ndctl.rank.many_ranks import World, place_in, saving


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def one_file(ranks: Ranks, folder: Path, step: int = 5, **options: Any) -> None:
    with saving(ranks, place_in(folder), step, **options) as own:
        (own / f"{ranks.rank}.pt").write_text(f"weights {ranks.rank}")


def test_files_of_all_ranks_are_in_one_complete_checkpoint(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        with saving(ranks, place_in(tmp_path), 7) as own:
            if ranks.rank != 2:  # it writes nothing
                (own / "shards").mkdir()
                (own / "shards" / f"{ranks.rank}.pt").write_text(f"weights {ranks.rank}")

    assert World(3).together(save) == [None] * 3
    folder = tmp_path / "checkpoints" / "step-7"
    assert newest_complete(tmp_path / "checkpoints") == (folder, ())
    marker = json.loads((folder / MARKER).read_text())
    assert marker["files"] == {"shards/0.pt": 9, "shards/1.pt": 9}
    assert marker["sha256"]["shards/1.pt"] == hashlib.sha256(b"weights 1").hexdigest()
    assert (marker["step"], marker["attempt"], marker["world_size"]) == (7, 1, 3)
    assert {path.name for path in folder.iterdir()} == {"shards", MARKER}


def test_old_checkpoints_are_removed_after_a_newer_one_is_complete(tmp_path: Path) -> None:
    world = World(2)
    for step in (10, 20, 30):
        world.together(partial(one_file, folder=tmp_path, step=step))
    assert names(tmp_path) == {"step-20", "step-30"}


def test_two_ranks_that_write_the_same_name_get_an_error_and_no_file_is_lost(
    tmp_path: Path,
) -> None:
    def save(ranks: Ranks) -> None:
        with saving(ranks, place_in(tmp_path), 6) as own:
            (own / "model.pt").write_text(f"weights {ranks.rank}")

    world = World(3)
    world.together(lambda ranks: one_file(ranks, tmp_path))
    for result in world.together(save):
        assert isinstance(result, CheckpointError)
        assert "ranks 0 and 1 both wrote model.pt" in str(result)
    assert names(tmp_path) - {"step-6.partial-1"} == {"step-5"}


@pytest.mark.parametrize("broken", [0, 2])
def test_if_one_rank_raises_inside_no_rank_has_a_checkpoint(tmp_path: Path, broken: int) -> None:
    def save(ranks: Ranks) -> None:
        with saving(ranks, place_in(tmp_path), 6) as own:
            (own / f"{ranks.rank}.pt").write_text("weights")
            if ranks.rank == broken:
                raise KeyError("no such weight")

    world = World(3)
    results = world.together(save)
    for rank, result in enumerate(results):
        assert isinstance(result, CheckpointError)
        assert f"rank {broken} raised KeyError: 'no such weight'" in str(result)
        assert isinstance(result.__cause__, KeyError) == (rank == broken)
    assert newest_complete(tmp_path / "checkpoints")[0] is None
    # The data is gone, because it may be what filled the disk. The next save works.
    assert not list(tmp_path.rglob("*.pt"))
    assert world.together(lambda ranks: one_file(ranks, tmp_path, 8)) == [None] * 3
    assert names(tmp_path) == {"step-8"}


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_exits_inside_keeps_no_other_rank_waiting(tmp_path: Path, leaver: int) -> None:
    def save(ranks: Ranks) -> None:
        with saving(ranks, place_in(tmp_path), 6, timeout_s=30.0):
            if ranks.rank == leaver:
                raise SystemExit(3)

    begun = time.monotonic()
    results = World(2).together(save)
    assert isinstance(results[leaver], SystemExit)
    assert "SystemExit: 3" in str(results[1 - leaver])
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("absent", [0, 1])
def test_a_save_that_one_rank_never_enters_names_it(tmp_path: Path, absent: int) -> None:
    def save(ranks: Ranks) -> None:
        if ranks.rank != absent:
            one_file(ranks, tmp_path, timeout_s=0.5)

    results = World(3).together(save)
    assert results.pop(absent) is None
    for result in results:
        assert isinstance(result, CheckpointError)
        assert f" s for rank {absent}; every rank must make this call" in str(result)
    assert newest_complete(tmp_path / "checkpoints")[0] is None


def test_ranks_that_save_different_steps_get_an_error(tmp_path: Path) -> None:
    results = World(2).together(lambda ranks: one_file(ranks, tmp_path, 5 + ranks.rank))
    for result in results:
        assert "rank 0 saves step 5, and rank 1 saves step 6" in str(result)


def test_a_rank_of_an_old_attempt_completes_no_checkpoint(tmp_path: Path) -> None:
    fence = tmp_path / "fence.json"
    fence.write_text(json.dumps({"leader": "a", "attempt": 2}))
    place = place_in(tmp_path, admit=admit_attempt(fence, 1))

    def save(ranks: Ranks) -> None:
        with saving(ranks, place, 5) as own:
            (own / f"{ranks.rank}.pt").write_text("weights")

    with pytest.raises(GivenUp):
        place.admit()
    for result in World(2).together(save):
        assert "attempt 1 was given up: attempt 2 has begun" in str(result)
    assert names(tmp_path) == set()


def test_what_a_killed_run_left_is_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    """Without ndctl, the next run has the same attempt number."""
    partial = tmp_path / "checkpoints" / "step-5.partial-1"
    (partial / ".rank-1").mkdir(parents=True)
    (partial / ".rank-1" / "torn.pt").write_text("half")
    (partial / ".rank-9").mkdir()
    (partial / "moved.pt").write_text("of the killed run")
    World(2).together(lambda ranks: one_file(ranks, tmp_path))
    folder = tmp_path / "checkpoints" / "step-5"
    assert {path.name for path in folder.iterdir()} == {"0.pt", "1.pt", MARKER}


def test_a_checkpoint_without_a_file_is_an_error(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        with saving(ranks, place_in(tmp_path), 5):
            pass

    assert "no rank wrote a file" in str(World(2).together(save)[1])


@pytest.mark.parametrize("name", [MARKER, ".rank-0/x", "link", "pipe"])
def test_names_and_kinds_of_files_that_cannot_be_kept_are_refused(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    match name:
        case "link":
            path.symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.write_text("x")
    with pytest.raises(OSError, match=name.replace(".", r"\.")):
        written_files(tmp_path, hashed=True)


@pytest.mark.parametrize("name", ["", MARKER])
def test_files_that_cannot_be_kept_are_a_checkpoint_error_of_one_process(
    tmp_path: Path, name: str
) -> None:
    """With the name "", the folder of checkpoints cannot be made."""
    if not name:
        (tmp_path / "checkpoints").write_text("a file")

    def save(ranks: Ranks) -> None:
        with saving(ranks, place_in(tmp_path), 5) as own:
            (own / name).write_text("weights")

    (result,) = World(1).together(save)
    assert isinstance(result, CheckpointError)
    assert isinstance(result.__cause__, OSError)


def test_without_checksums_only_sizes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "0.pt").write_text("weights")
    assert written_files(tmp_path, hashed=False)["0.pt"] == (7, None)


@pytest.mark.parametrize("step", [-1, 2.0, "3", True, None])
def test_a_step_that_is_no_number_of_steps_is_refused(step: Any) -> None:
    with pytest.raises(ValueError, match="give the number of steps done"), ndctl.checkpoint(step):
        raise AssertionError("entered")
