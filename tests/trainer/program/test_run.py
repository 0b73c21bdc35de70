"""What a rank of a user's program reports about the exception that ended it."""

from pathlib import Path

from ndctl.rank.agreement import Ranks
from tests.ndctl.rank.many_ranks import World, place_in, saving
from trainer.program.run import _cause


def test_of_a_failed_save_a_rank_reports_its_own_exception_if_it_has_one(tmp_path: Path) -> None:
    """The others have a CheckpointError only, and are not the root cause."""

    def save(ranks: Ranks) -> None:
        with saving(ranks, place_in(tmp_path), 6):
            if ranks.rank == 1:
                raise MemoryError("no room for a copy")

    first, second = World(2).together(save)
    assert first is not None
    assert second is not None
    assert _cause(first) is first
    assert isinstance(_cause(second), MemoryError)
    other = KeyError("a")
    other.__cause__ = ValueError("b")
    assert _cause(other) is other
