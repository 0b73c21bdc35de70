"""What a script reports while it trains: steps, metrics, phases."""

import contextlib
import functools
import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, SupportsFloat, get_args

from ndctl.rank.fence import GivenUp
from ndctl.rank.line_file import LineFile
from ndctl.rank.link import current, number_of_steps
from ndctl.rank.phases import Phase
from ndctl.rank.place import place

Number = SupportsFloat
"""A number, or a tensor with one element."""
RESERVED = ("attempt", "time")


def log(
    step: int, loss: SupportsFloat | None = None, **metrics: SupportsFloat | str | None
) -> None:
    """Report that `step` optimizer steps are done, and metrics of the last one.

        ndctl.log(step, loss=loss, learning_rate=scheduler.get_last_lr()[0])

    Call it on every rank. Each rank's call is a sign of life, and rank 0's values become a line of
    `metrics.jsonl` in the run directory. Without ndctl it only checks its arguments, and reads no
    tensor. From its first call on, ndctl no longer counts the steps of optimizers itself.

    Args:
        step: steps done since the beginning of the training, also in earlier attempts.
        loss: a number or a tensor with one element. Reading a tensor on a GPU waits for the GPU.
        metrics: further numbers or short texts. A number that is not finite is written as null.

    Raises:
        ValueError: `step` is no number of steps, or a metric is called `attempt` or `time`.
        TypeError: a value is neither a number nor a text.
    """
    step = number_of_steps(step, "ndctl.log")
    if taken := [name for name in RESERVED if name in metrics]:
        raise ValueError(f"ndctl.log: {taken[0]} is written by ndctl; choose another name")
    link = current()
    if not link.active:
        # A mistake must not wait for the first real job, but reading a tensor waits for the GPU.
        _check_types(loss, metrics)
        return
    link.logged = True
    link.step = step
    if link.rank != 0:
        link.beat("train")
        return
    number = None if loss is None else _finite("loss", loss)
    link.beat("train", loss=number)
    line: dict[str, Any] = {"attempt": link.attempt, "step": step, "loss": number}
    line |= {"time": time.time(), **link.use}
    line |= {name: _value(name, value) for name, value in metrics.items()}
    # A later attempt runs; ndctl ends this rank soon.
    with contextlib.suppress(GivenUp):
        _lines().append(json.dumps(line).encode() + b"\n")


@functools.cache
def _lines() -> LineFile:
    return LineFile(place().metrics, place().admit)


def _check_types(loss: object, metrics: Mapping[str, object]) -> None:
    for name, value in {"loss": loss, **metrics}.items():
        if value is None or (isinstance(value, str) and name != "loss"):
            continue
        numel = getattr(value, "numel", None)  # of a tensor
        if not isinstance(value, SupportsFloat) or (callable(numel) and numel() != 1):
            raise TypeError(f"ndctl.log: {name} is {value!r}; give a number")


def _value(name: str, value: Number | str | None) -> float | str | None:
    if value is None or isinstance(value, str):
        return value
    number = _finite(name, value)
    return value if isinstance(value, int) and number is not None else number


def _finite(name: str, value: Number) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None  # an integer that no float can hold
    except (TypeError, ValueError) as exc:
        raise TypeError(f"ndctl.log: {name} is {value!r}; give a number ({exc})") from None
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Tell ndctl that the rank does something else than training steps.

        with ndctl.phase("eval"):
            evaluate()

    ndctl takes a rank that does no step for 5 median step times for a hang. In the phases `eval`,
    `checkpoint`, `write` (other files) and `profile` the limit is `resilience.checkpoint_timeout`
    (900 s), in `init`, `compile` and `data` (workers of a data loader start or end) it is
    `resilience.init_timeout`. In `init` and `eval`, output
    and collectives are signs of life, so only a silent rank reaches the limit. Without ndctl a
    phase does nothing.

    Raises:
        ValueError: there is no phase of this name.
    """
    known = get_args(Phase)
    if name not in known:
        raise ValueError(f"ndctl.phase: {name!r} is no phase; use one of {', '.join(known)}")
    link = current()
    before = link.phase
    link.beat(name)
    try:
        yield
    finally:
        link.beat(before)
