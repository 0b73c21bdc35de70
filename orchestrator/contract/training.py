"""What one launch of the trainer is told: the CONFIG of `torchrun -m trainer CONFIG`."""

from dataclasses import dataclass, field
from typing import Annotated

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.limits import AtLeast
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec import CheckpointSpec, DataSpec, ModelSpec, TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    mesh: Mesh = field(default_factory=Mesh)
    """Its product must be torchrun's world size."""
    micro_batch_size: Annotated[int, AtLeast(1)]
    """Sequences per data-parallel rank and forward pass."""
    out: str
    """Directory of `checkpoints/` and `metrics.jsonl`; the run directory of a job."""

    def __post_init__(self) -> None:
        per_pass = self.mesh.data_parallel * self.micro_batch_size
        if self.train.global_batch_size % per_pass:
            raise Invalid(
                [
                    Problem(
                        path="train.global_batch_size",
                        value=self.train.global_batch_size,
                        limit=f"a multiple of {self.mesh.data_parallel} data-parallel ranks"
                        f" x micro batch {self.micro_batch_size} = {per_pass}",
                        fix="change micro_batch_size, the mesh or the global batch",
                    )
                ]
            )

    @property
    def gradient_accumulation(self) -> int:
        """Forward and backward passes per optimizer step."""
        per_pass = self.mesh.data_parallel * self.micro_batch_size
        return self.train.global_batch_size // per_pass
