import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ndctl.rank.regular_file import NotRegular, descriptor_of, open_regular, read_regular


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


NOT_REGULAR: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": listening,
}


@pytest.mark.parametrize("access", [os.O_RDONLY, os.O_RDWR], ids=["to read", "to write"])
@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_only_regular_files_are_opened(
    tmp_path: Path, kind: str, access: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("file")
    NOT_REGULAR[kind](path)
    with pytest.raises(NotRegular, match=f"^file: it is {kind}, not a file$"):
        descriptor_of(path, access)


def test_files_are_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\ntwo\n")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"one\ntwo\n"
    with open_regular(tmp_path / "file") as file:
        assert list(file) == [b"one\n", b"two\n"]


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read_regular(tmp_path / "nothing")
    assert caught.value.filename == str(tmp_path / "nothing")
