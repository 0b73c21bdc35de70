"""Which nodes match the request of a job, and which of them are available. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterable

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.inventory.slurm.inventory import Use, unfit
from orchestrator.inventory.slurm.nodes import IN_RESERVATION, Node
from orchestrator.inventory.slurm.standing import standing_of

SIZE = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
UNITS = {"K": 2**-10, "M": 1, "": 1, "G": 2**10, "T": 2**20}


def most_in_one_partition(
    launch: LaunchPlan, partitions: Collection[str], nodes: Iterable[Node]
) -> int:
    """The number of matching nodes in the partition with the most of them, because Slurm takes all
    nodes of a job from one partition. Without partitions: the number of all matching nodes."""
    fit = [node for node in nodes if fits(launch, node)]
    if not partitions:
        return len(fit)
    room = Counter(name for node in fit for name in node.partitions if name in partitions)
    return max(room.values(), default=0)


def fits(launch: LaunchPlan, node: Node) -> bool:
    """Whether the node matches the request, in any state. Unknown properties count as a match."""
    spec = launch.slurm_spec
    on_cpus = spec.gpus == "none"
    use = Use(constraint=spec.constraint, gpu_type=None if on_cpus else spec.gpu_type)
    return (
        (on_cpus or node.gpus >= launch.devices_per_host)
        and (not node.cpus or (spec.cpus_per_task or 0) <= node.cpus)
        and (not node.memory_mib or (mib(spec.mem) or 0) <= node.memory_mib)
        and _is_in_reservation(node, spec)
        and not unfit(node, use)
    )


def _is_in_reservation(node: Node, spec: SlurmSpec) -> bool:
    if spec.reservation is None:
        return True
    # Slurm 22.05 does not report which reservation a node is in.
    named = node.reservation in (spec.reservation, None)
    return named and bool(node.flags & IN_RESERVATION)


def is_away(node: Node, spec: SlurmSpec) -> bool:
    """Whether Slurm gives the node to no job at present: down, drained, in maintenance, …"""
    return standing_of(node, reservation=spec.reservation).state == "drained"


def mib(text: str | None) -> float | None:
    """Memory in MiB, in the syntax of sbatch. None: not a valid size."""
    found = SIZE.fullmatch(text or "")
    return int(found[1]) * UNITS[found[2].upper()] if found else None
