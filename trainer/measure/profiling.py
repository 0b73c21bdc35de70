"""Records some steps with torch.profiler: where their time went, and what took memory."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from orchestrator.contract.spec.train_spec import ProfileSpec
from trainer.rank.emit import Reporter

LOG = logging.getLogger("trainer")

MOST_EVENTS = 200_000
"""Allocations and frees that a memory snapshot goes back."""


class Profiling:
    """Told of every step of this rank, it records those that the configuration names.

    It leaves `rank-<r>.trace.json.gz`, for Perfetto or chrome://tracing, and of a GPU's memory
    `rank-<r>.memory.pickle`, for pytorch.org/memory_viz. A CPU has no such snapshot: its
    allocations are in the trace.
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
        # To start takes long too, and so may each of the steps that are recorded.
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
        """Write what was recorded, also of a job that ends before all the steps were done."""
        if self._running is None:
            return
        recorded, self._running = self._running, None
        # Writing may take longer than many steps do, and is no hang.
        self._reporter.beat("write")
        try:
            self._write(recorded)
        except Exception as exc:  # noqa: BLE001 (whatever it is, a profile is not worth the job)
            LOG.warning("rank %d: the profile could not be written: %s", self._rank, exc)
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
        LOG.info("rank %d: a profile from step %d is in %s", self._rank, self._spec.at_step, trace)

    @property
    def _rank(self) -> int:
        return self._reporter.env.rank
