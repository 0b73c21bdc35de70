"""How many files a reader must open to follow a decision. Each test prints the files it found."""

import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import orchestrator
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import HostStopped
from orchestrator.job.failures.policy import default_rules
from tests.job.job_driver import Job, exited, host

ROOT = Path(orchestrator.__file__).parent
MOST_FILES = 10


class CallTrace:
    """Files of `orchestrator` that were entered, and which file called into which."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.calls: dict[str, set[str]] = {}

    def follow(self, decide: Callable[[], Any]) -> None:
        sys.setprofile(self._seen)
        try:
            decide()
        finally:
            sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        name = _file_of(frame)
        if event != "call" or name is None:
            return
        if name not in self.files:
            self.files.append(name)
        caller = _file_of(frame.f_back) if frame.f_back else None
        if caller not in (None, name):
            self.calls.setdefault(name, set()).add(caller)


def _file_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def test_a_dead_rank_until_the_next_attempt() -> None:
    """A rank is killed, the agents stop the others, and the next attempt starts."""
    default_rules()  # a process reads them once, before any failure
    job, trace = Job().running(), CallTrace()
    killed = exited(1)  # as the agent of its host classified it
    trace.follow(lambda: job.tell(killed))
    for number in range(2):
        stopped = HostStopped(at=job.now(), attempt=1, host=host(number), finished=False)
        trace.follow(lambda stopped=stopped: job.tell(stopped))  # type: ignore[misc]
    _, actions = job.all[-1]
    assert [type(action) for action in actions] == [StartAttempt]
    sys.stdout.write("\n".join(trace.files) + "\n")
    assert len(trace.files) <= MOST_FILES
    # No file calls back into a file that led to it; otherwise this raises CycleError.
    order = [*TopologicalSorter(trace.calls).static_order()]
    assert order[0] == "job/transitions.py"
