"""The byte tokenizer, and Hugging Face tokenizers from a folder."""

import json
from pathlib import Path

import pytest

from orchestrator.errors import TrainingError
from tests.trainer.data.data_files import packed, save_tokenizer, text_of, write_texts
from trainer.data.packing.tokenizer import Bytes, open_tokenizer


def test_a_byte_is_a_token() -> None:
    encoded = Bytes().encode([b"ab", b"", b"\xff"])
    assert [one.tolist() for one in encoded] == [[97, 98], [], [255]]
    assert open_tokenizer("bytes").vocabulary.kind == "uint8"


def test_words_become_their_ids_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(save_tokenizer(tmp_path, ["one", "two"]))
    assert (tokenizer.vocabulary.num_tokens, tokenizer.vocabulary.end) == (4, 1)
    # The tokenizer's own limit of four tokens truncates nothing.
    encoded = tokenizer.encode([b"two one one two two", b"three"])
    assert [one.tolist() for one in encoded] == [[3, 2, 2, 3, 3], [0]]


@pytest.mark.parametrize(("words", "kind"), [(100, "uint8"), (300, "uint16"), (70_000, "uint32")])
def test_tokens_are_stored_in_the_smallest_type_for_the_vocabulary(
    tmp_path: Path, words: int, kind: str
) -> None:
    tokenizer = open_tokenizer(save_tokenizer(tmp_path / "t", (f"w{n}" for n in range(words))))
    file = packed(
        write_texts(tmp_path / "texts", f"w0 w{words - 1}"), tmp_path / "x.tokens", None, tokenizer
    )
    assert file.header.kind == kind
    assert file.tokens(0, 3).tolist() == [2, words + 1, 1]


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no end-of-sequence token") as told:
        open_tokenizer(save_tokenizer(tmp_path, ["one"], end=None))
    assert "eos_token" in told.value.fix


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="transformers failed to load"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "none"}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(TrainingError, match="transformers failed to load"):
        open_tokenizer(str(tmp_path))


def test_the_identity_of_a_tokenizer_ignores_its_folder(tmp_path: Path) -> None:
    folders = [
        save_tokenizer(tmp_path / name, words)
        for name, words in (("a", ["one", "two"]), ("b", ["one", "two"]), ("c", ["two", "one"]))
    ]
    a, b, c = (open_tokenizer(folder).vocabulary.identity for folder in folders)
    assert a == b != c


def test_bytes_that_are_not_text_are_tokens_too(tmp_path: Path) -> None:
    file = packed(write_texts(tmp_path / "texts", b"\xff\xfe"), tmp_path / "x.tokens")
    assert text_of(file) == b"\xff\xfe\0"
