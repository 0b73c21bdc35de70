"""How fast a job trains at present, from the end of its metrics file."""

import math
import os
from pathlib import Path
from typing import Any

from msgspec import Struct

from ndctl.rank.regular_file import open_regular
from orchestrator.contract.read_json import read_json

READ_BYTES = 1 << 16
MOST_STEPS = 32


class Pace(Struct, frozen=True, kw_only=True):
    attempt: int
    step: int
    """The last one."""
    loss: float | None = None
    tokens_per_second: float | None = None
    step_s: float | None = None
    """Seconds per step, including checkpoints; None with fewer than two steps."""


def pace_of_last(metrics: Path) -> Pace | None:
    """None if no step is written. Raises OSError."""
    if not metrics.exists():
        return None
    with open_regular(metrics) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - READ_BYTES))
        *whole, _ = file.read().split(b"\n")
    if size > READ_BYTES:
        whole = whole[1:]
    steps = [body for line in whole[-MOST_STEPS:] if (body := _parsed(line)) is not None]
    if not steps:
        return None
    last = steps[-1]
    same = [one for one in steps if one["attempt"] == last["attempt"]]
    return Pace(
        attempt=last["attempt"],
        step=last["step"],
        loss=_number(last.get("loss")),
        tokens_per_second=_number(last.get("tokens_per_second")),
        step_s=_step_s(same),
    )


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = read_json(line)
        return {**body, "attempt": int(body["attempt"]), "step": int(body["step"])}
    except (ValueError, KeyError, TypeError):
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def _step_s(steps: list[dict[str, Any]]) -> float | None:
    first, last = steps[0], steps[-1]
    began, ended = _number(first.get("time")), _number(last.get("time"))
    count = int(last["step"]) - int(first["step"])
    if began is None or ended is None or count <= 0 or ended <= began:
        return None
    return (ended - began) / count
