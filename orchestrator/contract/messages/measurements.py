"""What the ranks of `ndctl calibrate` measured: the file that they write and ndctl reads."""

from collections.abc import Mapping

from msgspec import Struct


class Sample(Struct, frozen=True, kw_only=True):
    """Repetitions of one operation, on all ranks at the same time."""

    what: str
    """Such as `product`, `attention forward`, `all-gather`."""
    size: Mapping[str, int]
    """What the operation depends on, such as `rows`, `tokens` or `bytes`."""
    kind: str = ""
    """Number format."""
    ranks: int = 1
    """Ranks of a collective."""
    across: bool = False
    """The ranks of the collective are on different hosts."""
    seconds: float
    """Median of all repetitions of all ranks."""
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""
    repeats: int
    """Of each rank."""


class Measurements(Struct, frozen=True, kw_only=True):
    device: str
    """`cuda` or `cpu`."""
    device_name: str
    memory_bytes: int | None
    """Of a GPU; None for a CPU."""
    hosts: int
    ranks_per_host: int
    torch: str
    samples: tuple[Sample, ...]
    missing: int = 0
    """Number of measurements for which the time did not suffice."""
    hot: float | None = None
    """Speed of the largest product after seconds of the same, relative to its first repetitions."""
    clock_mhz: float | None = None
    """Of the first GPU right after these products; None if it is not known."""
    power_w: float | None = None
    """Drawn by it at that moment."""
    load: float = 0.0
    """Processes that wanted to run on the first host just before, as `uptime` says."""
    processors: int = 1
    """Of the first host."""
