"""Signs that a host will fail soon, or slows all others down, while its ranks still train.

A watch compares what the host says now with what it said at the first look. What was so before is
left to the check before the start (`host_check.py`). A source that this host lacks says nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.messages.events import WarningKind
from orchestrator.health.gpus import (
    FATAL_XIDS,
    FORMAT,
    QUERY,
    REMAP_QUERY,
    SMI_TIMEOUT_S,
    YES,
    parse_gpus,
    parse_remapped,
    parse_xids,
    short_bus_id,
)
from orchestrator.seams import Shell

log = logging.getLogger(__name__)

WATCH_S = 30.0
"""Seconds between two looks at a host."""
WATCH_LIMIT_S = 100.0
"""Limit of a look. Each program that it runs has a limit of its own."""
THROTTLED_LOOKS = 6
"""Looks in a row that see a GPU slowed down by its hardware: three minutes. Shorter slowdowns come
with each change of the load."""
FLAPS = 3
"""Times that one port lost its link within `FLAPS_WITHIN_S`. Maintenance takes a link once."""
FLAPS_WITHIN_S = 600.0
EARLY_XIDS: Mapping[int, str] = {
    63: "a memory row is to be remapped",
    92: "many corrected memory errors",
    94: "contained memory error",
}
"""Xids after which a GPU goes on, and NVIDIA advises to reset it soon."""
KINDS_OF_XIDS: Mapping[int, WarningKind] = {
    48: "gpu-memory",
    63: "gpu-memory",
    64: "gpu-memory",
    92: "gpu-memory",
    94: "gpu-memory",
    95: "gpu-memory",
    140: "gpu-memory",
}
"""The kind of all others is `gpu`."""
THROTTLE_QUERY = (
    "pci.bus_id,clocks_throttle_reasons.hw_thermal_slowdown,"
    "clocks_throttle_reasons.hw_power_brake_slowdown"
)
"""Slowdowns by the hardware. A limit of power in software is the usual state of a busy GPU."""
REASONS = ("it is too hot", "the power supply demands it")


class Warned(Struct, frozen=True):
    """One thing that is wrong with this host."""

    kind: WarningKind
    what: str
    """Evidence, ready to print: the device and what it reports."""
    lasts: bool = True
    """False: it has ended."""


Watch = Callable[[float], tuple[Warned, ...]]
"""Takes monotonic seconds, and returns what is new since the last call. It may block."""


class HostWatch:
    """The `Watch` of a real host."""

    def __init__(self, root: Path, shell: Shell) -> None:
        """
        Args:
            root: folder of /proc and /sys.
        """
        self.root, self.shell = root, shell
        self.first = True
        self.said: set[str] = set()
        """What is known already. It is reported once."""
        self.flaps: dict[str, deque[tuple[float, int]]] = {}
        """Port -> when its link was lost, and how often."""
        self.counters: dict[str, int] = {}
        self.throttled: dict[str, int] = {}
        """Bus id -> looks in a row that saw it slowed down."""

    def __call__(self, now: float) -> tuple[Warned, ...]:
        found = [*self._gpus(), *flapping(self.flaps, self._lost_links(), now)]
        new = [one for one in found if one.what not in self.said]
        self.said |= {one.what for one in new}
        first, self.first = self.first, False
        return () if first else (*new, *self._throttling())

    # GPUs

    def _gpus(self) -> Iterator[Warned]:
        if not (self.root / "proc/driver/nvidia/version").exists():
            return
        gpus = parse_gpus(self._ask("nvidia-smi", f"--query-gpu={QUERY}", FORMAT))
        remapped = parse_remapped(
            self._ask("nvidia-smi", f"--query-remapped-rows={REMAP_QUERY}", FORMAT)
        )
        for gpu in gpus:
            if gpu.uncorrected:
                yield Warned("gpu-memory", f"GPU {gpu.bus_id}: uncorrected memory errors")
            if gpu.pages_pending:
                yield Warned("gpu-memory", f"GPU {gpu.bus_id}: memory pages are to be retired")
        for bus_id, why in remapped.items():
            yield Warned("gpu-memory", f"GPU {bus_id}: {why}")
        # The kernel log is of the whole machine. The job may have only some of its GPUs.
        ours = {gpu.bus_id for gpu in gpus}
        for xid in parse_xids(self._ask("dmesg")):
            known = {**FATAL_XIDS, **EARLY_XIDS}.get(xid.number)
            if known is not None and (not ours or xid.bus_id in ours):
                kind = KINDS_OF_XIDS.get(xid.number, "gpu")
                yield Warned(kind, f"GPU {xid.bus_id}: Xid {xid.number}, {known}")

    def _throttling(self) -> Iterator[Warned]:
        if not (self.root / "proc/driver/nvidia/version").exists():
            return
        slowed = parse_throttled(self._ask("nvidia-smi", f"--query-gpu={THROTTLE_QUERY}", FORMAT))
        before, self.throttled = (
            self.throttled,
            {bus_id: self.throttled.get(bus_id, 0) + 1 for bus_id in slowed},
        )
        for bus_id, looks in self.throttled.items():
            if looks == THROTTLED_LOOKS:
                yield Warned("throttling", f"GPU {bus_id} slows down: {slowed[bus_id]}")
        lasting = [bus_id for bus_id, looks in self.throttled.items() if looks >= THROTTLED_LOOKS]
        if not lasting and any(looks >= THROTTLED_LOOKS for looks in before.values()):
            yield Warned("throttling", "no GPU slows down any more", lasts=False)

    def _ask(self, *argv: str) -> str:
        """What a program prints; empty if it fails, as `dmesg` without permission does."""
        try:
            done = self.shell(argv, timeout=SMI_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s timed out after %.0f s", argv[0], SMI_TIMEOUT_S)
            return ""
        return done.out if done.code == 0 else ""

    # Links

    def _lost_links(self) -> Mapping[str, int]:
        """Port -> how often its link was lost since the last look, of ports that lost it."""
        now = dict(link_counters(self.root))
        before, self.counters = self.counters, now
        return {
            port: count - before[port]
            for port, count in now.items()
            if port in before and count > before[port]
        }


def parse_throttled(text: str) -> Mapping[str, str]:
    """Bus id -> why its hardware slows it down, of `nvidia-smi --query-gpu=THROTTLE_QUERY`."""
    found = {}
    for line in text.splitlines():
        bus_id, *active = [cell.strip() for cell in line.split(",")]
        short = short_bus_id(bus_id)
        if short is None or len(active) != len(REASONS):
            continue
        words = [
            why
            for why, said in zip(REASONS, active, strict=True)
            if said.lower() in (*YES, "active")
        ]
        if words:
            found[short] = ", ".join(words)
    return found


def link_counters(root: Path) -> Iterator[tuple[str, int]]:
    """Port -> how often its link was lost since the machine started."""
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*/counters/link_downed")):
        yield f"{path.parts[-5]}/{path.parts[-3]}", _number(path)
    for card in sorted((root / "sys/class/net").glob("*")):
        # A virtual interface has no device, and its carrier changes whenever a container starts.
        if (card / "device").exists():
            yield card.name, _number(card / "carrier_down_count")


def flapping(
    flaps: dict[str, deque[tuple[float, int]]], lost: Mapping[str, int], now: float
) -> Iterator[Warned]:
    """Adds to `flaps` the links that were `lost` since the last look, and yields what flaps."""
    for port, count in lost.items():
        times = flaps.setdefault(port, deque())
        times.append((now, count))
        while now - times[0][0] > FLAPS_WITHIN_S:
            times.popleft()
        if sum(each for _, each in times) >= FLAPS:
            yield Warned("links", f"port {port} loses its link again and again")


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a port that vanishes, or a driver without this counter
        return 0
