"""Records in each Python process which files of ndctl it enters, and when.

Python imports this module at its start when its folder is in PYTHONPATH.
"""

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

HAS_LOCALS = 2
"""Bit of `co_flags`: code of a function, not the body of a module or a class."""

ROOM_PREFIXES = tuple(f"{os.environ['WALK_ROOT']}/{top}/" for top in ("orchestrator", "trainer"))


def _is_imported(frame: FrameType | None) -> bool:
    """A module that is being imported makes the call, for example to fill a table. Nobody follows a
    job there."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return frame.f_globals.get("__name__") != "__main__"
        frame = frame.f_back
    return False


class Recorder:
    """Appends a line to one file for each file that a process enters first."""

    def __init__(self) -> None:
        self.fd = os.open(os.environ["WALK_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.pid = os.getpid()
        self.entered: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOM_PREFIXES):
            return
        if code.co_name.startswith("<") or not code.co_flags & HAS_LOCALS:
            return
        if (pid := os.getpid()) != self.pid:  # a fork inherits the recorder
            self.pid, self.entered = pid, set()
        if code.co_filename in self.entered or _is_imported(frame):
            return
        self.entered.add(code.co_filename)
        path = code.co_filename.removeprefix(os.environ["WALK_ROOT"] + "/")
        os.write(self.fd, f"{time.time()}\t{pid}\t{path}\t{code.co_name}\n".encode())


recorder = Recorder()
threading.setprofile(recorder)
sys.setprofile(recorder)
