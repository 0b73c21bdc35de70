"""flock as the NFS client of Linux implements it: a lock on all bytes of the file, owned by the
open file description. Such locks of the kernel refuse what NFS refuses: an exclusive lock through a
read-only descriptor, and a shared lock through a write-only one.
"""

import fcntl
import os
import struct
from typing import IO

KINDS = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}


def flock(file: int | IO[bytes], operation: int) -> None:
    command = fcntl.F_OFD_SETLK if operation & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
    whole = struct.pack("hhqqi0q", KINDS[operation & ~fcntl.LOCK_NB], os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(file, command, whole)
