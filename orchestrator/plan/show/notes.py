"""What a person should know of how a plan came about."""

import math
from collections.abc import Iterator

from orchestrator.contract.mesh import AXES
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.search.search_space import MODEST_BYTES, Space
from orchestrator.plan.setup import Setup
from orchestrator.plan.stages import bubble

SHOWN = 4
"""Hosts that are named."""
IDLE = 0.25
"""Share of a step that ranks of a pipeline wait, above which it is worth a note."""
AIMS = {
    "throughput": "the shortest step that fits",
    "memory": "the emptiest devices",
    "fewest_hosts": "the fewest hosts, and the shortest step on them",
}


def notes_of(space: Space, setup: Setup, inventory: Inventory) -> tuple[str, ...]:
    spec = space.spec
    return (
        *_chosen(spec, setup),
        *_micro(space, setup),
        *_across_hosts(setup, space.fabric.hosts, space.fabric.devices_per_host),
        *_waits(setup),
        *_rates(spec),
        *_hosts(space, inventory),
        *_tokenizer(space),
        *space.shape.notes,
    )


def _chosen(spec: JobSpec, setup: Setup) -> Iterator[str]:
    wish, mesh = spec.parallel, setup.mesh
    values = {axis: getattr(mesh, axis) for axis in AXES if getattr(wish, axis) == "auto"}
    if setup.mesh.pp > 1 and wish.pipeline.schedule == "auto":
        values["schedule"] = setup.pipeline.schedule
    if mesh.dp_shard * mesh.cp > 1 and wish.fsdp.reshard_after_forward == "auto":
        values["reshard_after_forward"] = str(setup.reshard).lower()
    if spec.train.micro_batch_size == "auto":
        values["micro_batch_size"] = setup.micro_batch_size
    if spec.train.activation_checkpointing == "auto":
        values["activation_checkpointing"] = setup.checkpointing
    if values:
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        yield f"chosen for {AIMS[spec.objective]}: {shown}"


def _micro(space: Space, setup: Setup) -> Iterator[str]:
    if space.spec.train.micro_batch_size == "auto" and space.fabric.profile.device == "cpu":
        yield (
            f"micro_batch_size={setup.micro_batch_size}: on CPU ranks, which share one memory, a"
            f" larger one must keep activations and logits within {show_bytes(MODEST_BYTES)}"
        )


def _across_hosts(setup: Setup, hosts: int, ranks: int) -> Iterator[str]:
    """Axes whose ranks are on several hosts, with what then goes between these."""
    mesh = setup.mesh
    if mesh.tp > ranks:
        yield (
            f"tp={mesh.tp}: each of its groups is {mesh.tp // ranks} hosts of one NVLink block,"
            " next to each other in rank order"
        )
    if mesh.cp > 1 and ranks % (mesh.tp * mesh.cp):
        yield (
            f"cp={mesh.cp}: its groups span hosts, between which keys and values go in every layer;"
            f" they stay inside where tp x cp divides the {ranks} ranks of a host"
        )
    if mesh.pp > 1 and hosts > 1:
        yield (
            f"pp={mesh.pp}: its stages are on different hosts, between which the hidden states of"
            " each micro batch go and their gradients come back"
        )


def _waits(setup: Setup) -> Iterator[str]:
    idle = bubble(setup.pipeline, setup.mesh.pp, setup.micro_batches)
    if idle is not None and idle > IDLE:
        yield (
            f"pp={setup.mesh.pp}: with {setup.micro_batches} micro batches a step its ranks wait"
            f" about {idle:.0%} of the time; a larger train.global_batch_size shortens that"
        )


def _rates(spec: JobSpec) -> Iterator[str]:
    """Linear scaling after Goyal et al. 2017 (arXiv 1706.02677), the square root after Krizhevsky
    2014 (arXiv 1404.5997), which Malladi et al. 2022 (arXiv 2205.10287) derive for Adam."""
    base, batch, rate = (
        spec.train.base_batch_size,
        spec.train.global_batch_size,
        spec.train.optimizer.lr,
    )
    if base is not None and base != batch:
        factor = batch / base
        yield (
            f"learning rate: {rate:g} was found with {base} sequences a step; for {batch} the"
            f" linear rule makes it {rate * factor:.4g} (SGD), the square-root rule"
            f" {rate * math.sqrt(factor):.4g} (Adam); the job trains with {rate:g}"
        )


def _hosts(space: Space, inventory: Inventory) -> Iterator[str]:
    cluster = space.spec.cluster
    spares = len(inventory.with_devices(cluster.gpus_per_host)) - space.fabric.hosts
    if spares < cluster.spare_hosts:
        yield f"{cluster.spare_hosts} spare hosts asked for, {spares} there"
    left_out = [f"{host} {why}" for host, why in inventory.left_out(cluster.gpus_per_host).items()]
    if left_out:
        more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        yield f"left out: {', '.join(left_out[:SHOWN])}{more}"


def _tokenizer(space: Space) -> Iterator[str]:
    if space.spec.data.tokenizer != "bytes":
        yield (
            f"data.tokenizer={space.spec.data.tokenizer}: whether its tokens are within the model's"
            f" vocabulary of {space.shape.vocab_size} is seen when the ranks start"
        )
