"""Notes below a plan: what the planner chose, and what may surprise."""

import math
from collections.abc import Collection, Iterator, Sequence

from orchestrator.contract.mesh import AXES
from orchestrator.contract.plan import IN_MEMORY, Plan, StepTime
from orchestrator.contract.spec.job_spec import MOST_BY_DEFAULT, NOT_ON_GPUS, JobSpec
from orchestrator.contract.spec.pipeline_spec import BACK_AND_FORTH
from orchestrator.inventory.hosts import Inventory, grouped
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.search.search_space import AUTO_MARGIN, MODEST_BYTES, Option, Space
from orchestrator.plan.setup import Setup

SHOWN = 4
"""Hosts named in one note."""
LEAST_GAIN = 0.001
IDLE = 0.25
"""A pipeline bubble above this share of a step gets a note."""


def notes_of(space: Space, options: Sequence[Option], inventory: Inventory) -> tuple[str, ...]:
    """`options`: the chosen plan, then the others that are shown."""
    spec, setup, time = space.spec, options[0].setup, options[0].time
    return (
        *_chosen(spec, setup, _aim(space, options)),
        *_micro(space, setup),
        *_across_hosts(setup, space.fabric.hosts, space.fabric.devices_per_host),
        *_waits(setup, time),
        *_rates(spec),
        *_hosts(space, inventory),
        *_one_of_a_board(space),
        *_tokenizer(space),
        *_deterministic(space),
        *space.shape.notes,
    )


def comparison_of(space: Space, options: Sequence[Option]) -> str | None:
    """Why the first option was chosen, if another one is faster."""
    if space.spec.objective == "memory":
        return None
    chosen, *others = options
    fastest = min(others, key=lambda option: option.time.step_s, default=chosen)
    gain = chosen.time.step_s / fastest.time.step_s - 1
    if gain <= 0:
        return None
    by = space.fabric.profile.calibration.comparison
    faster = f"{gain:.1%}" if gain >= LEAST_GAIN else f"less than {LEAST_GAIN:.1%}"
    return (
        f"{fastest.setup.mesh} is planned {faster} faster, but {chosen.setup.mesh} is simpler."
        f" Up to {by.typical:.1%} count as equal: the planned ratio of two speeds was off by more"
        f" for half of {by.pairs} pairs of published runs of one model on the same hosts"
    )


def software_note(made: Plan) -> Iterator[str]:
    """How the plan differs from what the other software runs.

    Its published runs are planned with compiled layers.
    """
    if made.software is None:
        return
    if made.schedule == BACK_AND_FORTH:
        yield (
            f"{made.software} has no schedule {BACK_AND_FORTH}; for its own:"
            " --set parallel.pipeline.schedule=interleaved_1f1b"
        )
    if not made.compile:
        yield (
            f"{made.software} has fused kernels, which train.compile=true describes best; this"
            " plan is without: --set train.compile=true"
        )


def margin_note(spec: JobSpec, space: Space) -> Iterator[str]:
    """`spec` is as the user wrote it; `space` has the plan."""
    if spec.cluster.memory_margin != space.spec.cluster.memory_margin:
        yield (
            f"no plan leaves {AUTO_MARGIN:.0%} of a device's memory free (cluster.memory_margin="
            "auto), so this one may run out of memory"
        )


def dtype_notes(spec: JobSpec, space: Space) -> Iterator[str]:
    """`spec` is as the user wrote it; in `space` the number format is decided."""
    dtype = space.spec.train.compute_dtype
    if spec.train.dtype == "auto" and dtype == "bfloat16":
        yield (
            f"train.dtype=auto: {space.fabric.profile.name} computes in bfloat16; master weights"
            " are float32"
        )


def memory_note(spec: JobSpec, made: Plan) -> Iterator[str]:
    """Whether hosts keep checkpoints in their memory, and how much that takes."""
    every, memory = spec.checkpoint.memory.every, made.needs.host
    if every == "off":
        return
    kept = memory.get(IN_MEMORY, 0)
    if not kept:
        yield f"no checkpoints in memory: {NOT_ON_GPUS}"
        return
    # One of the slots takes the place of the buffer of a save to the disk.
    whole = made.ranks_per_host * (kept + memory["checkpoint"])
    words = f"checkpoints in memory take {show_bytes(whole)} of each host"
    if every == "auto":
        least = show_bytes(round(whole / MOST_BY_DEFAULT))
        words += (
            f" (checkpoint.memory.every=auto); with less than {least} to use, a host keeps fewer"
            " copies, or none"
        )
    yield words


def _aim(space: Space, options: Sequence[Option]) -> str:
    """What the plan is best at."""
    if space.spec.objective == "memory":
        return "the lowest peak memory"
    shortest = "the shortest step that fits"
    if comparison_of(space, options):
        shortest = f"the simplest mesh within {space.margin:.1%} of {shortest}"
    return f"{'the fewest hosts, then ' * (space.spec.objective == 'fewest_hosts')}{shortest}"


