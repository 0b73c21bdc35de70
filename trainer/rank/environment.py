"""What torch reads from the environment while it is imported or makes process groups.

Whoever starts the ranks may set these otherwise; docs/reference.md says why they are as they are.
"""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.files.env import RankEnv, nccl_pipes
from orchestrator.contract.files.run_dir import FLIGHT_FILES


def torch_defaults(env: RankEnv) -> Mapping[str, str]:
    """Variables to set where nobody has set them."""
    values = {
        # The last collectives of every rank, with their stacks, for whoever looks into a hang.
        "TORCH_FR_BUFFER_SIZE": "2000",
        # Written when a collective has timed out: the supervisor acts on the exit that follows.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # The monitor kills a process whose watchdog thread has not moved for so long, which slow
        # file systems and compilers can also cause: no sooner than the longest timeout.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800",
        # Symbolizing C++ stacks while a process dies can hang it; SIGUSR2 shows the Python stacks.
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    }
    if env.trace_dir:
        values["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(env.trace_dir) / FLIGHT_FILES)
    if env.heartbeat_socket:
        # NCCL's monitor is a thread of C++: asked at this pipe it dumps also while the GIL is held.
        pipes = nccl_pipes(env.heartbeat_socket, env.attempt)
        values["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = pipes
    return values
