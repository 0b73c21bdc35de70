"""Packing writes a complete file or none, again only after a change, and in little memory."""

import errno
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import TrainingError
from tests.trainer.data.data_files import (
    ignore_progress,
    packed,
    save_tokenizer,
    text_of,
    write_rows,
    write_texts,
)
from trainer.data.packing import pack as pack_module
from trainer.data.packing import sources
from trainer.data.packing.documents import Columns
from trainer.data.packing.files import find
from trainer.data.packing.pack import Progress, pack, pack_unless_there, packing_of
from trainer.data.packing.tokenizer import Bytes, Tokenizer, open_tokenizer
from trainer.data.packing.writer import remove_partials, writing


def packing(files: str, columns: Columns | None = None, tokenizer: Tokenizer | None = None) -> Any:
    found = find(files, "auto", "data.files")
    return packing_of(found, columns or Columns("text"), tokenizer or Bytes())


def test_the_result_does_not_depend_on_the_size_of_read_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"q": f"question {n}", "a": f"answer {n * n}"} for n in range(50)]
    files = write_rows(tmp_path / "a.jsonl", rows)
    whole = packed(files, tmp_path / "whole.tokens", Columns("a", "q"))
    monkeypatch.setattr(pack_module, "BATCH_PIECES", 3)
    parts = packed(files, tmp_path / "parts.tokens", Columns("a", "q"))
    assert parts.header == whole.header
    assert (tmp_path / "parts.tokens").read_bytes() == (tmp_path / "whole.tokens").read_bytes()


def test_progress_runs_from_zero_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "BATCH_PIECES", 1)
    told: list[Progress] = []
    job = packing(write_texts(tmp_path / "texts", "a" * 30, "b" * 10))
    pack(job, tmp_path / "x.tokens", told.append)
    assert told == [Progress(0.75, 31), Progress(1.0, 42)]


def test_memory_does_not_grow_with_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "BATCH_BYTES", 1 << 16)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1 << 15)
    files = write_texts(tmp_path / "texts", b"a line of text\n" * (1 << 19))
    tracemalloc.start()
    try:
        pack(packing(files), tmp_path / "x.tokens", ignore_progress)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "x.tokens").stat().st_size > 7 << 20
    assert peak < 2 << 20


def test_a_packed_file_is_kept_until_its_input_changes(tmp_path: Path) -> None:
    out = tmp_path / "x.tokens"
    rows = tmp_path / "a.jsonl"
    write_rows(rows, [{"text": "one", "other": "uno"}])

    def made(**changes: Any) -> bool:
        return pack_unless_there(packing(str(rows), **changes), out, ignore_progress)[1]

    assert [made(), made()] == [True, False]
    assert [made(columns=Columns("other")), made(columns=Columns("other"))] == [True, False]
    tokenizer = open_tokenizer(save_tokenizer(tmp_path / "t", ["one"]))
    assert [made(tokenizer=tokenizer), made(tokenizer=tokenizer), made()] == [True, False, True]
    write_rows(rows, [{"text": "two", "other": "dos"}])
    os.utime(rows, ns=(1, 1))
    assert [made(), made()] == [True, False]
    out.write_bytes(out.read_bytes()[:-1])
    assert [made(), made()] == [True, False]
    assert text_of(packed(str(rows), out)) == b"two\0"


def test_the_content_hash_of_documents_does_not_depend_on_their_path(tmp_path: Path) -> None:
    here = packed(write_texts(tmp_path / "here", "text"), tmp_path / "x.tokens").header
    there = packed(write_texts(tmp_path / "there", "text"), tmp_path / "y.tokens").header
    other = packed(write_texts(tmp_path / "other", "tex", "t"), tmp_path / "z.tokens").header
    assert here.content == there.content != other.content
    assert here.made_from != there.made_from


def test_a_failed_pack_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nnot fine\n')
    out = tmp_path / "out" / "x.tokens"
    with pytest.raises(TrainingError, match=r"a\.jsonl:2"):
        pack(packing(str(tmp_path / "a.jsonl")), out, ignore_progress)
    assert [*out.parent.iterdir()] == []


def test_a_write_error_is_reported_and_the_old_file_kept(tmp_path: Path) -> None:
    out = tmp_path / "x.tokens"
    out.write_text("old")
    with (
        pytest.raises(
            TrainingError,
            match=r"failed to write .*x\.tokens: No space left on device \(.* MiB free\)",
        ) as full,
        writing(out, "uint8"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert full.value.fix.startswith(f"free space in {tmp_path}, or ")
    assert [path.name for path in tmp_path.iterdir()] == ["x.tokens"]
    assert out.read_text() == "old"
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="failed to write "):
        pack(
            packing(write_texts(tmp_path / "texts", "x")),
            tmp_path / "file" / "x.tokens",
            ignore_progress,
        )


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    for name in ("x.tokens", "x.tokens.partial-7", "y.tokens.partial-7"):
        (tmp_path / name).write_text("")
    remove_partials(tmp_path / "x.tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.tokens", "y.tokens.partial-7"]


def test_missing_text_and_missing_columns_are_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [{"text": ""}])
    with pytest.raises(TrainingError, match=r"no text in .*a\.jsonl"):
        pack(packing(rows), tmp_path / "x.tokens", ignore_progress)
    with pytest.raises(TrainingError, match="text files have no columns"):
        packing(write_texts(tmp_path / "texts", "x"), Columns("text", "prompt"))
