"""The bytes that a rank sends in a step, by axis, collective and level of links."""

from orchestrator.contract.plan import Traffic
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.cost.collective import Flow
from orchestrator.plan.cost.groups import pattern_of
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import timeline
from orchestrator.plan.setup import Setup


def traffic_of(setup: Setup, fabric: Fabric) -> tuple[Traffic, ...]:
    """The traffic of the slowest rank, most bytes first."""
    found = (
        Traffic(
            axis=flow.axis,
            collective=flow.collective,
            what=flow.what,
            bytes_per_step=round(flow.sent),
            messages=round(flow.calls),
            level=flow.group.level,
            by_level=_by_level(flow),
            seconds=flow.seconds,
            exposed_seconds=flow.exposed,
            ideal_seconds=flow.sent / _nominal_rate(flow, fabric),
        )
        for flow in timeline(setup, machine_of(fabric)).flows
        if flow.sent > 0
    )
    return tuple(sorted(found, key=lambda traffic: -traffic.bytes_per_step))


def _nominal_rate(flow: Flow, fabric: Fabric) -> float:
    """Bytes per second at which a rank could send, by the numbers of the vendor."""
    group, near = flow.group, fabric.profile.intra_host.bytes_per_s
    if group.hosts > group.blocks:
        near = fabric.block_link.bytes_per_s
    if group.blocks == 1:
        return near
    far = fabric.profile.inter_host.bytes_per_s
    is_ring = pattern_of(flow.axis, flow.collective) == "ring"
    # Rings leave a host over the links of all ranks of the group in it.
    return min(near, far * group.per_block) if is_ring and group.per_block > 1 else far


def _by_level(flow: Flow) -> dict[str, int]:
    shares = flow.group.crossings(pattern_of(flow.axis, flow.collective))
    return {level: round(flow.sent * share) for level, share in shares.items()}