def _chosen(spec: JobSpec, setup: Setup, aim: str) -> Iterator[str]:
    wish, mesh = spec.parallel, setup.mesh
    values = {axis: getattr(mesh, axis) for axis in AXES if getattr(wish, axis) == "auto"}
    if setup.mesh.pp > 1 and wish.pipeline.schedule == "auto":
        values["schedule"] = setup.pipeline.schedule
    if mesh.dp_shard * mesh.cp > 1 and wish.fsdp.reshard_after_forward == "auto":
        values["reshard_after_forward"] = str(setup.reshard).lower()
    if setup.reduces_each and wish.fsdp.reduce_gradients == "auto":
        values["reduce_gradients"] = setup.reduce
    if spec.train.compile == "auto":
        values["compile"] = str(setup.compile).lower()
    if spec.train.float8 == "auto":
        values["float8"] = str(setup.float8).lower()
    if setup.loss_chunks != spec.train.loss_chunks:
        values["loss_chunks"] = setup.loss_chunks
    if spec.train.micro_batch_size == "auto":
        values["micro_batch_size"] = setup.micro_batch_size
    if spec.train.activation_checkpointing == "auto":
        values["activation_checkpointing"] = setup.checkpointing
    if values:
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        yield f"chosen for {aim}: {shown}"


def _micro(space: Space, setup: Setup) -> Iterator[str]:
    if space.spec.train.micro_batch_size == "auto" and space.fabric.profile.device == "cpu":
        yield (
            f"micro_batch_size={setup.micro_batch_size}: CPU ranks share one memory, so the planner"
            f" keeps activations and logits of a rank within {show_bytes(MODEST_BYTES)}"
        )


def _across_hosts(setup: Setup, hosts: int, ranks: int) -> Iterator[str]:
    """Axes whose groups span hosts, and what these send between hosts."""
    mesh = setup.mesh
    if mesh.tp > ranks:
        yield (f"tp={mesh.tp}: each group takes {mesh.tp // ranks} hosts of one NVLink block")
    if mesh.cp > 1 and ranks % (mesh.tp * mesh.cp):
        yield (
            f"cp={mesh.cp}: groups span hosts and send keys and values between them in every"
            f" layer; they stay inside a host if tp x cp divides its {ranks} ranks"
        )
    if mesh.pp > 1 and hosts > 1:
        yield (
            f"pp={mesh.pp}: stages are on different hosts, which send each other the hidden states"
            " of each micro batch and their gradients"
        )


def _waits(setup: Setup, time: StepTime) -> Iterator[str]:
    if time.bubble > IDLE:
        yield (
            f"pp={setup.mesh.pp}: with {setup.micro_batches} micro batches per step the pipeline"
            f" bubble is {time.bubble:.1%} of the step; a larger train.global_batch_size shortens"
            " it"
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
            f"learning rate: {rate:g} was tuned for {base} sequences per step; for {batch} the"
            f" linear rule gives {rate * factor:.4g} (SGD), the square-root rule"
            f" {rate * math.sqrt(factor):.4g} (Adam); the job trains with {rate:g}"
        )


def _hosts(space: Space, inventory: Inventory) -> Iterator[str]:
    cluster = space.spec.cluster
    spares = len(inventory.with_devices(cluster.gpus_per_host)) - space.fabric.hosts
    if spares < cluster.spare_hosts:
        yield f"{cluster.spare_hosts} spare hosts requested, {spares} available"
    left_out = grouped(inventory.left_out(cluster.gpus_per_host), SHOWN)
    if left_out:
        more = f"; and for {len(left_out) - SHOWN} more reasons" if len(left_out) > SHOWN else ""
        yield f"hosts not used: {'; '.join(left_out[:SHOWN])}{more}"


def _one_of_a_board(space: Space) -> Iterator[str]:
    """`gpus_per_host` is easily forgotten, and 1 is its default."""
    fabric = space.fabric
    link = fabric.profile.intra_host.kind
    if fabric.devices_per_host == 1 and link.startswith(("nvlink", "infinity")):
        yield (
            f"cluster.gpus_per_host=1: ranks use one {fabric.profile.name} of each host, although"
            " such hosts have several as a rule"
        )


def idle_note(inventory: Inventory, hosts: Collection[str], ranks: int) -> Iterator[str]:
    """Devices of the planned `hosts` that have no rank, as when hosts differ in size."""
    chosen = set(hosts)
    more = {
        host.name: host.devices - ranks
        for host in inventory.hosts
        if host.name in chosen and host.devices > ranks
    }
    if not more:
        return
    names = list(more)
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    counts = sorted(set(more.values()))
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    yield (
        f"cluster.gpus_per_host={ranks}: {sum(more.values()):,} devices stay idle, {each} on each"
        f" of {', '.join(names[:SHOWN])}{rest}"
    )


def price_note(inventory: Inventory, hosts: Collection[str]) -> Iterator[str]:
    """Planned hosts without a price, if others have one: money is then unknown."""
    chosen = [host for host in inventory.hosts if host.name in set(hosts)]
    missing = {host.name: "has no price" for host in chosen if host.price_per_gpu_hour is None}
    if missing and len(missing) < len(chosen):
        yield (
            f"money is unknown: {'; '.join(grouped(missing, SHOWN))} (price_per_gpu_hour in the"
            " inventory, or --price for all hosts)"
        )


def _deterministic(space: Space) -> Iterator[str]:
    if space.spec.train.deterministic and space.fabric.profile.device == "cuda":
        yield (
            "train.deterministic=true: the predicted speed is that of the usual kernels; the"
            " deterministic ones are slower"
        )


def _tokenizer(space: Space) -> Iterator[str]:
    if space.spec.data.tokenizer != "bytes":
        yield (
            f"data.tokenizer={space.spec.data.tokenizer}: the trainer checks at start that its"
            f" tokens fit the model's vocabulary of {space.shape.vocab_size}"
        )
