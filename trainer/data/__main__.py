"""`python -m trainer.data pack …` makes a token file; `… ledger RUN_DIR` checks a ledger."""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, get_args

from ndctl.rank.checkpoint_files import step_of
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.checkpoint_names import newest_complete
from orchestrator.contract.files.data_files import Format
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import TrainingError
from trainer.data.ledger_check import LedgerState, first_mistake, replay
from trainer.data.packing.documents import Columns
from trainer.data.packing.files import find
from trainer.data.packing.pack import OnProgress, Progress, pack, packing_of
from trainer.data.packing.tokenizer import open_tokenizer

SHOW_LIVE_S, SHOW_S = 0.2, 10.0
CLEAR = "\x1b[K"
"""Terminal sequence that clears the rest of the line."""


def main(arguments: Sequence[str], out: TextIO, err: TextIO) -> int:
    """Run the command; returns the exit code."""
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
        description="Turn text, JSONL, Parquet or a saved dataset into one token file that"
        " data.files of a job can name. The options mean the same as the keys under data in a job.",
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
        help="check that each step read exactly its samples",
        description="Recompute which samples each step of a run should have read, and compare them"
        " with its sample ledger. If they differ: exit code 1, and the first wrong step.",
    )
    ledger.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    ledger.set_defaults(do=run_ledger)
    return top


def run_pack(asked: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    if asked.out.suffix != ".tokens":
        raise TrainingError(
            f"--out {asked.out}: the name of a token file must end in .tokens",
            fix=f"--out {asked.out}.tokens",
        )
    found = find(asked.files, asked.format, "--files")
    if found.format == "tokens":
        raise TrainingError(
            f"--files {asked.files!r} matches token files, which need no packing",
            fix="name them in data.files of the job",
        )
    columns = Columns(asked.column, asked.prompt_column)
    packing = packing_of(found, columns, open_tokenizer(asked.tokenizer))
    begun = time.perf_counter()
    header = pack(packing, asked.out, progress_printer(err))
    if err.isatty():
        err.write(f"\r{CLEAR}")
    out.write(
        f"{asked.out}: {header.num_documents} documents, {header.num_tokens} tokens"
        f" ({header.kind}, {header.vocabulary.tokenizer}), {header.size} bytes,"
        f" in {time.perf_counter() - begun:.1f} s\n"
    )
    return exit_codes.OK


def progress_printer(err: TextIO, clock: Callable[[], float] = time.monotonic) -> OnProgress:
    """Prints the progress of packing: on a terminal in one line that changes, else every 10 s."""
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
            ledger = replay(file)
    except OSError as exc:
        raise TrainingError(
            f"failed to read {run.samples}: {exc.strerror}",
            fix="name the run directory of a job, or the trainer's out",
        ) from exc
    newest, _ = newest_complete(run.checkpoints)
    saved = step_of(newest.name) if newest else None
    if ledger is None:
        out.write(f"{run.samples}: the ledger records no start of the trainer\n")
        return exit_codes.FAILED
    if mistake := first_mistake(ledger, saved or 0):
        out.write(f"{run.samples}: step {mistake.step}: {mistake.what}\n")
        return exit_codes.FAILED
    out.write(f"{run.samples}: {describe(ledger)}\n")
    return exit_codes.OK


def describe(ledger: LedgerState) -> str:
    start = ledger.start
    samples = ledger.steps * start.global_batch_size
    return (
        f"each of the {ledger.steps} valid steps (from {ledger.starts} starts) read exactly its"
        f" {start.global_batch_size} samples: {samples} in total,"
        f" {samples / start.num_samples:.3g} epochs of {start.num_samples}; no sample was lost or"
        f" read twice{_skipped(ledger)}"
    )


def _skipped(ledger: LedgerState) -> str:
    """The batches that were skipped on purpose."""
    if not ledger.skipped:
        return ""
    size = ledger.start.global_batch_size
    windows = [
        f"batches {window} of the stream (positions {(window.first - 1) * size} to"
        f" {window.last * size - 1})"
        for window in ledger.skipped
    ]
    samples = sum(window.size for window in ledger.skipped) * size
    return f"; skipped on purpose: {', '.join(windows)}, {samples} samples"


if __name__ == "__main__":
    # SIGTERM must raise SystemExit, so that an unfinished token file is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(sys.argv[1:], sys.stdout, sys.stderr))
