"""What the software of a source does in each step in another way than any plan of ndctl.

`software` of a source changes constants of a plan. A method here adds seconds to a step, from
counted operations and constants that the planner has; none is fitted to runs.
"""

from benchmarks.published.runs import Run
from orchestrator.plan.stages import layers_along_pp

LAYER_TENSORS, OUTER_TENSORS = 6, 3
"""Weights of nanotron's llama: joint query, key and value; output; joint gate and up; down; two
norms. Beside the layers: embedding, last norm, head."""
SLICE_OPERATIONS = 2
"""Operations of the host for a slice: one that copies it, and three views, which start no kernel
and are counted as a third each."""


def added_s(run: Run) -> float:
    """Seconds that `Source.method` adds to each step of `run`."""
    return _sliced_gather_s(run) if run.source.method == "sliced gather" else 0.0


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
