"""Defaults of environment variables that torch reads at import and when it creates process groups.

Values that are already set have priority. docs/reference.md explains each default.
"""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.files.env import RankEnv, nccl_pipes
from orchestrator.contract.files.run_dir import FLIGHT_FILES

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while NVIDIA's driver is loaded."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of one setting. torch prefers the first, so it must not be set if the user set another."""


def gpu_defaults(environ: Mapping[str, str], *, gpu: bool) -> Mapping[str, str]:
    """Variables to set if they are not set yet; none without a GPU."""
    if not gpu:
        return {}
    # NCCL sends the tensors then, and gloo only objects. By default each of gloo's groups connects
    # every rank with every other one: with 16,384 ranks that is 16,383 connections of each rank for
    # the group of all ranks, and as many for that of checkpoints. On demand a rank connects to its
    # neighbours, and rank 0 to those that send it something. Without a GPU gloo sends the tensors,
    # and a lost rank is noticed at once where a connection exists already.
    values = {"TORCH_GLOO_LAZY_INIT": "1"}
    if not any(name in environ for name in ALLOCATOR):
        # A plan fills almost the whole memory of a device. With segments of fixed size, a rank can
        # run out of memory although enough is free, because no free segment is large enough.
        values[ALLOCATOR[0]] = "expandable_segments:True"
    return values


def torch_defaults(env: RankEnv) -> Mapping[str, str]:
    """Variables to set if they are not set yet."""
    values = {
        # The flight recorder keeps the last collectives of each rank, to diagnose hangs.
        "TORCH_FR_BUFFER_SIZE": "2000",
        # Write a dump when a collective times out, before the process exits.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # NCCL's monitor kills a process whose watchdog thread makes no progress for so long. Slow
        # file systems and compilers cause that too, so it is as long as the longest timeout.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800",
        # Symbolizing C++ stacks while a process dies can hang it.
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    }
    if env.trace_dir:
        values["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(env.trace_dir) / FLIGHT_FILES)
    if env.heartbeat_socket:
        # NCCL's monitor is a C++ thread: it answers at this pipe even while the GIL is held.
        pipes = nccl_pipes(env.heartbeat_socket, env.attempt)
        values["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = pipes
    return values
