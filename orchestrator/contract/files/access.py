"""Permissions of a run directory, if its spec sets them."""

import grp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from orchestrator.contract.launch import LaunchPlan

SET_GROUP = 0o2000
"""The setgid bit: new files in the folder get the folder's group."""


class Access(Struct, frozen=True):
    mode: int
    """Permissions of the run directory, as chmod takes them."""
    group: int | None = None
    """Number of the Unix group; None: leave the group as it is."""

    @property
    def umask(self) -> int:
        """The umask with which new files and folders get the same permissions."""
        return 0o777 & ~self.mode

    def apply(self, folder: Path) -> None:
        """Raises OSError if this process is not a member of the group."""
        if self.group is not None:
            os.chown(folder, -1, self.group)
        folder.chmod(self.mode | (SET_GROUP if self.mode & 0o070 else 0))


@contextmanager
def access_umask(access: Access | None) -> Iterator[None]:
    """Files made inside the context get the permissions of the run directory."""
    if access is None:
        yield
        return
    former = os.umask(access.umask)
    try:
        yield
    finally:
        os.umask(former)


def access_of(launch: "LaunchPlan") -> Access | None:
    """None if the spec sets none. Raises OSError if this host does not know the group."""
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
    """Only the umask, for which the group is not looked up."""
    spec = launch.slurm
    return None if spec is None or spec.mode is None else Access(int(str(spec.mode), 8)).umask
