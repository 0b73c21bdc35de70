"""Complete and torn checkpoints in folders that all ranks of a framework write to."""

from pathlib import Path
from typing import Any

import pytest

from ndctl.rank.agreement import Ranks
from ndctl.rank.checkpoint_files import newest_complete
from ndctl.rank.fence import admit_attempt
from ndctl.rank.link import Link
from ndctl.rank.place import Place
from tests.ndctl.rank.many_ranks import World, place_in
from trainer.program.frameworks.folder_marks import INCOMPLETE, FolderSave, add_file, torn
from trainer.program.frameworks.last_checkpoint import get_last_checkpoint, skipped


class Told(Link):
    """Keeps what the agent of the host would get."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__({"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)})
        self.told: list[Any] = []

    def send(self, message: Any) -> None:
        self.told.append(message)


def out(folder: Path, step: int = 5) -> Path:
    return folder / "out" / f"checkpoint-{step}"


def save(ranks: Ranks, folder: Path, place: Place, *, step: int = 5, broken: int = -1) -> list[Any]:
    link = Told(ranks)
    one = FolderSave(out(folder, step), step, ranks, link, place, marks=ranks.rank == 0)
    with one.written():
        if ranks.rank == broken:
            raise KeyError("no such weight")
        (out(folder, step) / f"{ranks.rank}.pt").write_text(f"weights {ranks.rank}")
    return [(message["kind"], message.get("why", "")) for message in link.told]


def test_a_checkpoint_of_all_ranks_is_complete_and_has_its_name_in_the_run_directory(
    tmp_path: Path,
) -> None:
    place = place_in(tmp_path / "run")
    results = World(3).together(lambda ranks: save(ranks, tmp_path, place))
    assert results == [[("CheckpointSaved", "")], [], []]
    assert {path.name for path in out(tmp_path).iterdir()} == {"0.pt", "1.pt", "2.pt", "COMPLETE"}
    assert not torn(out(tmp_path))
    (newest, passed) = newest_complete(place.checkpoints)
    assert newest is not None
    assert (newest.name, newest.resolve(), passed) == ("step-5", out(tmp_path), ())


@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_that_fails_leaves_a_torn_checkpoint_and_no_rank_waits(
    tmp_path: Path, broken: int
) -> None:
    place, world = place_in(tmp_path / "run"), World(3)
    results = world.together(lambda ranks: save(ranks, tmp_path, place, broken=broken))
    assert isinstance(results[broken], KeyError)
    why = f"rank {broken} raised KeyError: 'no such weight'"
    if broken != 0:
        assert results[0] == [("CheckpointFailed", why)]
    assert torn(out(tmp_path)) == "its write was interrupted"
    assert newest_complete(place.checkpoints) == (None, ())
    # A script that catches the error saves the next one.
    results = world.together(lambda ranks: save(ranks, tmp_path, place, step=6))
    assert results == [[("CheckpointSaved", "")], [], []]
    assert not torn(out(tmp_path, 6))


def test_ranks_that_save_different_steps_make_no_checkpoint(tmp_path: Path) -> None:
    place = place_in(tmp_path / "run")
    results = World(2).together(lambda ranks: save(ranks, tmp_path, place, step=5 + ranks.rank))
    assert results[0] == [("CheckpointFailed", "rank 0 saves step 5, and rank 1 saves step 6")]
    assert torn(out(tmp_path))


def test_a_rank_of_an_old_attempt_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "fence.json").write_text('{"leader": "another", "attempt": 2}')
    place = place_in(tmp_path / "run", admit=admit_attempt(tmp_path / "fence.json", 1))
    (result,) = World(1).together(lambda ranks: save(ranks, tmp_path, place))
    assert isinstance(result, SystemExit)
    assert not out(tmp_path).exists()


def test_a_removed_checkpoint_loses_its_name_in_the_run_directory(tmp_path: Path) -> None:
    place, world = place_in(tmp_path / "run"), World(1)
    world.together(lambda ranks: save(ranks, tmp_path, place))
    out(tmp_path).rename(tmp_path / "removed")
    world.together(lambda ranks: save(ranks, tmp_path, place, step=6))
    assert {path.name for path in place.checkpoints.iterdir()} == {"step-6"}


def test_the_newest_checkpoint_that_is_not_torn_is_the_last_one(tmp_path: Path) -> None:
    place = place_in(tmp_path / "run")
    World(1).together(lambda ranks: save(ranks, tmp_path, place))
    folder = out(tmp_path).parent
    for step in (4, 10, 20):  # without marks: not written under ndctl
        (folder / f"checkpoint-{step}").mkdir()
    (folder / "checkpoint-20" / INCOMPLETE).touch()
    assert get_last_checkpoint(folder) == str(folder / "checkpoint-10")
    assert skipped == [("checkpoint-20", "its write was interrupted")]
    (folder / "checkpoint-10").rmdir()
    assert get_last_checkpoint(str(folder)) == str(out(tmp_path))
    (out(tmp_path) / "0.pt").write_text("wei")
    assert get_last_checkpoint(folder) == str(folder / "checkpoint-4")
    assert skipped[-1] == ("checkpoint-5", "0.pt has another size than its marker says")
    assert get_last_checkpoint(tmp_path) is None


def test_a_file_that_is_replaced_is_the_checkpoint_of_the_later_step_alone(tmp_path: Path) -> None:
    checkpoints, last = tmp_path / "run" / "checkpoints", tmp_path / "last.ckpt"
    other = tmp_path / "step=1.ckpt"
    for step, file, text in ((1, other, "one"), (5, last, "five"), (10, last, "tenth")):
        file.write_text(text)
        add_file(checkpoints, file, step, Link({}))
    assert {path.name for path in checkpoints.iterdir()} == {"step-1", "step-10"}
    newest, passed = newest_complete(checkpoints)
    assert newest is not None
    assert ((newest / "last.ckpt").read_text(), passed) == ("tenth", ())
    last.write_text("half")
    newest, passed = newest_complete(checkpoints)
    assert newest == checkpoints / "step-1"
    assert passed == (("step-10", "last.ckpt has another size than its marker says"),)
    # The framework removes the older file, and saves one of its own name in its place.
    other.unlink()
    (tmp_path / "step=2.ckpt").mkdir()
    (tmp_path / "step=2.ckpt" / "shard").write_text("two")
    add_file(checkpoints, tmp_path / "step=2.ckpt", 2, Link({}))
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-10"}
    assert newest_complete(checkpoints)[0] == checkpoints / "step-2"
