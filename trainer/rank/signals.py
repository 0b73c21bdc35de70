"""Signal handlers of a rank: stop (SIGTERM, SIGUSR1) and print all stacks (SIGUSR2)."""

import faulthandler
import signal
import sys
from pathlib import Path
from types import FrameType

from orchestrator.contract.files.env import RankEnv


class StopRequest:
    """Records a request to stop; the training loop stops at the next step boundary."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGUSR1, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


def show_stacks_on_signal(env: RankEnv) -> None:
    """Make SIGUSR2 write the stacks of all threads, even if one hangs inside C code."""
    out = sys.stderr
    if env.trace_dir:
        folder = Path(env.trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        out = (folder / f"rank-{env.rank}.stacks").open("a")
    faulthandler.register(signal.SIGUSR2, file=out, all_threads=True, chain=False)
