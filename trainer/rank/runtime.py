"""What a rank gets from its process in addition to the training configuration."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from orchestrator.contract.drills import Drill
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.skipped_batches import Window
from trainer.rank.reporter import Reporter
from trainer.rank.signals import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    env: RankEnv
    reporter: Reporter
    drills: Sequence[Drill]
    stop: StopRequest
    skip: Sequence[Window] = ()
    """Windows of data to skip, in addition to those that the checkpoint has skipped."""
    clock: Callable[[], float]
    """Unix time for the metrics file. Step durations are measured with `perf_counter` instead."""
    processors: int = 1
    """Processors of this host that the scheduler has given to its ranks together."""
    on_leave: ExitStack = field(default_factory=ExitStack)
    """Ends threads and closes files if this process outlives its attempt; else it is not called."""
