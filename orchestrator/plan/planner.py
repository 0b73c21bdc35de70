"""Plans a job: from its spec, the inventory and the model's config to one plan with its reasons."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import ModelWork, PlacementCost, Plan, Price, Traffic
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.errors import PlanError
from orchestrator.inventory.generate import LEVELS as SWITCHES
from orchestrator.inventory.hosts import Inventory, mean_price, tree_of
from orchestrator.plan.cost.traffic import traffic_of
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.history.correction import corrected, scaled_choice
from orchestrator.plan.history.record import SpeedRecord
from orchestrator.plan.memory.peak_memory import memories_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.flops import flops_per_token, recomputed_per_token
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.placement.arrange import arrange
from orchestrator.plan.search.admitted import first_mesh, likely_mesh
from orchestrator.plan.search.alternatives import nearest_plans
from orchestrator.plan.search.best import Found
from orchestrator.plan.search.edits import show_value, value_at
from orchestrator.plan.search.hosts import find, space_of_hosts, with_hosts
from orchestrator.plan.search.prices import FixedKeys, price_list
from orchestrator.plan.search.rule import Hosts, Refusal, Request
from orchestrator.plan.search.rules import refusals
from orchestrator.plan.search.search_space import Option, Space
from orchestrator.plan.search.smallest_change import SpecChange, smallest_changes
from orchestrator.plan.setup import Setup
from orchestrator.plan.show.methods import methods_of
from orchestrator.plan.show.notes import (
    comparison_of,
    dtype_notes,
    idle_note,
    margin_note,
    memory_note,
    notes_of,
    price_note,
    software_note,
)
from orchestrator.plan.sizes import COMPUTE_BYTES


def plan(
    spec: JobSpec,
    inventory: Inventory,
    config: Mapping[str, Any],
    earlier: Sequence[SpeedRecord] = (),
) -> Plan:
    """The plan for `spec` on `inventory`; `config` holds the values of the model's config.json.

    Args:
        earlier: what earlier jobs measured, the newest last. It changes the predicted times, and
            not the choice.

    Raises:
        PlanError: no plan; it lists every broken rule and the nearest specs that have a plan.
    """
    shape = shape_of(config)
    wished = _space(spec, inventory, shape)
    space, found = find(wished, spec.objective)
    if not found.options:
        raise _too_large(wished, space.limit, inventory, found)
    made = _plan_of(space, inventory, found)
    # Earlier jobs ran the bundled trainer, so they say nothing about other software.
    if made.software is None:
        made = corrected(made, found.options[0].setup, space.fabric, earlier)
    notes = (
        *software_note(made),
        *margin_note(spec, space),
        *dtype_notes(spec, space),
        *memory_note(spec, made),
    )
    return replace(made, notes=(*made.notes, *notes))


def with_prices(made: Plan, spec: JobSpec, inventory: Inventory, config: Mapping[str, Any]) -> Plan:
    """`made`, a plan for `spec` on `inventory`, with what the fixed keys of `spec` cost. This takes
    about as long as planning.

    Raises:
        PlanError: `made` is not a plan for `spec`.
    """
    # Prices are step times, which the objective `memory` does not look at.
    if spec.objective == "memory" or made.time is None:
        return made
    space = with_hosts(_space(spec, inventory, shape_of(config)), len(made.hosts))
    # A search compares uncorrected times, and earlier jobs correct all of them alike.
    used = made.time.correction
    factor = used.factor if used else 1.0
    step_s = factor * min([made.time.step_s, *(one.step_s for one in made.alternatives)])
    waits_s = factor * sum(one.exposed_seconds for one in made.communication if one.axis == "cp")
    # The search compares with the fastest plan, and a person with the plan that is shown, which may
    # be a simpler one.
    prices = (
        _price_of(space, one, factor, made.time.step_s)
        for one in price_list(space, step_s, waits_s)
    )
    return replace(made, prices=tuple(prices))


def _price_of(space: Space, found: FixedKeys, factor: float, step_s: float) -> Price:
    """`step_s`: seconds of a step of the plan with the keys of the spec."""
    decided = _decided(found.option, space.spec.cluster.gpus_per_host).choice
    assert decided is not None
    choice = scaled_choice(decided, factor)
    return Price(
        fixed={path: show_value(value_at(space.spec, path)) for path in found.edits},
        edits={path: show_value(value) for path, value in found.edits.items()},
        choice=choice,
        share=step_s / choice.step_s - 1,
        changes_numbers=found.changes_numbers,
    )


def memory_changes(
    spec: JobSpec, inventory: Inventory, config: Mapping[str, Any]
) -> tuple[SpecChange, ...]:
    """The smallest changes of `spec` with which it takes less memory.

    Raises:
        PlanError: it can have no plan for other reasons than memory.
    """
    return smallest_changes(_space(spec, inventory, shape_of(config)), inventory)


def _space(spec: JobSpec, inventory: Inventory, shape: ModelShape) -> Space:
    """All ways to run the job; at least one mesh breaks no rule, though memory may not suffice."""
    request = Request(spec, shape, Hosts.of(spec, inventory))
    mesh = first_mesh(request) or likely_mesh(request)
    if broken := refusals(request, mesh):
        raise _refusal(spec, inventory, shape, broken)
    return space_of_hosts(spec, inventory, shape)


def _refusal(
    spec: JobSpec, inventory: Inventory, shape: ModelShape, broken: tuple[Refusal, ...]
) -> PlanError:
    found = nearest_plans(spec, inventory, shape)
    fixes = [str(one) for one in found]
    head = "the nearest plans that can run:"
    if found and not found[0].fits:
        head = "these pass all rules, but need more memory than a device has:"
    elif not fixes:
        # No value that the planner may propose helps, as with a model that cannot be trained.
        fixes = list(dict.fromkeys(one.fix for one in broken))
        head = "all of these:"
    alone = len(fixes) == 1 and (not found or found[0].fits)
    fix = fixes[0] if alone else "\n    ".join([head, *fixes])
    return PlanError("\n  ".join([_head(spec), *map(str, broken)]), fix=fix)


def _too_large(space: Space, limit: int, inventory: Inventory, found: Found) -> PlanError:
    """Some mesh breaks no rule, but none fits the `limit` bytes of a device."""
    assert found.least is not None
    items = sorted(found.least.items.items(), key=lambda pair: -pair[1])
    most = ", ".join(f"{item} {show_bytes(size)}" for item, size in items[:4])
    reason = (
        f"memory: the smallest plan needs {show_bytes(found.least.peak_bytes)} on its fullest rank"
        f" ({most}, …), a device has {show_bytes(limit)}"
    )
    families = [f"{one.family}: {one.constraint} ({one.count})" for one in found.rejected]
    fixes = smallest_changes(space, inventory)
    fix = "the smallest changes that fit:\n    " + "\n    ".join(map(str, fixes))
    if not fixes:
        fix = "use a smaller model, or devices with more memory"
    if space.fabric.profile.name == "cpu":
        fix += (
            "\n    --inventory FILE or --set cluster.gpu=h100-sxm-80gb  (for GPUs; without either,"
            " ranks are CPU processes)"
        )
    return PlanError("\n  ".join([_head(space.spec), reason, *families]), fix=fix)


def _head(spec: JobSpec) -> str:
    cluster = spec.cluster
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''}"
    return f"no plan for {spec.name} on {hosts} x {cluster.gpus_per_host} ranks:"


def _plan_of(space: Space, inventory: Inventory, found: Found) -> Plan:
    best, *others = found.options
    spec, setup = space.spec, best.setup
    traffic = traffic_of(setup, space.fabric)
    hosts, placement = _placed(space, setup.mesh, inventory, traffic)
    return replace(
        _decided(best, spec.cluster.gpus_per_host),
        hosts=hosts,
        switches=tree_of(inventory.with_devices(space.fabric.devices_per_host)),
        placement=placement,
        memory_along_pp=memories_of(setup, space.fabric) if setup.mesh.pp > 1 else (),
        communication=traffic,
        profile=space.fabric.profile.name,
        software=space.fabric.profile.calibration.software,
        device_power_w=space.fabric.profile.power_w,
        price_per_gpu_hour=mean_price(inventory, hosts),
        alternatives=tuple(
            choice
            for option in others
            if (choice := _decided(option, spec.cluster.gpus_per_host).choice)
        ),
        comparison=comparison_of(space, found.options),
        untrainable=space.shape.untrainable,
        rejected=found.rejected,
        methods=methods_of(setup, best.time),
        notes=(
            *notes_of(space, found.options, inventory),
            *idle_note(inventory, hosts, spec.cluster.gpus_per_host),
            *price_note(inventory, hosts),
        ),
    )


def _decided(option: Option, ranks_per_host: int) -> Plan:
    """What the search decided; hosts are placed later."""
    setup = option.setup
    return Plan(
        mesh=setup.mesh,
        micro_batch_size=setup.micro_batch_size,
        gradient_accumulation=setup.micro_batches,
        activation_checkpointing=setup.checkpointing,
        reshard_after_forward=setup.reshard,
        reduce_gradients=setup.reduce,
        compile=setup.compile,
        float8=setup.float8,
        loss_chunks=setup.loss_chunks,
        pipeline=replace(setup.pipeline, stages_per_rank=setup.pipeline.stages),
        hosts=(),
        ranks_per_host=ranks_per_host,
        memory=option.memory,
        time=option.time,
        work=_work(setup),
    )


def _work(setup: Setup) -> ModelWork:
    shape, tokens = setup.shape, setup.tokens_of_step
    each = flops_per_token(shape, setup.tokens, setup.lora, setup.document_tokens)
    return ModelWork(
        parameters=shape.parameters,
        dtype=setup.dtype,
        weight_bytes=shape.parameters * COMPUTE_BYTES[setup.dtype],
        flops=each * tokens,
        recomputed_flops=recomputed_per_token(setup) * tokens,
    )


def _placed(
    space: Space, mesh: Mesh, inventory: Inventory, traffic: tuple[Traffic, ...]
) -> tuple[tuple[str, ...], PlacementCost | None]:
    """The host of each node; in name order if the switches are unknown."""
    devices = space.fabric.devices_per_host
    hosts = inventory.with_devices(devices)
    switches = tree_of(hosts)
    if not switches:
        return tuple(host.name for host in hosts[: space.fabric.hosts]), None
    found = arrange(mesh, devices, (host.name for host in hosts), switches, traffic)
    blocks = ("nvlink block",) if any(host.nvlink_block for host in hosts) else ()
    cost = PlacementCost(
        levels=("host", *blocks, *SWITCHES)[: len(found.cost.crossing)],
        crossing=found.cost.crossing,
        by_name=found.by_name.crossing,
    )
    return found.hosts, cost
