"""Tells complete from torn checkpoints in folders that a framework writes, all ranks into one.

Each rank puts `INCOMPLETE` into the folder before it writes. When all ranks have written, one of
them adds the marker of `ndctl.checkpoint`, with the sizes of all files, and removes `INCOMPLETE`. A
folder with neither was not written under ndctl, and its framework alone knows what it is worth.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ndctl.rank.agreement import NotAgreed, Ranks, ranks_of_script
from ndctl.rank.checkpoint_files import MARKER, defect_of, final_name, sync
from ndctl.rank.fence import GivenUp
from ndctl.rank.link import Link, current
from ndctl.rank.place import Place, place

INCOMPLETE = "INCOMPLETE"
WHAT = "framework-save"
TIMEOUT_S = 600.0
"""A rank waits so long for the others to have written."""


def report_saved(step: int, add: Callable[[], None]) -> None:
    """On rank 0, after all ranks have written a checkpoint: `add` it to the run directory, and tell
    the agent."""
    link, why = current(), ""
    try:
        place().admit()
        add()
    except OSError as exc:
        why = str(exc)
    kind, more = ("CheckpointFailed", {"why": why}) if why else ("CheckpointSaved", {})
    link.send({"kind": kind, "attempt": link.attempt, "step": step, **more})


def folder_save(folder: Path, step: int, *, marks: bool) -> "FolderSave":
    """The save of this process."""
    link = current()
    return FolderSave(
        folder, step, ranks_of_script(link.rank, link.world_size), link, place(), marks=marks
    )


class FolderSave:
    """One rank's part in one checkpoint that a framework writes."""

    def __init__(
        self, folder: Path, step: int, ranks: Ranks | None, link: Link, where: Place, *, marks: bool
    ) -> None:
        """
        Args:
            ranks: None: they do not know each other, and each trains for itself.
            marks: this rank adds the marker. If the hosts share no file system, one rank of each
                host does.
        """
        self.folder, self.step, self.marks = folder, step, marks
        self.ranks, self.link, self.place = ranks, link, where
        self.done = False

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Around the framework's own save, on every rank."""
        try:
            self._begin()
            yield
        except Exception as exc:
            self._leave(f"{type(exc).__name__}: {exc}")
            raise
        self.complete()

    def _begin(self) -> None:
        try:
            self.place.admit()
        except GivenUp as exc:
            sys.exit(f"ndctl: {self.folder} is not written: {exc}")
        except OSError:  # who may write is unknown at present; `complete` asks again
            pass
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / INCOMPLETE).touch()

    def _leave(self, raised: str) -> None:
        """The other ranks must not wait for this one. It does not wait for them either: they may be
        in a collective of the framework, and only the end of this rank frees them."""
        if self.done:
            return
        self.done = True
        if self.ranks is not None:
            with contextlib.suppress(RuntimeError):  # the store is lost
                self.ranks.leave(WHAT, [self.step, raised], f"rank 0 raised {raised}")
            self.ranks.calls[WHAT] += 1
        if self.link.rank == 0:
            self._tell(f"rank 0 raised {raised}")

    def complete(self) -> None:
        """Mark the folder as complete after all ranks have written. Call it on every rank."""
        if self.done:
            return
        self.done = True
        why = self._agreed()
        if not why and self.marks:
            try:
                self.place.admit()
                mark(self.folder, self.step, self.link)
                if self.link.rank == 0:
                    add_link(self.place.checkpoints, self.folder, self.step)
            except OSError as exc:
                why = str(exc)
        if self.link.rank == 0:
            self._tell(why)

    def _tell(self, why: str) -> None:
        kind, more = ("CheckpointFailed", {"why": why}) if why else ("CheckpointSaved", {})
        self.link.send({"kind": kind, "attempt": self.link.attempt, "step": self.step, **more})

    def _agreed(self) -> str:
        """Why the checkpoint is not complete; empty if all ranks have written it."""
        if self.ranks is None:
            return ""
        try:
            why: str = self.ranks.agree(
                WHAT, [self.step, ""], _problem, TIMEOUT_S, f"the save of step {self.step}"
            )
        except NotAgreed as exc:
            return str(exc)
        return why


def _problem(reports: list[tuple[int, str]]) -> str:
    for rank, (step, raised) in enumerate(reports):
        if raised:
            return f"rank {rank} raised {raised}"
        if step != reports[0][0]:
            return f"rank 0 saves step {reports[0][0]}, and rank {rank} saves step {step}"
    return ""


def mark(folder: Path, step: int, link: Link) -> None:
    """Raises OSError if a file cannot be read or written."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (INCOMPLETE, MARKER):
            # On NFS, opening the file also makes its size known here.
            sync(path)
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    (folder / MARKER).write_text(_marker(step, link, files))
    sync(folder / MARKER)
    (folder / INCOMPLETE).unlink(missing_ok=True)
    sync(folder)


def _marker(step: int, link: Link, files: dict[str, int]) -> str:
    body = {"step": step, "attempt": link.attempt, "world_size": link.world_size, "files": files}
    return json.dumps(body)


def add_link(checkpoints: Path, folder: Path, step: int) -> None:
    """Give `folder` the name in the run directory that commands show and `latest_checkpoint` finds.
    Links to checkpoints that the framework has removed are removed too."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for path in checkpoints.iterdir():
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)
    path = checkpoints / final_name(step)
    if path.is_symlink() or not path.exists():
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.symlink_to(folder.absolute(), target_is_directory=True)
        new.replace(path)


def add_file(checkpoints: Path, file: Path, step: int, link: Link) -> None:
    """The same for a checkpoint that is one file, or a folder without a marker: a folder of the run
    directory has a link to it, and the marker.

    Raises OSError.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    for folder in checkpoints.glob("step-*"):
        links = [path for path in folder.iterdir() if path.is_symlink()]
        # The framework has removed the file, or replaced it by the one of this step.
        if any(not path.exists() or path.samefile(file) for path in links):
            shutil.rmtree(folder)
    new = checkpoints / f"{final_name(step)}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    (new / file.name).symlink_to(file.absolute())
    parts = [file, *file.rglob("*")]
    names = {f"{file.name}/{part.relative_to(file)}".removesuffix("/."): part for part in parts}
    files = {name: part.stat().st_size for name, part in names.items() if part.is_file()}
    (new / MARKER).write_text(_marker(step, link, files))
    shutil.rmtree(checkpoints / final_name(step), ignore_errors=True)
    new.rename(checkpoints / final_name(step))


def torn(folder: Path) -> str:
    """Why `folder` is no complete checkpoint; empty if it is one, or was not written under
    ndctl."""
    if (folder / INCOMPLETE).exists():
        return "its write was interrupted"
    return (defect_of(folder) or "") if (folder / MARKER).exists() else ""
