"""The copy of the user's program that this rank runs, in place of the user's folder.

The working directory stays the user's own: relative paths of the program mean what they mean under
`python`, and its output does not land in the copy.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

OPTION = "--capture"
"""Followed by the user's folder and the copy, before the program."""


class Captured(NamedTuple):
    workdir: str
    folder: str
    copy: str

    def words(self, words: Sequence[str]) -> Sequence[str]:
        """The program and its arguments, with the script in the copy."""
        if words[0] == "-m":
            return words
        below = os.path.relpath(os.path.normpath(Path(self.workdir, words[0])), self.folder)
        return [str(Path(self.copy, below)), *words[1:]]

    def moved(self, path: str) -> str:
        """The same entry of a search path in the copy, if the copy has it. It does not have a
        virtual environment, for example."""
        place = os.path.normpath(Path(self.workdir, path))
        for one, home in (
            (place, self.folder),
            (os.path.realpath(place), os.path.realpath(self.folder)),
        ):
            if path and (one == home or one.startswith(f"{home}/")):
                there = Path(self.copy, os.path.relpath(one, home))
                return str(there) if there.exists() else path
        return path

    def move_search_path(self, environ: MutableMapping[str, str]) -> None:
        """Search modules in the copy where the user's folder is on the search path, here and in
        processes that the program starts."""
        sys.path[:] = map(self.moved, sys.path)
        if given := environ.get("PYTHONPATH"):
            environ["PYTHONPATH"] = os.pathsep.join(map(self.moved, given.split(os.pathsep)))

    def advice(self, exc: BaseException) -> str:
        """What to tell a program that does not find a module. Empty if the user's folder does not
        have it either."""
        if not isinstance(exc, ModuleNotFoundError) or not exc.name:
            return ""
        stem = exc.name.replace(".", "/")
        for entry in sys.path:
            if entry == self.copy or entry.startswith(f"{self.copy}/"):
                own = Path(self.folder, os.path.relpath(entry, self.copy))
                # The folder of a package, or a module of any suffix: `.py`, `.so`.
                if (own / stem).is_dir() or next(own.glob(f"{stem}.*"), None) is not None:
                    return (
                        f"{own}/{stem} was not copied with the program: an ignore file names it, or"
                        " it was not there at submission. To copy it, write"
                        f" {self.folder}/.ndctlignore, or set run.capture to false"
                    )
        return ""


def split(workdir: str, words: Sequence[str]) -> tuple[Captured | None, Sequence[str]]:
    """The copy, if there is one, and the program."""
    if words[0] != OPTION:
        return None, words
    captured = Captured(workdir, *words[1:3])
    return captured, captured.words(words[3:])
