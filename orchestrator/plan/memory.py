"""How many bytes the fullest rank needs, and for what: a first estimate.

Left out: the CUDA context, allocator slack, communication buffers and temporary values inside
kernels. Each formula names its source. Parameters are exact; activations without checkpointing are
within a tenth of what autograd keeps on CPU (`tests/plan/test_memory.py`). The rest has not been
measured.
"""

import math
from typing import Literal

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory
from orchestrator.contract.spec import JobSpec
from orchestrator.plan.shape import ModelShape

Checkpointing = Literal["none", "selective", "full", "every_k"]

MASTER_BYTES = 4
"""Weights that the optimizer updates are float32, whatever the model computes in."""
MOMENT_BYTES = 8
"""AdamW's two moments, float32 (Loshchilov and Hutter 2019, algorithm 2)."""
COMPUTE_BYTES = {"float32": 4, "bfloat16": 2}


def memory_of(
    spec: JobSpec, shape: ModelShape, mesh: Mesh, micro: int, kind: Checkpointing
) -> Memory:
    """What one rank of `mesh` needs with micro batches of `micro` sequences."""
    local = sharded_parameters(shape, mesh)
    items = {
        "parameters": local * MASTER_BYTES,
        "gradients": local * MASTER_BYTES,
        "optimizer": local * MOMENT_BYTES,
        "gathered": gathered_bytes(shape, mesh, spec.train.dtype),
        "activations": micro * activation_bytes(spec, shape, mesh, kind),
        "logits": micro * logits_bytes(spec, shape, mesh),
    }
    return Memory(peak_bytes=sum(items.values()), items=items)


def sharded_parameters(shape: ModelShape, mesh: Mesh) -> int:
    """Parameters that one rank keeps.

    Tensor parallelism splits the matrices; FSDP shards all that is left over dp_shard x cp
    (ZeRO-3, Rajbhandari et al. 2020, section 5.3). Rounded up: the first ranks hold what does not
    divide.
    """
    replicated = shape.num_layers * shape.layer_replicated + shape.hidden_size
    split = shape.parameters - replicated
    own = math.ceil(split / mesh.tp) + replicated
    return math.ceil(own / (mesh.pp * mesh.dp_shard * mesh.cp))


def gathered_bytes(shape: ModelShape, mesh: Mesh, dtype: str) -> int:
    """Whole units that are in memory while they compute.

    FSDP2 gathers a unit (a decoder layer) before it is used and prefetches the next, so two are
    whole at once, and the root unit (embeddings and last norm) stays; the backward pass adds the
    whole gradient of one layer before it is reduced (torch.distributed.fsdp.fully_shard).
    """
    if mesh.dp_shard * mesh.dp_replicate * mesh.cp == 1 and dtype == "float32":
        return 0
    layer = math.ceil(shape.layer_weights / mesh.tp) + shape.layer_replicated
    root = math.ceil(shape.embedding_parameters / mesh.tp) + shape.hidden_size
    return (2 * layer + root) * COMPUTE_BYTES[dtype] + layer * MASTER_BYTES


def activation_bytes(spec: JobSpec, shape: ModelShape, mesh: Mesh, kind: Checkpointing) -> int:
    """What the decoder layers keep of one sequence for the backward pass.

    Counted as Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) count it, for the operations
    of transformers' llama and qwen3 and an attention kernel that keeps no score matrix: see
    `_kept_by_layer`. `full` keeps each layer's input and one layer in recomputation (their section
    5, with Chen et al. 2016 for `every_k`, which treats every √L-th layer so).
    """
    size = COMPUTE_BYTES[spec.train.dtype]
    tokens = math.ceil(spec.data.sequence_length / mesh.cp)
    layers = math.ceil(shape.num_layers / mesh.pp)
    whole = _kept_by_layer(shape, mesh, size)
    only_input = math.ceil(shape.hidden_size / mesh.tp) * size
    match kind:
        case "none":
            kept = layers * whole
        case "full":
            kept = layers * only_input + whole
        case "selective":
            kept = layers * _kept_by_matmuls(shape, mesh, size) + whole
        case "every_k":
            treated = layers // max(1, round(math.sqrt(layers)))
            kept = (layers - treated) * whole + treated * only_input + whole
    return tokens * kept


def _kept_by_layer(shape: ModelShape, mesh: Mesh, size: int) -> int:
    """Bytes per token of one decoder layer without checkpointing.

    Each of the two norms keeps its input, once more as float32 (transformers computes norms so);
    sequence parallelism splits these. The matmuls keep the norms' results, gathered. Attention
    keeps q, k, v and its result; the MLP keeps gate, up, the activated gate and their product.
    """
    norms = 2 * (math.ceil(shape.hidden_size / mesh.tp) * (4 + size) + shape.hidden_size * size)
    attention = 2 * shape.query_size + 2 * shape.kv_size
    if shape.qk_norm:
        attention += shape.query_size + shape.kv_size
    return norms + math.ceil((attention + 4 * shape.intermediate_size) / mesh.tp) * size


def _kept_by_matmuls(shape: ModelShape, mesh: Mesh, size: int) -> int:
    """Bytes per token of one layer's input and the results of its matmuls and its attention.

    Two of the seven matmuls are as wide as the model on every tp rank, before their sum is
    scattered; with tp the two gathered inputs and the two scattered sums are kept as well.
    """
    split = 2 * shape.query_size + 2 * shape.kv_size + 2 * shape.intermediate_size
    split += shape.hidden_size * (3 if mesh.tp > 1 else 1)
    return (shape.hidden_size * (4 if mesh.tp > 1 else 2) + math.ceil(split / mesh.tp)) * size


def logits_bytes(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> int:
    """Logits of one sequence: as computed, as float32 for the loss, and their float32 gradient.

    transformers' `ForCausalLMLoss` takes float32; log-softmax keeps its result as large as they.
    The vocabulary is split over tp.
    """
    tokens = math.ceil(spec.data.sequence_length / mesh.cp)
    return tokens * math.ceil(shape.vocab_size / mesh.tp) * (COMPUTE_BYTES[spec.train.dtype] + 8)


def show_bytes(count: int) -> str:
    """`count` bytes for a person: 3 digits and a binary unit."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:.0f} TiB"
