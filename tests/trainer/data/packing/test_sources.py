"""Documents from text files and JSONL, and the errors for rows that cannot be used."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import TrainingError
from tests.trainer.data.data_files import write_rows, write_texts
from trainer.data.packing import sources
from trainer.data.packing.documents import Columns, Piece
from trainer.data.packing.files import find
from trainer.data.packing.sources import end_of_piece, read_pieces


def pieces(files: str, utf8: bool = True, **columns: Any) -> list[Piece]:
    found = find(files, "auto", "data.files")
    return [*read_pieces(found, Columns(**{"text": "text", **columns}), utf8)]


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    found = pieces(write_texts(tmp_path, "one\ntwo", "", "drei"))
    assert [(p.text, p.learned, p.last) for p in found] == [
        (b"one\ntwo", True, True),
        (b"drei", True, True),
    ]
    assert sum(p.size for p in found) == 11


def test_a_large_text_is_read_in_pieces_that_end_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 16)
    text = "a line\nand two\n" * 7 + "anendwithoutanyspaceinit" + "é" * 20
    found = pieces(write_texts(tmp_path, text))
    assert b"".join(p.text for p in found).decode() == text
    assert all(len(p.text) <= 16 for p in found)
    assert [p.last for p in found] == [False] * (len(found) - 1) + [True]
    assert found[0].text == b"a line\nand two\n"
    for piece in found:
        piece.text.decode()


@pytest.mark.parametrize(
    ("data", "cut"),
    [(b"ab\ncd", 3), (b"ab cd", 2), ("abcdé".encode(), 4), ("aé€".encode()[:-1], 3), (b"", 0)],
)
def test_pieces_end_where_tokens_are_least_affected(data: bytes, cut: int) -> None:
    assert end_of_piece(data) == cut


def test_invalid_utf8_in_text_is_reported_with_its_line(tmp_path: Path) -> None:
    files = write_texts(tmp_path, b"one\ntwo\nth\xffee\n")
    with pytest.raises(TrainingError, match=r"0\.txt:3: byte 0xff is not UTF-8"):
        pieces(files)
    assert pieces(files, utf8=False)[0].text == b"one\ntwo\nth\xffee\n"


def test_rows_are_documents_and_empty_rows_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "n": 1}\n\n{"text": ""}\n{"text": "zw\\u00f6i"}')
    found = pieces(str(path))
    assert [p.text.decode() for p in found] == ["one", "zwöi"]
    assert all(p.learned and p.last for p in found)


def test_a_prompt_comes_first_and_is_not_learned(tmp_path: Path) -> None:
    rows = [{"q": "why?", "a": "so"}, {"q": "what?", "a": ""}, {"q": "", "a": ""}]
    found = pieces(write_rows(tmp_path / "a.jsonl", rows), text="a", prompt="q")
    assert [(p.text, p.learned, p.last) for p in found] == [
        (b"why?", False, False),
        (b"so", True, True),
        (b"what?", False, False),
        (b"", True, True),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"body": "x", "id": 3}', r"no column 'text'; columns: 'body', 'id'"),
        ('{"text": 3}', r"column 'text' holds 3 \(int\), not a string"),
        ('{"text": null}', r"column 'text' holds None \(null\), not a string"),
        ('{"text": "x"', r"not JSON: Expecting ',' delimiter"),
        ('{"text": "x", "n": ' + "1" * 5000 + "}", "a number has more than 4,300 digits"),
        ("[1, 2]", r"'\[1, 2\]' is not a JSON object"),
        ('{"text": "\\ud800"}', r"column 'text' holds half a surrogate pair"),
    ],
)
def test_a_bad_row_is_reported_with_its_line(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(TrainingError, match=rf"a\.jsonl:2: {what}"):
        pieces(str(path))


def test_invalid_utf8_in_a_row_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xe4"}\n')
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: byte 0xe4 is not UTF-8"):
        pieces(str(path))


def test_a_file_that_was_removed_is_reported(tmp_path: Path) -> None:
    found = find(write_texts(tmp_path, "x"), "auto", "data.files")
    (tmp_path / "0.txt").unlink()
    with pytest.raises(TrainingError, match=r"failed to read .*0\.txt: .*No such file"):
        list(read_pieces(found, Columns("text"), utf8=True))
