"""What a rank keeps of the tokens it passes, from the forward pass to the backward pass."""

import math

from orchestrator.plan.setup import Setup
from orchestrator.plan.stages import StageRank

FLOAT32_BYTES = 4
COMPUTE_BYTES = {"float32": 4, "bfloat16": 2}


def activation_bytes(setup: Setup, rank: StageRank) -> int:
    """What the decoder layers of `rank` keep at once, with micro batches of one sequence.

    Counted as Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) count it, for the operations
    of transformers' models and an attention kernel that keeps no score matrix: see `_by_layer`.
    `full` keeps each layer's input and one layer in recomputation (their section 5, with Chen et
    al. 2016 for `every_k`, which treats every k-th layer so). What a pipeline has gone forward with
    and not yet back is kept as often (`stages.kept_passes`); in recomputation is one layer.
    """
    shape, mesh = setup.shape, setup.mesh
    size = COMPUTE_BYTES[setup.dtype]
    whole = _by_layer(setup, size)
    only_input = math.ceil(shape.hidden_size / mesh.tp) * size
    again = whole
    match setup.checkpointing:
        case "none":
            kept, again = rank.layers * whole, 0
        case "full":
            kept = rank.layers * only_input
        case "selective":
            kept = rank.layers * _by_matmuls(setup, size)
        case "every_k":
            every = setup.checkpoint_every or max(1, round(math.sqrt(shape.num_layers)))
            treated = rank.layers // every
            kept = (rank.layers - treated) * whole + treated * only_input
    return math.ceil(tokens_of_rank(setup) * (rank.kept * kept + again))


def tokens_of_rank(setup: Setup) -> int:
    """Of each sequence; context parallelism cuts it."""
    return math.ceil(setup.tokens / setup.mesh.cp)


def _by_layer(setup: Setup, size: int) -> int:
    """Bytes per token of one decoder layer without checkpointing.

    Each of the two norms keeps its input, RMS norms once more as float32 (transformers computes
    them so); sequence parallelism splits these. The matmuls keep the norms' results, gathered.
    Attention keeps q, k, v and its result, Ulysses the latter once more as it is handed back; a
    gated MLP keeps gate, up, the activated gate and their product, GPT-2's the five values that its
    approximated GELU is made of.
    """
    shape, mesh = setup.shape, setup.mesh
    upcast = 0 if shape.norm_bias else FLOAT32_BYTES
    norms = math.ceil(shape.hidden_size / mesh.tp) * (upcast + size) + shape.hidden_size * size
    attention = 2 * shape.query_size + 2 * shape.kv_size
    if shape.qk_norm:
        attention += shape.query_size + shape.kv_size
    if mesh.cp > 1 and setup.context == "ulysses":
        attention += shape.query_size
    mlp = shape.intermediate_size * (4 if shape.gated else 5)
    return 2 * norms + math.ceil((attention + mlp) / mesh.tp) * size


def _by_matmuls(setup: Setup, size: int) -> int:
    """Bytes per token of one layer's input and the results of its matmuls and its attention.

    Two of the matmuls are as wide as the model on every tp rank, before their sum is scattered;
    with tp the two gathered inputs and the two scattered sums are kept as well.
    """
    shape, mesh = setup.shape, setup.mesh
    split = 2 * shape.query_size + 2 * shape.kv_size + shape.up_size
    split += shape.hidden_size * (3 if mesh.tp > 1 else 1)
    return (shape.hidden_size * (4 if mesh.tp > 1 else 2) + math.ceil(split / mesh.tp)) * size


def logits_bytes(setup: Setup) -> int:
    """Logits of one sequence: as computed, as float32 for the loss, and their float32 gradient.

    The loss takes float32; log-softmax keeps its result as large as they. The vocabulary is split
    over tp. A pipeline's last stage goes back with a micro batch before it takes the next, but for
    GPipe's, see `memory.memory_of`.
    """
    size = COMPUTE_BYTES[setup.output_dtype or setup.dtype]
    entries = math.ceil(setup.shape.vocab_size / setup.mesh.tp)
    return tokens_of_rank(setup) * entries * (size + 2 * FLOAT32_BYTES)


def boundary_bytes(setup: Setup, rank: StageRank) -> int:
    """What goes between stages, with micro batches of one sequence; 0 without a pipeline.

    torch makes a buffer for each micro batch of a step, for the hidden states that each stage gets
    and for the gradients that come back (`PipelineStage`, `_RecvInfo`); what a stage handed on is
    kept until it has gone back.
    """
    shape, mesh = setup.shape, setup.mesh
    if mesh.pp == 1:
        return 0
    stages = setup.pipeline.stages
    arrive = 2 * stages - rank.is_first - rank.is_last
    tensors = arrive * setup.micro_batches + rank.kept * stages
    width = math.ceil(shape.hidden_size / mesh.tp) * COMPUTE_BYTES[setup.dtype]
    return math.ceil(tensors * tokens_of_rank(setup) * width)
