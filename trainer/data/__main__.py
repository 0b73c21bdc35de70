"""`python -m trainer.data pack …` makes a token file; `… ledger RUN_DIR` checks what was read."""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, get_args

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.checkpoint_names import newest_complete, step_of
from orchestrator.contract.files.data_files import Format
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import TrainingError
from trainer.data.ledger_check import Standing, first_mistake, fold
from trainer.data.packing.documents import Columns
from trainer.data.packing.files import find
from trainer.data.packing.pack import Progress, Say, pack, packing_of
from trainer.data.packing.tokenizer import open_tokenizer

SHOW_LIVE_S, SHOW_S = 0.2, 10.0
CLEAR = "\x1b[K"
"""Tells a terminal to empty the rest of the line."""


def main(arguments: Sequence[str], out: TextIO, err: TextIO) -> int:
    """Do what the command line says; returns the exit code."""
    asked = parser().parse_args(arguments)
    do: Callable[[argparse.Namespace, TextIO, TextIO], int] = asked.do
    try:
        return do(asked, out, err)
    except TrainingError as exc:
        err.write(f"error: {exc}\n")
        return exc.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m trainer.data", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    formats = ["auto", *(name for name in get_args(Format) if name != "tokens")]
    packing = commands.add_parser(
        "pack",
        help="turn text into a token file",
        description="Turn text, JSONL, Parquet or a saved dataset into one token file, which"
        " data.files of a job can name. The options mean what the keys under data mean in a job.",
    )
    packing.add_argument("--files", required=True, metavar="GLOB")
    packing.add_argument("--format", choices=formats, default="auto")
    packing.add_argument("--column", default="text", metavar="NAME")
    packing.add_argument("--prompt-column", metavar="NAME")
    packing.add_argument("--tokenizer", default="bytes", metavar="bytes|FOLDER|HUB_ID")
    packing.add_argument("--out", required=True, type=Path, metavar="FILE.tokens")
    packing.set_defaults(do=run_pack)
    ledger = commands.add_parser(
        "ledger",
        help="check that every step read its samples and no others",
        description="Compute again which samples every step of a run must have read, and compare"
        " with its sample ledger. Exit code 1, and the first wrong step, where they differ.",
    )
    ledger.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    ledger.set_defaults(do=run_ledger)
    return top


def run_pack(asked: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    if asked.out.suffix != ".tokens":
        raise TrainingError(
            f"--out {asked.out}: the name of a token file ends in .tokens",
            fix=f"--out {asked.out}.tokens",
        )
    found = find(asked.files, asked.format, "--files")
    if found.format == "tokens":
        raise TrainingError(
            f"--files {asked.files!r} are token files already",
            fix="name them in data.files of the job as they are",
        )
    columns = Columns(asked.column, asked.prompt_column)
    packing = packing_of(found, columns, open_tokenizer(asked.tokenizer))
    begun = time.perf_counter()
    header = pack(packing, asked.out, showing(err))
    if err.isatty():
        err.write(f"\r{CLEAR}")
    out.write(
        f"{asked.out}: {header.num_documents} documents, {header.num_tokens} tokens"
        f" ({header.kind}, {header.vocabulary.tokenizer}), {header.size} bytes,"
        f" in {time.perf_counter() - begun:.1f} s\n"
    )
    return exit_codes.OK


def showing(err: TextIO, clock: Callable[[], float] = time.monotonic) -> Say:
    """Shows how far packing is: on a terminal in one line that changes, else now and then."""
    live = err.isatty()
    begun = shown = clock()

    def show(progress: Progress) -> None:
        nonlocal shown
        now = clock()
        if now - shown < (SHOW_LIVE_S if live else SHOW_S):
            return
        shown = now
        speed = progress.num_tokens / (now - begun)
        text = f"{progress.part:6.1%}  {progress.num_tokens} tokens  {speed:,.0f} tokens/s"
        err.write(f"\r{text}{CLEAR}" if live else f"{text}\n")
        err.flush()

    return show


def run_ledger(asked: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    run = RunDir(asked.run_dir)
    try:
        with run.samples.open(encoding="utf-8", errors="replace") as file:
            standing = fold(file)
    except OSError as exc:
        raise TrainingError(
            f"{run.samples} cannot be read: {exc.strerror}",
            fix="name the run directory of a job, or the trainer's out",
        ) from exc
    newest, _ = newest_complete(run.checkpoints)
    saved = step_of(newest.name) if newest else None
    if standing is None:
        out.write(f"{run.samples}: there is no line of any start of the trainer\n")
        return exit_codes.FAILED
    if mistake := first_mistake(standing, saved or 0):
        out.write(f"{run.samples}: step {mistake.step}: {mistake.what}\n")
        return exit_codes.FAILED
    out.write(f"{run.samples}: {describe(standing)}\n")
    return exit_codes.OK


def describe(standing: Standing) -> str:
    start = standing.start
    samples = standing.steps * start.global_batch_size
    return (
        f"each of the {standing.steps} steps that stand (of {standing.starts} starts) read exactly"
        f" its {start.global_batch_size} samples: {samples} in all,"
        f" {samples / start.num_samples:.3g} epochs of {start.num_samples}; none lost, none twice"
        f"{_skipped(standing)}"
    )


def _skipped(standing: Standing) -> str:
    """What no step has read, and why."""
    if not standing.skipped:
        return ""
    size = standing.start.global_batch_size
    told = [
        f"batches {window} of the stream (positions {(window.first - 1) * size} to"
        f" {window.last * size - 1})"
        for window in standing.skipped
    ]
    samples = sum(window.size for window in standing.skipped) * size
    return f"; skipped on purpose: {', '.join(told)}, {samples} samples"


if __name__ == "__main__":
    # A pack that is ended takes its unfinished file away with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(sys.argv[1:], sys.stdout, sys.stderr))
