"""Records the time and memory use of some steps with torch.profiler."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from orchestrator.contract.files.profile_request import ProfileRequest, request_path, take_request
from orchestrator.contract.messages.rank_messages import Profiled
from orchestrator.contract.spec.train_spec import ProfileSpec
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")

MOST_EVENTS = 200_000
"""The newest allocations and frees that a memory snapshot contains."""


@dataclass(slots=True)
class Recording:
    first: int
    """The first step."""
    steps: int
    name: str
    """Of its files, without the suffixes."""
    request: str = ""
    """Id of the request; empty if the configuration named the steps."""
    profiler: profile | None = None


class Profiling:
    """Profiles the steps of this rank that the configuration names, and those that `ndctl profile`
    asks for.

    It writes `<name>.trace.json.gz` for Perfetto or chrome://tracing and, on a GPU,
    `<name>.memory.pickle` for pytorch.org/memory_viz. On a CPU the allocations are in the trace.
    The name is `rank-<r>`, and on request `rank-<r>.step-<first>`.
    """

    def __init__(
        self, spec: ProfileSpec | None, folder: Path, device: torch.device, reporter: Reporter
    ) -> None:
        """`spec`: None if the configuration names no step of this rank."""
        self._spec = spec
        self._folder = folder
        self._cuda = device.type == "cuda"
        self._reporter = reporter
        self._running: Recording | None = None
        env = reporter.env
        # Without an agent nobody can ask. A look takes a microsecond: the folder is local.
        self._requests = request_path(env) if env.heartbeat_socket else None

    def before(self, step: int) -> None:
        if self._running is not None:
            return
        found = self._wanted(step)
        if found is None:
            return
        # Starting the profiler and each recorded step take long. The agent must not see a hang.
        self._reporter.profiled = True
        self._reporter.beat("train")
        try:
            found.profiler = self._started()
        except Exception as exc:  # noqa: BLE001 (a failed profile must not end the job)
            self._end(found, [], f"failed to start the profile: {exc}")
            return
        self._running = found

    def _started(self) -> profile:
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities, record_shapes=True, profile_memory=True, with_stack=True
        )
        profiler.start()
        return profiler

    def _wanted(self, step: int) -> Recording | None:
        name, spec = f"rank-{self._rank}", self._spec
        if spec is not None and step == spec.at_step:
            return Recording(step, spec.steps, name)
        if self._requests is None or not os.access(self._requests, os.F_OK):
            return None
        asked: ProfileRequest | None = take_request(self._requests)
        if asked is None:
            return None
        return Recording(step, asked.steps, f"{name}.step-{step}", asked.id)

    def after(self, step: int) -> None:
        running = self._running
        if running is not None and step >= running.first + running.steps - 1:
            self.finish()

    def finish(self) -> None:
        """Write the profile, also if the job ends before all steps are recorded."""
        if self._running is None:
            return
        recorded, self._running = self._running, None
        # Writing may take longer than many steps. The phase tells the agent that it is no hang.
        self._reporter.beat("write")
        files, why = [], ""
        try:
            files = self._write(recorded)
            LOG.info(
                "rank %d: wrote the profile from step %d: %s", self._rank, recorded.first, files[0]
            )
        except Exception as exc:  # noqa: BLE001 (a failed profile must not end the job)
            why = f"failed to write the profile: {exc}"
        self._end(recorded, files, why)

    def _end(self, recorded: Recording, files: list[Path], why: str) -> None:
        """`why`: the reason why there are no `files`, else empty."""
        if self._cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
        if why:
            LOG.warning("rank %d: %s", self._rank, why)
        self._reporter.profiled = False
        self._reporter.beat("train")
        if recorded.request:
            self._answer(recorded, files, why)

    def _write(self, recorded: Recording) -> list[Path]:
        assert recorded.profiler is not None
        recorded.profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"{recorded.name}.trace.json.gz"
        snapshot = self._folder / f"{recorded.name}.memory.pickle"
        if self._cuda:
            torch.cuda.memory._dump_snapshot(str(snapshot))
        recorded.profiler.export_chrome_trace(str(trace))
        return [trace, snapshot] if self._cuda else [trace]

    def _answer(self, recorded: Recording, files: list[Path], why: str) -> None:
        env = self._reporter.env
        self._reporter.profile_written(
            Profiled(
                attempt=env.attempt,
                rank=env.rank,
                request=recorded.request,
                first_step=recorded.first,
                files=tuple(map(str, files)),
                why=why[:1_000],
            )
        )

    @property
    def _rank(self) -> int:
        return self._reporter.env.rank
