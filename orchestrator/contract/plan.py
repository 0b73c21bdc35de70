"""A plan: how the planner splits a job over ranks."""

from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct, field

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.train_spec import Checkpointing
from orchestrator.contract.spec.types import Auto, Dtype

RESERVE = ("communication", "context", "slack")
"""Items of memory that torch.cuda.max_memory_allocated does not count."""
IN_MEMORY = "checkpoints in memory"
"""Item of the host's memory: the slots of `checkpoint.memory`, but the one that takes the place of
the buffer for saves to the disk."""


class Memory(Struct, frozen=True, kw_only=True):
    """Estimated bytes that a rank needs, by purpose; by default of the fullest rank."""

    peak_bytes: int
    device_bytes: int | None = None
    """Memory of a device; None: unknown."""
    worst_rank: str = "every rank"
    """Which rank this is, such as `pp stage 0`."""
    items: Mapping[str, int]
    peak_bytes_range: tuple[int, int] | None = None
    """Has 9 of 10 runs; None: unknown."""
    basis: str | None = None
    """What the range rests on."""
    fits: float | None = None
    """Likelihood that the peak fits the device, from the spread of published allocators; None:
    unknown."""
    host: Mapping[str, int] = field(default_factory=dict)
    """What is offloaded to host memory; not part of `items`."""

    @property
    def tensor_bytes(self) -> int:
        """The part of the peak that a GPU's allocator reports; all of it on a CPU."""
        return self.peak_bytes - sum(self.items.get(item, 0) for item in RESERVE)


class Traffic(Struct, frozen=True, kw_only=True):
    """What one rank sends in each step along one axis of the mesh, by one kind of collective."""

    axis: str
    """An axis of the mesh, or two that form one group, such as `dp_shard x cp`."""
    collective: str
    """`all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `send`, `exchange`."""
    what: str
    """`weights`, `gradients`, `activations`, `keys and values`, …"""
    bytes_per_step: int
    """Bytes that the slowest rank sends."""
    messages: int
    """Calls of the collective per step."""
    level: str
    """The slowest link that it crosses: `host`, `nvlink block`, `leaf` or `spine`."""
    by_level: Mapping[str, int] = field(default_factory=dict)
    """Part of `bytes_per_step` that crosses each level: the mean over the group's ranks."""
    seconds: float
    exposed_seconds: float
    """Part of `seconds` that no computation hides."""
    ideal_seconds: float = 0.0
    """`bytes_per_step` at the nominal rate of the links, without latency."""


class SpeedCorrection(Struct, frozen=True, kw_only=True):
    """By how much the measured speed of earlier jobs changed a prediction."""

    factor: float
    """All times were divided by it; 0.93: earlier jobs were slower than predicted."""
    jobs: int
    family: str
    """`model_type` of the jobs."""
    profile: str
    """Hardware profile of the jobs."""


class StepTime(Struct, frozen=True, kw_only=True):
    """Predicted time of one optimizer step."""

    step_s: float
    tokens_per_second_per_device: float
    mfu: float
    """Model FLOPs utilisation: share of the device's dense peak in the computation's format."""
    parts: Mapping[str, float]
    """Seconds by purpose: `compute`, `recompute`, `communication` (exposed), `bubble`,
    `optimizer`, …; their sum is the step time."""
    confidence: str
    """What `tokens_per_second_per_device_range` rests on."""
    tokens_per_second_per_device_range: tuple[float, float] | None = None
    """9 of 10 published runs of a new source are expected inside, relative to their plans;
    None: unknown."""
    certainty: Literal["measured", "derived", "guessed", "calibrated"] | None = None
    """Where the least certain constant of the device comes from; None: a plan of an older ndctl."""
    correction: SpeedCorrection | None = None
    """None: no comparable job was measured, or none was asked for."""

    @property
    def bubble(self) -> float:
        """Share of the step that a pipeline rank is idle."""
        return self.parts.get("bubble", 0.0) / self.step_s


class ModelWork(Struct, frozen=True, kw_only=True):
    """What a step takes, whatever the mesh."""

    parameters: int
    dtype: Dtype
    """The type that the model computes in."""
    weight_bytes: int
    """All weights in this type."""
    flops: float
    """Model FLOPs of a step, which MFU counts."""
    recomputed_flops: float
    """Further FLOPs of a step, to compute activations again."""


class Choice(Struct, frozen=True, kw_only=True):
    """One way to run a job, with its predicted cost."""

    mesh: Mesh
    micro_batch_size: int
    gradient_accumulation: int
    activation_checkpointing: str
    reshard_after_forward: bool | int
    reduce_gradients: Literal["each", "last"] = "last"
    compile: bool = False
    float8: bool = False
    loss_chunks: int | Auto = "auto"
    schedule: str | None
    """Pipeline schedule; None without a pipeline."""
    step_s: float
    tokens_per_second_per_device: float
    mfu: float
    peak_bytes: int


class Price(Struct, frozen=True, kw_only=True):
    """What it costs that a spec fixes some keys."""

    fixed: Mapping[str, str]
    """Path of a key to the value in the spec, as text."""
    edits: Mapping[str, str]
    """Path of a key to the value that allows a faster plan, as text."""
    choice: Choice
    """The best plan then."""
    share: float
    """Share by which a step takes longer with the fixed keys."""
    changes_numbers: bool = False
    """The faster plan computes in another number format."""


