"""The map of ranks: which host and switch each rank is on, coloured by one axis at a time.

Few ranks are drawn one by one. Many are folded: a square is a host, or several equal ones, and one
host is drawn with its ranks. Radio buttons choose the axis, so the page needs no script.
"""

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.contract.mesh import AXES
from orchestrator.contract.plan import Plan
from orchestrator.plan.page.markup import Markup, element
from orchestrator.plan.page.style import coordinate_colour

DRAWN = 256
"""Ranks that are drawn one by one; of more, hosts are drawn."""
SQUARES = 4096
"""Squares of a folded map; of more hosts, a square stands for several."""
COLUMNS = 8
"""Devices of a host in one row."""
SHADES = 256
"""Colours of an axis; neighbours on a longer axis share one."""
KEYS = 16
"""Coordinates in a legend."""


def axes_of(plan: Plan) -> list[str]:
    return [] if plan.is_own else [axis for axis in AXES if getattr(plan.mesh, axis) > 1]


def map_rules(plan: Plan) -> str:
    """The colour of each coordinate, and the text of each axis, while its button is chosen."""
    rules = []
    for number, axis in enumerate(axes_of(plan)):
        chosen, degree = f"#axis-{number}:checked ~ ", getattr(plan.mesh, axis)
        rules += [
            f"{chosen}.groups .a{number}-{value}, {chosen}.keys .a{number}-{value}"
            f" {{ background: {coordinate_colour(value, min(degree, SHADES))}; }}"
            for value in range(min(degree, SHADES))
        ]
        rules.append(f"{chosen}.groups .v{number} {{ display: block; }}")
        rules.append(f"{chosen}.k{number} {{ display: flex; }}")
    return "\n".join(rules)


def rank_map(plan: Plan) -> Markup:
    axes = axes_of(plan)
    return element(
        "div",
        [one for number, axis in enumerate(axes) for one in _button(plan, number, axis)],
        [_key(plan, number, axis) for number, axis in enumerate(axes)],
        *(_drawn(plan, axes) if plan.world_size <= DRAWN else _folded(plan, axes)),
        class_="map",
    )


def _button(plan: Plan, number: int, axis: str) -> Iterator[Markup]:
    # Squares are hosts, which the outermost axis tells apart; ranks of a host, the innermost.
    chosen = len(axes_of(plan)) - 1 if plan.world_size <= DRAWN else 0
    first = "" if number == chosen else None
    name = f"axis-{number}"
    yield element("input", type="radio", name="axis", id=name, checked=first)
    yield element("label", f"{axis}={getattr(plan.mesh, axis)}", for_=name)


def _key(plan: Plan, number: int, axis: str) -> Markup:
    degree = getattr(plan.mesh, axis)
    shown = range(min(degree, KEYS))
    more = [element("li", f"… {degree - 1}")] if degree > KEYS else []
    items = [
        element(
            "li", element("span", class_=f"swatch a{number}-{_shade(value, degree)}"), str(value)
        )
        for value in shown
    ]
    head = element("li", f"coordinate on {axis}:")
    return element("ul", [head, *items, *more], class_=f"legend keys k{number}")


def _drawn(plan: Plan, axes: Sequence[str]) -> Iterator[Markup]:
    yield element("p", "Small: the rank. Large: its coordinate on the chosen axis.", class_="dim")
    groups = [
        element(
            "div",
            element("span", place, class_="dim"),
            element("div", [_host(plan, axes, node) for node in nodes], class_="hosts"),
            class_="group",
        )
        for place, nodes in _places(plan)
    ]
    yield element("div", groups, class_="groups")


def _folded(plan: Plan, axes: Sequence[str]) -> Iterator[Markup]:
    each = -(-len(plan.hosts) // SQUARES)
    what = "a host" if each == 1 else f"{each} hosts"
    yield element(
        "p",
        f"A square is {what} of {plan.ranks_per_host} ranks, with the colour of its first rank, in"
        " a box for each switch. Below is the first host with its ranks.",
        class_="dim",
    )
    groups = [
        element(
            "div",
            element("span", place, class_="dim"),
            element("div", [_dot(plan, axes, node) for node in nodes[::each]], class_="dots"),
            class_="group",
        )
        for place, nodes in _places(plan)
    ]
    yield element("div", groups, class_="groups")
    inside = element("div", _host(plan, axes, 0), class_="group")
    yield element("div", inside, class_="groups first")


def _places(plan: Plan) -> list[tuple[str, list[int]]]:
    """The switches above hosts, and the nodes below them, in the order of the first node."""
    found: dict[str, list[int]] = {}
    for node, host in enumerate(plan.hosts):
        path = plan.switches.get(host, ())
        found.setdefault(" / ".join(path) or "switches not known", []).append(node)
    return list(found.items())


def _host(plan: Plan, axes: Sequence[str], node: int) -> Markup:
    ranks = range(node * plan.ranks_per_host, (node + 1) * plan.ranks_per_host)
    columns = min(COLUMNS, plan.ranks_per_host)
    return element(
        "div",
        element("span", plan.hosts[node], class_="dim"),
        element(
            "div",
            [_device(plan, axes, rank) for rank in ranks],
            class_="devices",
            style=f"--columns: {columns}",
        ),
        class_="host",
    )


def _device(plan: Plan, axes: Sequence[str], rank: int) -> Markup:
    coords = plan.mesh.coords(rank)
    values = [
        element("b", str(coords[axis]), class_=f"v{number}") for number, axis in enumerate(axes)
    ]
    title = f"rank {rank}" + "".join(f", {axis}={coords[axis]}" for axis in axes)
    return element("i", str(rank), values, class_=_classes(plan, coords, axes), title=title)


def _dot(plan: Plan, axes: Sequence[str], node: int) -> Markup:
    first = node * plan.ranks_per_host
    coords = plan.mesh.coords(first)
    last = first + plan.ranks_per_host - 1
    title = f"{plan.hosts[node]}: ranks {first:,} to {last:,}" + "".join(
        f", {axis}={coords[axis]}" for axis in axes
    )
    return element("i", class_=_classes(plan, coords, axes), title=title)


def _classes(plan: Plan, coords: Mapping[str, int], axes: Sequence[str]) -> str | None:
    shades = [_shade(coords[axis], getattr(plan.mesh, axis)) for axis in axes]
    return " ".join(f"a{number}-{shade}" for number, shade in enumerate(shades)) or None


def _shade(value: int, degree: int) -> int:
    return value if degree <= SHADES else value * SHADES // degree
