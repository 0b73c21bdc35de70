"""What reaches a rank from outside its configuration, gathered by the frame and handed inwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.drills import Drill
from trainer.rank.emit import Reporter
from trainer.rank.signals import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    env: RankEnv
    reporter: Reporter
    drills: Sequence[Drill]
    stop: StopRequest
    skip: Sequence[Window] = ()
    """Data to be left out, besides what the checkpoint has left out already."""
    clock: Callable[[], float]
    """Unix time, for readers of the metrics; the length of a step is measured without it."""
