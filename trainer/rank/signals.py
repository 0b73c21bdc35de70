"""Signal handlers of a rank: stop (SIGTERM, SIGUSR1, `STOP_IN_MEMORY`) and save (`SAVE`)."""

import signal
from types import FrameType

from orchestrator.contract.messages.rank_orders import SAVE, STOP_IN_MEMORY


class StopRequest:
    """Records requests to stop or to save; the training loop does it at the next step boundary."""

    def __init__(self) -> None:
        self.asked = False
        self.on_disk = False
        """It must leave a checkpoint on the disk."""
        self.save = False
        """A checkpoint is asked for, after which training goes on."""
        signal.signal(signal.SIGTERM, self._stop_on_disk)
        signal.signal(signal.SIGUSR1, self._stop_on_disk)
        signal.signal(STOP_IN_MEMORY, self._stop)
        signal.signal(SAVE, self._save)

    def _stop_on_disk(self, signum: int, frame: FrameType | None) -> None:
        self.asked = self.on_disk = True

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True

    def _save(self, signum: int, frame: FrameType | None) -> None:
        self.save = True
