"""Trainings in which saving checkpoints fails for some steps, because of a real fault of the disk.

A case is `{"config": …, "fault": name, "from": step, "until": step}`: `FAULTS[name]` is active from
the end of step `from` to the end of step `until`. Its answer has `code`, and for each rank `errors`
(of the exception that ended it) and `reports` (of its last complete save). `nice` has how nice the
threads were that wrote on rank 0, step by step, and at the end that of the main thread.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist

from orchestrator.contract.files.env import RankEnv
from tests.trainer.launch import training_worker
from trainer import main as main_module
from trainer.checkpoint.collective import Outcome
from trainer.checkpoint.save import Checkpoints


@contextmanager
def file_in_place(folder: Path, rank: int) -> Iterator[None]:
    """Put a file where the folder of checkpoints should be."""
    aside = folder.with_name("aside")
    if rank == 0:
        if folder.exists():
            folder.rename(aside)
        folder.write_text("a file")
    yield
    if rank == 0:
        folder.unlink()
        if aside.exists():
            aside.rename(folder)


@contextmanager
def not_permitted(folder: Path, rank: int) -> Iterator[None]:
    """Make the folder read-only, also for root."""
    folder.mkdir(exist_ok=True)
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    with bound_by_permissions():
        yield
    folder.chmod(mode)


class CapabilityHeader(ctypes.Structure):
    _fields_: ClassVar = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class CapabilitySets(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_uint32 * 3) for name in ("low", "high")]


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Drop CAP_DAC_OVERRIDE (bit 1), by which root ignores permissions, in this thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = CapabilityHeader(0x20080522, 0), CapabilitySets()
    assert libc.capget(ctypes.byref(header), ctypes.byref(sets)) == 0
    effective = sets.low[0]
    sets.low[0] = effective & ~(1 << 1)
    assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0
    yield
    sets.low[0] = effective
    assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0


@contextmanager
def vanishing(folder: Path, rank: int) -> Iterator[None]:
    """Remove the folder again and again, as soon as a rank writes into it."""
    over = threading.Event()

    def remove() -> None:
        while not over.is_set():
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=remove)
    if rank == 0:
        thread.start()
    yield
    over.set()
    if rank == 0:
        thread.join()


@contextmanager
def too_large(folder: Path, rank: int) -> Iterator[None]:
    """Limit the files of the last rank to 20 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def unreadable_fence(folder: Path, rank: int) -> Iterator[None]:
    """Make the fence, which says which attempt may write, unreadable."""
    fence = folder.with_name("fence.json")
    aside = folder.with_name("fence.aside")
    if rank == 0:
        fence.rename(aside)
        fence.mkdir()
    yield
    if rank == 0:
        fence.rmdir()
        aside.rename(fence)


FAULTS: dict[str, Callable[[Path, int], AbstractContextManager[None]]] = {
    "file in place": file_in_place,
    "not permitted": not_permitted,
    "vanishing": vanishing,
    "too large": too_large,
    "unreadable fence": unreadable_fence,
}


def own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def failing(case: dict[str, Any], made: list[Checkpoints], nice: list[int]) -> type[Checkpoints]:
    fault = contextlib.ExitStack()
    folder = Path(case["config"]["out"]) / "checkpoints"

    class FailingCheckpoints(Checkpoints):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

        def _write(self, *arguments: Any) -> Outcome:
            nice.append(own_nice())
            return super()._write(*arguments)

        def after_step(self, step: int, step_s: float, some_failed: bool, every: int = 0) -> None:
            super().after_step(step, step_s, some_failed, every)
            if step == case["from"]:
                dist.barrier()
                fault.enter_context(FAULTS[case["fault"]](folder, self._env.rank))
                dist.barrier()
            if step == case["until"]:
                if self._pending is not None:
                    self._pending.exception()  # On a busy machine it may not have met the fault.
                dist.barrier()
                fault.close()
                dist.barrier()

    return FailingCheckpoints


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    made: list[Checkpoints] = []
    nice: list[int] = []
    answer: dict[str, Any] = {"code": None, "error": "", "nice": nice}
    with mock.patch.object(main_module, "Checkpoints", failing(case, made, nice)):
        try:
            answer["code"] = training_worker.run_case({"config": case["config"]}, env)["code"]
        except RuntimeError as exc:
            answer["error"] = str(exc)
    nice.append(own_nice())
    told: list[Any] = [None] * env.world_size
    last = made[0].last
    dist.all_gather_object(told, (answer["error"], asdict(last) if last else None))
    return {**answer, "errors": [error for error, _ in told], "reports": [r for _, r in told]}
