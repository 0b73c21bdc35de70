"""Assigns node ranks of a plan to the hosts that have registered."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from orchestrator.contract.plan import Plan, Traffic
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import natural
from orchestrator.plan.placement.arrange import arrange, groups_in_blocks
from orchestrator.plan.placement.edges import edges_of, flows_of

NO_SWITCHES: Mapping[str, tuple[str, ...]] = {}


def place(
    plan: Plan,
    hosts: Sequence[str],
    previous: tuple[str, ...] = (),
    avoid: Collection[str] = (),
    switches: Mapping[str, tuple[str, ...]] = NO_SWITCHES,
    traffic: Iterable[Traffic] = (),
) -> tuple[str, ...]:
    """Hosts for `plan` in node-rank order, chosen from the registered `hosts`.

    A host of `previous` that is still registered keeps its node rank, so that its page cache and
    local files stay useful. New hosts fill the gaps: each gap gets the host whose `switches` are
    nearest to the nodes that it exchanges most with, or the next in natural order if there is no
    difference. If no host of `previous` is registered, all hosts are arranged again.

    A host holds whole tp groups in rank order. A tp group wider than a host stays inside one NVLink
    block, which is the last of a host's `switches`.

    Raises:
        PlanError: fewer hosts are usable than the plan needs, or their NVLink blocks do not hold
        its
            tp groups.
    """
    need = len(plan.hosts)
    present = {host for host in hosts if host not in avoid}
    stays = previous[:need]
    if plan.mesh.tp <= plan.ranks_per_host and len(stays) == need and present.issuperset(stays):
        return (
            stays  # nothing moves, the commonest restart: nothing to sort among thousands of hosts
        )
    usable = sorted(present, key=natural)
    if len(usable) < need:
        raise _too_few(need, hosts, usable, avoid)
    left = set(usable)
    slots: dict[int, str] = {}
    for node, host in enumerate(previous[:need]):
        if host in left:
            left.remove(host)
            slots[node] = host
    known = {host: switches[host] for host in usable if host in switches}
    if plan.mesh.tp > plan.ranks_per_host:
        return _place_in_blocks(plan, slots, known, traffic)
    if known and not slots:
        return arrange(plan.mesh, plan.ranks_per_host, usable, known, traffic).hosts
    # A host that was in the job without a node rank of this plan is preferred to a new host.
    former = frozenset(previous)
    free = sorted((host for host in usable if host in left), key=lambda host: host not in former)
    if known and len(slots) < need:
        _fill_near(plan, slots, free, known, traffic)
    newcomers = iter(free)
    return tuple(slots[node] if node in slots else next(newcomers) for node in range(need))


def room_for(plan: Plan, hosts: Collection[str], switches: Mapping[str, tuple[str, ...]]) -> int:
    """Number of nodes of `plan` that `hosts` have room for."""
    wide = plan.mesh.tp // plan.ranks_per_host
    return wide * len(groups_in_blocks(hosts, switches, wide)) if wide > 1 else len(hosts)


def _place_in_blocks(
    plan: Plan,
    slots: Mapping[int, str],
    switches: Mapping[str, tuple[str, ...]],
    traffic: Iterable[Traffic],
) -> tuple[str, ...]:
    """`place` for tp groups that are wider than a host: each group is placed like one node, on
    hosts of one NVLink block. `slots` has the nodes whose hosts are still registered.

    A group stays in the block with most of its hosts, and its gaps are filled there. If a block has
    no room for all of its groups any more, those with the fewest remaining hosts move.
    """
    wide = plan.mesh.tp // plan.ranks_per_host
    stay = _staying(plan, slots, switches, wide)
    taken = {host for group in stay.values() for host in group}
    groups = groups_in_blocks([h for h in switches if h not in taken], switches, wide)
    groups |= {group[0]: group for group in stay.values()}
    need = len(plan.hosts) // wide
    if len(groups) < need:
        raise PlanError(
            f"a tp group needs {wide} hosts of one NVLink block: the plan has {need} groups, the"
            f" usable hosts have room for {len(groups)}",
            fix="wait for more hosts of the same blocks, or plan again for the available ones",
        )
    found = place(
        replace(plan, ranks_per_host=plan.mesh.tp, hosts=plan.hosts[::wide]),
        list(groups),
        tuple(stay[number][0] if number in stay else "" for number in range(need)),
        switches={first: switches[first] for first in groups},
        traffic=traffic,
    )
    return tuple(host for first in found for host in groups[first])


def _staying(
    plan: Plan, slots: Mapping[int, str], switches: Mapping[str, tuple[str, ...]], wide: int
) -> dict[int, tuple[str, ...]]:
    """The tp groups that stay in their NVLink block, by number, each with its gaps filled."""
    left: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    """Hosts of each block that are not assigned yet."""
    for host, path in switches.items():
        left[path][host] = None
    by_block: dict[tuple[str, ...], list[tuple[int, dict[int, str]]]] = defaultdict(list)
    """Groups of each block: number, and the nodes that are in the block."""
    for number in range(len(plan.hosts) // wide):
        nodes = {n: slots[n] for n in range(number * wide, (number + 1) * wide) if n in slots}
        blocks = Counter(switches[host] for host in nodes.values() if host in switches)
        if blocks:
            block = blocks.most_common(1)[0][0]
            inside = {n: host for n, host in nodes.items() if switches.get(host) == block}
            by_block[block].append((number, inside))
    found = {}
    for block, groups in by_block.items():
        groups.sort(key=lambda group: -len(group[1]))
        kept = groups[: len(left[block]) // wide]
        for host in [host for _, nodes in kept for host in nodes.values()]:
            del left[block][host]
        others = iter(left[block])
        for number, nodes in kept:
            places = range(number * wide, (number + 1) * wide)
            found[number] = tuple(nodes[n] if n in nodes else next(others) for n in places)
    return found


def _too_few(
    need: int, hosts: Sequence[str], usable: Sequence[str], avoid: Collection[str]
) -> PlanError:
    avoided = ", ".join(sorted(set(hosts) & set(avoid), key=natural))
    excluded = f"; excluded: {avoided}" if avoided else ""
    return PlanError(
        f"the plan needs {need} hosts, but only {len(usable)} of {len(set(hosts))} registered hosts"
        f" are usable{excluded}",
        fix="wait for more hosts, or plan again for fewer"
        + (f" (--set cluster.hosts={len(usable)})" if usable else ""),
    )


def _fill_near(
    plan: Plan,
    slots: dict[int, str],
    free: list[str],
    switches: Mapping[str, tuple[str, ...]],
    traffic: Iterable[Traffic],
) -> None:
    """Assign each gap, in node order, the host of `free` that is nearest to its peers.

    If no free host shares a switch with its peers, the gap stays for the caller to fill in order.
    """
    peers = _peers(plan, traffic)
    below: dict[tuple[str, ...], list[str]] = {}
    for host in reversed(free):
        path = switches.get(host, ())
        for size in range(1, len(path) + 1):
            below.setdefault(path[:size], []).append(host)
    for node in range(len(plan.hosts)):
        if node in slots:
            continue
        near: dict[tuple[str, ...], int] = {}
        for peer, sent in peers.get(node, {}).items():
            path = switches.get(slots.get(peer, ""), ())
            for size in range(1, len(path) + 1):
                near[path[:size]] = near.get(path[:size], 0) + sent
        best = _nearest(near, below, free)
        if best is not None:
            slots[node] = best
            free.remove(best)


def _nearest(
    near: Mapping[tuple[str, ...], int], below: Mapping[tuple[str, ...], list[str]], free: list[str]
) -> str | None:
    """The free host that shares most with its peers: bytes, counted once per shared switch."""
    left = set(free)
    found: tuple[int, str] | None = None
    for switch in near:
        while below.get(switch) and below[switch][-1] not in left:
            below[switch].pop()
        if below.get(switch):
            shared = sum(near.get(switch[:size], 0) for size in range(1, len(switch) + 1))
            if found is None or shared > found[0]:
                found = (shared, below[switch][-1])
    return found[1] if found else None


def _peers(plan: Plan, traffic: Iterable[Traffic]) -> Mapping[int, Mapping[int, int]]:
    """Bytes that each pair of nodes exchanges in a step."""
    peers: dict[int, dict[int, int]] = {}
    flows = flows_of(plan.mesh, traffic)
    for size, (ones, others) in edges_of(plan.mesh, plan.ranks_per_host, flows).items():
        for one, other in zip(ones, others, strict=True):
            peers.setdefault(one, {})[other] = size
            peers.setdefault(other, {})[one] = size
    return peers
