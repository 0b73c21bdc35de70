"""The files of the run directory that a leader uses: an interface, and its real implementation.

All methods may block, so the leader calls them in a worker thread.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.fence import Fence, check_leader, write_fence
from orchestrator.contract.files.leader_file import Term, announce, announce_end
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.failover.run_dir_watch import Loss, RunDirWatch
from orchestrator.host_strikes import Line
from orchestrator.job.state import Run
from orchestrator.journal import snapshot
from orchestrator.journal.supervisor import Folded
from orchestrator.leader.records.strike_writer import record
from orchestrator.seams import Clock


class Watch(Protocol):
    """Checks that the run directory still exists. `RunDirWatch` implements it."""

    lost: Loss | None

    def look(self) -> None:
        """Called about once a second. Raises RunDirGone, and OSError if that cannot be told."""


class LeaderStorage(Protocol):
    watch: Watch

    def check_leader(self, name: str) -> None:
        """Called about once a second and before each line of the journal. Raises GivenUp if
        another leader has taken over from `name`, and another OSError if that cannot be told."""

    def write_fence(self, fence: Fence) -> None:
        """Called before an attempt starts. The fence is on disk on return. Raises OSError."""

    def announce(self, term: Term, address: str, port: int, name: str) -> None:
        """Called once, when the server listens. Raises OSError."""

    def announce_end(self, term: Term) -> None:
        """Called once the job has ended. Raises OSError."""

    def write_snapshot(self, folded: Folded, guard: Callable[[], None]) -> None:
        """Called now and then, while nothing is urgent. Raises OSError, Unfit, and the exceptions
        of `guard`."""

    def write_trace(self, attempt: int, name: str, data: bytes) -> None:
        """Called when a hang is analysed. Raises OSError."""

    def record_strike(self, path: Path, line: Line) -> None:
        """Called when a host caused an incident, or is cleared of one. Raises nothing."""

    def record_speed(self, run: Run) -> None:
        """Called once when the job has ended. Raises nothing that storage can cause."""


class LeaderFiles:
    def __init__(self, run_dir: RunDir, clock: Clock) -> None:
        self.run_dir = run_dir
        self.watch: Watch = RunDirWatch(run_dir, clock)

    def check_leader(self, name: str) -> None:
        check_leader(self.run_dir.fence, name)

    def write_fence(self, fence: Fence) -> None:
        write_fence(self.run_dir.fence, fence)

    def announce(self, term: Term, address: str, port: int, name: str) -> None:
        announce(self.run_dir, term, address, port, name)

    def announce_end(self, term: Term) -> None:
        announce_end(self.run_dir, term)

    def write_snapshot(self, folded: Folded, guard: Callable[[], None]) -> None:
        snapshot.write(self.run_dir, folded, guard)

    def write_trace(self, attempt: int, name: str, data: bytes) -> None:
        write_whole(self.run_dir.traces(attempt) / name, data)

    def record_strike(self, path: Path, line: Line) -> None:
        record(path, line)

    def record_speed(self, run: Run) -> None:
        # It imports the planner, which takes long.
        from orchestrator.leader.records.speed_writer import write_speed

        write_speed(self.run_dir, run)
