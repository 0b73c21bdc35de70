"""Token files are read completely or refused."""

import os
from pathlib import Path

import pytest

from orchestrator.errors import TrainingError
from tests.trainer.data.data_files import packed, text_of, write_rows, write_texts
from trainer.data.packing.documents import Columns
from trainer.data.tokens import HEADER_BYTES, TokenFile, read_header


def test_documents_follow_each_other_with_an_end_token(tmp_path: Path) -> None:
    file = packed(write_texts(tmp_path / "texts", "abc", "", "defg"), tmp_path / "x.tokens")
    assert text_of(file) == b"abc\0defg\0"
    assert file.ends.tolist() == [4, 9]
    assert file.header.num_documents == 2
    assert file.header.size == (tmp_path / "x.tokens").stat().st_size
    assert file.learned(1, 6).tolist() == [True] * 5


def test_only_answers_and_end_tokens_are_learned(tmp_path: Path) -> None:
    rows = [{"q": "why", "a": "so"}, {"q": "", "a": "x"}, {"q": "how", "a": ""}]
    files = write_rows(tmp_path / "a.jsonl", rows)
    file = packed(files, tmp_path / "x.tokens", Columns("a", "q"))
    assert text_of(file) == b"whyso\0x\0how\0"
    shown = "".join("+" if learned else "." for learned in file.learned(0, 12))
    assert shown == "...+++++...+"
    for start in range(12):
        for stop in range(start + 1, 13):
            part = file.learned(start, stop)
            assert "".join("+" if learned else "." for learned in part) == shown[start:stop]


def test_a_file_that_shrank_raises_an_error_and_does_not_kill_the_process(tmp_path: Path) -> None:
    file = packed(write_texts(tmp_path / "texts", "x" * 9000), tmp_path / "x.tokens")
    os.truncate(tmp_path / "x.tokens", HEADER_BYTES)
    with pytest.raises(TrainingError, match="was truncated while it was in use"):
        file.tokens(0, 9000)


def test_an_open_file_that_is_removed_or_replaced_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    file = packed(write_texts(tmp_path / "texts", "before"), path)
    packed(write_texts(tmp_path / "texts", "after"), path)
    path.unlink()
    assert text_of(file) == b"before\0"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data[:-1], "bytes, but its header says"),
        (lambda data: data + b"x", "bytes, but its header says"),
        (lambda data: b"", "failed to open the token file"),
        (lambda data: b"some text, not tokens", "is not a token file: it does not start with"),
        (lambda data: data.replace(b'"kind"', b'"king"', 1), "is not a token file: king: "),
        (lambda data: data.replace(b'"uint8"', b'"int99"', 1), "is not a token file: kind: "),
    ],
)
def test_a_damaged_token_file_is_refused(tmp_path: Path, change: object, what: str) -> None:
    assert callable(change)
    path = tmp_path / "x.tokens"
    packed(write_texts(tmp_path / "texts", "text"), path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TrainingError, match=what):
        read_header(str(path))


def test_a_file_that_differs_from_the_first_hosts_is_refused(tmp_path: Path) -> None:
    here = packed(write_texts(tmp_path / "here", "text"), tmp_path / "x.tokens")
    there = packed(write_texts(tmp_path / "there", "tixt"), tmp_path / "y.tokens")
    assert TokenFile(here.path, here.header).header == here.header
    with pytest.raises(TrainingError, match="on this host differs from the file on the first host"):
        TokenFile(there.path, here.header)
