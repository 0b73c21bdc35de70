"""A mesh beside the plan, item by item, for people and for scripts."""

from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.contract.plan import Plan
from orchestrator.plan.beside import Beside, rows, time_items
from orchestrator.plan.figures import show_bytes, show_seconds
from orchestrator.plan.show.explain import plan_json, short, software_of
from orchestrator.plan.show.tables import labelled, table, wrapped


def describe_beside(plan: Plan, other: Beside) -> str:
    lines = [*labelled("plan", str(plan.mesh)), *labelled("beside it", str(other.mesh))]
    if other.settings:
        said = ", ".join(f"{key}={value}" for key, value in other.settings.items() if value)
        lines += labelled("", said)
    if plan.software is not None:
        lines += labelled("software", software_of(plan.software))
    lines += labelled("verdict", _verdict(plan, other))
    for reason in other.reasons:
        lines += wrapped(reason, "  - ", "    ")
    if plan.time is not None and other.time is not None:
        times = rows(
            time_items(plan.time, plan.communication), time_items(other.time, other.communication)
        )
        items = [[n, show_seconds(a), show_seconds(b), _signed(b - a)] for n, a, b in times]
        whole = [plan.time.step_s, other.time.step_s]
        items.append(["step", *map(show_seconds, whole), _signed(whole[1] - whole[0])])
        lines += ["", *table(["time", short(plan.mesh), short(other.mesh), "more"], items)]
    if plan.memory is not None and other.memory is not None:
        sizes = rows(plan.memory.items, other.memory.items)
        items = [[n, *map(_size, (a, b)), f"{(b - a) / 2**30:+.2f} GiB"] for n, a, b in sizes]
        peaks = [plan.memory.peak_bytes, other.memory.peak_bytes]
        items.append(["peak", *map(show_bytes, peaks), f"{(peaks[1] - peaks[0]) / 2**30:+.2f} GiB"])
        lines += ["", *table(["memory", short(plan.mesh), short(other.mesh), "more"], items)]
    return "\n".join(lines)


def beside_json(plan: Plan, other: Beside) -> dict[str, Any]:
    items: dict[str, Any] = {}
    if plan.time is not None and other.time is not None:
        ours = time_items(plan.time, plan.communication)
        items["seconds"] = {n: [a, b] for n, a, b in rows(ours, _times(other))}
    if plan.memory is not None and other.memory is not None:
        items["bytes"] = {n: [a, b] for n, a, b in rows(plan.memory.items, other.memory.items)}
    return {"plan": plan_json(plan), "beside": encode(other), "items": items}


def _times(other: Beside) -> dict[str, float]:
    assert other.time is not None
    return time_items(other.time, other.communication)


def _verdict(plan: Plan, other: Beside) -> str:
    slower = ""
    if plan.time is not None and other.time is not None:
        share = other.time.step_s / plan.time.step_s - 1
        slower = f"a step takes {share:+.1%}"
    if not other.reasons:
        return f"can run; {slower}" if slower else "can run"
    return f"cannot run; {slower} if it could" if slower else "cannot run"


def _size(count: float) -> str:
    return show_bytes(round(count))


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{show_seconds(abs(seconds))}" if seconds else "-"
