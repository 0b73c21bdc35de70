"""What the slowest rank sends in a step."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from orchestrator.contract.plan import Plan, Traffic
from orchestrator.plan.figures import show_seconds, show_traffic, three_digits
from orchestrator.plan.show.tables import labelled, table, wrapped


def describe_traffic(plan: Plan) -> list[str]:
    """Lines: a row for each collective, the bytes of each axis, and the bytes on each level."""
    if not plan.communication:
        return []
    rows = [
        [
            one.axis,
            one.collective,
            one.what,
            one.level,
            show_traffic(one.bytes_per_step),
            f"{one.messages:,}",
            show_seconds(one.ideal_seconds),
            show_seconds(one.seconds),
            show_seconds(one.exposed_seconds) if one.exposed_seconds > 0 else "hidden",
        ]
        for one in plan.communication
    ]
    head = ["axis", "collective", "of", "crosses", "per step", "calls", "ideal", "time", "exposed"]
    return [
        *labelled(
            "traffic",
            "sent per step by the slowest rank; ideal: at the links' nominal rate; exposed: not"
            " hidden by compute",
        ),
        *table(head, rows, left=4),
        *_by_axis(plan),
        *_by_level(plan.communication),
    ]


def _by_axis(plan: Plan) -> list[str]:
    """The bytes of each axis, in multiples of the model's weights."""
    if plan.work is None:
        return []
    sent: Counter[str] = Counter()
    for one in plan.communication:
        sent[one.axis] += one.bytes_per_step
    weights = plan.work.weight_bytes
    axes = ", ".join(
        f"{axis} {show_traffic(size)} ({three_digits(size / weights)} x)"
        for axis, size in sent.items()
    )
    return wrapped(f"in multiples of all weights, {show_traffic(weights)}: {axes}", "  ", "    ")


def _by_level(communication: Sequence[Traffic]) -> list[str]:
    """Bytes over links of each level, where a plan uses more than one level."""
    sent: dict[str, Counter[str]] = defaultdict(Counter)
    for one in communication:
        sent[one.axis].update(one.by_level)
    total: Counter[str] = Counter()
    for levels in sent.values():
        total.update(levels)
    crossed = [level for level, size in total.items() if size]
    if len(crossed) < 2:
        return []
    rows = [
        [axis, *(show_traffic(levels[level]) for level in crossed)]
        for axis, levels in (*sent.items(), ("total", total))
    ]
    return [
        "  over links of each level, per step, mean of a group's ranks",
        *table(["axis", *crossed], rows),
    ]
