"""Records the time and memory use of some steps with torch.profiler."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from orchestrator.contract.spec.train_spec import ProfileSpec
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")

MOST_EVENTS = 200_000
"""The newest allocations and frees that a memory snapshot contains."""


class Profiling:
    """Profiles the steps of this rank that the configuration names.

    It writes `rank-<r>.trace.json.gz` for Perfetto or chrome://tracing and, on a GPU,
    `rank-<r>.memory.pickle` for pytorch.org/memory_viz. On a CPU the allocations are in the trace.
    """

    def __init__(
        self, spec: ProfileSpec, folder: Path, device: torch.device, reporter: Reporter
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._cuda = device.type == "cuda"
        self._reporter = reporter
        self._running: profile | None = None

    def before(self, step: int) -> None:
        if step != self._spec.at_step:
            return
        # Starting the profiler and each recorded step take long. The agent must not see a hang.
        self._reporter.profiled = True
        self._reporter.beat("train")
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(
            activities=activities, record_shapes=True, profile_memory=True, with_stack=True
        )
        self._running.start()

    def after(self, step: int) -> None:
        if self._running is not None and step >= self._spec.at_step + self._spec.steps - 1:
            self.finish()

    def finish(self) -> None:
        """Write the profile, also if the job ends before all steps are recorded."""
        if self._running is None:
            return
        recorded, self._running = self._running, None
        # Writing may take longer than many steps. The phase tells the agent that it is no hang.
        self._reporter.beat("write")
        try:
            self._write(recorded)
        except Exception as exc:  # noqa: BLE001 (a failed profile must not end the job)
            LOG.warning("rank %d: failed to write the profile: %s", self._rank, exc)
        self._reporter.profiled = False
        self._reporter.beat("train")

    def _write(self, recorded: profile) -> None:
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._cuda:
            snapshot = self._folder / f"rank-{self._rank}.memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        trace = self._folder / f"rank-{self._rank}.trace.json.gz"
        recorded.export_chrome_trace(str(trace))
        LOG.info(
            "rank %d: wrote the profile from step %d: %s", self._rank, self._spec.at_step, trace
        )

    @property
    def _rank(self) -> int:
        return self._reporter.env.rank
