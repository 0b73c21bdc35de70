"""The ranks as torch sees them: device, process group and the five-dimensional mesh."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.rendezvous import rendezvous

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.errors import TrainingError
from trainer.rank.devices import device_of

T = TypeVar("T")

INIT_TIMEOUT = timedelta(minutes=30)
"""Of a collective until the first step is done: ranks load, compile and wait for one another."""
TRAIN_TIMEOUT = timedelta(minutes=20)
"""Afterwards. Longer than ndctl lets ranks stand still by itself, which is 900 s in a checkpoint,
an evaluation or a profile: a shorter one would end what it still allows, such as the wait of all
ranks for rank 0 to complete a checkpoint. Within a step ndctl notices a hang long before; in the
others, before; and where nobody watches, this ends it."""
MARGIN = timedelta(minutes=5)
"""By which both are longer at least than the longest limit of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    env: RankEnv
    device: torch.device
    mesh: DeviceMesh
    data_rank: int
    """Which of the data-parallel ranks this one is; ranks that differ in pp, cp or tp alone share
    it."""

    @property
    def tp(self) -> int:
        return self.mesh["tp"].size()

    @property
    def shards(self) -> DeviceMesh:
        """Ranks that share one copy of the weights: those of dp_shard, and those of cp, which pass
        other tokens of the same sequences through the same weights."""
        return self._with_context("dp_shard")

    @property
    def replicas(self) -> DeviceMesh:
        """Ranks that each have a copy of the weights, where no axis shards them."""
        return self._with_context("dp_replicate")

    def _with_context(self, axis: str) -> DeviceMesh:
        if self.mesh["cp"].size() == 1:
            return self.mesh[axis]
        # torch remembers a flattened mesh by its name, so asking again makes no new groups.
        return self.mesh[axis, "cp"]._flatten(f"{axis}_cp")

    @property
    def stage_ranks(self) -> int:
        """Ranks that work on the same pipeline stages as this one, this one included."""
        return self.mesh.size() // self.mesh["pp"].size()


@contextmanager
def process_group(env: RankEnv, pause_s: float = 0.0) -> Iterator[None]:
    """The process group of all ranks, for as long as all goes well; `pause_s` of the configuration.

    It is not torn down after an error: that can wait for ranks which are gone, and the process is
    about to end anyway.
    """
    device = device_of(env.local_rank, hidden=env.no_gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_meeting_place(env),
        rank=env.rank,
        world_size=env.world_size,
        timeout=_at_least(INIT_TIMEOUT, pause_s),
    )
    yield
    dist.destroy_process_group()


def meet() -> None:
    """Go on once every rank is here."""
    dist.all_reduce(torch.zeros(1))


def _meeting_place(env: RankEnv) -> Store:
    """Where ranks leave their addresses for one another.

    Under `torchrun --max-restarts` the store outlives the ranks: without an attempt of their own in
    the names, those that are started again would read the addresses of those that are gone.
    """
    if env.world_size == 1:
        # A rank alone needs nobody to meet; so it runs without torchrun as well.
        return HashStore()
    store, _, _ = next(rendezvous("env://", timeout=INIT_TIMEOUT))
    return PrefixStore(f"attempt-{env.attempt}", store)


def train_timeout(pause_s: float) -> timedelta:
    """Of a collective after the first step; `pause_s` of the configuration."""
    return _at_least(TRAIN_TIMEOUT, pause_s)


def _at_least(usual: timedelta, pause_s: float) -> timedelta:
    return max(usual, timedelta(seconds=pause_s) + MARGIN)


def shorten_timeouts(timeout: timedelta) -> None:
    """From now on collectives fail after `timeout`, in every group that there is; groups made
    later, such as that of saves in the background, have a timeout of their own.

    gloo's point-to-point receives, which pipelines on CPU use, keep the timeout that their group
    began with (measured on torch 2.13); all its collectives heed this one.
    """
    for group in list(_world.pg_map):
        _set_pg_timeout(timeout, group)


def arrange(mesh: Mesh, env: RankEnv) -> Ranks:
    """This rank's place in `mesh`."""
    device = device_of(env.local_rank, hidden=env.no_gpu)
    coords = mesh.coords(env.rank)
    return Ranks(
        env=env,
        device=device,
        mesh=init_device_mesh(device.type, mesh.degrees, mesh_dim_names=AXES),
        data_rank=coords["dp_replicate"] * mesh.dp_shard + coords["dp_shard"],
    )


def joined(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh of all their axes, in that order; they must be cut from the same one."""
    return DeviceMesh._concatenate(list(meshes))


def shared_from_first(ask: Callable[[], T]) -> T:
    """What `ask` answers on rank 0, on every rank; or the TrainingError that it raises there."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [ask()]
        except TrainingError as exc:
            answer = [exc]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if isinstance(answer[0], TrainingError):
        raise answer[0]
    return cast(T, answer[0])


def on_all_ranks(do: Callable[[], T]) -> T:
    """`do` on every rank; where one raises a TrainingError, all raise that of the first such."""
    answer: T | TrainingError
    try:
        answer = do()
    except TrainingError as exc:
        answer = exc
    errors: list[TrainingError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, answer if isinstance(answer, TrainingError) else None)
    for error in errors:
        if error is not None:
            raise error
    assert not isinstance(answer, TrainingError)
    return answer


def memory_bytes(device: torch.device) -> int:
    """Peak memory of the device; on CPU, what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held so far: of the GPU's allocator, or of a CPU's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
