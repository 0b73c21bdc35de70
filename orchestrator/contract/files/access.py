"""Who may read and write a run directory, where its spec says so."""

import grp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.contract.launch import LaunchPlan

SET_GROUP = 0o2000
"""What is made in the folder has its group, whatever the group of the process that makes it."""


@dataclass(frozen=True, slots=True)
class Access:
    mode: int
    """Of the run directory, as chmod takes it."""
    group: int | None = None
    """Number of the Unix group; None: as the file system has it."""

    @property
    def umask(self) -> int:
        """With which its files and folders let in whom it does itself."""
        return 0o777 & ~self.mode

    def apply(self, folder: Path) -> None:
        """Raises OSError: the group is none of this process's."""
        if self.group is not None:
            os.chown(folder, -1, self.group)
        folder.chmod(self.mode | (SET_GROUP if self.mode & 0o070 else 0))


@contextmanager
def as_said(access: Access | None) -> Iterator[None]:
    """What this process makes meanwhile lets in whom the run directory does."""
    if access is None:
        yield
        return
    former = os.umask(access.umask)
    try:
        yield
    finally:
        os.umask(former)


def access_of(launch: "LaunchPlan") -> Access | None:
    """None where the spec does not say. Raises OSError: this host knows no such group."""
    spec = launch.slurm
    if spec is None or spec.mode is None:
        return None
    group = None if spec.group is None else _number_of(spec.group)
    return Access(int(str(spec.mode), 8), group)


def _number_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as exc:
        raise OSError(f"{os.uname().nodename} knows no Unix group {group}") from exc


def umask_of(launch: "LaunchPlan") -> int | None:
    """The same of the umask alone, which asks for no group."""
    spec = launch.slurm
    return None if spec is None or spec.mode is None else Access(int(str(spec.mode), 8)).umask
