"""Text to tokens: a byte each, or by a Hugging Face tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import TrainingError

Tokens = NDArray[Any]
"""Whole numbers of one of `KINDS`."""
Kind = Literal["uint8", "uint16", "uint32"]
KINDS: dict[Kind, int] = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}
"""What tokens are stored as, and how many different ones that can tell apart."""
BYTES = "bytes"
LONGEST_NAME = 200
"""Of a longer name, such as that of a deep folder, the end is kept: a header has limited room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a file of tokens must say about the tokenizer that made them."""

    tokenizer: str
    """Its name."""
    num_tokens: int
    """Every token is below this."""
    end: int
    """The token that ends each document."""
    identity: str
    """Differs where two tokenizers do, whatever their names."""

    @property
    def kind(self) -> Kind:
        return next(kind for kind, most in KINDS.items() if self.num_tokens <= most)


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def reads_text(self) -> bool:
        """Texts must be valid UTF-8."""

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each text, and none but those: no begin, no end."""


class Bytes:
    """A byte is a token; zero ends documents, for it stands for nothing in text."""

    vocabulary = Vocabulary(tokenizer=BYTES, num_tokens=256, end=0, identity=BYTES)
    reads_text = False

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class HuggingFace:
    reads_text = True

    def __init__(self, name: str) -> None:
        self._tokenizer = load(name)
        end = self._tokenizer.eos_token_id
        if end is None:
            raise TrainingError(
                f"data.tokenizer {name!r} has no end-of-sequence token to end documents with",
                fix="set eos_token in its tokenizer_config.json",
            )
        ids = self._tokenizer.get_vocab()
        self.vocabulary = Vocabulary(
            tokenizer=name[-LONGEST_NAME:],
            num_tokens=max(*ids.values(), end) + 1,
            end=end,
            identity=identity_of(self._tokenizer, ids),
        )

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        ids = self._tokenizer(
            [text.decode() for text in texts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # documents may well be longer than the model's context
        )["input_ids"]
        return [np.array(one, dtype=self.vocabulary.kind) for one in ids]


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`.

    Raises:
        TrainingError: when it is not on this machine, or cannot end documents.
    """
    return Bytes() if name == BYTES else HuggingFace(name)


def load(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as exc:  # what the library tokenizers raises is of no class of its own
        raise TrainingError(
            f"data.tokenizer {name!r} is no tokenizer that transformers can load here: {exc}",
            fix="give bytes, a folder with tokenizer.json, or a hub id that is in the local cache",
        ) from exc


def identity_of(tokenizer: Any, ids: dict[str, int]) -> str:
    """A hash of all that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else type(tokenizer).__name__
    said = json.dumps([rules, sorted(ids.items()), tokenizer.eos_token_id])
    return hashlib.sha256(said.encode()).hexdigest()
