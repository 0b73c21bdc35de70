"""Parses `scontrol -o show partitions`."""

from collections.abc import Iterable

from msgspec import Struct

from orchestrator.contract.codec import nearest
from orchestrator.contract.spec.slurm_spec import seconds
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.records import records, value


class Partition(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    default: bool
    nodes: tuple[str, ...]
    max_time_s: int | None
    """None: no limit."""
    max_nodes: int | None
    topology: str | None = None
    """The partition's own topology, if a cluster has several (25.05 and newer)."""
    default_time_s: int | None = None
    """Time limit of a job that requests none; None: the maximum."""


def parse_partitions(text: str) -> tuple[Partition, ...]:
    return tuple(
        Partition(
            name=value(record, "PartitionName"),
            state=value(record, "State") or "UP",
            default=value(record, "Default") == "YES",
            nodes=expand(value(record, "Nodes")),
            max_time_s=seconds(value(record, "MaxTime")),
            max_nodes=_count(value(record, "MaxNodes")),
            topology=value(record, "Topology") or None,
            default_time_s=seconds(value(record, "DefaultTime")),
        )
        for record in records(text, "PartitionName")
    )


def _count(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def time_words(seconds: int | None) -> str:
    """In Slurm's form: `7-00:00:00`, `1:00:00` or `UNLIMITED`."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(seconds, 24 * 3600)
    hours, rest = divmod(rest, 3600)
    clock = f"{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{hours:02}:{clock}" if days else f"{hours}:{clock}"


def not_up_fix(name: str) -> str:
    """What to do if partition `name` is not UP."""
    return f"use another partition, or ask the administrators when {name} is up again"


def partition_fix(name: str, known: Iterable[str]) -> str:
    """What to use in place of `name`, which is none of the `known` partitions."""
    names = sorted(known)
    near = nearest(name, names)
    meant = f"did you mean {near}? " if near is not None else ""
    return f"{meant}partitions of this cluster: {', '.join(names) or 'none'}"
