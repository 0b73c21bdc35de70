"""Rank 0 prepares token files, and refuses data that cannot be used."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.spec.data_spec import DataSpec, ValidationSpec
from orchestrator.errors import TrainingError
from tests.trainer.data.data_files import (
    ignore_progress,
    packed,
    save_tokenizer,
    write_rows,
    write_texts,
)
from trainer.data.open_data import Prepared, prepare, shares
from trainer.data.packing.documents import Columns
from trainer.data.packing.tokenizer import open_tokenizer


def spec_of(files: str, validation: dict[str, Any] | None = None, **more: Any) -> DataSpec:
    held_out = ValidationSpec(**validation) if validation else None
    return DataSpec(files=files, sequence_length=8, validation=held_out, **more)


def prepared(spec: DataSpec, tokens: Path) -> Prepared:
    return prepare(spec, tokens, lambda num_tokens: None, ignore_progress)


def test_data_without_tokens_is_packed_into_token_files(tmp_path: Path) -> None:
    files = write_texts(tmp_path / "texts", "abc", "defg")
    spec = spec_of(files, {"files": str(tmp_path / "texts" / "1.txt")})
    found = prepared(spec, tmp_path / "tokens")
    assert [path for path, _ in found.train] == [str(tmp_path / "tokens" / "train.tokens")]
    assert [header.num_tokens for _, header in found.train + found.validation] == [4, 5]
    made = (tmp_path / "tokens" / "train.tokens").stat()
    assert prepared(spec, tmp_path / "tokens") == found
    assert (tmp_path / "tokens" / "train.tokens").stat().st_mtime_ns == made.st_mtime_ns


def test_token_files_are_used_as_they_are(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        packed(write_texts(tmp_path / name, name * 20), tmp_path / f"{name}.tokens")
    spec = spec_of(str(tmp_path / "*.tokens"), {"files": str(tmp_path / "b.tokens")})
    found = prepared(spec, tmp_path / "tokens")
    assert [Path(path).name for path, _ in found.train] == ["a.tokens", "c.tokens"]
    assert [Path(path).name for path, _ in found.validation] == ["b.tokens"]
    assert not (tmp_path / "tokens").exists()
    assert shares(found, spec, 5) == (5, 2)


def test_a_fraction_is_held_out_from_the_end(tmp_path: Path) -> None:
    spec = spec_of(write_texts(tmp_path / "texts", "x" * 800), {"fraction": 0.1})
    found = prepared(spec, tmp_path / "tokens")
    assert shares(found, spec, 90) == (90, 10)
    with pytest.raises(
        TrainingError,
        match=r"has 90 sequences of 8 tokens \(without 10 held-out sequences\); one global batch",
    ):
        shares(found, spec, 91)


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    spec = spec_of(write_texts(tmp_path / "texts", "x" * 16))
    with pytest.raises(TrainingError, match="has 2 sequences of 8 tokens; one global batch"):
        shares(prepared(spec, tmp_path / "tokens"), spec, 3)
    files = write_texts(tmp_path / "texts", "x" * 16, "y")
    spec = spec_of(files, {"files": str(tmp_path / "texts" / "1.txt")})
    with pytest.raises(TrainingError, match=r"validation\.files has 2 tokens; one sequence needs"):
        shares(prepared(spec, tmp_path / "tokens"), spec, 1)


def test_contradicting_data_settings_are_refused(tmp_path: Path) -> None:
    files = write_texts(tmp_path / "texts", "abc")
    rows = write_rows(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(TrainingError, match=r"has format jsonl, but data\.files has format text"):
        prepared(spec_of(files, {"files": rows}), tmp_path)
    with pytest.raises(TrainingError, match=r"matches all of data\.files, so nothing is left"):
        prepared(spec_of(files, {"files": files}), tmp_path)


def test_a_vocabulary_that_is_too_small_is_refused_before_packing(tmp_path: Path) -> None:
    def check(num_tokens: int) -> None:
        raise TrainingError(f"too many: {num_tokens}")

    rows = write_rows(tmp_path / "a.jsonl", ["not a row"])
    with pytest.raises(TrainingError, match="too many: 256"):
        prepare(spec_of(rows), tmp_path / "tokens", check, ignore_progress)
    packed(write_texts(tmp_path / "texts", "abc"), tmp_path / "a.tokens")
    with pytest.raises(TrainingError, match="too many: 256"):
        prepare(spec_of(str(tmp_path / "a.tokens")), tmp_path / "tokens", check, ignore_progress)


def test_token_files_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", "one two")
    folder = save_tokenizer(tmp_path / "words", ["one", "two"])
    packed(texts, tmp_path / "a.tokens")
    packed(texts, tmp_path / "b.tokens", None, open_tokenizer(folder))
    with pytest.raises(TrainingError, match=r"a\.tokens was made by tokenizer 'bytes', but .*b"):
        prepared(spec_of(str(tmp_path / "*.tokens")), tmp_path)
    with pytest.raises(TrainingError, match=r"'bytes', which is not data.tokenizer '.*words'"):
        prepared(spec_of(str(tmp_path / "a.tokens"), tokenizer=folder), tmp_path)
    found = prepared(spec_of(str(tmp_path / "b.tokens"), tokenizer=folder), tmp_path)
    assert found.num_tokens == 4


def test_leftovers_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    (tmp_path / "train.tokens.partial-99").write_text("half")
    prepared(spec_of(write_texts(tmp_path / "texts", "abc")), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "train.tokens"}


def test_token_files_with_prompts_and_no_masks_get_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"q": "why", "a": "so"}])
    packed(rows, tmp_path / "a.tokens", Columns("a", "q"))
    files = str(tmp_path / "a.tokens")
    prepared(spec_of(files, document_mask=True), tmp_path)
    assert caplog.messages == []
    prepared(spec_of(files), tmp_path)
    (said,) = caplog.messages
    assert "a.tokens holds prompts and answers, and data.document_mask is off" in said
