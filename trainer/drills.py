"""Makes the faults that a team ordered happen to this rank, for real."""

import json
import logging
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator.contract import exits
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.drills import Drill
from orchestrator.contract.env import DRILLS, RankEnv
from orchestrator.errors import TrainingError
from trainer.emit import Reporter

if TYPE_CHECKING:
    from torch import nn

LOG = logging.getLogger("trainer")
AGENT_KILLS_WITHIN_S = 30.0
TOO_MUCH = 1 << 60
"""Bytes that no device has."""


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


def suffer(
    drill: Drill, reporter: Reporter, parameters: "Sequence[tuple[str, nn.Parameter]]"
) -> None:
    """Tell the agent, then let the fault happen; only a rank that was stopped, or whose weights
    were spoiled, ever returns from it."""
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
        case "raise":
            raise RuntimeError(f"drill {drill}")
        case "exit":
            os._exit(exits.FAILED)
        case "oom":
            exhaust(parameters)
        case "nan":
            spoil(parameters)


def exhaust(parameters: "Sequence[tuple[str, nn.Parameter]]") -> None:
    """Ask the allocator of the device for what it cannot have; it raises its own error."""
    import torch

    torch.empty(TOO_MUCH, dtype=torch.uint8, device=parameters[0][1].device)


def spoil(parameters: "Sequence[tuple[str, nn.Parameter]]") -> None:
    """One number of this rank's weights is none any more, as memory that fails may have it."""
    import torch
    from torch.distributed.tensor import DTensor

    for _, parameter in parameters:
        part = parameter.detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        if part.numel():
            part.view(-1)[0] = torch.nan
            return
