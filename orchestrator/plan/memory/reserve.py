"""What a GPU's memory holds beside the trainer's tensors, which the allocator does not count."""

from collections.abc import Mapping

from orchestrator.contract.mesh import Mesh
from orchestrator.inventory.profile import Fabric

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""The CUDA context with the kernels that are loaded, and cuBLAS' workspace of 32 MiB on Hopper
(PyTorch's notes on CUDA semantics, cuBLAS workspaces). The context is what nvidia-smi shows of a
process that has done one operation: between 400 and 600 MiB on A100 and H100. Not measured here."""
CHANNELS = 16
CHANNEL_BYTES = 4 * MIB + 2 * MIB
"""Of one channel of a communicator: NCCL_BUFFSIZE, 4 MiB by default, for the simple protocol
(NCCL's user guide, environment variables), and about half of that for LL and LL128."""
SLACK = 0.03
"""Of the tensors, what the caching allocator holds and cannot give: blocks are rounded to 2 MiB and
cut from segments (PyTorch's notes on CUDA semantics, memory management). An assumption."""
RESERVE = ("communication", "context", "slack")
"""Items that the allocator's own figures, as torch.cuda.max_memory_allocated, leave out."""


def reserve_bytes(mesh: Mesh, tensors: int, fabric: Fabric | None) -> Mapping[str, int]:
    """Beside `tensors` bytes of tensors, on a device of `fabric`; nothing where it is a CPU, or
    nobody says."""
    if fabric is None or fabric.profile.device == "cpu":
        return {}
    # One communicator for each axis in use, and the one of all ranks.
    axes = sum(degree > 1 for degree in mesh.degrees)
    groups = axes + 1 if axes else 0
    return {
        "communication": groups * CHANNELS * CHANNEL_BYTES,
        "context": CONTEXT_BYTES,
        "slack": int(SLACK * tensors),
    }
