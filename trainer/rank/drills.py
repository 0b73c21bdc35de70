"""Makes the faults that a team ordered happen to this rank, for real."""

import importlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import DRILLS, RankEnv
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.drills import Drill
from orchestrator.errors import TrainingError
from trainer.rank.emit import Reporter

if TYPE_CHECKING:
    from torch import nn

LOG = logging.getLogger("trainer")
AGENT_KILLS_WITHIN_S = 30.0
TOO_MUCH = 1 << 60
"""Bytes that no device has."""
LEAST_DRAG_S = 0.25


@dataclass(slots=True)
class Victim:
    """What of a rank drills reach into, and what they leave behind."""

    parameters: "Sequence[tuple[str, nn.Parameter]]"
    stall_loader: Callable[[], None]
    step_s: float = 0.0
    """What its last step took."""
    drag_s: float = 0.0
    """What it waits at the beginning of each step, as for its data."""

    def drag(self) -> None:
        if self.drag_s:
            threading.Event().wait(self.drag_s)


def read_drills(text: str) -> tuple[Drill, ...]:
    try:
        drills: tuple[Drill, ...] = decode(tuple[Drill, ...], read_json(text), DRILLS)
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


def suffer(drill: Drill, reporter: Reporter, victim: Victim) -> None:  # noqa: C901 - a case a kind
    """Tell the agent, then let the fault happen, or prepare it where it is part of a step."""
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
            victim.drag_s = max(LEAST_DRAG_S, victim.step_s)
        case "raise":
            raise RuntimeError(f"drill {drill}")
        case "exit":
            os._exit(exit_codes.FAILED)
        case "oom":
            exhaust(victim.parameters)
        case "nan":
            spoil(victim.parameters)
        case "busy":
            sum(itertools.repeat(0))  # in C, which never lets go of the GIL
        case "skip" | "shape" | "order":
            _spoil_all_reduce(drill.fault)
        case "data":
            victim.stall_loader()
        case "write":
            _stall_writes()


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


def _stall_writes() -> None:
    """Whoever opens a file of a checkpoint waits for ever."""
    files: Any = importlib.import_module("trainer.checkpoint.writer").WatchedFiles
    files.create_stream = lambda *_: threading.Event().wait()


def _spoil_all_reduce(fault: str) -> None:
    """The step's all-reduce goes wrong on this rank, once, as after a branch that ranks take
    differently."""
    dist: Any = importlib.import_module("torch.distributed")  # drills are read before torch is
    proper = dist.all_reduce

    def spoiled(tensor: Any, **how: Any) -> Any:
        if how:  # HSDP's own, of gradients, not the totals of the step
            return proper(tensor, **how)
        dist.all_reduce = proper
        match fault:
            case "skip":
                return None
            case "shape":
                return proper(tensor[: tensor.numel() // 2].clone())
            case _:
                dist.barrier()
                return proper(tensor)

    dist.all_reduce = spoiled
