"""Parses `scontrol --details -o show nodes`: what a node has, and whether it is free."""

from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct

from orchestrator.inventory.slurm.gres import gpu_count, gpu_type, gpus_of_tres, parse_gres
from orchestrator.inventory.slurm.records import reason, records, value


class Node(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """Base state, such as `IDLE`, `MIXED`, `DOWN`."""
    flags: frozenset[str] = frozenset()
    """Such as `DRAIN`, `CLOUD`, `NOT_RESPONDING`. Marks such as * are spelled out."""
    cpus: int = 0
    memory_mib: int = 0
    """0 if Slurm does not report it."""
    gpus: int = 0
    gpu_type: str | None = None
    gpus_used: int | None = None
    """None if Slurm does not report it."""
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    reservation: str | None = None
    reason: str = ""
    address: str = ""
    """NodeAddr: a name or an address."""

    @property
    def words(self) -> str:
        """Such as `ALLOCATED+DRAIN`."""
        return "+".join((self.state, *sorted(self.flags)))

    @property
    def is_gone(self) -> bool:
        """Whether Slurm has given up the node, so that nothing runs there any more."""
        return self.state == "DOWN" or bool(self.flags & POWERLESS)

    @property
    def is_dead(self) -> bool:
        """Whether nothing can be started there. Running work may continue."""
        return self.is_gone or "NOT_RESPONDING" in self.flags


MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
SYNONYMS = {
    "MAINT": "MAINTENANCE",
    "RESV": "RESERVED",
    "DRAINED": "DRAIN",
    "DRAINING": "DRAIN",
    "FAILING": "FAIL",
    "NO_RESPOND": "NOT_RESPONDING",
    "POWER": "POWERED_DOWN",
    "REBOOT": "REBOOT_REQUESTED",
}
POWERLESS = frozenset({"POWERED_DOWN", "POWERING_DOWN"})
IN_RESERVATION = {"RESERVED", "MAINTENANCE"}
BASES = {"ALLOC": "ALLOCATED", "MIX": "MIXED", "UNK": "UNKNOWN", "ERR": "ERROR"}


def parse_nodes(text: str) -> tuple[Node, ...]:
    return tuple(_nodes(text))


def _nodes(text: str) -> Iterator[Node]:
    for record in records(text, "NodeName"):
        state, flags = parse_state(value(record, "State"))
        gres = parse_gres(value(record, "Gres"))
        yield Node(
            name=value(record, "NodeName"),
            state=state,
            flags=flags,
            cpus=_number(value(record, "CPUEfctv") or value(record, "CPUTot")),
            memory_mib=_number(value(record, "RealMemory")),
            gpus=gpu_count(gres),
            gpu_type=gpu_type(gres),
            gpus_used=_used(record),
            features=_listed(value(record, "ActiveFeatures") or value(record, "AvailableFeatures")),
            partitions=_listed(value(record, "Partitions")),
            reservation=_reservation(record) if flags & IN_RESERVATION else None,
            reason=reason(record),
            address=value(record, "NodeAddr"),
        )


@lru_cache(maxsize=4096)  # thousands of nodes have few states
def parse_state(text: str) -> tuple[str, frozenset[str]]:
    """`IDLE*+DRAIN` gives IDLE with the flags DRAIN and NOT_RESPONDING."""
    flags: set[str] = set()
    words: list[str] = []
    for word in text.upper().split("+"):
        bare = word.rstrip("".join(MARKS))
        flags.update(MARKS[mark] for mark in word[len(bare) :])
        words.append(bare)
    base = BASES.get(words[0], words[0])
    if base in SYNONYMS or base in SYNONYMS.values():  # sinfo's form: DRAINED, MAINT, RESERVED
        flags.add(SYNONYMS.get(base, base))
        base = "ALLOCATED" if base == "DRAINING" else "IDLE"
    flags.update(SYNONYMS.get(word, word) for word in words[1:] if word)
    return base or "UNKNOWN", frozenset(flags)


def _reservation(record: str) -> str | None:
    return value(record, "ReservationName") or value(record, "ResvName") or None


def _used(record: str) -> int | None:
    used = value(record, "GresUsed")  # only with --details
    if used:
        return gpu_count(parse_gres(used))
    if gpus_of_tres(value(record, "CfgTRES")) is None:
        return None  # the site does not count GPUs among its TRES
    return gpus_of_tres(value(record, "AllocTRES")) or 0


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


@lru_cache(maxsize=4096)
def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)