class Rejected(Struct, frozen=True, kw_only=True):
    """Meshes that share one reason: a constraint that rules them out, or they are slower."""

    family: str
    """What the meshes have in common, such as `tp=16 and more`."""
    constraint: str
    """The constraint that they break."""
    count: int
    """Number of meshes: ways to write the number of ranks as a product of five degrees."""


class PlacementCost(Struct, frozen=True, kw_only=True):
    """Bytes per step that all ranks together send out of a host, out of a leaf switch, and so on
    upwards. Bytes that leave a leaf have also left a host."""

    levels: tuple[str, ...]
    """`host`, `nvlink block` if there are any, and then as many of `leaf`, `spine` and `core` as
    there are levels of switches."""
    crossing: tuple[int, ...]
    by_name: tuple[int, ...]
    """The same cost if hosts were used in the order of their names."""


class Plan(Struct, frozen=True, kw_only=True):
    mesh: Mesh
    """ndctl does not know how the user's own program splits its work. Its ranks are all along
    `dp_replicate`."""
    micro_batch_size: int | None
    """None: the program decides."""
    gradient_accumulation: int | None
    activation_checkpointing: Checkpointing = "none"
    """The spec's choice, with `auto` decided."""
    reshard_after_forward: bool | int = True
    reduce_gradients: Literal["each", "last"] = "last"
    compile: bool = False
    float8: bool = False
    loss_chunks: int | Auto = "auto"
    """`auto`: as many as the trainer takes by itself."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    """Also decided, if pp is more than 1."""
    hosts: tuple[str, ...]
    """Names in node-rank order, as planned. The leader assigns ranks again to the granted hosts."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> the switches above it, outermost first, for all candidate hosts whose switches are
    known. With NVLink blocks the last one is the host's block (`tree_of`)."""
    ranks_per_host: int
    placement: PlacementCost | None = None
    """None: the switches between the hosts are unknown."""
    memory: Memory | None
    """None: unknown, because the ranks run the user's own program."""
    memory_along_pp: tuple[Memory, ...] = ()
    """Memory of each rank along pp, in order; empty without a pipeline."""
    time: StepTime | None = None
    work: ModelWork | None = None
    """None: the ranks run the user's own program."""
    communication: tuple[Traffic, ...] = ()
    profile: str | None = None
    """Hardware profile of the prediction of memory and time."""
    software: str | None = None
    """Training software that `time` is for; None: the bundled trainer, as in the plan of a job."""
    device_power_w: int | None = None
    """Power limit of one device's board; None: unknown."""
    price_per_gpu_hour: float | None = None
    """Mean price of the planned hosts' devices, as in the inventory; None: no price there."""
    alternatives: tuple[Choice, ...] = ()
    """The best plans of other kinds of meshes (other axes in use), the fastest first. One of them
    is faster than the plan if `comparison` is given."""
    untrainable: str | None = None
    """Why the bundled trainer cannot train the model; None: it can."""
    comparison: str | None = None
    """Why a faster alternative was not chosen; None: no alternative is faster."""
    prices: tuple[Price, ...] = ()
    """What fixed keys cost, the highest price first; empty if it was not asked for."""
    rejected: tuple[Rejected, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    """Axis (pipeline, data, context, tensor, …) -> how it works, in words, for axes in use."""
    notes: tuple[str, ...] = ()
    """Remarks for the user about how the plan was made."""

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def is_own(self) -> bool:
        """The ranks run the user's own program, so only it knows how they split the work."""
        return self.memory is None

    @property
    def split(self) -> str:
        """How the ranks split the work, as text."""
        return "own program" if self.is_own else str(self.mesh)

    @property
    def needs(self) -> Memory:
        """The memory of a plan that the planner made."""
        assert self.memory is not None
        return self.memory

    @property
    def schedule(self) -> str | None:
        """Pipeline schedule; None without a pipeline."""
        return self.pipeline.schedule if self.mesh.pp > 1 else None

    @property
    def choice(self) -> Choice | None:
        """The plan in the form of its alternatives; None if its time was not predicted."""
        if self.time is None or self.memory is None:
            return None
        assert self.micro_batch_size is not None
        assert self.gradient_accumulation is not None
        return Choice(
            mesh=self.mesh,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation=self.gradient_accumulation,
            activation_checkpointing=self.activation_checkpointing,
            reshard_after_forward=self.reshard_after_forward,
            reduce_gradients=self.reduce_gradients,
            compile=self.compile,
            float8=self.float8,
            loss_chunks=self.loss_chunks,
            schedule=self.schedule,
            step_s=self.time.step_s,
            tokens_per_second_per_device=self.time.tokens_per_second_per_device,
            mfu=self.time.mfu,
            peak_bytes=self.memory.peak_bytes,
        )


class RankPlace(Struct, frozen=True, kw_only=True):
    rank: int
    host: str
    local_rank: int
    coords: Mapping[str, int]


def places(plan: Plan, hosts: tuple[str, ...]) -> Iterator[RankPlace]:
    """Every rank of `plan` on `hosts`, which are in node-rank order."""
    for rank in range(plan.world_size):
        node, local = divmod(rank, plan.ranks_per_host)
        yield RankPlace(
            rank=rank, host=hosts[node], local_rank=local, coords=plan.mesh.coords(rank)
        )
