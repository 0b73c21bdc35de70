"""`train.deterministic`: the same losses, bit by bit, whenever the same plan runs again.

On a CPU this always holds, because each operation and each of gloo's collectives adds in one order.
On a GPU some kernels add with atomics, in the order in which threads finish. The settings here
replace these kernels. An operation that has no other kernel raises an error.

They do not cover another mesh, GPU, driver or release of torch, and no host in another place of the
network: NCCL may then arrange its rings differently. Each adds the same numbers in another order.
"""

import os

import torch

VARIABLES = {
    # Without a workspace of its own for each stream, cuBLAS may split a product differently.
    # NVIDIA's documentation names this value; torch raises an error at a product without it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # In a ring, each value is summed in the order of the ranks. Which trees and switches (NVLS) sum
    # a value is chosen by size and load, and switches sum in the order of arrival.
    "NCCL_ALGO": "Ring",
}
"""Read when a process uses cuBLAS and NCCL for the first time. Values of the user have priority."""


def make_deterministic() -> None:
    """Call it before the first operation on a GPU and before the process group is made."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)  # noqa: TID251 (libraries read them there)
    # Errors instead of warnings. It also makes torch fill new memory, so that a kernel which reads
    # memory before it is written gives the same result, and stops Inductor from choosing kernels by
    # their measured speed.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # The backward pass of cuDNN's attention adds with atomics. Those of FlashAttention and of the
    # memory-efficient kernel have a deterministic form, which torch now selects.
    torch.backends.cuda.enable_cudnn_sdp(False)
