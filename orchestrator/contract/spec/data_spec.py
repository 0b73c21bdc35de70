"""What a job reads: where its text or tokens are, and how they become sequences."""

from typing import Annotated, Literal

from msgspec import Struct

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost, Matches
from orchestrator.contract.spec.types import Auto

Files = Annotated[str, Matches(r".+", "a file name or a glob, not empty", "corpus/**/*.txt")]
Column = Annotated[str, Matches(r".+", "a column's name, not empty", "text")]


class ValidationSpec(Struct, frozen=True, kw_only=True):
    """Held-out data. Give exactly one of the two keys."""

    files: Files | None = None
    """A glob of files in the same format as the training data."""
    fraction: Annotated[float, Above(0), AtMost(0.5)] | None = None
    """Share of the training data's sequences, from its end, that is held out instead."""

    def __post_init__(self) -> None:
        if (self.files is None) == (self.fraction is None):
            raise Invalid(
                [
                    Problem(
                        path="",
                        value="none" if self.files is None else "files, fraction",
                        limit="given by exactly one of files, fraction",
                        fix="keep one, for example fraction: 0.01",
                    )
                ]
            )


class DataSpec(Struct, frozen=True, kw_only=True):
    """What the job reads, and how it becomes sequences of tokens."""

    files: Files
    """A glob of files, `**` for any depth; `{stdlib}` is Python's own library folder."""
    format: Literal["auto", "text", "jsonl", "parquet", "dataset", "tokens"] = "auto"
    """`auto` decides by name: .jsonl, .parquet, .tokens (made by `python -m trainer.data pack`), a
    folder written by datasets' save_to_disk; anything else is text, one document per file."""
    column: Column = "text"
    """The column that holds the text, in jsonl, parquet and datasets."""
    prompt_column: Column | None = None
    """If set, `column` is the answer to this prompt. A document is the prompt followed by the
    answer, and only the answer's tokens count in the loss."""
    tokenizer: Annotated[str, Matches(r".+", "bytes or a folder, not empty", "bytes")] = "bytes"
    """`bytes`: each byte is a token (vocabulary of 256). Otherwise a Hugging Face folder, or a hub
    id in the local cache."""
    sequence_length: Annotated[int, AtLeast(8), AtMost(1 << 20)]
    """Tokens per sequence."""
    document_mask: bool | Auto = "auto"
    """true: tokens attend only to their own document, and its positions start at 0. false: to all
    earlier tokens of the sequence. `auto`: true with `prompt_column`, else false."""
    document_tokens: Annotated[int, AtLeast(1)] | None = None
    """Mean tokens of a document. With document masks the plan uses it for the time of attention,
    which falls with it, and plan and trainer for the MFU. null: documents as long as a sequence.
    It does not change what is trained."""
    validation: ValidationSpec | None = None
    """Held-out data for `train.eval_every`. null: none."""

    @property
    def masks_documents(self) -> bool:
        """`document_mask`, decided."""
        # An answer must not learn from other prompts. Text is packed without masks, as in GPT-3.
        if self.document_mask == "auto":
            return self.prompt_column is not None
        return self.document_mask
