"""The measured speed of one job.

A record has what the cost model needs to predict the job, and not what it predicted. So each
planner compares the job with its own prediction, and a record outlives changes of the formulas.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.devices import compute_dtype
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.plan import Plan
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup, setup_of

FEWEST_STEPS = 20
"""Steady steps of a job that counts."""
MOST_DATA = 0.1
"""Share of a step that may be waiting for data. Beyond it the data was measured, not the plan."""
LARGEST = {"num_layers": 10_000, "hidden_size": 1 << 20, "vocab_size": 1 << 24}
"""Larger values of a model come from a file that is damaged or foreign."""
MOST_RANKS = 1 << 20
MOST_MICRO_BATCHES = 1 << 20


class SpeedRecord(Struct, frozen=True, kw_only=True):
    at: float
    """Unix seconds, by the leader's clock. Only shown: the order in the file decides."""
    job: str
    run_dir: str
    submitted: float
    """When this run of the job was submitted. With `run_dir` it identifies the record."""
    backend: str
    """`local` jobs share their machine with other programs, so they count for local plans only."""
    profile: str
    """Name of the hardware profile."""
    hosts: int
    devices_per_host: int
    setup: Setup
    steps: int
    """Number of steady steps."""
    step_s: float
    """Their median."""
    step_s_range: tuple[float, float]
    """10th and 90th percentile of single steps."""

    @property
    def identity(self) -> tuple[str, float]:
        return self.run_dir, self.submitted


def setup_of_training(config: TrainingConfig, plan: Plan) -> Setup:
    """What the ranks ran, with the number format that the trainer chose for `auto`."""
    values = config.model.config
    assert values is not None, "a planned job has the model's config inline"
    # What a plan reserves besides tensors is for GPUs, and each GPU with a profile has bfloat16.
    on_gpu = plan.needs.tensor_bytes < plan.needs.peak_bytes
    dtype = compute_dtype(config.train.dtype, fast_bfloat16=on_gpu)
    memory = config.checkpoint.memory.on_devices(cpu=not on_gpu)
    config = replace(
        config,
        train=replace(config.train, dtype=dtype),
        checkpoint=replace(config.checkpoint, memory=memory),
    )
    return setup_of(
        config,
        shape_of(values),
        config.mesh,
        config.micro_batch_size,
        config.train.recompute,
        config.parallel.pipeline,
    )


def is_sound(record: SpeedRecord) -> bool:
    """Whether the record can be one of ndctl's. Many users write the file."""
    seconds = (record.step_s, *record.step_s_range, record.at, record.submitted)
    setup, shape = record.setup, record.setup.shape
    return (
        all(math.isfinite(value) and value > 0 for value in seconds)
        and record.steps >= FEWEST_STEPS
        and min(setup.mesh.degrees) >= 1
        and setup.mesh.world_size == record.hosts * record.devices_per_host <= MOST_RANKS
        and min(record.hosts, setup.micro_batch_size, setup.micro_batches, setup.tokens) >= 1
        and setup.micro_batches <= MOST_MICRO_BATCHES
        and all(0 < getattr(shape, name) <= most for name, most in LARGEST.items())
    )
