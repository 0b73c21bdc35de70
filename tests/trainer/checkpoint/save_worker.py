"""Trainings during which the folder of checkpoints is in real trouble for some steps.

A case is `{"config": …, "trouble": name, "from": step, "until": step}`: from the end of step `from`
to the end of step `until` the disk is as `TROUBLES[name]` says. Its answer has `code`, `error` of
the exception that ended it, and `num_reports` and `report` of the last complete save on each rank.
"""

import contextlib
import ctypes
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
from tests.trainer import trainer_worker
from trainer import main as main_module
from trainer.checkpoint.save import Checkpoints


@contextmanager
def file_in_place(folder: Path, rank: int) -> Iterator[None]:
    """A file where a folder should be."""
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
    """Nothing may be made in the folder, by root neither."""
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
    """Root's right to pass over them (CAP_DAC_OVERRIDE, bit 1) is laid down in this thread."""
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
    """The folder is removed again and again, as soon as somebody writes into it."""
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
    """The last rank, and no other, may write files of 50 kB at most."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def unknown(folder: Path, rank: int) -> Iterator[None]:
    """Which attempt may write cannot be read."""
    fence = folder.with_name("fence.json")
    aside = folder.with_name("fence.aside")
    if rank == 0:
        fence.rename(aside)
        fence.mkdir()
    yield
    if rank == 0:
        fence.rmdir()
        aside.rename(fence)


TROUBLES: dict[str, Callable[[Path, int], AbstractContextManager[None]]] = {
    "file in place": file_in_place,
    "not permitted": not_permitted,
    "vanishing": vanishing,
    "too large": too_large,
    "unknown": unknown,
}


def troubled(case: dict[str, Any], made: list[Checkpoints]) -> type[Checkpoints]:
    trouble = contextlib.ExitStack()
    folder = Path(case["config"]["out"]) / "checkpoints"

    class Troubled(Checkpoints):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def after_step(self, step: int, step_s: float, some_failed: bool, every: int = 0) -> None:
            super().after_step(step, step_s, some_failed, every)
            if step == case["from"]:
                dist.barrier()
                trouble.enter_context(TROUBLES[case["trouble"]](folder, self._env.rank))
                dist.barrier()
            if step == case["until"]:
                dist.barrier()
                trouble.close()
                dist.barrier()

    return Troubled


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    made: list[Checkpoints] = []
    answer: dict[str, Any] = {"code": None, "error": ""}
    with mock.patch.object(main_module, "Checkpoints", troubled(case, made)):
        try:
            answer["code"] = trainer_worker.run_case({"config": case["config"]}, env)["code"]
        except RuntimeError as exc:
            answer["error"] = str(exc)
    told: list[Any] = [None] * env.world_size
    last = made[0].last
    dist.all_gather_object(told, (answer["error"], asdict(last) if last else None))
    return {**answer, "errors": [error for error, _ in told], "reports": [r for _, r in told]}
