"""Faults of training: what ranks raise and log, and when.

The messages are those of `tests/captured/failures/samples.yaml`, so each gets its failure class.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from signal import Signals

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.files import exit_codes


class RankFailure(Struct, frozen=True):
    """How a rank exits: its exit code or signal, its exception and its log line."""

    message: str = ""
    error: str = ""
    """Class of the exception; empty: the message is only in the log."""
    code: int | None = 1
    signal: Signals | None = None
    first_bad_step: int | None = None
    """The first bad step."""
    failure_class: str = "unknown"
    """The failure class, unless the user defines another for it."""
    symptom: bool = False
    """A rank also reports this after a peer failed, so it is not a root cause."""

    @property
    def line(self) -> str:
        return f"{self.error}: {self.message}" if self.error else self.message


_ERRORS = {
    "python-exception": RankFailure("'input_ids'", "KeyError"),
    "import-or-version": RankFailure("No module named 'flash_attn'", "ModuleNotFoundError"),
    "data-error": RankFailure(
        "Expecting value: line 1 column 1 (char 0)", "json.decoder.JSONDecodeError"
    ),
    "illegal-memory-access": RankFailure(
        "CUDA error: an illegal memory access was encountered", "RuntimeError"
    ),
    "segfault": RankFailure(
        "Fatal Python error: Segmentation fault", code=None, signal=Signals.SIGSEGV
    ),
    "sigkill-from-outside": RankFailure(code=None, signal=Signals.SIGKILL),
    "gpu-lost": RankFailure("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"),
    "xid-48-double-bit-ecc": RankFailure(
        "NVRM: Xid (PCI:0000:07:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double"
        " bit error (DBE) has been detected on GPU in the framebuffer at physAddr 0x7fdf0de80"
    ),
    "uncorrectable-ecc": RankFailure(
        "CUDA error: uncorrectable ECC error encountered", "RuntimeError"
    ),
    "ended-early": RankFailure(code=exit_codes.OK),
    "licence-server": RankFailure("licence 7 is refused by the server", "RuntimeError"),
}
ERRORS = {name: replace(failure, failure_class=name) for name, failure in _ERRORS.items()}
"""Failure class -> a failure that happens once. The last class is one of the user."""

HARDWARE_FAILURES = frozenset(
    ERRORS[name] for name in ("gpu-lost", "xid-48-double-bit-ecc", "uncorrectable-ecc")
)
"""Failures that only hardware causes."""

_START_FAILURES = {
    "name-resolution": RankFailure("[Errno -2] Name or service not known", "socket.gaierror"),
    "stale-file-handle": RankFailure("[Errno 116] Stale file handle", "OSError"),
    "storage-error": RankFailure("write(): fd 29 failed with Input/output error", "RuntimeError"),
    "infiniband-error": RankFailure("NCCL WARN NET/IB : Got async event : port error"),
    "rendezvous-failure": RankFailure(
        "Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "torch.distributed.DistStoreError",
        symptom=True,
    ),
}
START_FAILURES = {
    name: replace(failure, failure_class=name) for name, failure in _START_FAILURES.items()
}
"""Failure class -> a failure of every attempt until the fault ends."""

OUT_OF_MEMORY = RankFailure(
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "torch.OutOfMemoryError",
    failure_class="cuda-out-of-memory",
)


def not_finite(step: int, first_bad_step: int) -> RankFailure:
    message = f"step {step}: loss is nan, and has not been finite since step {first_bad_step}"
    return RankFailure(
        message,
        "NotFinite",
        exit_codes.UNSTABLE,
        first_bad_step=first_bad_step,
        failure_class="nan-loss",
    )


@dataclass(slots=True)
class TrainingFaults:
    on_effect: Callable[[str], None]
    """Called with the kind of each fault that a rank meets."""
    start_fails_until: float = 0.0
    """Until this time every attempt fails with `healing`."""
    start_failure: RankFailure = field(default_factory=RankFailure)
    device_bytes: int | None = None
    """Device memory in bytes; a plan that takes more runs out of memory."""
    bad_batches: frozenset[int] = frozenset()
    """Batches with a NaN loss."""
    diverges_at: int | None = None
    """The first step from which on the loss is NaN with any data."""
    bad_steps_allowed: int = 1
    """Consecutive bad steps after which a rank fails."""

    def clear(self) -> None:
        """A user has fixed the cause of all faults."""
        self.start_fails_until, self.device_bytes = 0.0, None
        self.bad_batches, self.diverges_at = frozenset(), None

    def failure_at_start(self, now: float) -> RankFailure | None:
        if now >= self.start_fails_until:
            return None
        self.on_effect("fabric")
        return self.start_failure

    def makes_nan(self, step: int, batch: int) -> bool:
        bad = batch in self.bad_batches or (
            self.diverges_at is not None and step >= self.diverges_at
        )
        return bad and self._met("nan")

    def runs_out_of_memory(self, peak_bytes: int) -> bool:
        large = self.device_bytes is not None and peak_bytes > self.device_bytes
        return large and self._met("memory")

    def _met(self, kind: str) -> bool:
        self.on_effect(kind)
        return True
