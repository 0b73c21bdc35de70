"""The link of a rank to the agent of its host. Without an agent it does nothing."""

import contextlib
import functools
import json
import math
import operator
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, SupportsIndex

SEND_TIMEOUT = struct.pack("ll", 1, 0)
STEPS = struct.Struct("<q")
MAX_BYTES = 60_000
MAX_MESSAGE = 4_000
MEMORY_SNAPSHOT = "memory_snapshot"
"""Attribute of an exception: the path of the state of the GPU's memory, if it was written."""


class Link:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.rank = int(environ.get("RANK", "0"))
        self.world_size = int(environ.get("WORLD_SIZE", "1"))
        # Under `torchrun --max-restarts` without ndctl, torchrun itself restarts the ranks.
        restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.attempt = int(environ.get("NDCTL_ATTEMPT", "1")) + restarts
        self.path = environ.get("NDCTL_HEARTBEAT_SOCKET", "")
        self.active = bool(self.path)
        self.phase = "init"
        self._step = 0
        fd = environ.get("NDCTL_PROGRESS_FD")
        self._fd = int(fd) if fd is not None and _is_shared(int(fd)) else None
        self._pid = os.getpid()
        self.loading: set[object] = set()
        """One entry per call, in any thread, that waits for workers of a data loader to start or
        end. Meanwhile the phase `train` is reported as `data`, also if another thread steps."""
        self.logged = False
        """The script reports its steps itself, with `ndctl.log`."""
        self.use: Mapping[str, float] = {}
        """Memory and GPU that the rank uses, as keys of `metrics.jsonl`."""
        self.resumed = False
        """It is known from which step the script resumed."""
        self.saved: int | None = None
        """Step of the last checkpoint that the script completed in this attempt."""
        self.stopped = False
        """The script knows that it was asked to stop, so its end is not the end of the training."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        return cls(environ)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, done: int) -> None:
        if os.getpid() != self._pid:
            return
        self._step = done
        if self._fd is not None:
            os.pwrite(self._fd, STEPS.pack(done), 0)

    def stepped(self) -> None:
        self.step += 1
        self.beat("train")

    def beat(self, phase: str | None = None, **fields: Any) -> None:
        self.phase = phase or self.phase
        shown = "data" if self.loading and self.phase == "train" else self.phase
        body = {"rank": self.rank, "step": self.step, "phase": shown, **fields}
        loss = body.get("loss")
        if loss is not None and not math.isfinite(loss):
            body["loss"] = None
        self._send({"kind": "Beat", "attempt": self.attempt, **body}, wait=False)

    def send(self, message: Mapping[str, Any]) -> None:
        self._send(message, wait=True)

    def raised(self, exc: BaseException) -> None:
        import traceback  # here, like socket below, because its import takes several milliseconds

        text = "".join(traceback.format_exception(exc))[-MAX_BYTES // 2 :]
        error = {
            "error": type(exc).__name__,
            "message": str(exc)[:MAX_MESSAGE],
            # In which step; 0: the program has reported none.
            "step": self.step + 1 if self.step else 0,
            "traceback": text,
            "memory_snapshot": getattr(exc, MEMORY_SNAPSHOT, ""),
        }
        self.send(
            {"kind": "RankRaised", "attempt": self.attempt, "rank": self.rank, "error": error}
        )

    def _send(self, message: Mapping[str, Any], *, wait: bool) -> None:
        if not self.active or os.getpid() != self._pid:
            return
        import socket

        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            if wait:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)
            else:
                sock.setblocking(False)
            sock.sendto(json.dumps(message).encode(), self.path)


def _is_shared(fd: int) -> bool:
    try:
        return Path(f"/proc/self/fd/{fd}").readlink().name.startswith("memfd:ndctl-steps")
    except OSError:
        return False


@functools.cache
def current() -> Link:
    return Link.of(os.environ)


def number_of_steps(step: SupportsIndex, call: str) -> int:
    """`step` as an int. It may be an integer of numpy or torch.

    Raises:
        ValueError: it is no number of steps.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(step, bool) and (number := operator.index(step)) >= 0:
            return number
    raise ValueError(f"{call}: step is {step!r}; give the number of steps done")
