"""Which leader and which attempt may write."""

import errno
from pathlib import Path
from typing import Any

import pytest

from ndctl.rank.fence import GivenUp, check_attempt
from orchestrator.contract.files.fence import Fence, check_leader, read_fence, write_fence


def test_a_replaced_leader_must_not_write(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    write_fence(path, Fence(leader="a", attempt=1))
    check_leader(path, "a")
    write_fence(path, Fence(leader="b", attempt=1))
    with pytest.raises(GivenUp, match="another leader"):
        check_leader(path, "a")


def test_only_the_newest_attempt_may_write(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    write_fence(path, Fence(leader="a", attempt=2))
    check_attempt(path, 2)
    check_attempt(path, 3)  # the leader raises the fence a moment later
    with pytest.raises(GivenUp, match="attempt 1 was given up: attempt 2"):
        check_attempt(path, 1)


def test_ranks_write_nothing_if_their_fence_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    write_fence(path, Fence(leader="a", attempt=2))
    tmp_path.joinpath("fence.json").unlink()
    check_leader(path, "a")
    with pytest.raises(FileNotFoundError, match="has lost its fence"):
        check_attempt(path, 2)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"leader": "a"}'])
def test_without_a_readable_fence_writing_is_allowed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fence.json"
    path.write_text(text)
    assert read_fence(path) is None
    check_leader(path, "a")
    check_attempt(path, 1)


def test_a_failed_write_leaves_the_old_fence(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    write_fence(path, Fence(leader="a", attempt=1))
    (tmp_path / "gone").mkdir()
    with pytest.raises(OSError, match="gone"):
        write_fence(tmp_path / "gone" / "x" / "fence.json", Fence(leader="a", attempt=2))
    assert read_fence(path) == Fence(leader="a", attempt=1)


class Disk(type(Path())):  # type: ignore[misc] # Path is made for the platform when it is called
    """A path whose reads fail some times before they succeed."""

    errors: list[int]

    def read_text(self, *args: Any, **more: Any) -> str:
        if self.errors:
            raise OSError(self.errors.pop(0), "no")
        return str(super().read_text(*args, **more))


def fence_with_errors(folder: Path, *errors: int) -> Path:
    path = Disk(folder / "fence.json")
    path.errors = list(errors)
    write_fence(path, Fence(leader="b", attempt=2))
    return path


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ETIMEDOUT])
def test_nothing_may_write_while_the_fence_cannot_be_read(tmp_path: Path, number: int) -> None:
    with pytest.raises(OSError, match="no") as caught:
        check_leader(fence_with_errors(tmp_path, number), "a")
    assert not isinstance(caught.value, GivenUp), (
        "an unreadable fence does not mean that another leader took over"
    )
    with pytest.raises(OSError, match="no"):
        check_attempt(fence_with_errors(tmp_path, number), 1)


def test_a_fence_that_was_replaced_while_it_was_opened_is_opened_again(tmp_path: Path) -> None:
    with pytest.raises(GivenUp):
        check_leader(fence_with_errors(tmp_path, errno.ESTALE, errno.ESTALE), "a")
    with pytest.raises(OSError, match="no") as caught:
        check_attempt(fence_with_errors(tmp_path, *[errno.ESTALE] * 3), 1)
    assert caught.value.errno == errno.ESTALE
