"""The smallest changes of a spec that make a job fit in memory.

Each change was tried: the changed spec has a plan. Single keys come before pairs, and more keys
are changed only if nothing less fits. Changes that only leave more to the planner come first, then
those that slow steps down, round more or take more hosts, then those that train something else.
"""

from collections.abc import Iterator
from itertools import combinations, islice

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.search.admitted import first_mesh
from orchestrator.plan.search.best import can_fit
from orchestrator.plan.search.edits import Value, apply, show_edits
from orchestrator.plan.search.hosts import least_hosts, with_hosts
from orchestrator.plan.search.rule import Hosts, Request
from orchestrator.plan.search.rules import refusals
from orchestrator.plan.search.search_space import Space

SHOWN = 3
SHORTEST_SEQUENCE = 128
"""In tokens; no shorter sequence is proposed."""
HOSTS_TRIED = 12
PAIRS_TRIED = 40

Edits = dict[str, Value]


class SpecChange(Struct, frozen=True):
    edits: Edits
    price: str

    def __str__(self) -> str:
        return f"{show_edits(self.edits)}  ({self.price})"


def smallest_changes(space: Space, inventory: Inventory) -> tuple[SpecChange, ...]:
    """Up to three, the cheapest first."""
    found: list[SpecChange] = []
    kinds = (_leave_to_planner, _offload, _narrower, _more_hosts, _shorter_sequences, _adapters)
    for kind in (*kinds, _pairs):
        # Only the smallest change of each kind is shown.
        fitting = (one for one in kind(space, inventory) if _fits(space, inventory, one.edits))
        found += islice(fitting, 1)
        if len(found) == SHOWN:
            return tuple(found)
    if not found:
        fitting = (one for one in _many(space, inventory) if _fits(space, inventory, one.edits))
        found += islice(fitting, SHOWN)
    if not found and space.spec.cluster.memory_margin == "auto":
        return smallest_changes(space.filled(), inventory)
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
    """Leaves one key that the spec fixes to the planner."""
    for path, value in space.free_keys.items():
        yield SpecChange({path: value}, "the planner chooses it")


def _offload(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    # Only FSDP can offload, and only once.
    if space.spec.parallel.data != "fsdp" or space.spec.parallel.fsdp.cpu_offload:
        return
    price = "slower: weights, gradients and moments stay in host memory"
    yield SpecChange({"parallel.fsdp.cpu_offload": True}, price)


def _narrower(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    """Narrower formats of states and of the reduction."""
    train = space.spec.train
    if train.optimizer.state_dtype == "float32":
        edits: Edits = {"train.optimizer.state_dtype": "bfloat16"}
        yield SpecChange(edits, "rounds the optimizer's moments once a step")
    if train.reduce_dtype == "float32":
        yield SpecChange({"train.reduce_dtype": "bfloat16"}, "rounds gradients that are reduced")


def _pairs(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    """Two keys, of changes that neither take other hosts nor train something else."""
    singles = [
        *_leave_to_planner(space, inventory),
        *_offload(space, inventory),
        *_narrower(space, inventory),
    ]
    for one, other in islice(combinations(singles, 2), PAIRS_TRIED):
        prices = dict.fromkeys((one.price, other.price))
        yield SpecChange({**one.edits, **other.edits}, "; ".join(prices))


def _many(space: Space, inventory: Inventory) -> Iterator[SpecChange]:
    """All keys that the spec fixes, alone, with offloading, and with more hosts."""
    free = space.free_keys
    if len(free) > 1:
        yield SpecChange(free, "the planner chooses them")
    for one in (*_offload(space, inventory), *_more_hosts(space, inventory)):
        yield SpecChange({**free, **one.edits}, one.price)


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
