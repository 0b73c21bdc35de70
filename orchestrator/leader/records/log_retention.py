"""Removes the files of earlier attempts. Each has a log of every rank, and gigabytes of dumps after
a hang. The journal keeps how each attempt ended.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.job.stage import Running
from orchestrator.job.state import Run
from orchestrator.seams import Worker

log = logging.getLogger(__name__)


class LogRetention:
    """Removes old files in the background while ranks train."""

    def __init__(
        self,
        run: Callable[[], Run],
        run_dir: RunDir,
        keep: int,
        worker: Worker = asyncio.to_thread,
    ) -> None:
        """
        Args:
            keep: number of newest attempts whose files stay.
        """
        self.worker = worker
        self.run, self.run_dir, self.keep = run, run_dir, keep
        self.tidied = keep
        """The newest attempt whose start needs no more removal."""

    def is_due(self) -> bool:
        run = self.run()
        return isinstance(run.stage, Running) and run.attempt.number > self.tidied

    async def tidy(self) -> None:
        # Set before the work, because the leader asks `is_due` again while the thread removes
        # files.
        self.tidied = self.run().attempt.number
        over = Event()
        try:
            await self.worker(remove_before, self.run_dir, self.tidied - self.keep + 1, over.is_set)
        finally:
            over.set()  # if the leader exits, the thread stops before the next file


def remove_before(run_dir: RunDir, first: int, is_over: Callable[[], bool]) -> None:
    """Remove all files of attempts before `first`, until `is_over` is true. Files that cannot be
    removed stay, and the next attempt tries again."""
    failed: list[OSError] = []
    for folder in _folders_before(run_dir, first):
        for path, names, files in os.walk(folder, topdown=False, onerror=failed.append):
            for name in files + names:
                if is_over():
                    return
                _remove(Path(path, name), failed)
        _remove(folder, failed)
    if failed:
        log.info("failed to remove some files of earlier attempts, the first: %s", failed[0])


def _folders_before(run_dir: RunDir, first: int) -> Iterator[Path]:
    for parent in (run_dir.logs, run_dir.traces(0).parent, run_dir.profiles(0).parent):
        for folder in sorted(parent.glob("attempt-*")):
            number = re.fullmatch(r"attempt-(\d+)", folder.name)
            if number is not None and int(number[1]) < first:
                yield folder


def _remove(path: Path, failed: list[OSError]) -> None:
    try:
        # `rmdir` does not remove a link to a folder.
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    except OSError as exc:
        failed.append(exc)
