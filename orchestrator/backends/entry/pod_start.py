"""The first process of each pod: `python -m orchestrator.backends.entry.pod_start`

It takes no arguments, because all pods of a job have the same command. The kernel does not deliver
SIGTERM to the first process of a container without a handler, and the pod would run until SIGKILL.
So the handler is set before the slow imports.
"""

import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType


def main(environ: Mapping[str, str]) -> int:
    signal.signal(signal.SIGTERM, _leave)  # until the agent sets its own handler
    from orchestrator.backends.entry.pod_agent import run

    return run(environ)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(os.environ))
