"""Plans side by side: the same job with other values of some keys."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from orchestrator.contract.plan import Plan
from orchestrator.plan.figures import show_bytes, show_seconds, show_traffic, three_digits
from orchestrator.plan.show.explain import plan_json, short
from orchestrator.plan.show.tables import table, wrapped

ABREAST = 3
"""Plans side by side in one table of 100 columns."""


class Compared(Struct, frozen=True, kw_only=True):
    values: str
    """The changed keys as typed: `parallel.tp=4`."""
    plan: Plan | None
    refusal: str = ""
    """Why there is no plan."""


def describe_compared(compared: Sequence[Compared]) -> str:
    """A column for each plan, and below it the refusals."""
    planned = [(one.values, one.plan) for one in compared if one.plan is not None]
    lines: list[str] = []
    for first in range(0, len(planned), ABREAST):
        some = planned[first : first + ABREAST]
        columns = [_column(plan, planned[0][1]) for _, plan in some]
        rows = [
            [what, *(column.get(what, "-") for column in columns)] for what in _rows_of(columns)
        ]
        lines += [*table(["", *(values for values, _ in some)], rows, left=len(some) + 1), ""]
    for one in compared:
        if one.plan is None:
            # A refusal is a heading and a line for each broken rule.
            heading, *reasons = one.refusal.splitlines()
            lines += wrapped(heading, f"{one.values}  ", "  ")
            lines += [line for reason in reasons for line in wrapped(reason, "  ", "    ")]
    return "\n".join(lines).rstrip()


def _rows_of(columns: Sequence[Mapping[str, str]]) -> list[str]:
    """The row names of all columns, merged so that each keeps the order of its own column."""
    rows: list[str] = []
    for column in columns:
        place = 0
        for what in column:
            if what not in rows:
                rows.insert(place, what)
            place = rows.index(what) + 1
    return rows


def compared_json(compared: Sequence[Compared]) -> dict[str, Any]:
    plans = [
        {
            "set": one.values,
            "plan": None if one.plan is None else plan_json(one.plan),
            "refusal": one.refusal or None,
        }
        for one in compared
    ]
    return {"plans": plans}


def _column(plan: Plan, first: Plan) -> dict[str, str]:
    memory, time = plan.needs, plan.time
    sent: Counter[str] = Counter()
    for one in plan.communication:
        sent.update(one.by_level)
    column = {
        "mesh": short(plan.mesh),
        "hosts": f"{len(plan.hosts):,} x {plan.ranks_per_host}",
        "micro batch": f"{plan.micro_batch_size} x {plan.gradient_accumulation}",
        "schedule": plan.schedule or "-",
        "recompute": plan.activation_checkpointing,
        "reshard": str(plan.reshard_after_forward).lower(),
        "reduce": plan.reduce_gradients,
        "memory": show_bytes(memory.peak_bytes) + _share(memory.peak_bytes, memory.device_bytes),
        **{f"  of {item}": show_bytes(size) for item, size in memory.items.items()},
    }
    if time is not None and first.time is not None:
        column |= {
            "step": f"{show_seconds(time.step_s)}  {time.step_s / first.time.step_s - 1:+.1%}",
            **{f"  for {part}": show_seconds(s) for part, s in time.parts.items()},
            "tokens/s per device": three_digits(time.tokens_per_second_per_device),
            "MFU": f"{time.mfu:.1%}",
        }
    return column | {f"sent over {level} links": show_traffic(size) for level, size in sent.items()}


def _share(size: int, limit: int | None) -> str:
    return f"  {size / limit:.0%}" if limit else ""
