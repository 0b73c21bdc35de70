"""What may be asked of a rank by signal: to leave (SIGTERM, SIGUSR1), or its stacks (SIGUSR2)."""

import faulthandler
import signal
import sys
from pathlib import Path
from types import FrameType

from orchestrator.contract.files.env import RankEnv


class StopRequest:
    """Remembers that the rank was asked to leave; the loop answers at its next step boundary."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGUSR1, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


def show_stacks_on_signal(env: RankEnv) -> None:
    """From now on SIGUSR2 writes the stacks of all threads, even while one hangs inside C."""
    out = sys.stderr
    if env.trace_dir:
        folder = Path(env.trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        out = (folder / f"rank-{env.rank}.stacks").open("a")
    faulthandler.register(signal.SIGUSR2, file=out, all_threads=True, chain=False)
