"""How many bytes the fullest rank needs, and for what: a first estimate.

Left out: the CUDA context, allocator slack, communication buffers and temporary values inside
kernels. Each formula names its source. Parameters are exact; activations without checkpointing are
within a tenth of what autograd keeps on CPU (`tests/plan/test_memory.py`). The rest has not been
measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.cluster.profile import Fabric
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory
from orchestrator.plan.memory.activations import (
    COMPUTE_BYTES,
    activation_bytes,
    boundary_bytes,
    logits_bytes,
)
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Setup
from orchestrator.plan.stages import StageRank, fullest_ranks

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""4 bits, and for each 64 weights a scale of 8 bits, of which 256 share a float32 (Dettmers et al.
2023, section 3: block sizes 64 and 256)."""
MOMENTS = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adafactor": 0, "sgd": 1}
"""float32 values that the optimizer keeps of each weight; Adafactor keeps sums of rows and columns,
which are few (Shazeer and Stern 2018)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerParameter:
    """Bytes of the model states for each parameter."""

    weights: int = 4
    gradients: int = 4
    optimizer: int = 8


def model_states(parameters: int, ranks: int, level: int, each: PerParameter) -> tuple[int, ...]:
    """Bytes of weights, gradients and optimizer state of a rank, one of `ranks`, at a ZeRO level.

    Level 1 shards the optimizer's state, 2 the gradients as well, 3 all (Rajbhandari et al. 2020,
    section 5, figure 1). Rounded up: the first ranks hold what does not divide.
    """
    sizes = (each.weights, each.gradients, each.optimizer)
    first_sharded = 3 - level
    return tuple(
        size * (math.ceil(parameters / ranks) if place >= first_sharded else parameters)
        for place, size in enumerate(sizes)
    )


def memory_of(setup: Setup, fabric: Fabric | None) -> Memory:
    """What the fullest rank of `setup` needs, against what a device of `fabric` has."""
    mesh, micro = setup.mesh, setup.micro_batch_size
    ranks = fullest_ranks(setup.shape, mesh.pp, setup.pipeline, setup.micro_batches, setup.tokens)
    all_items = []
    for rank in ranks:
        # GPipe's last stage has all micro batches before it goes back with the first.
        kept = rank.kept if setup.pipeline.schedule == "gpipe" else 1
        passing = {
            "activations": micro * activation_bytes(setup, rank),
            "logits": math.ceil(micro * kept * logits_bytes(setup)) * rank.is_last,
        }
        if mesh.pp > 1:
            passing["boundaries"] = micro * boundary_bytes(setup, rank)
        states, host = state_bytes(setup, rank)
        all_items.append((states | passing, host))
    items, host = max(all_items, key=lambda pair: sum(pair[0].values()))
    return Memory(
        peak_bytes=sum(items.values()),
        device_bytes=fabric.profile.memory_bytes if fabric else None,
        worst_rank="every rank",
        items=items,
        host=host,
    )


def state_bytes(setup: Setup, rank: StageRank) -> tuple[dict[str, int], Mapping[str, int]]:
    """Of weights, gradients and optimizer: what is on the device, and what in the host's memory."""
    mesh = setup.mesh
    own = Weights.of(setup.shape, mesh, rank)
    trained = own.parameters if setup.lora is None else adapter_parameters(setup, rank)
    sharing = mesh.cp * (mesh.dp_shard if setup.data == "fsdp" else mesh.dp_replicate)
    level = {"ddp": 0, "zero1": 1, "fsdp": 3}[setup.data]
    each = PerParameter(optimizer=4 * MOMENTS[setup.optimizer])
    weights, gradients, optimizer = model_states(trained, sharing, level, each)
    if setup.lora is not None:
        frozen = frozen_bytes(setup, own)
        weights += math.ceil(frozen / (sharing if level == 3 else 1))
    states = {"parameters": weights, "gradients": gradients, "optimizer": optimizer}
    host = {}
    if setup.data == "fsdp" and setup.cpu_offload:
        host, states = states, dict.fromkeys(states, 0)
    if level == 3 and sharing > 1 and setup.micro_batches > 1:
        # Gradients are reduced with the last micro batch; until then each rank adds up its own of
        # all weights, in the type they are reduced in (FSDPModule.set_requires_gradient_sync).
        states["gradients"] = trained * COMPUTE_BYTES[setup.reduce_dtype]
    states["gathered"] = gathered_bytes(setup, own)
    if setup.data != "fsdp" and sharing > 1:
        # Every bucket in which gradients are averaged lives until the last one is done.
        states["buckets"] = trained * COMPUTE_BYTES[setup.reduce_dtype]
    return states, host


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one rank after pipeline and tensor parallelism, before any sharding."""

    layer: int
    """Of one decoder layer."""
    layers: int
    root: int
    """Of what is not in a decoder layer: embeddings, the last norm and the head."""

    @classmethod
    def of(cls, shape: ModelShape, mesh: Mesh, rank: StageRank) -> "Weights":
        """Tensor parallelism splits the matrices, and each rank has all of the norms."""
        vocabulary = math.ceil(shape.vocabulary_parameters / mesh.tp)
        root = (vocabulary + shape.position_parameters) * rank.is_first
        if rank.is_last:
            tied_here = shape.tied_embeddings and mesh.pp == 1
            root += shape.norm_parameters + (0 if tied_here else vocabulary)
        layer = math.ceil(shape.layer_weights / mesh.tp) + shape.layer_replicated
        return cls(layer, rank.layers, root)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root


def gathered_bytes(setup: Setup, own: Weights) -> int:
    """Whole units that are in memory while they compute.

    FSDP2 gathers a unit (a decoder layer) before it is used and prefetches the next, so with a
    depth of 1 two are whole at once, and the root unit stays; the backward pass adds the whole
    gradient of one layer before it is reduced. Not resharded after the forward pass, every layer
    stays whole (torch.distributed.fsdp.fully_shard). Embeddings and heads that are large enough for
    units of their own are counted as if they, too, stayed.
    """
    mesh, dtype = setup.mesh, setup.dtype
    alone = mesh.data_parallel * mesh.cp == 1
    if dtype == "float32" and (setup.data != "fsdp" or (alone and not setup.cpu_offload)):
        return 0
    size = COMPUTE_BYTES[dtype]
    if setup.data != "fsdp":
        # Autocast keeps what it cast of the weights for the backward pass.
        return own.parameters * size
    whole = 1 + max(setup.forward_prefetch, setup.backward_prefetch)
    layers = float(min(whole, own.layers))
    reshard = setup.reshard
    # Schedules with several stages a rank keep whole stages gathered, whatever is asked.
    if reshard is False or (mesh.pp > 1 and setup.pipeline.stages > 1):
        layers = own.layers
    elif reshard is not True:
        layers += (own.layers - layers) / reshard
    return math.ceil(layers * own.layer + own.root) * size + own.layer * 4


def adapter_parameters(setup: Setup, rank: StageRank) -> int:
    """Of LoRA's two matrices beside each target (Hu et al. 2021, section 4.1), as if no tensor
    parallelism split them."""
    lora = setup.lora
    assert lora is not None
    sizes = (into + out for name, into, out in setup.shape.linear if name in lora.target_modules)
    return rank.layers * lora.rank * sum(sizes)


def frozen_bytes(setup: Setup, own: Weights) -> int:
    """Of the weights that LoRA leaves as they are; NF4 has those of the layers' matrices."""
    assert setup.lora is not None
    if setup.lora.quantize == "none":
        return own.parameters * 4
    matrices = own.layers * (setup.shape.layer_matrices // setup.mesh.tp)
    return math.ceil((own.parameters - matrices) * 4 + matrices * NF4_BYTES)


def show_bytes(count: int) -> str:
    """`count` bytes for a person: 3 digits and a binary unit."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:.0f} TiB"
