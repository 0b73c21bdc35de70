"""Changes of a spec with which a job runs after it was out of memory, the cheapest first.

Changes that do not change training come first (other splits, smaller micro batches, more
recomputation), ordered by step time. Then come those of `search/smallest_change.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.contract.mesh import AXES
from orchestrator.contract.plan import Choice, Plan
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.figures import show_bytes, show_seconds
from orchestrator.plan.planner import memory_changes, plan
from orchestrator.plan.search.edits import Edits, Value, apply, show_edits, value_at

SHOWN = 3
ANOTHER_JOB = frozenset({"data.sequence_length", "model.lora", "cluster.hosts"})
"""Keys whose change affects what is trained, or the hosts."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    edits: Edits
    """Changed keys of the spec."""
    price: str
    plan: Plan | None = None
    """None if the change affects what is trained, or the hosts."""

    def __str__(self) -> str:
        return f"{show_edits(self.edits)}  ({self.price})"


def memory_savings(
    spec: JobSpec, inventory: Inventory, config: Mapping[str, Any], former: Plan
) -> tuple[MemorySaving, ...]:
    """Up to three changes for a plan, `former`, that ran out of memory. `inventory` has the lowered
    memory limit.

    Raises:
        PlanError: the spec breaks a rule that has nothing to do with memory.
    """
    try:
        best = plan(spec, inventory, config)
    except PlanError:
        best = None
    found = [] if best is None else list(_chosen(spec, inventory, config, best, former))
    if len(found) < SHOWN:
        known = [saving.edits for saving in found]
        found += _without_known(known, _fixed_keys_changed(spec, inventory, config, former))
    return tuple(found[:SHOWN])


def _without_known(known: list[Edits], savings: Iterable[MemorySaving]) -> Iterator[MemorySaving]:
    """Two kinds of change may give the same edits; each is shown once."""
    for saving in savings:
        if saving.edits not in known:
            known.append(saving.edits)
            yield saving


def _chosen(
    spec: JobSpec, inventory: Inventory, config: Mapping[str, Any], best: Plan, former: Plan
) -> Iterator[MemorySaving]:
    """Other values for the keys that the spec leaves to the planner."""
    choices = [best.choice, *best.alternatives]
    for number, choice in enumerate(choice for choice in choices if choice is not None):
        found = best
        # An alternative does not record the stages per rank, so plan again to get them.
        if number and choice.schedule is not None:
            found = plan(apply(spec, _decided(spec, choice, "auto")), inventory, config)
        decided = _decided(spec, choice, found.pipeline.stages_per_rank)
        edits = {path: value for path, value in decided.items() if value_at(spec, path) != value}
        yield MemorySaving(edits=edits, price=_price(choice, former), plan=None if number else best)


def _decided(spec: JobSpec, choice: Choice, stages: Value) -> dict[str, Value]:
    """All keys that the planner decided, as fixed values, so that the next plan is the same."""
    degrees: dict[str, Value] = {f"parallel.{a}": getattr(choice.mesh, a) for a in AXES}
    more: dict[str, Value] = {
        "train.micro_batch_size": choice.micro_batch_size,
        "train.activation_checkpointing": choice.activation_checkpointing,
    }
    if spec.parallel.data == "fsdp":
        more["parallel.fsdp.reshard_after_forward"] = choice.reshard_after_forward
        if choice.gradient_accumulation > 1:
            more["parallel.fsdp.reduce_gradients"] = choice.reduce_gradients
    kernels: dict[str, Value] = {
        "train.compile": choice.compile,
        "train.float8": choice.float8,
        "train.loss_chunks": choice.loss_chunks,
    }
    # As long as the planner takes the usual chunks, they stay with the trainer.
    more |= {path: value for path, value in kernels.items() if value_at(spec, path) != value}
    if choice.schedule is not None:
        more["parallel.pipeline.schedule"] = choice.schedule
        more["parallel.pipeline.stages_per_rank"] = stages
    return degrees | more


def _price(choice: Choice, former: Plan | None) -> str:
    words = f"about {show_bytes(choice.peak_bytes)}, {show_seconds(choice.step_s)} a step"
    if former is None or former.time is None:
        return words
    return f"{words} instead of {show_seconds(former.time.step_s)}"


def _fixed_keys_changed(
    spec: JobSpec, inventory: Inventory, config: Mapping[str, Any], former: Plan
) -> Iterator[MemorySaving]:
    """Other values for keys that the spec fixes.

    All keys get fixed values. A resumed job plans with the full memory of a device, so with `auto`
    the planner would again choose the plan that did not fit.
    """
    for change in memory_changes(spec, inventory, config):
        try:
            changed = apply(spec, change.edits)
            found = plan(changed, _with_hosts(inventory, changed.cluster.hosts), config)
        except (PlanError, Invalid):
            continue
        assert found.choice is not None
        decided = _decided(changed, found.choice, found.pipeline.stages_per_rank)
        edits = {path: value for path, value in change.edits.items() if value != "auto"} | {
            path: value for path, value in decided.items() if value_at(spec, path) != value
        }
        same = not ANOTHER_JOB & change.edits.keys()
        price = _price(found.choice, former if same else None)
        if len(edits) > len(decided.keys() & edits.keys()):
            price = f"{change.price}; {price}"  # more than the split changes
        yield MemorySaving(edits=edits, price=price, plan=found if same else None)


def _with_hosts(inventory: Inventory, count: int) -> Inventory:
    """Adds hosts of the same kind up to `count`, which the inventory does not have yet."""
    like = inventory.hosts[-1]
    more = range(len(inventory.hosts), count)
    added = [replace(like, name=f"another-{number}") for number in more]
    return Inventory(hosts=(*inventory.hosts, *added))
