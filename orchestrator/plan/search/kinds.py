"""Kinds of meshes, and which of their best plans a plan shows.

Two meshes are of one kind if they use the same axes. Plans of one kind differ in degrees and
settings, plans of different kinds in how a job runs, so a plan shows the best of each kind.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

from orchestrator.contract.mesh import Mesh
from orchestrator.plan.search.search_space import Option, Rank, Space

SHOWN = 5
"""Alternatives beside the chosen plan."""

Kind = tuple[bool, ...]
"""Whether a mesh uses pp, dp_replicate, dp_shard, cp and tp, and whether tp is wider than a
host."""
Best = Mapping[Kind, tuple[Rank, Option]]
"""The best option of each kind of mesh, with its place."""


def kind_of(mesh: Mesh, devices_per_host: int) -> Kind:
    return (*(degree > 1 for degree in mesh.degrees), mesh.tp > devices_per_host)


def simplicity(kind: Kind) -> tuple[int, ...]:
    """A sort key: fewer axes first, then tp inside a host, then no pipeline, then no context
    parallelism and no replicas."""
    pp, replicate, _, cp, _, wide = kind
    return (sum(kind[:-1]), wide, pp, cp, replicate)


def last_place(best: Best, margin: float) -> float:
    """Seconds or bytes above which no plan can be shown, given the best options so far."""
    places: dict[Kind, float] = {}
    for kind, (place, _) in best.items():
        splits = _splits(kind)
        places[splits] = min(place[0], places.get(splits, math.inf))
    # Before this many kinds are known, every plan may still be shown.
    if len(places) <= SHOWN:
        return math.inf
    first = heapq.nsmallest(SHOWN + 1, places.values())
    # Plans within the margin are compared by simplicity, so all of them must be known.
    return max(first[-1], first[0] * (1 + margin))


def _splits(kind: Kind) -> Kind:
    """The kind without its data-parallel axes."""
    pp, _, _, cp, tp, wide = kind
    return pp, cp, tp, wide


def shown(space: Space, options: Sequence[Option], margin: float) -> tuple[Option, ...]:
    """The chosen plan and up to `SHOWN` alternatives, the best first.

    Chosen is the simplest of the plans within `margin` of the best. The best one is always shown.
    Then come the best plans of each other split along pp, cp and tp, because kinds that differ in
    data parallelism alone are alike; those fill the list.

    Args:
        options: the best of each kind, the best first.
    """
    if not options:
        return ()
    kinds = [kind_of(option.setup.mesh, space.fabric.devices_per_host) for option in options]
    limit = options[0].time.step_s * (1 + margin)
    equal = [at for at, option in enumerate(options) if at == 0 or option.time.step_s <= limit]
    chosen = min(equal, key=lambda at: simplicity(kinds[at])) if margin else 0
    seen = {_splits(kinds[chosen]), _splits(kinds[0])}
    first, alike = [0], list[int]()
    for at, kind in enumerate(kinds):
        if at in (chosen, 0):
            continue
        (alike if _splits(kind) in seen else first).append(at)
        seen.add(_splits(kind))
    others = [at for at in (*first, *alike) if at != chosen][:SHOWN]
    return tuple(options[at] for at in (chosen, *sorted(others)))
