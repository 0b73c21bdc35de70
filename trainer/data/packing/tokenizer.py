"""Tokenizers: one token per byte, or a Hugging Face tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from orchestrator.errors import TrainingError

Tokens = NDArray[Any]
"""Integers of one of `KINDS`."""
Kind = Literal["uint8", "uint16", "uint32"]
KINDS: dict[Kind, int] = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}
"""Storage types of tokens, and how many different tokens each can hold."""
BYTES = "bytes"
LONGEST_NAME = 200
"""Longer names (paths of deep folders) are cut at the front: a header has limited room."""


class Vocabulary(Struct, frozen=True, kw_only=True):
    """What a token file records about its tokenizer."""

    tokenizer: str
    """Its name."""
    num_tokens: int
    """Upper bound (exclusive) of the token ids."""
    end: int
    """The token that ends each document."""
    identity: str
    """Equal for two tokenizers only if they give the same tokens, no matter how they are named."""

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
        """The tokens of each text, without begin and end tokens."""


class Bytes:
    """Each byte is a token. Zero is the end token, because it does not occur in text."""

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
                f"data.tokenizer {name!r} has no end-of-sequence token, which documents need",
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
            verbose=False,  # no warning about documents longer than the model's context
        )["input_ids"]
        return [np.array(one, dtype=self.vocabulary.kind) for one in ids]


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`.

    Raises:
        TrainingError: the tokenizer is not on this machine, or has no end token.
    """
    return Bytes() if name == BYTES else HuggingFace(name)


def load(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as exc:  # the library `tokenizers` raises plain Exception
        raise TrainingError(
            f"transformers failed to load data.tokenizer {name!r}: {exc}",
            fix="give bytes, a folder with tokenizer.json, or a hub id that is in the local cache",
        ) from exc


def identity_of(tokenizer: Any, ids: dict[str, int]) -> str:
    """A hash of everything that decides the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else type(tokenizer).__name__
    content = json.dumps([rules, sorted(ids.items()), tokenizer.eos_token_id])
    return hashlib.sha256(content.encode()).hexdigest()
