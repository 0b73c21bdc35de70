"""How a job is split: the degrees of the mesh, and the method on each of its axes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, Self

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.limits import AtLeast, Matches
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.words import Auto, Count

Depth = Annotated[int, AtLeast(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSpec:
    """FSDP2's knobs, for `parallel.data: fsdp`."""

    wrap: Annotated[str, Matches(r"\w+", "a class name, or auto", "LlamaDecoderLayer")] = "auto"
    """Class of the modules that are gathered one at a time; `auto` is the decoder layer."""
    reshard_after_forward: bool | Annotated[int, AtLeast(2)] = True
    """true frees each layer's weights after its forward pass (ZeRO-3), false keeps them until the
    backward pass (ZeRO-2), and a number shards them over that many ranks in between. Pipelines with
    several stages per rank gather and free a whole stage at a time, whatever this says."""
    forward_prefetch: Depth = 1
    """Layers whose weights are gathered ahead in the forward pass."""
    backward_prefetch: Depth = 1
    """The same in the backward pass."""
    cpu_offload: bool = False
    """Keep weights, gradients and moments in the host's memory, and update them there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """How micro batches travel through the stages, for pp above 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv"] = "1f1b"
    """`zbv` is the zero-bubble schedule on V-shaped stages."""
    stages_per_rank: Count | Auto = "auto"
    """Stages that a rank has; `auto` is 2 for interleaved_1f1b and zbv, else 1."""

    def __post_init__(self) -> None:
        limits = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved_1f1b": (2, math.inf), "zbv": (2, 2)}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Degrees of the mesh, outermost first, and the methods."""

    pp: Count = 1
    """Pipeline-parallel degree."""
    dp_replicate: Count = 1
    """Copies of the sharded model (HSDP when above 1)."""
    dp_shard: Count | Auto = "auto"
    """FSDP degree; `auto` takes every rank that the other axes leave."""
    cp: Count = 1
    """Context-parallel degree."""
    tp: Count | Auto = "auto"
    """Tensor-parallel degree, inside one host; `auto` fills the host as far as the heads divide."""
    data: Literal["fsdp", "ddp", "zero1"] = "fsdp"
    """What data-parallel ranks share: `fsdp` shards everything over dp_shard; `ddp` copies
    everything over dp_replicate; `zero1` copies all but the optimizer's state."""
    fsdp: FsdpSpec = field(default_factory=FsdpSpec)
    context: Literal["ring", "ulysses", "all_gather"] = "ring"
    """How attention sees the whole sequence when cp cuts it."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)

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

    def filled(self, world_size: int) -> Self:
        """Without `auto`, as far as `world_size` ranks alone can tell: tp is 1, dp the rest."""
        tp = 1 if self.tp == "auto" else self.tp
        shard = self.dp_shard
        if shard == "auto" and self.data != "fsdp":
            shard = 1
        if shard == "auto":
            shard = max(1, world_size // (self.pp * self.dp_replicate * self.cp * tp))
        return replace(self, dp_shard=shard, tp=tp)

    @property
    def mesh(self) -> Mesh:
        """The mesh of degrees that are all numbers."""
        assert self.dp_shard != "auto"
        assert self.tp != "auto"
        return Mesh(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            tp=self.tp,
        )
