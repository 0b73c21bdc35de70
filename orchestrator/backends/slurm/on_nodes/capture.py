"""A copy of the user's program in the run directory, so that a job runs what was submitted.

A job may wait for hours and be requeued for weeks, while the user edits the next version. Ranks
start the script of the copy, in the user's own working directory.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from orchestrator.backends.slurm.on_nodes.capture_rules import OWN, TOOLS, Rules, is_never_copied
from orchestrator.errors import Refused
from orchestrator.seams import Clock

MOST_FILES = 20_000
MOST_BYTES = 200 * 10**6
MOST_S = 30.0
"""Maximum seconds to list the files. If it takes longer, the copy would take minutes."""
NAMED = 5
"""Maximum number of files that a message names."""
CODE = (".py", ".so")
"""Suffixes of what Python imports."""

Kind = Literal["file", "link", "folder", "ignored", "nothing"]


class Chosen(Struct, frozen=True, kw_only=True):
    """What is copied, as paths relative to `folder`."""

    folder: Path
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    """Each with its target."""
    size: int
    ignored: tuple[str, ...]
    """Files and folders that are not copied."""

    @property
    def ignored_code(self) -> tuple[str, ...]:
        """What the program may import, but the copy does not have."""
        return tuple(one for one in self.ignored if one.endswith(CODE))

    def words(self) -> str:
        told = f"{len(self.files):,} files, {_megabytes(self.size)}, of {self.folder}"
        return f"{told} (without {named(self.ignored)})" if self.ignored else told


def named(paths: tuple[str, ...]) -> str:
    more = len(paths) - NAMED
    return ", ".join(paths[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def choose(folder: Path, run_root: Path, clock: Clock) -> Chosen:
    """List the files of the program. Raises Refused if they are too many or too large, or if a file
    cannot be read."""
    try:
        return _choose(folder, run_root, clock)
    except OSError as exc:
        raise Refused(
            f"run.capture: cannot copy {exc.filename or folder}: {exc.strerror}",
            fix=f"name it in {folder / OWN}, or set run.capture to false; nothing was written or"
            " queued",
        ) from exc


def _choose(folder: Path, run_root: Path, clock: Clock) -> Chosen:
    began = clock.monotonic()
    files: list[str] = []
    links: list[tuple[str, str]] = []
    ignored: list[str] = []
    counts, sizes = Counter[str](), Counter[str]()
    for kind, path in _walk(folder, run_root):
        below = os.path.relpath(path, folder)
        first = below.partition("/")[0]
        if kind == "ignored":
            ignored.append(below + ("/" if Path(path).is_dir() else ""))
        elif kind == "link":
            links.append((below, _target(path, folder)))
            counts[first] += 1
        elif kind == "file":
            files.append(below)
            counts[first] += 1
            sizes[first] += _size(path)
        seconds = clock.monotonic() - began
        if counts.total() > MOST_FILES or sizes.total() > MOST_BYTES or seconds > MOST_S:
            raise _too_large(folder, counts, sizes, seconds)
    there = {*files, *(str(one) for file in files for one in Path(file).parents)}
    links = [(link, _in_copy(link, target, folder, there)) for link, target in links]
    return Chosen(
        folder=folder,
        files=tuple(sorted(files)),
        links=tuple(sorted(links)),
        size=sizes.total(),
        ignored=tuple(sorted(ignored)),
    )


def _size(path: str) -> int:
    if not os.access(path, os.R_OK):
        raise PermissionError(13, "permission denied", path)
    return Path(path).stat().st_size


def _walk(folder: Path, run_root: Path) -> Iterator[tuple[Kind, str]]:
    runs = run_root.stat() if run_root.exists() else None
    left = [(str(folder), Rules.of(folder))]
    while left:
        here, rules = left.pop()
        with os.scandir(here) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            kind = _kind(entry, rules, folder)
            if kind != "folder":
                yield kind, entry.path
            elif runs is None or not os.path.samestat(runs, Path(entry.path).stat()):
                left.append((entry.path, rules.inside(entry.path)))


def _kind(entry: os.DirEntry[str], rules: Rules, folder: Path) -> Kind:
    is_folder, path = entry.is_dir(follow_symlinks=False), Path(entry.path)
    if is_never_copied(path, is_folder=is_folder):
        # Those of tools are in each project, and no program expects them.
        return "nothing" if is_folder or entry.name in TOOLS else "ignored"
    if rules.ignore(entry.path, is_folder=is_folder):
        return "ignored"
    if is_folder:
        return "folder"
    if not path.exists():
        return "nothing"  # a link without a target
    if entry.is_symlink():
        return "file" if _is_code_elsewhere(path, folder) else "link"
    return "file" if entry.is_file() else "nothing"  # a socket, pipe or device


def _is_code_elsewhere(link: Path, folder: Path) -> bool:
    """A link to code outside of the folder: its content is copied."""
    target = link.resolve()
    return target.suffix == ".py" and target.is_file() and folder.resolve() not in target.parents


def _target(link: str, folder: Path) -> str:
    """Relative to `folder` if it is inside, else absolute. Links are not followed."""
    target, home = Path(link).resolve(), folder.resolve()
    return str(target.relative_to(home)) if target.is_relative_to(home) else str(target)


def _in_copy(link: str, target: str, folder: Path, there: set[str]) -> str:
    """The text of the link in the copy. A target that is not copied stays where it is."""
    if target.startswith("/"):
        return target
    if target in there:
        return os.path.relpath(target, Path(link).parent)
    return str(folder / target)


def _too_large(folder: Path, counts: Counter[str], sizes: Counter[str], seconds: float) -> Refused:
    most = sorted(counts, key=lambda one: sizes[one] / MOST_BYTES + counts[one] / MOST_FILES)
    shown = (f"{one} ({counts[one]:,} files, {_megabytes(sizes[one])})" for one in most[:-4:-1])
    return Refused(
        f"run.capture: {folder} has at least {counts.total():,} files and"
        f" {_megabytes(sizes.total())} to copy (listed for {seconds:.0f} s); the limits are"
        f" {MOST_FILES:,} files, {_megabytes(MOST_BYTES)} and {MOST_S:.0f} s. The largest so far:"
        f" {', '.join(shown) or 'none'}",
        fix=f"name in {folder / OWN} what the program does not import (with the syntax of"
        " .gitignore, which it replaces); or set run.workdir to the folder of the program; or set"
        " run.capture to false, so that ranks run the files of the folder itself. Nothing was"
        " written or queued",
    )


def _megabytes(size: int) -> str:
    return f"{size / 10**6:,.1f} MB" if size < 10**7 else f"{size / 10**6:,.0f} MB"


def take(chosen: Chosen, target: Path) -> None:
    """Copy the files to `target` atomically. Raises OSError."""
    fresh = target.with_name(f"{target.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a submission that was killed
    fresh.mkdir()
    for below in chosen.files:
        _copy(chosen.folder / below, fresh / below)
    for below, to in chosen.links:
        (fresh / below).parent.mkdir(parents=True, exist_ok=True)
        (fresh / below).symlink_to(to)
    fresh.rename(target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
        can_run = source.stat().st_mode & 0o100
    except FileNotFoundError:
        return  # removed since the files were listed, such as a log of another job
    if can_run:  # the rest of the mode is that of the run directory's files
        mode = target.stat().st_mode
        target.chmod(mode | (mode & 0o444) >> 2)
