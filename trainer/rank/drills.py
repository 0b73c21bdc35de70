"""Injects the faults of ordered drills into this rank. The faults are real, not simulated."""

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
from orchestrator.contract.drills import Drill
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import DRILLS, RankEnv
from orchestrator.contract.read_json import read_json
from orchestrator.errors import TrainingError
from trainer.rank.reporter import Reporter

if TYPE_CHECKING:
    from torch import nn

LOG = logging.getLogger("trainer")
AGENT_KILLS_WITHIN_S = 30.0
MORE_THAN_ANY_DEVICE = 1 << 60
"""Bytes; no device has so many."""
MIN_DELAY_S = 0.25


@dataclass(slots=True)
class FaultTarget:
    """The parts of a rank that drills change."""

    parameters: "Sequence[tuple[str, nn.Parameter]]"
    stall_loader: Callable[[], None]
    step_s: float = 0.0
    """Duration of the last step."""
    delay_s: float = 0.0
    """Delay at the start of each step, as if the data were slow."""

    def slow_down(self) -> None:
        if self.delay_s:
            threading.Event().wait(self.delay_s)


def read_drills(text: str) -> tuple[Drill, ...]:
    try:
        drills: tuple[Drill, ...] = decode(tuple[Drill, ...], read_json(text), DRILLS)
    except (Invalid, ValueError) as exc:
        raise TrainingError(
            f"failed to read {DRILLS}: {exc}", fix="unset it, or give a JSON list of drills"
        ) from exc
    return drills


def drills_due(drills: Iterable[Drill], env: RankEnv, step: int) -> list[Drill]:
    """The drills that fire on this rank at the start of `step`."""
    return [drill for drill in drills if drill.step == step and _hits_rank(drill, env)]


def _hits_rank(drill: Drill, env: RankEnv) -> bool:
    if drill.target == "rank":
        return drill.index == env.rank
    # A drill on a host: its first rank reports it, and the agent then does it.
    return drill.index == env.rank // env.local_world_size and env.local_rank == 0


def inject_fault(drill: Drill, reporter: Reporter, target: FaultTarget) -> None:  # noqa: C901 - a case a kind
    """Report the drill to the agent, then inject its fault, or prepare a fault within the step."""
    LOG.warning("rank %d: drill %s", reporter.env.rank, drill)
    reporter.drill_fired(drill)
    if drill.fault == "warn":
        return  # the agent reports the warning
    if drill.target == "host":
        threading.Event().wait(AGENT_KILLS_WITHIN_S)
        os.kill(os.getpid(), signal.SIGKILL)
    match drill.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segv":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "slow":
            target.delay_s = max(MIN_DELAY_S, target.step_s)
        case "raise":
            raise RuntimeError(f"drill {drill}")
        case "exit":
            os._exit(exit_codes.FAILED)
        case "oom":
            exhaust_memory(target.parameters)
        case "nan":
            set_nan(target.parameters)
        case "busy":
            sum(itertools.repeat(0))  # an endless loop in C that never releases the GIL
        case "skip" | "shape" | "order":
            _break_all_reduce(drill.fault)
        case "data":
            target.stall_loader()
        case "write":
            _stall_writes()


def exhaust_memory(parameters: "Sequence[tuple[str, nn.Parameter]]") -> None:
    """Allocate more memory than the device has, so that its allocator raises its own error."""
    import torch

    torch.empty(MORE_THAN_ANY_DEVICE, dtype=torch.uint8, device=parameters[0][1].device)


def set_nan(parameters: "Sequence[tuple[str, nn.Parameter]]") -> None:
    """Set one weight of this rank to NaN, as defective memory might."""
    import torch
    from torch.distributed.tensor import DTensor

    for _, parameter in parameters:
        part = parameter.detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        if part.numel():
            part.view(-1)[0] = torch.nan
            return


def _stall_writes() -> None:
    """Make every open of a checkpoint file block forever, as hung storage does."""
    files: Any = importlib.import_module("trainer.checkpoint.writer").WatchedFiles
    files.create_stream = lambda *_: threading.Event().wait()


def _break_all_reduce(fault: str) -> None:
    """Break the step's all-reduce once on this rank, like a branch that depends on the rank."""
    # Imported here, because drills are parsed before torch is imported.
    dist: Any = importlib.import_module("torch.distributed")
    proper = dist.all_reduce

    def spoiled(tensor: Any, *op: Any, **how: Any) -> Any:
        # HSDP also calls all_reduce for gradients, tp for the loss. Only the totals of the step,
        # which have no further arguments, are to be broken.
        if op or how:
            return proper(tensor, *op, **how)
        dist.all_reduce = proper
        match fault:
            case "skip":
                return None  # the peers wait for this rank
            case "shape":
                return proper(tensor[: tensor.numel() // 2].clone())
            case _:
                dist.barrier()  # a second collective before it: the order differs from the peers
                return proper(tensor)

    dist.all_reduce = spoiled
