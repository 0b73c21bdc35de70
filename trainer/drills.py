"""Makes the faults that a team ordered happen to this rank, for real."""

import json
import logging
import os
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.contract import exits
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.drills import Drill
from orchestrator.contract.env import DRILLS, RankEnv
from orchestrator.errors import TrainingError
from trainer.emit import Reporter

LOG = logging.getLogger("trainer")
AGENT_KILLS_WITHIN_S = 30.0
LEAST_DRAG_S = 0.25


@dataclass(slots=True)
class Drag:
    """What a rank that is to be slow waits at the beginning of each step, as for its data."""

    seconds: float = 0.0

    def wait(self) -> None:
        if self.seconds:
            threading.Event().wait(self.seconds)


def read_drills(text: str) -> tuple[Drill, ...]:
    try:
        drills: tuple[Drill, ...] = decode(tuple[Drill, ...], json.loads(text), DRILLS)
    except (Invalid, ValueError) as exc:
        raise TrainingError(
            f"{DRILLS} cannot be read: {exc}", fix="unset it, or give a JSON list of drills"
        ) from exc
    return drills


def drills_due(drills: Iterable[Drill], env: RankEnv, step: int) -> list[Drill]:
    """The drills that happen to this rank at the beginning of `step`."""
    return [drill for drill in drills if drill.step == step and _strikes(drill, env)]


def _strikes(drill: Drill, env: RankEnv) -> bool:
    if drill.target == "rank":
        return drill.index == env.rank
    # One rank tells the agent of the host, which then takes itself and all its ranks down.
    return drill.index == env.rank // env.local_world_size and env.local_rank == 0


def suffer(drill: Drill, reporter: Reporter, drag: Drag, step_s: float) -> None:
    """Tell the agent, then let the fault happen; only a rank that is stopped, or slow from here on,
    returns from it. `step_s`: what its last step took."""
    LOG.warning("rank %d: drill %s", reporter.env.rank, drill)
    reporter.drill_fired(drill)
    if drill.target == "host":
        threading.Event().wait(AGENT_KILLS_WITHIN_S)
        os.kill(os.getpid(), signal.SIGKILL)
    match drill.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            drag.seconds = max(LEAST_DRAG_S, step_s)
        case "raise":
            raise RuntimeError(f"drill {drill}")
        case "exit":
            os._exit(exits.FAILED)
