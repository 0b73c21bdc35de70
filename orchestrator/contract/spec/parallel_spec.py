"""How a job is split over ranks: the degrees of the mesh and the method on each axis."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from msgspec import Struct, field
from msgspec.structs import asdict, fields, replace

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.spec.limits import AtLeast, Matches
from orchestrator.contract.spec.types import Auto, Count

Depth = Annotated[int, AtLeast(0)]


class FsdpSpec(Struct, frozen=True, kw_only=True):
    """Options of FSDP2, used by `parallel.data: fsdp`."""

    wrap: Annotated[str, Matches(r"\w+", "a class name, or auto", "LlamaDecoderLayer")] = "auto"
    """Class of the modules that are gathered one at a time; `auto` is the decoder layer."""
    reshard_after_forward: bool | Annotated[int, AtLeast(2)] | Auto = "auto"
    """true frees each layer's weights after its forward pass (ZeRO-3). false keeps them until the
    backward pass (ZeRO-2). A number shards them over that many ranks in between. `auto`: the
    planner chooses true or false; without a planner it is true. Pipelines with several stages per
    rank gather and free a whole stage at a time, whatever is set here."""
    reduce_gradients: Literal["each", "last"] | Auto = "auto"
    """If a step has several micro batches: `each` reduce-scatters their gradients one after the
    other, so that a rank sums only its shard. `last` sums whole gradients on each rank and reduces
    them once. With replicas (HSDP), shards are averaged over them once in both cases. `auto`: the
    planner chooses `last` where the memory is enough; without a planner it is `each`. Schedule zbv
    always does as with `last`."""
    forward_prefetch: Depth = 1
    """Number of layers whose weights are gathered ahead in the forward pass."""
    backward_prefetch: Depth = 1
    """The same in the backward pass."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and update them there."""

    @property
    def reshard(self) -> bool | int:
        """The value after the planner: `auto` means true if no planner decided it."""
        return True if self.reshard_after_forward == "auto" else self.reshard_after_forward

    @property
    def reduce(self) -> Literal["each", "last"]:
        """The value after the planner: `auto` means `each` if no planner decided it."""
        return "each" if self.reduce_gradients == "auto" else self.reduce_gradients


class PipelineSpec(Struct, frozen=True, kw_only=True):
    """How micro batches pass through the stages, for pp above 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv"] | Auto = "auto"
    """`zbv` is the zero-bubble schedule on V-shaped stages. `auto` is the planner's choice; without
    a planner it is 1f1b."""
    stages_per_rank: Count | Auto = "auto"
    """Number of stages of a rank; `auto` is 2 for interleaved_1f1b and zbv, else 1."""

    def __post_init__(self) -> None:
        limits = {
            "gpipe": (1, 1),
            "1f1b": (1, 1),
            "interleaved_1f1b": (2, math.inf),
            "zbv": (2, 2),
            "auto": (1, math.inf),
        }
        low, high = limits[self.schedule]
        if self.stages_per_rank != "auto" and not low <= self.stages_per_rank <= high:
            limit = f"{low}" if low == high else f"at least {low}"
            raise Invalid(
                [
                    Problem(
                        path="stages_per_rank",
                        value=self.stages_per_rank,
                        limit=f"{limit} with schedule {self.schedule}",
                        fix="set stages_per_rank to auto",
                    )
                ]
            )

    @property
    def stages(self) -> int:
        """Stages per rank."""
        if self.stages_per_rank != "auto":
            return self.stages_per_rank
        return 2 if self.schedule in ("interleaved_1f1b", "zbv") else 1


class ParallelSpec(Struct, frozen=True, kw_only=True):
    """Degrees of the mesh, outermost first, and the method on each axis.

    `auto` leaves a degree to the planner. Without a planner dp_shard gets the ranks that the other
    degrees leave, and every other `auto` is 1.
    """

    pp: Count | Auto = "auto"
    """Pipeline-parallel degree."""
    dp_replicate: Count | Auto = "auto"
    """Copies of the sharded model (HSDP when above 1)."""
    dp_shard: Count | Auto = "auto"
    """FSDP degree."""
    cp: Count | Auto = "auto"
    """Context-parallel degree."""
    tp: Count | Auto = "auto"
    """Tensor-parallel degree, inside one host or one NVLink block."""
    data: Literal["fsdp", "ddp", "zero1"] = "fsdp"
    """`fsdp` shards everything over dp_shard; `ddp` copies everything over dp_replicate; `zero1`
    copies everything except the optimizer's state, which it shards."""
    fsdp: FsdpSpec = field(default_factory=FsdpSpec)
    """Options of FSDP2, for `data: fsdp`."""
    context: Literal["ring", "ulysses", "all_gather"] = "ring"
    """How attention sees the whole sequence if cp splits it."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    """Schedule of the pipeline, for pp above 1."""

    def __post_init__(self) -> None:
        if self.data != "fsdp" and (problems := [*self._problems_of_copies()]):
            raise Invalid(problems)

    def _problems_of_copies(self) -> Iterator[Problem]:
        if self.dp_shard not in ("auto", 1):
            yield Problem(
                path="dp_shard",
                value=self.dp_shard,
                limit=f"1 with data: {self.data}, which shards no weights",
                fix=f"set dp_replicate to {self.dp_shard} and dp_shard to 1",
            )
        if self.fsdp != FsdpSpec():
            names = [field.name for field in fields(FsdpSpec)]
            default = FsdpSpec()
            given = [n for n in names if getattr(self.fsdp, n) != getattr(default, n)]
            yield Problem(
                path="fsdp",
                value=", ".join(given),
                limit=f"left out with data: {self.data}",
                fix="remove fsdp, or set data to fsdp",
            )

    @property
    def degrees(self) -> tuple[int | Auto, ...]:
        """Degrees as written in the spec, outermost first."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    def filled(self, world_size: int) -> Self:
        """The spec without `auto`, as far as the number of ranks alone decides it."""
        mesh = self.filled_mesh(world_size)
        fsdp, schedule = self.fsdp, self.pipeline.schedule
        if self.data == "fsdp":
            fsdp = replace(fsdp, reshard_after_forward=fsdp.reshard, reduce_gradients=fsdp.reduce)
        return replace(
            self,
            **asdict(mesh),
            fsdp=fsdp,
            pipeline=replace(self.pipeline, schedule="1f1b")
            if schedule == "auto"
            else self.pipeline,
        )

    def filled_mesh(self, world_size: int) -> Mesh:
        """dp_shard gets the ranks that the other degrees leave; any other `auto` is 1."""
        given = {axis: 1 if d == "auto" else d for axis, d in zip(AXES, self.degrees, strict=True)}
        if self.dp_shard == "auto" and self.data == "fsdp":
            given["dp_shard"] = max(1, world_size // math.prod(given.values()))
        return Mesh(**given)

    @property
    def mesh(self) -> Mesh:
        """The mesh, if no degree is `auto`."""
        given = {axis: d for axis, d in zip(AXES, self.degrees, strict=True) if d != "auto"}
        assert len(given) == len(AXES)
        return Mesh(**given)
