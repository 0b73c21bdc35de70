"""The first process of each pod: `python -m orchestrator.backends.entry.pod_start`

Takes no arguments: all pods of a job have one command. The kernel keeps SIGTERM from the first
process of a container that does not ask for it, and the pod would then stay until SIGKILL: so it is
asked for before anything is imported that takes time, as all else does on a cold node.
"""

import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType


def main(environ: Mapping[str, str]) -> int:
    signal.signal(signal.SIGTERM, _leave)  # until the agent handles it
    from orchestrator.backends.entry.pod_agent import run

    return run(environ)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(os.environ))
