"""Sets up a rank in torch: device, process group and the five-dimensional device mesh."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.rendezvous import rendezvous

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.errors import TrainingError
from trainer.program.devices import state_of
from trainer.rank.devices import device_of
from trainer.rank.host.numa import bind_to_node
from trainer.rank.stores import serve

T = TypeVar("T")

INIT_TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective until the first step is done. Ranks load and compile at different
speeds."""
TRAIN_TIMEOUT = timedelta(minutes=20)
"""Timeout of a collective after the first step.

It must be longer than ndctl's own limits, which detect a hang first: up to 900 s without progress
in a checkpoint, an evaluation or a profile. For example, all ranks wait while rank 0 completes a
checkpoint. Without ndctl (plain torchrun), this timeout ends a hang."""
MARGIN = timedelta(minutes=5)
"""Both timeouts exceed the longest limit of the job by at least this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    env: RankEnv
    device: torch.device
    mesh: DeviceMesh
    data_rank: int
    """Index among the data-parallel ranks. Ranks that differ only in pp, cp or tp have the same."""

    @property
    def tp(self) -> int:
        # Steps ask for it. `self.mesh["tp"]` makes a new mesh, which takes milliseconds.
        return self.mesh.size(AXES.index("tp"))

    @property
    def shards(self) -> DeviceMesh:
        """Ranks that shard one copy of the weights: those of dp_shard and of cp. The ranks of cp
        process other tokens of the same sequences with the same weights."""
        return self._with_context("dp_shard")

    @property
    def replicas(self) -> DeviceMesh:
        """Ranks that each hold a full copy of the weights, under DDP and ZeRO-1."""
        return self._with_context("dp_replicate")

    def _with_context(self, axis: str) -> DeviceMesh:
        if self.mesh["cp"].size() == 1:
            return self.mesh[axis]
        # torch caches a flattened mesh by its name, so a second call creates no new groups.
        return self.mesh[axis, "cp"]._flatten(f"{axis}_cp")

    @property
    def stage_ranks(self) -> int:
        """Number of ranks with the same pipeline stages as this one, itself included."""
        return self.mesh.size() // self.mesh["pp"].size()


@contextmanager
def process_group(env: RankEnv, pause_s: float = 0.0) -> Iterator[None]:
    """The process group of all ranks. `pause_s` is the longest pause that the configuration allows.

    After an error it is not destroyed, because that can wait for ranks that are lost, and the
    process is about to end anyway.
    """
    device = device_of(env.local_rank, hidden=env.no_gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        bind_to_node(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_rendezvous_store(env),
        rank=env.rank,
        world_size=env.world_size,
        timeout=_at_least(INIT_TIMEOUT, pause_s),
        # NCCL then connects all ranks here, where a broken link fails early, and splits this one
        # communicator for each axis of the mesh instead of connecting the ranks of each again.
        device_id=device if device.type == "cuda" else None,
    )
    yield
    dist.destroy_process_group()


def barrier() -> None:
    """Return when all ranks have called it."""
    dist.all_reduce(torch.zeros(1))


def _rendezvous_store(env: RankEnv) -> Store:
    """The store in which ranks publish their addresses.

    Under `torchrun --max-restarts` the store outlives the ranks. Its keys have the attempt as
    prefix, so that restarted ranks do not read the addresses of dead ones.
    """
    if env.world_size == 1:
        # A single rank needs no server, so it also runs without torchrun.
        return HashStore()
    if env.place is not None:
        # torchrun knows its own host alone then, so its store is not that of all ranks.
        where = (env.place.address, env.place.port)
        if env.rank == 0:
            return serve(*where, INIT_TIMEOUT, env.world_size, shared=False)
        return TCPStore(*where, None, False, INIT_TIMEOUT)
    store, _, _ = next(rendezvous("env://", timeout=INIT_TIMEOUT))
    return PrefixStore(f"attempt-{env.attempt}", store)


def train_timeout(pause_s: float) -> timedelta:
    """Timeout of collectives after the first step; `pause_s` as in `process_group`."""
    return _at_least(TRAIN_TIMEOUT, pause_s)


def _at_least(usual: timedelta, pause_s: float) -> timedelta:
    return max(usual, timedelta(seconds=pause_s) + MARGIN)


def shorten_timeouts(timeout: timedelta) -> None:
    """Set the timeout of collectives in all existing groups. Groups that are created later have
    their own.

    gloo's point-to-point receives, which pipelines on CPU use, keep the timeout that their group
    was created with (measured on torch 2.13). All its collectives use the new one.
    """
    for group in list(_world.pg_map):
        _set_pg_timeout(timeout, group)


def arrange(mesh: Mesh, env: RankEnv) -> Ranks:
    """Create the device mesh and this rank's coordinates in it."""
    device = device_of(env.local_rank, hidden=env.no_gpu)
    coords = mesh.coords(env.rank)
    return Ranks(
        env=env,
        device=device,
        mesh=init_device_mesh(device.type, mesh.degrees, mesh_dim_names=AXES),
        data_rank=coords["dp_replicate"] * mesh.dp_shard + coords["dp_shard"],
    )


def joined(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh of the axes of all `meshes`, in that order. They must be parts of the same mesh."""
    return DeviceMesh._concatenate(list(meshes))


def broadcast_from_rank0(compute: Callable[[], T]) -> T:
    """Call `compute` on rank 0, and return its result, or raise its TrainingError, on every
    rank."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [compute()]
        except TrainingError as exc:
            answer = [exc]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if isinstance(answer[0], TrainingError):
        raise answer[0]
    return cast(T, answer[0])


def on_all_ranks(do: Callable[[], T]) -> T:
    """Call `do` on each rank. If any raises a TrainingError, all raise that of the lowest rank."""
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


def gpu_state(device: torch.device) -> dict[str, float]:
    """Utilization, temperature and power of a GPU, as far as NVIDIA's driver tells them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {}
    return state_of(torch.cuda, device.index or 0)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
