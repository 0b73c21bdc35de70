"""The setups that a search compares, their memory and time, and how they are ranked."""

from collections.abc import Callable, Collection

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.plan import Memory, StepTime
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.cost.step import step_seconds, step_time
from orchestrator.plan.memory.peak_memory import Peak, peak_of
from orchestrator.plan.memory.states import MASTER_BYTES, MOMENTS
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.edits import Value, free_keys
from orchestrator.plan.search.meshes import simplicity
from orchestrator.plan.search.rule import Hosts, Request
from orchestrator.plan.setup import Setup
from orchestrator.plan.sizes import COMPUTE_BYTES

MODEST_BYTES = 256 << 20
"""Limit of activations and logits of a CPU rank, if the planner chooses the micro batch. CPU ranks
share one memory whose size is unknown."""
AUTO_MARGIN = 0.04
"""Share of a GPU's memory that `memory_margin: auto` leaves free. With the 90th percentile of the
published allocators a plan needs 4 % of its tensors more than planned (`peak_range.py`)."""
DIGITS = 9
"""Significant digits of a time; a difference in later digits is rounding and counts as a tie."""

FSDP = "parallel.fsdp."
Rank = tuple[float | int, ...]
"""Smaller is better."""


class Option(Struct, frozen=True):
    setup: Setup
    memory: Memory
    time: StepTime


class Space(Struct, frozen=True):
    spec: JobSpec
    shape: ModelShape
    fabric: Fabric

    @property
    def request(self) -> Request:
        """The input of the rules."""
        return Request(
            self.spec, self.shape, Hosts(self.fabric.devices_per_host, self.fabric.blocks)
        )

    @property
    def free_keys(self) -> dict[str, Value]:
        """Keys of the spec that can be left to the planner, see `edits.free_keys`. Those that the
        software fixes cannot."""
        found = free_keys(self.spec)
        if not self.fabric.profile.calibration.whole_weights:
            return found
        return {path: value for path, value in found.items() if not path.startswith(FSDP)}

    @property
    def world(self) -> int:
        return self.fabric.hosts * self.fabric.devices_per_host

    @property
    def limit(self) -> int:
        """Bytes of memory of one device that a plan may use."""
        profile, margin = self.fabric.profile, self.spec.cluster.memory_margin
        if margin == "auto":
            margin = AUTO_MARGIN if profile.device == "cuda" else 0.0
        return int(profile.memory_bytes * (1 - margin))

    def filled(self) -> "Space":
        """The same without a margin."""
        cluster = replace(self.spec.cluster, memory_margin=0.0)
        return replace(self, spec=replace(self.spec, cluster=cluster))

    @property
    def states_bytes(self) -> int:
        """Bytes of model states on all devices together, in any split; 0 if the states are
        offloaded or only adapters are trained."""
        # Then the states are not in device memory, or most weights have no gradient and moments. A
        # bound of 0 excludes nothing.
        if self.spec.parallel.fsdp.cpu_offload or self.spec.model.lora is not None:
            return 0
        optimizer = self.spec.train.optimizer
        moments = COMPUTE_BYTES[optimizer.state_dtype] * MOMENTS[optimizer.name]
        return (2 * MASTER_BYTES + moments) * self.shape.parameters

    @property
    def margin(self) -> float:
        """Share by which planned step times of two meshes must differ to be told apart."""
        return self.fabric.profile.calibration.comparison.typical

    def peak(self, setup: Setup) -> Peak:
        return peak_of(setup, self.fabric)

    def seconds(self, setup: Setup) -> float:
        return step_seconds(setup, self.fabric)

    def option(self, peak: Peak) -> Option:
        return Option(peak.setup, peak.memory(), step_time(peak.setup, self.fabric))

    def is_too_large(self, count: int) -> bool:
        return count > self.limit

    def fits(self, peak: Peak, smallest: int) -> bool:
        """`smallest` is the smallest micro batch that the job can use."""
        if self.is_too_large(peak.bytes):
            return False
        # On CPU ranks the planner does not choose a larger micro batch than it must.
        larger = self.fabric.profile.device == "cpu" and peak.setup.micro_batch_size > smallest
        return not larger or _bytes_of(peak.memory(), KEPT) <= MODEST_BYTES


PASSING = frozenset({"activations", "logits", "boundaries", "temporary", "slack"})
"""Items of memory that depend on micro batch and checkpointing; the others do not."""
KEPT = frozenset({"activations", "logits"})


def standing_bytes(memory: Memory) -> int:
    """Bytes that do not depend on the micro batch or on checkpointing."""
    return memory.peak_bytes - _bytes_of(memory, PASSING)


def _bytes_of(memory: Memory, items: Collection[str]) -> int:
    return sum(size for item, size in memory.items.items() if item in items)


def by_throughput(option: Option) -> Rank:
    setup, seconds = option.setup, float(f"{option.time.step_s:.{DIGITS}g}")
    kernels = (setup.compile, setup.float8)
    return (seconds, *simplicity(setup.mesh), *kernels, option.memory.peak_bytes)


def by_memory(option: Option) -> Rank:
    return (option.memory.peak_bytes, *by_throughput(option))


RANKS: dict[str, Callable[[Option], Rank]] = {
    "throughput": by_throughput,
    "memory": by_memory,
    "fewest_hosts": by_throughput,
}
"""Sort key by objective. For `fewest_hosts`, the number of hosts is chosen before."""
