"""What a rank of a user's program reports about the exception that ended it."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from ndctl.rank.agreement import Ranks
from ndctl.rank.link import Link
from tests.ndctl.rank.many_ranks import World, place_in, saving
from trainer.program.run import _cause, _code_of


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


@pytest.mark.parametrize(
    ("before", "code", "told"),
    [
        (KeyboardInterrupt(), 1, True),
        (KeyboardInterrupt(), "interrupted", True),
        (KeyboardInterrupt(), 0, False),
        (KeyError("a"), 1, False),
    ],
)
def test_an_exit_because_of_an_interrupt_is_told_as_the_interrupt(
    before: BaseException, code: int | str, told: bool
) -> None:
    """As in Lightning, which catches KeyboardInterrupt and calls sys.exit(1)."""
    exc, link = SystemExit(code), Mock(spec=Link)
    exc.__context__ = before
    assert _code_of(exc, link) == (1 if code else 0)
    assert link.raised.called is told
