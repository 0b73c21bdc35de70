"""Faults of training: what ranks raise and log, and when.

The messages are those of `tests/captured/failures/samples.yaml`, so each gets its failure class.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from signal import Signals

from orchestrator.contract.files import exit_codes


@dataclass(frozen=True, slots=True)
class Words:
    """How a rank exits: its exit code or signal, its exception and its log line."""

    message: str = ""
    error: str = ""
    """Class of the exception; empty: the message is only in the log."""
    code: int | None = 1
    by: Signals | None = None
    since: int | None = None
    """The first bad step."""
    failure: str = "unknown"
    """The failure class, unless the user defines another for it."""
    symptom: bool = False
    """A rank also reports this after a peer failed, so it is not a root cause."""

    @property
    def line(self) -> str:
        return f"{self.error}: {self.message}" if self.error else self.message


_ERRORS = {
    "python-exception": Words("'input_ids'", "KeyError"),
    "import-or-version": Words("No module named 'flash_attn'", "ModuleNotFoundError"),
    "data-error": Words(
        "Expecting value: line 1 column 1 (char 0)", "json.decoder.JSONDecodeError"
    ),
    "illegal-memory-access": Words(
        "CUDA error: an illegal memory access was encountered", "RuntimeError"
    ),
    "segfault": Words("Fatal Python error: Segmentation fault", code=None, by=Signals.SIGSEGV),
    "sigkill-from-outside": Words(code=None, by=Signals.SIGKILL),
    "gpu-lost": Words("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"),
    "xid-48-double-bit-ecc": Words(
        "NVRM: Xid (PCI:0000:07:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double"
        " bit error (DBE) has been detected on GPU in the framebuffer at physAddr 0x7fdf0de80"
    ),
    "uncorrectable-ecc": Words("CUDA error: uncorrectable ECC error encountered", "RuntimeError"),
    "ended-early": Words(code=exit_codes.OK),
    "licence-server": Words("licence 7 is refused by the server", "RuntimeError"),
}
ERRORS = {name: replace(words, failure=name) for name, words in _ERRORS.items()}
"""Failure class -> a failure that happens once. The last class is one of the user."""

BREAKS = frozenset(
    ERRORS[name] for name in ("gpu-lost", "xid-48-double-bit-ecc", "uncorrectable-ecc")
)
"""Failures that only hardware causes."""

_HEALING = {
    "name-resolution": Words("[Errno -2] Name or service not known", "socket.gaierror"),
    "stale-file-handle": Words("[Errno 116] Stale file handle", "OSError"),
    "storage-error": Words("write(): fd 29 failed with Input/output error", "RuntimeError"),
    "infiniband-error": Words("NCCL WARN NET/IB : Got async event : port error"),
    "rendezvous-failure": Words(
        "Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "torch.distributed.DistStoreError",
        symptom=True,
    ),
}
HEALING = {name: replace(words, failure=name) for name, words in _HEALING.items()}
"""Failure class -> a failure of every attempt until the fault ends."""

OUT_OF_MEMORY = Words(
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "torch.OutOfMemoryError",
    failure="cuda-out-of-memory",
)


def not_finite(step: int, since: int) -> Words:
    message = f"step {step}: loss is nan, and has not been finite since step {since}"
    return Words(message, "NotFinite", exit_codes.UNSTABLE, since=since, failure="nan-loss")


@dataclass(slots=True)
class Troubles:
    happens: Callable[[str], None]
    """Called with the kind of each fault that a rank meets."""
    heals_at: float = 0.0
    """Until this time every attempt fails with `healing`."""
    healing: Words = field(default_factory=Words)
    capacity: int | None = None
    """Device memory in bytes; a plan that takes more runs out of memory."""
    poison: frozenset[int] = frozenset()
    """Batches with a NaN loss."""
    diverges_at: int | None = None
    """The first step from which on the loss is NaN with any data."""
    patience: int = 1
    """Consecutive bad steps after which a rank fails."""

    def repair(self) -> None:
        """A user has fixed the cause of all faults."""
        self.heals_at, self.capacity = 0.0, None
        self.poison, self.diverges_at = frozenset(), None

    def at_start(self, now: float) -> Words | None:
        if now >= self.heals_at:
            return None
        self.happens("fabric")
        return self.healing

    def spoils(self, step: int, batch: int) -> bool:
        bad = batch in self.poison or (self.diverges_at is not None and step >= self.diverges_at)
        return bad and self._met("nan")

    def too_large(self, peak_bytes: int) -> bool:
        large = self.capacity is not None and peak_bytes > self.capacity
        return large and self._met("memory")

    def _met(self, kind: str) -> bool:
        self.happens(kind)
        return True
