"""What a job reads: where its text or tokens are, and how they become sequences."""

from dataclasses import dataclass
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost, Matches

Files = Annotated[str, Matches(r".+", "a file name or a glob, not empty", "corpus/**/*.txt")]
Column = Annotated[str, Matches(r".+", "a column's name, not empty", "text")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSpec:
    """Held-out data; exactly one of the two keys."""

    files: Files | None = None
    """A glob of files of the same format as the training data's."""
    fraction: Annotated[float, Above(0), AtMost(0.5)] | None = None
    """Part of the training data's sequences that is held out instead, from its end."""

    def __post_init__(self) -> None:
        if (self.files is None) == (self.fraction is None):
            raise Invalid(
                [
                    Problem(
                        path="",
                        value="none" if self.files is None else "files, fraction",
                        limit="told by exactly one of files, fraction",
                        fix="keep one, for example fraction: 0.01",
                    )
                ]
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    files: Files
    """A glob of files, `**` for any depth; `{stdlib}` is Python's own library folder."""
    format: Literal["auto", "text", "jsonl", "parquet", "dataset", "tokens"] = "auto"
    """`auto` goes by the names: .jsonl, .parquet, .tokens (made by `python -m trainer.data pack`),
    a folder that datasets' save_to_disk wrote; anything else is text, a file a document."""
    column: Column = "text"
    """Of jsonl, parquet and datasets: the column that holds the text."""
    prompt_column: Column | None = None
    """With one, `column` is its answer: a document is the prompt and then the answer, and only the
    answer's tokens are learned."""
    tokenizer: Annotated[str, Matches(r".+", "bytes or a folder, not empty", "bytes")] = "bytes"
    """`bytes`: each byte is a token, 256 of them; else a Hugging Face folder, or a hub id in the
    local cache."""
    sequence_length: Annotated[int, AtLeast(8), AtMost(1 << 20)]
    """Tokens that one sequence feeds to the model."""
    validation: ValidationSpec | None = None
