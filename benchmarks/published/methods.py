"""What the software of a source does in each step in another way than any plan of ndctl.

`software` of a source changes constants of a plan. A method here adds seconds to a step, from
counted operations and constants that the planner has; none is fitted to runs.
"""

from benchmarks.published.runs import Run
from orchestrator.plan.cost.kernels import move_s
from orchestrator.plan.cost.layers import COMPILED, EAGER
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.stages import layers_along_pp

LAYER_TENSORS, OUTER_TENSORS = 6, 3
"""Weights of nanotron's llama: joint query, key and value; output; joint gate and up; down; two
norms. Beside the layers: embedding, last norm, head."""
SLICE_OPERATIONS = 2
"""Operations of the host for a slice: one that copies it, and three views, which start no kernel
and are counted as a third each."""


def added_s(run: Run) -> float:
    """Seconds that `Source.method` adds to each step of `run`."""
    match run.source.method:
        case "sliced gather":
            return _sliced_gather_s(run)
        case "whole norms":
            return _whole_norms_s(run)
        case None:
            return 0.0


def _sliced_gather_s(run: Run) -> float:
    """nanotron's ZeRO-1, while devices wait for the host.

    After the update each tensor is cut into a slice for each data-parallel rank; the slices are
    gathered, and each one is copied to its place alone (`all_gather_coalesced`). So the host starts
    operations for tensors x ranks.
    """
    setup, mesh = run.setup, run.setup.mesh
    if mesh.dp_shard == 1:
        return 0.0
    stages = layers_along_pp(setup.shape, mesh.pp, setup.pipeline, setup.tokens)
    tensors = max(stage.layers for stage in stages) * LAYER_TENSORS + OUTER_TENSORS
    operations = tensors * mesh.dp_shard * SLICE_OPERATIONS
    return operations * run.fabric.profile.calibration.host_op_s


def _whole_norms_s(run: Run) -> float:
    """Tensor parallelism without sequence parallelism: each rank of tp computes norms and residuals
    of all tokens, and not of its part."""
    setup, mesh, shape = run.setup, run.setup.mesh, run.setup.shape
    fusion = COMPILED if setup.compile else EAGER
    norms = fusion.layer_norm if shape.norm_bias else fusion.norm
    ways = (0, 0, 1) if setup.checkpointing == "full" else (0, 1)
    per_value = sum(shape.layer_norms * norms[way] + 2 * fusion.residual[way] for way in ways)
    values = setup.micro_batch_size * setup.tokens * shape.hidden_size * (1 - 1 / mesh.tp)
    each = move_s(machine_of(run.fabric), values * per_value)
    stages = layers_along_pp(shape, mesh.pp, setup.pipeline, setup.tokens, setup.even_stages)
    passes = setup.micro_batches + (mesh.pp - 1) / setup.pipeline.stages
    return each * max(stage.layers for stage in stages) * passes
