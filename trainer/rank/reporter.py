"""Reports the state of this rank to the agent of its host; without an agent it sends nothing.

A heartbeat is sent without waiting and without retry, so that a slow agent never slows training.
Rare datagrams (resumed, saved, a drill, an exception) wait up to a second for room, because the
kernel may keep no more than ten for an agent that is busy.
"""

import contextlib
import math
import os
import socket
import struct
import traceback

from msgspec.structs import replace

from ndctl.rank.link import MEMORY_SNAPSHOT
from ndctl.rank.phases import Phase
from orchestrator.contract.drills import Drill
from orchestrator.contract.files import progress
from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.messages.events import (
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    MemoryCheckpointsSet,
    RankError,
    TrainingResumed,
)
from orchestrator.contract.messages.rank_messages import (
    MAX_BYTES,
    Beat,
    CopiesEnded,
    CopyReady,
    Datagram,
    Profiled,
    RankLeft,
    RankRaised,
    RankStarted,
    to_bytes,
)
from trainer.guard import Unstable

MAX_MESSAGE = 4_000
SEND_TIMEOUT = struct.pack("ll", 1, 0)
"""One second, as the kernel's timeval."""


class Reporter:
    def __init__(self, env: RankEnv) -> None:
        self.env = env
        fd = env.progress_fd
        self._progress_fd = fd if fd is not None and progress.is_shared(fd) else None
        self._step = 0
        self.phase: Phase = "init"
        """The phase of the last heartbeat."""
        self.unread = 0
        """Steps before the present one that are queued on the device, but not known to be done."""
        self.profiled = False
        """Steps are being profiled, which makes them slower, so they have their own time limit."""
        self._nonblocking = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._nonblocking.setblocking(False)
        self._blocking = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._blocking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return self._step

    @step.setter
    def step(self, done: int) -> None:
        self._step = done
        if self._progress_fd is not None:
            progress.write(self._progress_fd, done)

    def started(self) -> None:
        """This process joins an attempt that it was not started for."""
        env = self.env
        started = RankStarted(
            attempt=env.attempt, rank=env.rank, local_rank=env.local_rank, pid=os.getpid()
        )
        self._send(started, self._blocking)

    def left(self) -> None:
        """The rank has left its attempt, and waits."""
        left = RankLeft(attempt=self.env.attempt, rank=self.env.rank, step=self.step)
        self._send(left, self._blocking)

    def beat(
        self,
        phase: Phase,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        own_s: float | None = None,
    ) -> None:
        self.phase = "profile" if self.profiled and phase == "train" else phase
        beat = Beat(
            attempt=self.env.attempt,
            rank=self.env.rank,
            step=self.step,
            phase=self.phase,
            # JSON has no NaN, and the agent refuses the NaN that Python writes.
            loss=loss if loss is not None and math.isfinite(loss) else None,
            tokens_per_second=tokens_per_second,
            own_s=own_s,
        )
        self._send(beat, self._nonblocking)

    def resumed(
        self, step: int, passed_over: tuple[SkippedCheckpoint, ...], *, in_memory: bool
    ) -> None:
        resumed = TrainingResumed(
            attempt=self.env.attempt, step=step, passed_over=passed_over, in_memory=in_memory
        )
        self._send(resumed, self._blocking)

    def saved(self, step: int) -> None:
        self._send(CheckpointSaved(attempt=self.env.attempt, step=step), self._blocking)

    def save_failed(self, step: int, why: str) -> None:
        why = why[:MAX_MESSAGE]
        self._send(CheckpointFailed(attempt=self.env.attempt, step=step, why=why), self._blocking)

    def interval_changed(self, step: int, old: int, new: int, why: str) -> None:
        changed = CheckpointIntervalChanged(
            attempt=self.env.attempt, step=step, old=old, new=new, why=why
        )
        self._send(changed, self._blocking)

    def copy_ready(self, step: int, slot: int, copies: int) -> None:
        attempt, rank = self.env.attempt, self.env.rank
        ready = CopyReady(attempt=attempt, rank=rank, step=step, slot=slot, copies=copies)
        self._send(ready, self._nonblocking)

    def memory_set(self, copies: int | None, host_bytes: int, why: str) -> None:
        """As in `MemoryCheckpointsSet`."""
        said = MemoryCheckpointsSet(
            attempt=self.env.attempt, copies=copies, host_bytes=host_bytes, why=why[:MAX_MESSAGE]
        )
        self._send(said, self._blocking)

    def copies_ended(self) -> None:
        attempt, rank = self.env.attempt, self.env.rank
        self._send(CopiesEnded(attempt=attempt, rank=rank), self._blocking)

    def drill_fired(self, drill: Drill) -> None:
        attempt, rank = self.env.attempt, self.env.rank
        self._send(
            DrillHappened(attempt=attempt, drill=drill.id, rank=rank, step=drill.step),
            self._blocking,
        )

    @property
    def computing(self) -> int:
        """The step that is being computed, queued on the device, or saved."""
        return self.step + self.unread + (self.phase != "checkpoint")

    def profile_written(self, profiled: Profiled) -> None:
        self._send(profiled, self._blocking)

    def raised(self, exc: BaseException) -> None:
        self._send(raised_of(exc, self.env, self.computing), self._blocking)

    def close(self) -> None:
        self._nonblocking.close()
        self._blocking.close()

    def _send(self, datagram: Datagram, sender: socket.socket) -> None:
        if self.env.heartbeat_socket:
            # Sent to the socket's path, not over a connection, so that a restarted agent gets it.
            with contextlib.suppress(OSError):
                sender.sendto(to_bytes(datagram), self.env.heartbeat_socket)


def raised_of(exc: BaseException, env: RankEnv, step: int) -> RankRaised:
    """`exc` as a datagram of at most `MAX_BYTES`. `step` is the step that was being computed."""
    error = RankError(
        error=type(exc).__name__,
        message=str(exc)[:MAX_MESSAGE],
        step=step,
        traceback="".join(traceback.format_exception(exc)),
        since=exc.since if isinstance(exc, Unstable) else None,
        memory_snapshot=getattr(exc, MEMORY_SNAPSHOT, ""),
    )
    raised = RankRaised(attempt=env.attempt, rank=env.rank, error=error)
    while len(to_bytes(raised)) > MAX_BYTES:
        # The cause is at the end of a traceback, so the beginning is cut.
        error = replace(error, traceback=error.traceback[len(error.traceback) // 2 + 1 :])
        raised = replace(raised, error=error)
    return raised
