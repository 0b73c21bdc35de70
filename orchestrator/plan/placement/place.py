"""Late binding: which of the hosts that came play which node of a plan."""

from collections.abc import Collection, Sequence

from orchestrator.cluster.inventory import natural
from orchestrator.contract.plan import Plan
from orchestrator.errors import PlanError


def place(
    plan: Plan,
    hosts: Sequence[str],
    previous: tuple[str, ...] = (),
    avoid: Collection[str] = (),
) -> tuple[str, ...]:
    """Hosts for `plan` in node-rank order, out of the registered `hosts`.

    A host of `previous` that is still there keeps its node rank, so that its page cache and its
    files stay of use; newcomers fill the gaps in natural order. A host holds a whole number of tp
    groups in rank order, so none of them leaves it.

    Raises:
        PlanError: fewer hosts can be used than the plan needs.
    """
    usable = sorted({host for host in hosts if host not in avoid}, key=natural)
    need = len(plan.hosts)
    if len(usable) < need:
        out = ", ".join(sorted(set(hosts) & set(avoid), key=natural))
        left = f", {out} left out" if out else ""
        raise PlanError(
            f"the plan needs {need} hosts, {len(usable)} can be used of {len(set(hosts))} that"
            f" registered{left}",
            fix="wait for more hosts, or plan again for fewer"
            + (f" (--set cluster.hosts={len(usable)})" if usable else ""),
        )
    kept = {host: node for node, host in reversed([*enumerate(previous[:need])])}
    slots: dict[int, str] = {kept[host]: host for host in usable if host in kept}
    # A host that was in the job but had no node rank within this plan comes before a fresh one.
    free = sorted(
        (host for host in usable if host not in kept), key=lambda host: host not in previous
    )
    newcomers = iter(free)
    return tuple(slots[node] if node in slots else next(newcomers) for node in range(need))
