"""Opens a job's data: rank 0 packs it into token files, and all ranks map these into memory."""

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
from trainer.data.packing.pack import OnProgress, Packing, Progress, pack_unless_there, packing_of
from trainer.data.packing.tokenizer import BYTES, open_tokenizer
from trainer.data.packing.writer import remove_partials
from trainer.data.rank0_task import run_on_rank0
from trainer.data.sequences import Sequences, TokenRow, fingerprint, num_held_out, num_sequences
from trainer.data.tokens import Header, TokenFile, read_header
from trainer.rank.ranks import on_all_ranks
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")
LOG_EVERY_S = 10.0

Check = Callable[[int], None]
"""Called with a vocabulary size; raises TrainingError if it is too large for the model."""
Parts = tuple[tuple[str, Header], ...]
"""Consecutive token files: path and header of each."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What rank 0 broadcasts to the other ranks."""

    train: Parts
    validation: Parts
    """Empty without validation, and if a fraction of the training data is held out."""

    @property
    def num_tokens(self) -> int:
        """Upper bound (exclusive) of the token ids."""
        return max(header.vocabulary.num_tokens for _, header in self.train + self.validation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    train: Sequences
    validation: Sequences | None
    fingerprint: str
    """Of the training data. It changes if any sample changes."""


def open_sequences(config: TrainingConfig, tokens: Path, check: Check, reporter: Reporter) -> Data:
    """The sequences of `config.data`. Token files that must be packed are stored in `tokens`.

    Raises:
        TrainingError: on all ranks, if the data of any rank is unusable or too small.
    """
    spec = config.data
    prepared = run_on_rank0(lambda on_progress: prepare(spec, tokens, check, on_progress), reporter)
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


def prepare(spec: DataSpec, tokens: Path, check: Check, on_progress: OnProgress) -> Prepared:
    """Find the files of `spec`, and pack them unless they are token files."""
    train, validation = _find_both(spec)
    if train.format == "tokens":
        prepared = Prepared(_headers(train), _headers(validation))
        _check_vocabularies(prepared.train + prepared.validation, spec)
        _warn_of_prompts(prepared.train, spec)
        check(prepared.num_tokens)
        return prepared
    tokenizer = open_tokenizer(spec.tokenizer)
    # Before packing, which may take hours.
    check(tokenizer.vocabulary.num_tokens)
    columns = Columns(spec.column, spec.prompt_column)
    packings = {
        tokens / f"{name}.tokens": packing_of(found, columns, tokenizer)
        for name, found in (("train", train), ("validation", validation))
        if found is not None
    }
    made = [((str(out), _pack(packing, out, on_progress)),) for out, packing in packings.items()]
    return Prepared(made[0], made[1] if validation else ())


def shares(prepared: Prepared, spec: DataSpec, global_batch_size: int) -> tuple[int, int]:
    """The number of training sequences and of validation sequences.

    Raises:
        TrainingError: the training sequences do not fill one global batch.
    """
    length = spec.sequence_length
    num = num_sequences(_num_tokens(prepared.train), length)
    held_out = num_held_out(num, spec.validation.fraction if spec.validation else None)
    if num - held_out < global_batch_size:
        without = f" (without {held_out} held-out sequences)" if held_out else ""
        raise TrainingError(
            f"data.files {spec.files!r} has {num - held_out} sequences of {length} tokens"
            f"{without}; one global batch needs {global_batch_size}",
            fix="give more data, shorter sequences or a smaller global batch",
        )
    if not prepared.validation:
        return num - held_out, held_out
    num_validation = num_sequences(_num_tokens(prepared.validation), length)
    if not num_validation:
        raise TrainingError(
            f"data.validation.files has {_num_tokens(prepared.validation)} tokens; one sequence"
            f" needs {length + 1}",
            fix="give more validation data, or shorter sequences",
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
            f"data.validation.files {held_out!r} has format {validation.format}, but data.files"
            f" has format {train.format}",
            fix="use one format for both",
        )
    # The two globs may overlap; held-out files are never trained on.
    train = train.without(validation)
    if not train.files:
        raise TrainingError(
            f"data.validation.files {held_out!r} matches all of data.files, so nothing is left to"
            " train on",
            fix="hold out fewer files, or set data.validation.fraction instead",
        )
    return train, validation


def _headers(found: Found | None) -> Parts:
    return tuple((file.path, read_header(file.path)) for file in found.files) if found else ()


def _pack(packing: Packing, out: Path, on_progress: OnProgress) -> Header:
    # Only rank 0 of the current attempt packs, so partial files are leftovers of dead processes.
    remove_partials(out)
    begun = time.perf_counter()
    header, packed = pack_unless_there(packing, out, _with_logging(on_progress, out.stem))
    if packed:
        LOG.info(
            "packed %d documents of %d files into %d tokens in %s in %.1f s",
            header.num_documents,
            len(packing.found.files),
            header.num_tokens,
            out,
            time.perf_counter() - begun,
        )
    return header


def _with_logging(on_progress: OnProgress, name: str) -> OnProgress:
    """`on_progress`, which then also logs a line every `LOG_EVERY_S`."""
    logged = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal logged
        on_progress(progress)
        if time.monotonic() - logged >= LOG_EVERY_S:
            logged = time.monotonic()
            LOG.info(
                "packing %s data: %.0f %%, %d tokens",
                name,
                100 * progress.part,
                progress.num_tokens,
            )

    return report


def _check_vocabularies(parts: Parts, spec: DataSpec) -> None:
    """Check that one tokenizer made all token files, and that it is the spec's, if it names one."""
    path, first = parts[0]
    for other, header in parts[1:]:
        if header.vocabulary.identity != first.vocabulary.identity:
            raise TrainingError(
                f"{path} was made by tokenizer {first.vocabulary.tokenizer!r}, but {other} by"
                f" {header.vocabulary.tokenizer!r}, which is a different one",
                fix="make all token files with one tokenizer",
            )
    # "bytes" is the default, so it does not say that the user chose it.
    if spec.tokenizer != BYTES:
        wanted = open_tokenizer(spec.tokenizer).vocabulary
        if wanted.identity != first.vocabulary.identity:
            raise TrainingError(
                f"{path} was made by tokenizer {first.vocabulary.tokenizer!r}, which is not"
                f" data.tokenizer {spec.tokenizer!r}",
                fix="remove data.tokenizer, or pack the token files again",
            )


def _warn_of_prompts(parts: Parts, spec: DataSpec) -> None:
    prompts = [path for path, header in parts if header.prompts]
    if prompts and not spec.masks_documents:
        LOG.warning(
            "%s holds prompts and answers, and data.document_mask is off: an answer attends to the"
            " prompts and answers before it; set data.document_mask to true",
            prompts[0],
        )


def _row(parts: Parts) -> TokenRow:
    return TokenRow([TokenFile(path, header) for path, header in parts])


def _num_tokens(parts: Parts) -> int:
    return sum(header.num_tokens for _, header in parts)
