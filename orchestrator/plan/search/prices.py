"""What it costs that a spec fixes keys: how much faster the best plan is without them.

Each key is tried alone. The degrees are also tried together, because with all of them fixed no
single one can change, and float8 together with `compile`, which it needs.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.contract.mesh import AXES
from orchestrator.plan.search.best import fastest
from orchestrator.plan.search.edits import Edits, Value, apply
from orchestrator.plan.search.search_space import Option, Space

LEAST = 0.05
"""Share of the step time above which a price is named."""
DEGREES = tuple(f"parallel.{axis}" for axis in AXES)
METHODS = ("ring", "ulysses", "all_gather")


class FixedKeys(Struct, frozen=True, kw_only=True):
    edits: Edits
    """The keys, each with the value that allows a faster plan."""
    option: Option
    """The fastest plan then."""
    changes_numbers: bool


def price_list(space: Space, step_s: float, waits_s: float) -> tuple[FixedKeys, ...]:
    """Fixed keys of `space.spec` that cost more than `LEAST`, the highest price first.

    Args:
        step_s: seconds of a step of the fastest plan with all of them.
        waits_s: part of it in which ranks wait for the traffic of context parallelism.
    """
    found: list[FixedKeys] = []
    # Another method can save little where the exchange of keys and values takes little.
    for edits in _candidates(space, methods=waits_s > LEAST * step_s):
        # A group must be better than each part of it alone.
        parts = [one.option.time.step_s for one in found if one.edits.items() < edits.items()]
        least = min([step_s, *parts])
        try:
            spec = apply(space.spec, edits)
        except Invalid:
            continue  # the new values exclude each other
        option = fastest(replace(space, spec=spec), least / (1 + LEAST))
        if option is not None:
            numbers = "train.float8" in edits
            found.append(FixedKeys(edits=edits, option=option, changes_numbers=numbers))
    return tuple(sorted(found, key=lambda one: one.option.time.step_s))


def _candidates(space: Space, *, methods: bool) -> Iterator[Edits]:
    """Single keys first, then groups. With `methods`, also other methods of context parallelism."""
    spec, profile = space.spec, space.fabric.profile
    free = space.free_keys
    for path, value in free.items():
        yield {path: value}
    for method in METHODS if methods else ():
        if method != spec.parallel.context:
            yield {"parallel.context": method}
    if spec.parallel.data == "fsdp" and spec.parallel.fsdp.cpu_offload:
        yield {"parallel.fsdp.cpu_offload": False}
    compiled: dict[str, Value] = {} if spec.train.compile is True else {"train.compile": True}
    if spec.train.compile is False and profile.device == "cuda":
        yield compiled
    if spec.train.float8 is False and "float8" in profile.flops and spec.model.lora is None:
        yield {**compiled, "train.float8": True}
    degrees = {path: value for path, value in free.items() if path in DEGREES}
    if len(degrees) > 1:
        yield degrees
