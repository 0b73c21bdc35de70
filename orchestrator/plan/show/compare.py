"""Plans side by side: the same job with other values of some keys."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from orchestrator.contract.plan import Plan
from orchestrator.plan.decision import Decision
from orchestrator.plan.figures import (
    show_amount,
    show_bytes,
    show_duration,
    show_seconds,
    three_digits,
)
from orchestrator.plan.show.explain import plan_json, short, software_of
from orchestrator.plan.show.tables import labelled, table, wrapped

LEAST = 0.01
"""A part of the step that changes by less than this share of it is not named."""
NAMED = 3
"""Parts of the time, and items of memory, named for one plan."""


class Compared(Struct, frozen=True, kw_only=True):
    values: tuple[str, ...]
    """The changed keys as typed: `parallel.tp=4`."""
    plan: Plan | None
    decision: Decision | None = None
    refusal: str = ""
    """Why there is no plan."""


def describe_compared(compared: Sequence[Compared]) -> str:
    """A row for each combination of values, in their order, with a line on what makes it differ
    from the first plan. A refused one has its reasons in place of numbers."""
    first = next((one for one in compared if one.plan is not None), None)
    rows = [_row(one, first) for one in compared]
    head = [*_keys(compared), *HEAD]
    # A column without any value, such as the money without a price, is not shown.
    kept = [at for at, _ in enumerate(head) if at < len(_keys(compared)) or any(_at(rows, at))]
    shown = table(
        [head[at] for at in kept],
        [[row[at] if at < len(row) else "" for at in kept] for row in rows],
        left=len(_keys(compared)) + 1,
    )
    lines = shown[:1]
    for one, line in zip(compared, shown[1:], strict=True):
        lines.append(line)
        lines += _refused(one) if one.plan is None else _differs(one.plan, first)
    if first is not None and first.plan is not None and first.plan.software is not None:
        lines += labelled("software", software_of(first.plan.software))
    return "\n".join(lines)


HEAD = ("mesh", "step", "change", "MFU", "memory", "to finish", "GPU-hours", "money")


def _keys(compared: Sequence[Compared]) -> list[str]:
    """The last parts of the keys where these differ, as the user typed the whole ones."""
    keys = [value.partition("=")[0] for value in compared[0].values]
    short_keys = [key.rpartition(".")[2] for key in keys]
    return short_keys if len(set(short_keys)) == len(keys) else keys


def _at(rows: Sequence[Sequence[str]], column: int) -> list[str]:
    return [row[column] for row in rows if column < len(row)]


def _row(one: Compared, first: Compared | None) -> list[str]:
    values = [value.partition("=")[2] for value in one.values]
    plan = one.plan
    if plan is None:
        return [*values, "refused"]
    memory, time = plan.needs, plan.time
    limit = memory.device_bytes
    full = f"{memory.peak_bytes / limit:.0%}" if limit else show_bytes(memory.peak_bytes)
    if time is None:
        return [*values, short(plan.mesh), "", "", "", full]
    assert first is not None
    base = first.plan and first.plan.time
    change = f"{time.step_s / base.step_s - 1:+.1%}" if base and one is not first else ""
    step = show_seconds(time.step_s)
    row = [*values, short(plan.mesh), step, change, f"{time.mfu:.1%}", full]
    if one.decision is None:
        return row
    told = one.decision
    finish = told.with_failures_s or told.training_s
    return [
        *row,
        show_duration(finish.expected),
        "" if told.gpu_hours is None else show_amount(told.gpu_hours.expected),
        "" if told.money is None else show_amount(told.money.expected),
    ]


def _refused(one: Compared) -> list[str]:
    """The reasons: of a plan without its heading, and without the families of meshes that need too
    much memory."""
    reasons = [line.strip() for line in one.refusal.splitlines()]
    if len(reasons) > 1 and reasons[0].startswith("no plan for "):
        del reasons[0]
    if reasons and reasons[0].startswith("memory: "):
        del reasons[1:]
    return [line for reason in reasons for line in wrapped(reason, "      ", "        ")]


def _differs(plan: Plan, first: Compared | None) -> list[str]:
    """The range of the speed, and what makes the plan faster or slower than the first one."""
    assert first is not None
    base, time = first.plan, plan.time
    said = []
    if time is not None and time.tokens_per_second_per_device_range is not None:
        low, high = map(three_digits, time.tokens_per_second_per_device_range)
        said.append(f"{low} to {high} tokens/s per device")
    if base is not None and base is not plan:
        if time is not None and base.time is not None:
            said.append(", ".join(_changed_parts(time.parts, base.time.parts, base.time.step_s)))
        said.append(", ".join(_changed_items(plan, base)))
    text = "; ".join(part for part in said if part)
    return wrapped(text, "      ", "        ") if text else []


def _changed_parts(
    parts: Mapping[str, float], base: Mapping[str, float], step_s: float
) -> Iterator[str]:
    for part, change in _largest(parts, base, LEAST * step_s):
        yield f"{part} {'+' if change > 0 else '-'}{show_seconds(abs(change))}"


def _changed_items(plan: Plan, base: Plan) -> Iterator[str]:
    least = LEAST * (base.needs.device_bytes or base.needs.peak_bytes)
    for item, change in _largest(plan.needs.items, base.needs.items, least):
        yield f"{item} {'+' if change > 0 else '-'}{show_bytes(abs(round(change)))}"


def _largest(
    ours: Mapping[str, float], base: Mapping[str, float], least: float
) -> list[tuple[str, float]]:
    """Up to `NAMED` changes above `least`, the largest first."""
    names = dict.fromkeys((*ours, *base))
    changes = [(name, ours.get(name, 0) - base.get(name, 0)) for name in names]
    large = [change for change in changes if abs(change[1]) > least]
    return sorted(large, key=lambda change: -abs(change[1]))[:NAMED]


def compared_json(compared: Sequence[Compared]) -> dict[str, Any]:
    plans = [
        {
            "set": " ".join(one.values),
            "plan": None if one.plan is None else plan_json(one.plan, one.decision),
            "refusal": one.refusal or None,
        }
        for one in compared
    ]
    return {"plans": plans}
