"""The bundled trainer against its peers, on the same two ranks, model sizes and batch.

    python -m benchmarks.trainer [ALTERNATIONS]

The peers are Accelerate as documented, Accelerate with every setting that ours has, and loops
written by hand over torch's FSDP2 and DDP. All contestants live in the same two processes and train
a few steps each in turn, so that whatever else the machine does hits them alike. Each takes the
mean loss and the gradient norm of every step to the host, clips, and updates with fused AdamW. The
peers get ready-made batches; ours reads its own and writes its ledger.

Peak memory is what operations of rank 0 allocate in one step, storage by storage, together with
the states that it keeps. Buffers inside of gloo are not seen, for anyone.

Target: at least 1.05 of the best peer at the same mesh, with the interval above 1.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.measure.ranks import run_ranks
from benchmarks.measure.timing import machine, middle, pairs

STEPS = 3
"""That one contestant trains before it is the next one's turn."""
RANKS = 2
MIB = 1 << 20
FSDP_PEERS = ("accelerate fsdp2", "accelerate fsdp2, tuned", "fsdp2 by hand")
PEERS = {
    "fsdp": FSDP_PEERS,
    "fsdp, gathers as on a GPU": FSDP_PEERS,
    "fsdp without reshard": ("accelerate fsdp2 without reshard, tuned",),
    "ddp": ("accelerate ddp", "accelerate ddp, tuned", "ddp by hand"),
}
"""Ours -> theirs at the same mesh."""


def main(alternations: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = run_ranks(
            "benchmarks.trainer.contestants", RANKS, Path(folder), alternations, STEPS
        )
    rates: Mapping[str, list[float]] = result["rates"]
    peaks: Mapping[str, int] = result["peaks"]
    print(f"{machine()}, {alternations} alternations of {STEPS} steps")
    print("| contestant | tokens/s | peak memory |")
    print("|---|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {middle(values, 0)} | {peaks[name] / MIB:.0f} MiB |")
    print("\n| ours | peer | speed, ours / peer | memory, ours / peer |")
    print("|---|---|---|---|")
    for ours, theirs in PEERS.items():
        for peer in theirs:
            memory = peaks[ours] / peaks[peer]
            print(f"| {ours} | {peer} | {middle(pairs(rates, ours, peer), 3)} | {memory:.2f} |")
    gain = middle(pairs(rates, "fsdp", "fsdp, gathers as on a GPU"), 3)
    print(f"\ngain of ours by gathering without waiting, which a GPU has for every peer: {gain}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
