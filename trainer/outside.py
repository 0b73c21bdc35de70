"""What reaches a rank from outside its configuration, gathered by the frame and handed inwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.contract.drills import Drill
from orchestrator.contract.env import RankEnv
from orchestrator.contract.skipping import Window
from trainer.emit import Reporter
from trainer.signals import StopRequest


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
