"""Which files this process may trust, because no other user made them."""

import os
import stat
import tempfile
from pathlib import Path

from orchestrator.errors import JobError
from orchestrator.posix.denied import user_of

KINDS = {stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}
ANOTHER = (
    "give the job another name (--set name=…), or use a run root of your own (--run-root,"
    " NDCTL_RUN_ROOT)"
)


def is_trusted(path: Path, found: os.stat_result) -> bool:
    """Whether this user or root owns the file. `found` is what `stat` or `lstat` said of `path`."""
    if found.st_uid in (os.geteuid(), 0):
        return True
    # A file server may show this user's files as another user's: as those of nobody, if it does not
    # trust root. So compare with the owner of a new file.
    try:
        with tempfile.TemporaryFile(dir=path.parent) as mine:
            return file_status(mine.fileno()).st_uid == found.st_uid
    except OSError:
        return False


def file_status(fd: int) -> os.stat_result:
    """What the file system says of an open file."""
    return os.fstat(fd)


def refuse_foreign(folder: Path) -> None:
    """Refuse a run directory that another user made, or a link there to one: that user could read
    and change the job.

    Raises JobError, and OSError if it cannot be examined.
    """
    try:
        entry = folder.lstat()
    except FileNotFoundError:
        return
    if not is_trusted(folder, entry):
        what = KINDS.get(stat.S_IFMT(entry.st_mode), "file")
        raise JobError(
            f"{folder} is a {what} of {user_of(entry)}, who could read and change the job",
            fix=ANOTHER,
        )
    # A link of this user is fine, for example to a larger disk. What it leads to must be this
    # user's, too.
    target = folder.resolve()
    if not target.is_dir():
        raise JobError(f"{target} is not a folder", fix=f"remove {folder}, or {ANOTHER}")
    found = target.stat()
    if not is_trusted(target, found):
        raise JobError(
            f"{folder} is a link to {target} of {user_of(found)}, who could read and change the"
            " job",
            fix=f"remove the link, or {ANOTHER}",
        )
