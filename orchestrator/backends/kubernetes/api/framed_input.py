"""Runs the command in its arguments with a standard input that can end.

The WebSocket of `pods/exec` cannot say that the standard input has ended (only Kubernetes 1.30 and
newer can), so a command such as `sort` would wait for ever. The input therefore comes in frames:
four bytes with the length of what follows; 0 is the end. `pod_exec.py` sends the text of this file
to the pod, so it uses only the standard library.
"""

import contextlib
import os
import subprocess
import sys
import threading
from typing import IO


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _feed(source: IO[bytes], command: IO[bytes]) -> None:
    # A command that ended, or that closed its input, reads no more.
    with contextlib.suppress(OSError):
        while length := int.from_bytes(source.read(4), "big"):
            command.write(source.read(length))
            command.flush()
    with contextlib.suppress(OSError):
        command.close()


def _main(argv: list[str]) -> None:
    try:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE)
    except OSError as exc:
        sys.stderr.write(f"{argv[0]}: {exc.strerror}\n")
        sys.exit(127)
    given = (sys.stdin.buffer, process.stdin)
    threading.Thread(target=_feed, args=given, daemon=True).start()
    code = process.wait()
    # Not sys.exit: the thread may still wait for input, with a lock on the stream.
    os._exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    _main(sys.argv[1:])
