"""`scontrol -o show partitions`."""

import re
from dataclasses import dataclass

from orchestrator.cluster.slurm.hostlist import expand
from orchestrator.cluster.slurm.records import records, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    name: str
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    default: bool
    nodes: tuple[str, ...]
    max_time_s: int | None
    """None: no limit."""
    max_nodes: int | None
    topology: str | None = None
    """Its own, where a cluster has several (25.05 and newer)."""


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
        )
        for record in records(text, "PartitionName")
    )


def _count(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def seconds(text: str) -> int | None:
    """Of `MINUTES`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; None of UNLIMITED or NONE."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # hours first
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) < 3:  # minutes first
        hours, minutes, secs = (0, *parts, 0)[:3]
    else:
        hours, minutes, secs = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def time_words(seconds: int | None) -> str:
    """As Slurm writes it: `7-00:00:00`, `1:00:00` or `UNLIMITED`."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(seconds, 24 * 3600)
    hours, rest = divmod(rest, 3600)
    clock = f"{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{hours:02}:{clock}" if days else f"{hours}:{clock}"
