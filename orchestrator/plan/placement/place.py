"""Late binding: which of the hosts that came play which node of a plan."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from orchestrator.cluster.inventory import natural
from orchestrator.contract.plan import Plan, Traffic
from orchestrator.errors import PlanError
from orchestrator.plan.placement.arrange import arrange
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
    """Hosts for `plan` in node-rank order, out of the registered `hosts`.

    A host of `previous` that is still there keeps its node rank, so that its page cache and its
    files stay of use. Newcomers fill the gaps where their `switches` bring them nearest to those
    with whom they exchange the most, in natural order where that makes no difference. When none of
    `previous` is there, all are arranged anew. A host holds a whole number of tp groups in rank
    order, so none of them leaves it.

    Raises:
        PlanError: fewer hosts can be used than the plan needs.
    """
    usable = sorted({host for host in hosts if host not in avoid}, key=natural)
    need = len(plan.hosts)
    if len(usable) < need:
        raise _too_few(need, hosts, usable, avoid)
    stay = set(usable)
    slots: dict[int, str] = {}
    for node, host in enumerate(previous[:need]):
        if host in stay and host not in slots.values():
            slots[node] = host
    known = {host: switches[host] for host in usable if host in switches}
    if known and not slots:
        return arrange(plan.mesh, plan.ranks_per_host, usable, known, traffic).hosts
    taken = set(slots.values())
    # A host that was in the job but had no node rank within this plan comes before a fresh one.
    free = sorted((host for host in usable if host not in taken), key=lambda h: h not in previous)
    if known and len(slots) < need:
        _fill_near(plan, slots, free, known, traffic)
    newcomers = iter(free)
    return tuple(slots[node] if node in slots else next(newcomers) for node in range(need))


def _too_few(
    need: int, hosts: Sequence[str], usable: Sequence[str], avoid: Collection[str]
) -> PlanError:
    out = ", ".join(sorted(set(hosts) & set(avoid), key=natural))
    left = f", {out} left out" if out else ""
    return PlanError(
        f"the plan needs {need} hosts, {len(usable)} can be used of {len(set(hosts))} that"
        f" registered{left}",
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
    """Give each gap, in node order, the host of `free` that is nearest to its peers.

    Where one brings it no nearer than another the gap stays, for the next in order.
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
    """The free host that shares the most with its peers: bytes, once for each switch shared."""
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
    """What each node exchanges with each other one in a step."""
    peers: dict[int, dict[int, int]] = {}
    flows = flows_of(plan.mesh, traffic)
    for size, (ones, others) in edges_of(plan.mesh, plan.ranks_per_host, flows).items():
        for one, other in zip(ones, others, strict=True):
            peers.setdefault(one, {})[other] = size
            peers.setdefault(other, {})[one] = size
    return peers
