"""The split of a job over ranks, as the planner decided it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.parallel_spec import PipelineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a rank needs, the fullest where nothing else is said, by what for; an estimate."""

    peak_bytes: int
    device_bytes: int | None = None
    """What a device has; None where nobody says."""
    worst_rank: str = "every rank"
    """Which it is, as in `pp stage 0`."""
    items: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    """What is offloaded to the host's own memory instead, and not among `items`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends along one axis of the mesh by one kind of collective, each step."""

    axis: str
    """One of the mesh, or two that are one group, as in `dp_shard x cp`."""
    collective: str
    """`all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `send`, `exchange`."""
    what: str
    """`weights`, `gradients`, `activations`, `keys and values`, …"""
    bytes_per_step: int
    """That the rank with the most of it sends."""
    messages: int
    """Calls of the collective in a step."""
    level: str
    """The widest link that it crosses: `host`, `nvlink block`, `leaf` or `spine`."""
    by_level: Mapping[str, int] = field(default_factory=dict)
    """Of `bytes_per_step`, what goes over links of each level: the mean of the group's ranks."""
    seconds: float
    exposed_seconds: float
    """Of these, what no computation hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Of one optimizer step, as predicted."""

    step_s: float
    tokens_per_second_per_device: float
    mfu: float
    """Model FLOPs utilisation of the device's dense peak in the type that is computed in."""
    parts: Mapping[str, float]
    """Seconds by what for: `compute`, `recompute`, `communication` (exposed), `bubble`,
    `optimizer`, …; they add up to the step."""
    confidence: str
    """How sure the figure is, and what it was calibrated on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run a job, and what it would cost."""

    mesh: Mesh
    micro_batch_size: int
    gradient_accumulation: int
    activation_checkpointing: str
    reshard_after_forward: bool | int
    schedule: str | None
    """Of the pipeline; None without one."""
    step_s: float
    tokens_per_second_per_device: float
    mfu: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Meshes that are ruled out for one reason, or that are slower than those that are shown."""

    family: str
    """What they have in common, as in `tp=16 and more`."""
    constraint: str
    """What binds them."""
    count: int
    """Of meshes: ways to multiply five degrees to the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCost:
    """Bytes of a step that all ranks send out of a host, out of a leaf switch, and so on upwards;
    what leaves a leaf has left a host as well."""

    levels: tuple[str, ...]
    """`host`, `nvlink block` where there are any, and as many of `leaf`, `spine` and `core` as
    there are switches."""
    crossing: tuple[int, ...]
    by_name: tuple[int, ...]
    """The same, were the hosts taken in the order of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    mesh: Mesh
    micro_batch_size: int
    gradient_accumulation: int
    activation_checkpointing: Literal["none", "selective", "full", "every_k"] = "none"
    """What the spec asked for, `auto` decided."""
    reshard_after_forward: bool | int = True
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    """Decided as well, where pp is more than 1."""
    hosts: tuple[str, ...]
    """Names in node-rank order, as planned; the leader binds again to the hosts that came."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> the switches above it, outermost first, of all hosts that could come and are known to
    hang on one. Where there are NVLink blocks the last is the host's block (`tree_of`)."""
    ranks_per_host: int
    placement: PlacementCost | None = None
    """None where the switches between the hosts are not known."""
    memory: Memory
    memory_along_pp: tuple[Memory, ...] = ()
    """Of every rank along pp, in order, where there are several."""
    time: StepTime | None = None
    communication: tuple[Traffic, ...] = ()
    profile: str | None = None
    """Of the hardware that memory and time were predicted for."""
    alternatives: tuple[Choice, ...] = ()
    """The next best meshes, each as it runs best; the best first."""
    rejected: tuple[Rejected, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    """How each axis in use does its part, in words: pipeline, data, context, tensor, …"""
    notes: tuple[str, ...] = ()
    """What a person should know of how the plan came about."""

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def schedule(self) -> str | None:
        """Of the pipeline; None without one."""
        return self.pipeline.schedule if self.mesh.pp > 1 else None

    @property
    def choice(self) -> Choice | None:
        """The plan as its alternatives are told; None where its time was not predicted."""
        if self.time is None:
            return None
        return Choice(
            mesh=self.mesh,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation=self.gradient_accumulation,
            activation_checkpointing=self.activation_checkpointing,
            reshard_after_forward=self.reshard_after_forward,
            schedule=self.schedule,
            step_s=self.time.step_s,
            tokens_per_second_per_device=self.time.tokens_per_second_per_device,
            mfu=self.time.mfu,
            peak_bytes=self.memory.peak_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    rank: int
    host: str
    local_rank: int
    coords: Mapping[str, int]


def places(plan: Plan, hosts: tuple[str, ...]) -> Iterator[RankPlace]:
    """Every rank of `plan` on `hosts`, given in node-rank order."""
    for rank in range(plan.world_size):
        node, local = divmod(rank, plan.ranks_per_host)
        yield RankPlace(
            rank=rank, host=hosts[node], local_rank=local, coords=plan.mesh.coords(rank)
        )
