"""`ndctl.latest_checkpoint`: the newest complete one, the same on every rank."""

from pathlib import Path

from ndctl.rank.agreement import Ranks
from ndctl.rank.resuming import find_checkpoint
from tests.ndctl.rank.many_ranks import World, place_in, saving


def save(world: World, folder: Path, step: int) -> None:
    def one(ranks: Ranks) -> None:
        with saving(ranks, place_in(folder), step) as own:
            (own / f"{ranks.rank}.pt").write_text(f"weights {step} {ranks.rank}")

    assert world.together(one) == [None] * len(world.ranks)


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks_though_one_read_the_file(
    tmp_path: Path,
) -> None:
    world, place = World(3), place_in(tmp_path)
    save(world, tmp_path, 5)
    save(world, tmp_path, 6)
    (tmp_path / "checkpoints" / "step-9.partial-1").mkdir()
    damaged = tmp_path / "checkpoints" / "step-6" / "2.pt"
    damaged.write_text(damaged.read_text().upper())

    found = world.together(lambda ranks: find_checkpoint(ranks, place))
    folder = tmp_path / "checkpoints" / "step-5"
    why = "2.pt has another checksum than its marker says"
    skipped = [("step-9.partial-1", "its write was interrupted"), ("step-6", why)]
    assert found == [(folder, skipped)] * 3
    # Without checksums, the size alone is compared.
    trusting = place_in(tmp_path, verify=False)
    (newest, _) = world.together(lambda ranks: find_checkpoint(ranks, trusting))[0]
    assert newest is not None
    assert newest.name == "step-6"


def test_before_the_process_group_exists_each_rank_looks_for_itself(tmp_path: Path) -> None:
    save(World(2), tmp_path, 5)
    assert find_checkpoint(None, place_in(tmp_path)) == (tmp_path / "checkpoints" / "step-5", [])


def test_a_first_run_finds_nothing(tmp_path: Path) -> None:
    found = World(2).together(lambda ranks: find_checkpoint(ranks, place_in(tmp_path)))
    assert found == [(None, [])] * 2
