"""`ndctl.checkpoint`: all ranks write one checkpoint, which is complete or does not exist."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ndctl.rank.agreement import NotAgreed, Ranks, ranks_of_script
from ndctl.rank.checkpoint_files import (
    MARKER,
    Written,
    checksum,
    commit,
    partial_name,
    remove_old,
    sync,
)
from ndctl.rank.link import Link, current, number_of_steps
from ndctl.rank.place import Place, place

OWN = ".rank-"
"""Folder in a partial checkpoint that one rank writes to."""
HASHING_THREADS = 4
NO_GROUP = (
    "needs torch.distributed, because this is one of {size} ranks, which agree through its store;"
    " call torch.distributed.init_process_group first"
)


class CheckpointError(RuntimeError):
    """A checkpoint is not complete. Every rank gets it, with the same reason. Older checkpoints are
    unchanged."""


@contextlib.contextmanager
def checkpoint(step: int, *, timeout_s: float = 600.0) -> Iterator[Path]:
    """Save the checkpoint of `step`: write files into the folder that this gives.

        with ndctl.checkpoint(step) as folder:
            torch.save(model.state_dict(), folder / f"rank-{rank}.pt")

    Every rank must enter it, with the same step, also a rank that writes nothing. Each rank gets an
    empty folder of its own. At the end all files are together in one folder, so two ranks must not
    write files of the same name. When it returns, the checkpoint is complete on every rank: all
    files are on disk with their sizes and checksums in a marker. If a rank raises or dies, or the
    disk is full, no checkpoint appears, and older ones stay.

    The folder is `checkpoints/step-N` in the job's run directory. Without ndctl it is in the
    working directory, or in NDCTL_RUN_DIR, and old checkpoints are not removed.

    Args:
        step: optimizer steps that are done, 0 or more.
        timeout_s: seconds that a rank waits for the others.

    Raises:
        CheckpointError: on every rank, if the checkpoint is not complete. On a rank that raised
            inside, its own exception is the `__cause__`.
        ValueError: `step` is no step.
    """
    step = number_of_steps(step, "ndctl.checkpoint")
    link = current()
    ranks = ranks_of_script(link.rank, link.world_size)
    if ranks is None:
        raise CheckpointError(f"ndctl.checkpoint {NO_GROUP.format(size=link.world_size)}")
    if not _saving.acquire():
        raise CheckpointError("ndctl.checkpoint is already saving; save one checkpoint at a time")
    before = link.phase
    link.beat("checkpoint")
    try:
        save = Save(step, ranks, link, place(), timeout_s)
        yield from save.run()
    finally:
        _saving.release()
        link.beat(before)


class _Flag:
    """Taken while this process saves. Not a lock: a second save must fail, not wait."""

    taken = False

    def acquire(self) -> bool:
        free, self.taken = not self.taken, True
        return free

    def release(self) -> None:
        self.taken = False


_saving = _Flag()


class Save:
    """One rank's part in saving one checkpoint."""

    def __init__(self, step: int, ranks: Ranks, link: Link, where: Place, timeout_s: float) -> None:
        self.step, self.ranks, self.link, self.place = step, ranks, link, where
        self.timeout_s = timeout_s
        self.partial = where.checkpoints / partial_name(step, link.attempt)
        self.own = self.partial / f"{OWN}{ranks.rank}"

    def run(self) -> Iterator[Path]:
        raised: BaseException | None = None
        written: dict[str, Written] = {}
        try:
            _remove(self.own)  # of an earlier try
            self.own.mkdir(parents=True)
            yield self.own
            written = written_files(self.own, hashed=self.place.verify)
        except Exception as exc:  # noqa: BLE001 - the other ranks must hear of it first
            raised = exc
        except BaseException as exc:
            # The process ends. It does not wait for the other ranks, and they must not wait for it.
            self._leave(exc)
            raise
        why = self._complete(written, raised)
        if why:
            said = f"the checkpoint of step {self.step} is not complete: {why}"
            raise CheckpointError(said) from raised
        self.link.saved = self.step

    def _complete(self, written: dict[str, Written], raised: BaseException | None) -> str:
        """Why the checkpoint is not complete; empty if it is."""
        try:
            why = self._agree("written", self._report(written, raised), self._check)
            why = why or self._agree("moved", self._move(written), self._commit)
        except NotAgreed as exc:
            why = str(exc)
        if why:
            self._discard()  # it may be what filled the disk
        if self.ranks.rank == 0:
            self._tell(why)
        return why

    def _report(self, written: dict[str, Written], raised: BaseException | None) -> dict[str, Any]:
        return {
            "step": self.step,
            "why": f"{type(raised).__name__}: {raised}" if raised is not None else "",
            "files": written,
        }

    def _agree(self, what: str, mine: Any, decide: Callable[[list[Any]], str]) -> str:
        call = f"ndctl.checkpoint({self.step})"
        why: str = self.ranks.agree(f"save-{what}", mine, decide, self.timeout_s, call)
        return why

    def _leave(self, exc: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            report = self._report({}, exc)
            self.ranks.leave("save-written", report, f"rank 0 raised {report['why']}")
        self._discard()

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # for the same reason as the save failed
            _remove(self.own)

    def _check(self, reports: list[dict[str, Any]]) -> str:
        """On rank 0: whether the files of all ranks can be put together."""
        owner: dict[str, int] = {}
        for rank, report in enumerate(reports):
            if report["why"]:
                return f"rank {rank} raised {report['why']}"
            if report["step"] != self.step:
                return f"rank 0 saves step {self.step}, and rank {rank} saves step {report['step']}"
            for name in report["files"]:
                other = owner.setdefault(name, rank)
                if other != rank:
                    return (
                        f"ranks {other} and {rank} both wrote {name}; let one rank write it, or put"
                        " the rank into its name"
                    )
        if not owner:
            return "no rank wrote a file"
        self.files = {
            name: Written(*file) for report in reports for name, file in report["files"].items()
        }
        try:
            self._clear(len(reports))
        except OSError as exc:
            return _reason(exc)
        return ""

    def _clear(self, size: int) -> None:
        """Remove what a killed run of the same attempt left, which happens without ndctl."""
        own = {f"{OWN}{rank}" for rank in range(size)}
        for path in self.partial.iterdir():
            if path.name not in own:
                _remove(path)

    def _move(self, written: dict[str, Written]) -> str:
        """Move the files of this rank together with those of the others. Why not, or empty."""
        try:
            for name in written:
                target = self.partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (self.own / name).rename(target)
            for folder in {(self.partial / name).parent for name in written}:
                sync(folder)
        except OSError as exc:
            return _reason(exc)
        _remove(self.own)
        return ""

    def _commit(self, whys: list[str]) -> str:
        """On rank 0: make the checkpoint complete."""
        for rank, why in enumerate(whys):
            if why:
                return f"rank {rank}: {why}"
        try:
            self.place.admit()
            commit(
                self.partial,
                self.files,
                step=self.step,
                attempt=self.link.attempt,
                world_size=self.ranks.size,
            )
        except OSError as exc:
            _remove(self.partial)
            return _reason(exc)
        with contextlib.suppress(OSError):  # the next save tries again
            remove_old(self.place.checkpoints, self.step, self.place.keep, self.place.keep_every)
        return ""

    def _tell(self, why: str) -> None:
        kind, more = ("CheckpointFailed", {"why": why}) if why else ("CheckpointSaved", {})
        self.link.send({"kind": kind, "attempt": self.link.attempt, "step": self.step, **more})


def written_files(folder: Path, *, hashed: bool) -> dict[str, Written]:
    """The files in `folder`, after they are on disk. Names use `/`.

    Raises OSError, also for anything that is neither a file nor a folder.
    """
    from concurrent.futures import ThreadPoolExecutor

    names = []
    for parent, folders, files in os.walk(folder):
        for name in (*files, *folders):
            path = Path(parent, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise OSError(f"{path.relative_to(folder)} is neither a file nor a folder")
        names += [Path(parent, name).relative_to(folder).as_posix() for name in files]
    if reserved := [name for name in names if name == MARKER or name.startswith(OWN)]:
        raise OSError(f"the name {reserved[0]} is reserved; choose another one")

    def finished(name: str) -> Written:
        path = folder / name
        sync(path)
        return Written(path.stat().st_size, checksum(path) if hashed else None)

    # Hashing and syncing release the interpreter lock.
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return dict(zip(names, threads.map(finished, names), strict=True))


def _remove(path: Path) -> None:
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _reason(exc: OSError) -> str:
    if exc.strerror is None:
        return str(exc)
    return f"{exc.strerror} ({exc.filename})" if exc.filename else exc.strerror
