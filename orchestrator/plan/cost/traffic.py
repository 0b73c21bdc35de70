"""What a rank sends in a step, along which axis, by which collective, and over which links."""

from collections.abc import Mapping

from orchestrator.cluster.profile import Fabric
from orchestrator.contract.plan import Traffic
from orchestrator.plan.cost.groups import LEVELS
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import timeline
from orchestrator.plan.setup import Setup


def traffic_of(setup: Setup, fabric: Fabric) -> tuple[Traffic, ...]:
    """Of the rank that takes the longest, most bytes first."""
    found = (
        Traffic(
            axis=flow.axis,
            collective=flow.collective,
            what=flow.what,
            bytes_per_step=round(flow.sent),
            messages=round(flow.calls),
            level=flow.group.level,
            seconds=flow.seconds,
            exposed_seconds=flow.exposed,
        )
        for flow in timeline(setup, machine_of(fabric)).flows
        if flow.sent > 0
    )
    return tuple(sorted(found, key=lambda traffic: -traffic.bytes_per_step))


def bytes_by_level(setup: Setup, fabric: Fabric) -> Mapping[str, int]:
    """Bytes of a step that a rank sends over links of each level, averaged over its group.

    Rings enter and leave a host once: of a group's hops so many are between hosts as it has hosts,
    and of these as many between leaf switches as there are leaves.
    """
    total = dict.fromkeys(LEVELS, 0.0)
    for flow in timeline(setup, machine_of(fabric)).flows:
        for level, share in flow.group.crossings.items():
            total[level] += flow.sent * share
    return {level: round(size) for level, size in total.items()}
