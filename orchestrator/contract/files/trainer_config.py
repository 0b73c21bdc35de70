"""The CONFIG of `torchrun -m trainer CONFIG`."""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Struct, field

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.contract.spec.job_spec import CheckpointSpec, eval_without_data
from orchestrator.contract.spec.limits import AtLeast
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.parallel_spec import ParallelSpec
from orchestrator.contract.spec.train_spec import TrainSpec


class TrainingConfig(Struct, frozen=True, kw_only=True):
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    """The product of its degrees must be torchrun's world size; `auto` degrees follow from that."""
    micro_batch_size: Annotated[int, AtLeast(1)]
    """Sequences per data-parallel rank and forward pass."""
    pause_s: Annotated[float, AtLeast(0)] = 0.0
    """Seconds for which the supervisor lets ranks stand still in one phase, if longer than usual.
    The timeout of collectives is raised accordingly."""
    out: str
    """Folder of `checkpoints/` and `metrics.jsonl`; for a job its run directory."""

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise Invalid(problems)

    def _problems(self) -> Iterator[Problem]:
        if self.train.eval_every is not None and self.data.validation is None:
            yield eval_without_data(self.train.eval_every)
        if "auto" in (self.parallel.dp_shard, self.parallel.tp):
            return
        mesh = self.parallel.filled_mesh(1)
        per_pass = mesh.data_parallel * self.micro_batch_size
        if self.train.global_batch_size % per_pass:
            yield Problem(
                path="train.global_batch_size",
                value=self.train.global_batch_size,
                limit=f"a multiple of {mesh.data_parallel} data-parallel ranks"
                f" x micro batch {self.micro_batch_size} = {per_pass}",
                fix="change micro_batch_size, the degrees or the global batch",
            )

    @property
    def mesh(self) -> Mesh:
        return self.parallel.mesh

    @property
    def gradient_accumulation(self) -> int:
        """Forward and backward passes per optimizer step."""
        per_pass = self.mesh.data_parallel * self.micro_batch_size
        return self.train.global_batch_size // per_pass
