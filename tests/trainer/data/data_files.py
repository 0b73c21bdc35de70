"""Small data for tests: text files, tokenizers and token files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.data.packing.documents import Columns
from trainer.data.packing.files import find
from trainer.data.packing.pack import Progress, pack, packing_of
from trainer.data.packing.tokenizer import Bytes, Tokenizer
from trainer.data.sequences import Sequences, TokenRow, num_sequences
from trainer.data.tokens import TokenFile


def ignore_progress(progress: Progress) -> None:
    """A callback for progress that does nothing."""


def write_texts(folder: Path, *texts: str | bytes) -> str:
    """Write each text into a file; the glob of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        data = text.encode() if isinstance(text, str) else text
        (folder / f"{number}.txt").write_bytes(data)
    return str(folder / "*.txt")


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def packed(
    files: str, out: Path, columns: Columns | None = None, tokenizer: Tokenizer | None = None
) -> TokenFile:
    found = find(files, "auto", "data.files")
    packing = packing_of(found, columns or Columns("text"), tokenizer or Bytes())
    pack(packing, out, ignore_progress)
    return TokenFile(str(out))


def sequences(files: list[TokenFile], length: int = 8) -> Sequences:
    num = num_sequences(sum(file.header.num_tokens for file in files), length)
    return Sequences(TokenRow(files), length, 0, num)


def text_of(file: TokenFile) -> bytes:
    """All text of a token file of the byte tokenizer."""
    return bytes(file.tokens(0, file.header.num_tokens).tolist())


def save_tokenizer(folder: Path, words: Iterable[str], end: str | None = "<end>") -> str:
    """Save a Hugging Face tokenizer with the vocabulary `words`; its folder."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    names = ["<unknown>", *([end] if end else []), *words]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Backend(WordLevel(vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = WhitespaceSplit()
    if end:
        # Many tokenizers append the end token to every text, so this one does too.
        backend.post_processor = TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, vocabulary[end])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unknown>", eos_token=end, model_max_length=4
    )
    tokenizer.save_pretrained(str(folder))
    return str(folder)
