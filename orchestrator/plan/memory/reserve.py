"""GPU memory that is used in addition to tensors: context, communicators and allocator slack."""

from collections.abc import Mapping

from orchestrator.contract.mesh import Mesh
from orchestrator.inventory.profile import Fabric

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""The CUDA context with its loaded kernels, and cuBLAS's workspace, 32 MiB on Hopper (PyTorch notes
on CUDA semantics, cuBLAS workspaces). nvidia-smi shows 400 to 600 MiB on A100 and H100 for a
process that has run one operation. Not measured here."""
CHANNELS = 16
CHANNEL_BYTES = 4 * MIB + 2 * MIB
"""Bytes of one channel of a communicator: NCCL_BUFFSIZE (4 MiB by default) for the simple protocol
(NCCL user guide, environment variables), and about half of that for LL and LL128."""
SLACK = 0.03
"""Share of the tensors' bytes that the caching allocator holds but cannot use: blocks are rounded
to 2 MiB and cut from segments (PyTorch notes on CUDA semantics, memory management). An
assumption."""


def reserve_bytes(mesh: Mesh, tensors: int, fabric: Fabric | None) -> Mapping[str, int]:
    """Bytes in addition to `tensors` bytes of tensors; empty for a CPU or an unknown device."""
    if fabric is None or fabric.profile.device == "cpu":
        return {}
    # One communicator per axis in use, and one for all ranks.
    axes = sum(degree > 1 for degree in mesh.degrees)
    groups = axes + 1 if axes else 0
    return {
        "communication": groups * CHANNELS * CHANNEL_BYTES,
        "context": CONTEXT_BYTES,
        "slack": int(SLACK * tensors),
    }
