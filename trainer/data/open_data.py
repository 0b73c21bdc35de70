"""Opens a job's data: the first rank makes token files of it, all ranks map them into memory."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.files.data_files import Found
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.errors import TrainingError
from trainer.data.packing.documents import Columns
from trainer.data.packing.files import find
from trainer.data.packing.pack import Packing, Progress, Say, pack_unless_there, packing_of
from trainer.data.packing.tokenizer import BYTES, open_tokenizer
from trainer.data.packing.writer import remove_partials
from trainer.data.sequences import Sequences, TokenRow, fingerprint, num_held_out, num_sequences
from trainer.data.together import wait_for_first
from trainer.data.tokens import Header, TokenFile, read_header
from trainer.rank.emit import Reporter
from trainer.rank.ranks import on_all_ranks

LOG = logging.getLogger("trainer")
LOG_EVERY_S = 10.0

Check = Callable[[int], None]
"""Raises TrainingError where a model cannot read as many different tokens."""
Parts = tuple[tuple[str, Header], ...]
"""Token files that follow each other: where each is, and its header."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the first rank tells the others."""

    train: Parts
    validation: Parts
    """Empty without validation, and where a fraction of the training data is held out."""

    @property
    def num_tokens(self) -> int:
        """Every token is below this."""
        return max(header.vocabulary.num_tokens for _, header in self.train + self.validation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    train: Sequences
    validation: Sequences | None
    fingerprint: str
    """Of the training data: changes when any sample would be another."""


def open_sequences(config: TrainingConfig, tokens: Path, check: Check, reporter: Reporter) -> Data:
    """The sequences of `config.data`; what has to be packed for them is kept in folder `tokens`.

    Raises:
        TrainingError: on all ranks, when the data of one cannot be used, or is too little.
    """
    spec = config.data
    prepared = wait_for_first(lambda say: prepare(spec, tokens, check, say), reporter)
    num_train, num_validation = shares(prepared, spec, config.train.global_batch_size)
    train, validation = on_all_ranks(lambda: (_row(prepared.train), _row(prepared.validation)))
    held_out = (validation, 0) if prepared.validation else (train, num_train)
    return Data(
        train=Sequences(train, spec.sequence_length, 0, num_train),
        validation=Sequences(held_out[0], spec.sequence_length, held_out[1], num_validation)
        if spec.validation
        else None,
        fingerprint=fingerprint([header.content for _, header in prepared.train], num_train),
    )


def prepare(spec: DataSpec, tokens: Path, check: Check, say: Say) -> Prepared:
    """Find the files of `spec`, and pack those that are no token files yet."""
    train, validation = _find_both(spec)
    if train.format == "tokens":
        prepared = Prepared(_headers(train), _headers(validation))
        _check_vocabularies(prepared.train + prepared.validation, spec)
        check(prepared.num_tokens)
        return prepared
    tokenizer = open_tokenizer(spec.tokenizer)
    check(tokenizer.vocabulary.num_tokens)
    columns = Columns(spec.column, spec.prompt_column)
    packings = {
        tokens / f"{name}.tokens": packing_of(found, columns, tokenizer)
        for name, found in (("train", train), ("validation", validation))
        if found is not None
    }
    made = [((str(out), _pack(packing, out, say)),) for out, packing in packings.items()]
    return Prepared(made[0], made[1] if validation else ())


def shares(prepared: Prepared, spec: DataSpec, global_batch_size: int) -> tuple[int, int]:
    """How many sequences are trained on, and how many are for validation.

    Raises:
        TrainingError: when there is less than one global batch of the former.
    """
    length = spec.sequence_length
    num = num_sequences(_num_tokens(prepared.train), length)
    held_out = num_held_out(num, spec.validation.fraction if spec.validation else None)
    if num - held_out < global_batch_size:
        besides = f" besides the {held_out} held out" if held_out else ""
        raise TrainingError(
            f"data.files {spec.files!r} holds {num - held_out} sequences of {length} tokens"
            f"{besides}; one global batch takes {global_batch_size}",
            fix="give more data, shorter sequences or a smaller global batch",
        )
    if not prepared.validation:
        return num - held_out, held_out
    num_validation = num_sequences(_num_tokens(prepared.validation), length)
    if not num_validation:
        raise TrainingError(
            f"data.validation.files holds {_num_tokens(prepared.validation)} tokens, and a sequence"
            f" takes {length + 1}",
            fix="give more data to validate on, or shorter sequences",
        )
    return num, num_validation


def _find_both(spec: DataSpec) -> tuple[Found, Found | None]:
    train = find(spec.files, spec.format, "data.files")
    held_out = spec.validation.files if spec.validation else None
    if held_out is None:
        return train, None
    validation = find(held_out, spec.format, "data.validation.files")
    if validation.format != train.format:
        raise TrainingError(
            f"data.validation.files {held_out!r} is of format {validation.format}, and data.files"
            f" of format {train.format}",
            fix="hold out files of the same format",
        )
    train = train.without(validation)
    if not train.files:
        raise TrainingError(
            f"data.validation.files {held_out!r} leaves nothing of data.files to train on",
            fix="hold out fewer files, or give data.validation.fraction instead",
        )
    return train, validation


def _headers(found: Found | None) -> Parts:
    return tuple((file.path, read_header(file.path)) for file in found.files) if found else ()


def _pack(packing: Packing, out: Path, say: Say) -> Header:
    # Only the first rank of a job's one attempt is here, so whatever lies there is nobody's.
    remove_partials(out)
    begun = time.perf_counter()
    header, packed = pack_unless_there(packing, out, _logging(say, out.stem))
    if packed:
        LOG.info(
            "packed %d documents of %d files into %d tokens of %s in %.1f s",
            header.num_documents,
            len(packing.found.files),
            header.num_tokens,
            out,
            time.perf_counter() - begun,
        )
    return header


def _logging(say: Say, name: str) -> Say:
    """`say`, and a line in the log now and then."""
    logged = time.monotonic()

    def tell(progress: Progress) -> None:
        nonlocal logged
        say(progress)
        if time.monotonic() - logged >= LOG_EVERY_S:
            logged = time.monotonic()
            LOG.info(
                "packing %s data: %.0f %%, %d tokens",
                name,
                100 * progress.part,
                progress.num_tokens,
            )

    return tell


def _check_vocabularies(parts: Parts, spec: DataSpec) -> None:
    """Token files of several tokenizers, or of another than the spec's, are a mistake."""
    path, first = parts[0]
    for other, header in parts[1:]:
        if header.vocabulary.identity != first.vocabulary.identity:
            raise TrainingError(
                f"{path} was made by tokenizer {first.vocabulary.tokenizer!r}, and {other} by"
                f" another ({header.vocabulary.tokenizer!r})",
                fix="make all token files with one tokenizer",
            )
    # Of token files, bytes is only what nobody has said otherwise.
    if spec.tokenizer != BYTES:
        wanted = open_tokenizer(spec.tokenizer).vocabulary
        if wanted.identity != first.vocabulary.identity:
            raise TrainingError(
                f"{path} was made by tokenizer {first.vocabulary.tokenizer!r}, which is not"
                f" data.tokenizer {spec.tokenizer!r}",
                fix="leave data.tokenizer out, or make the token files again",
            )


def _row(parts: Parts) -> TokenRow:
    return TokenRow([TokenFile(path, header) for path, header in parts])


def _num_tokens(parts: Parts) -> int:
    return sum(header.num_tokens for _, header in parts)
