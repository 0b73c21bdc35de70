"""The smallest changes of a spec that make a job fit in memory.

Each change was tried: the changed spec has a plan. Changes that only leave more to the planner come
first, then those that slow steps down or take more hosts, then those that train something else.
"""

from collections.abc import Iterator
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.search.admitted import first_mesh
from orchestrator.plan.search.best import can_fit
from orchestrator.plan.search.edits import Value, apply, free_keys, show_edits
from orchestrator.plan.search.hosts import least_hosts, with_hosts
from orchestrator.plan.search.rule import Hosts, Request
from orchestrator.plan.search.rules import refusals
from orchestrator.plan.search.search_space import Space

SHOWN = 3
SHORTEST_SEQUENCE = 128
"""In tokens; no shorter sequence is proposed."""
HOSTS_TRIED = 12

Edits = dict[str, Value]


class SpecChange(Struct, frozen=True):
    edits: Edits
    price: str

    def __str__(self) -> str:
        return f"{show_edits(self.edits)}  ({self.price})"


def smallest_changes(space: Space, inventory: Inventory) -> tuple[SpecChange, ...]:
    """Up to three, the cheapest first."""
    found: list[SpecChange] = []
    for kind in (_leave_to_planner, _offload, _more_hosts, _shorter_sequences, _adapters):
        # Only the smallest change of each kind is shown.
        fitting = (one for one in kind(space, inventory) if _fits(space, inventory, one.edits))
        found += islice(fitting, 1)
        if len(found) == SHOWN:
            break
    return tuple(found)


def _fits(space: Space, inventory: Inventory, edits: Edits) -> bool:
    try:
        spec = apply(space.spec, edits)
    except Invalid:
        return False  # the new values exclude each other
    changed = replace(with_hosts(space, spec.cluster.hosts), spec=spec)
    mesh = first_mesh(changed.request)
    if mesh is None:
        return False
    if spec.cluster.hosts > space.spec.cluster.hosts:
        return can_fit(changed)  # the inventory need not have the proposed hosts
    request = Request(spec, space.shape, Hosts.of(spec, inventory))
    return not refusals(request, mesh) and can_fit(changed)


def _leave_to_planner(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    """Leaves keys that the spec fixes to the planner: one key, then all of them."""
    free = free_keys(space.spec)
    for path, value in free.items():
        yield SpecChange({path: value}, "the planner chooses it")
    if len(free) > 1:
        yield SpecChange(free, "the planner chooses them")


def _offload(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    # Only FSDP can offload, and only once.
    if space.spec.parallel.data != "fsdp" or space.spec.parallel.fsdp.cpu_offload:
        return
    price = "slower: weights, gradients and moments stay in host memory"
    offload: Edits = {"parallel.fsdp.cpu_offload": True}
    yield SpecChange(offload, price)
    # Offloading alone may not fit, because fixed keys still force large activations.
    yield SpecChange({**free_keys(space.spec), **offload}, price)


def _more_hosts(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    """More hosts, starting from the fewest that can hold weights, gradients and moments."""
    asked = space.spec.cluster.hosts
    there = len(inventory.with_devices(space.spec.cluster.gpus_per_host))
    first = max(asked + 1, least_hosts(space))
    # A few close counts, then powers of two: most degrees divide those.
    steps = {first + more for more in range(4)} | {asked << power for power in range(1, 12)}
    for hosts in islice(sorted(count for count in steps if count >= first), HOSTS_TRIED):
        price = "more hosts" if there >= hosts else f"more hosts; the inventory has {there} free"
        yield SpecChange({"cluster.hosts": hosts}, price)
    if free := free_keys(space.spec):
        yield SpecChange(
            {**free, "cluster.hosts": max(first, 2 * asked)},
            "more hosts, split freely",
        )


def _shorter_sequences(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    length = space.spec.data.sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        yield SpecChange({"data.sequence_length": length}, "changes training: shorter sequences")
        length //= 2


def _adapters(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    lora = space.spec.model.lora
    if lora is None:
        yield SpecChange({"model.lora": LoraSpec()}, "changes training: LoRA adapters only")
    if lora is None or lora.quantize == "none":
        adapters = replace(lora or LoraSpec(), quantize="nf4")
        yield SpecChange({"model.lora": adapters}, "changes training: LoRA on 4-bit weights")
