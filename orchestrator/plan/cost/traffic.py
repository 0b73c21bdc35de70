"""What a rank sends in a step, along which axis, by which collective, and over which links."""

from collections.abc import Iterable

from orchestrator.cluster.profile import Fabric
from orchestrator.contract.plan import Traffic
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import timeline
from orchestrator.plan.setup import Setup


def traffic_of(setup: Setup, fabric: Fabric) -> tuple[Traffic, ...]:
    """Of the rank that takes the longest, most bytes first."""
    flows = timeline(setup, machine_of(fabric)).flows
    found: Iterable[Traffic] = (
        Traffic(
            axis=flow.axis,
            collective=flow.collective,
            what=flow.what,
            bytes_per_step=round(flow.sent),
            messages=round(flow.calls),
            level=flow.level,
            seconds=flow.seconds,
            exposed_seconds=flow.exposed,
        )
        for flow in flows
        if flow.sent > 0
    )
    return tuple(sorted(found, key=lambda traffic: -traffic.bytes_per_step))
