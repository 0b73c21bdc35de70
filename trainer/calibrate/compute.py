"""Matrix products by shape, attention by length, copies, and the start of a small operation."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from trainer.calibrate.repeat import Run, Task

MIB = 1 << 20


class Sizes(NamedTuple):
    """Sizes of the operations. A CPU rank computes a thousandth of what a GPU does."""

    products: tuple[tuple[int, int, int], ...]
    """Rows, columns and inner size."""
    lengths: tuple[int, ...]
    tokens: int
    """Tokens of attention together, in sequences of each length."""
    heads: int
    bytes: int
    """Of a copy."""


ON_GPU = Sizes(
    # The best of them is what a device reaches at most (S. Bekman, Maximum Achievable Matmul
    # FLOPS). The others have the shapes of layers of 8B and 70B models, also with tp.
    products=(
        (8192, 8192, 8192),
        (16384, 8192, 4096),
        (8192, 14336, 4096),
        (8192, 4096, 14336),
        (8192, 28672, 8192),
        (8192, 4096, 1024),
        (8192, 4096, 512),
        (2048, 4096, 4096),
    ),
    lengths=(1024, 2048, 4096, 8192, 16384, 32768),
    tokens=32768,
    heads=32,
    bytes=512 * MIB,
)
ON_CPU = Sizes(
    products=(
        (512, 512, 64),
        (512, 512, 256),
        (512, 512, 1024),
        (1024, 256, 256),
        (512, 1024, 512),
    ),
    lengths=(128, 256, 512, 1024),
    tokens=1024,
    heads=4,
    bytes=32 * MIB,
)
HEADS = (128, 64)
"""Features of a head."""
CHAIN = 64
"""Small operations, one after the other."""
SMALL = 16
"""Values of a small operation."""


def sizes_of(device: torch.device) -> Sizes:
    return ON_GPU if device.type == "cuda" else ON_CPU


def compute_tasks(device: torch.device) -> tuple[list[Task], list[Task]]:
    """The most important ones, and those that may be missing if the time does not suffice."""
    sizes = sizes_of(device)
    # The trainer computes in bfloat16 on GPUs, and in float32 on CPUs.
    used, other = torch.bfloat16, torch.float32
    if device.type == "cpu":
        used, other = other, used
    wide, narrow = HEADS
    first = [
        *_products(device, sizes, used),
        *_attention(device, sizes, used, wide, sizes.lengths),
        *_copies(device, sizes),
    ]
    rest = [
        *_products(device, sizes, other),
        *_attention(device, sizes, used, narrow, sizes.lengths[-1:]),
    ]
    return first, rest


def _products(device: torch.device, sizes: Sizes, kind: torch.dtype) -> Iterator[Task]:
    for rows, columns, inner in sizes.products:
        size = {"rows": rows, "columns": columns, "inner": inner}
        make = partial(product, device, kind, rows, columns, inner)
        yield Task(what="product", make=make, size=size, kind=name(kind))


def _attention(
    device: torch.device, sizes: Sizes, kind: torch.dtype, head: int, lengths: Sequence[int]
) -> Iterator[Task]:
    for length in lengths:
        size = {"tokens": length, "sequences": sizes.tokens // length}
        size |= {"heads": sizes.heads, "head": head}
        for way in ("forward", "backward"):
            make = partial(attention, device, kind, size, way)
            yield Task(what=f"attention {way}", make=make, size=size, kind=name(kind))


def _copies(device: torch.device, sizes: Sizes) -> Iterator[Task]:
    values, size = sizes.bytes // 4, sizes.bytes
    yield Task(what="copy", make=partial(copy, device, values), size={"bytes": 2 * size})
    yield Task(what="activation", make=partial(gated, device, values), size={"bytes": 3 * size})
    yield Task(what="small operations", make=partial(chain, device), size={"operations": 2 * CHAIN})
    if device.type == "cuda":
        for way in ("to the device", "to the host"):
            make = partial(host_copy, device, size, way)
            yield Task(what=f"copy {way}", make=make, size={"bytes": size})


def name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def product(device: torch.device, kind: torch.dtype, rows: int, columns: int, inner: int) -> Run:
    """Random numbers, because the power that a GPU draws, and so its clock, depends on them."""
    left = torch.randn(rows, inner, device=device, dtype=kind)
    right = torch.randn(columns, inner, device=device, dtype=kind)
    return lambda: linear(left, right)


def attention(device: torch.device, kind: torch.dtype, size: dict[str, int], way: str) -> Run:
    """What `trainer/model/attention.py` calls for a causal layer without context parallel."""
    shape = (size["sequences"], size["heads"], size["tokens"], size["head"])
    q, k, v = (torch.randn(shape, device=device, dtype=kind, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    if way == "forward":
        return forward
    out = forward()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def copy(device: torch.device, values: int) -> Run:
    source = torch.randn(values, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def gated(device: torch.device, values: int) -> Run:
    """Reads two tensors and writes one, as the MLP does between its products."""
    gate, up = (torch.randn(values, device=device) for _ in range(2))
    out = torch.empty_like(gate)
    return lambda: torch.mul(gate, up, out=out)


def chain(device: torch.device) -> Run:
    """Operations on so few values that only their start takes time, forward and backward."""
    value = torch.randn(SMALL, device=device, requires_grad=True)

    def run() -> object:
        out = value
        for _ in range(CHAIN):
            out = out * 1.01
        return torch.autograd.grad(out.sum(), value)

    return run


def host_copy(device: torch.device, count: int, way: str) -> Run:
    here = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, dtype=torch.uint8, device=device)
    target, source = (there, here) if way == "to the device" else (here, there)
    return lambda: target.copy_(source, non_blocking=True)
