"""Metrics as text: OpenMetrics for a scrape, and the older text format for node_exporter."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.web.fleet import FleetState
from orchestrator.web.metrics.families import Floor, Quantiles, Sample, families_of


class Exposition:
    """Lives as long as the process, because counters must not fall between two scrapes."""

    def __init__(self) -> None:
        self.floor = Floor()

    def text(
        self, state: FleetState, accept: str, quantiles: Quantiles | None = None
    ) -> tuple[bytes, str]:
        """The metrics and their content type, in the best format that `accept` allows.

        Args:
            quantiles: of the ranks of the only job; None: unknown.
        """
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no version
            encoder, content_type = choose_encoder("")
        return encoder(self._registry(state, quantiles)), content_type

    def write(self, state: FleetState, path: Path) -> None:
        """Write the file for node_exporter's textfile collector, as a whole. Raises OSError."""
        write_whole(path, generate_latest(self._registry(state, None)))

    def _registry(self, state: FleetState, quantiles: Quantiles | None) -> CollectorRegistry:
        samples = [
            Sample(job=job, view=job.snapshot.view, quantiles=quantiles or {}) for job in state.jobs
        ]
        made = families_of(samples, len(state.unreadable), state.strikes, self.floor)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(list(made)))
        return registry


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self.metrics

    def describe(self) -> Iterator[Metric]:
        return iter(())
