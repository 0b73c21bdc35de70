"""flock as Linux's NFS client does it: a lock on the bytes of the whole file, whose owner is the
open file description. The kernel's own locks of that kind refuse what NFS refuses: an exclusive
one through a descriptor that may not write, a shared one through one that may not read.
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
