"""Metrics as text: OpenMetrics for a scrape, and the older text format for node_exporter."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.posix.run_with_timeout import Lane
from orchestrator.web.fleet import FleetState
from orchestrator.web.metrics.families import Floor, Quantiles, Sample, families_of

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
NO_FIGURES: Mapping[str, Sequence[float]] = {}


def quantiles(values: Sequence[float]) -> Mapping[float, float]:
    """Quantile -> value, by the nearest rank; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {one: ordered[min(last, max(0, math.ceil(one * len(ordered)) - 1))] for one in QUANTILES}


class Exposition:
    """Lives as long as the process, because counters must not fall between two scrapes."""

    def __init__(self) -> None:
        self.floor = Floor()
        self.made: tuple[FleetState, str, bytes] | None = None
        """The last state, its content type and its text, for the next scrape of the same state."""
        self.lane = Lane()
        """Where `text` is called: thousands of jobs would keep an event loop for seconds."""

    def text(
        self, state: FleetState, accept: str, figures: Mapping[str, Sequence[float]] = NO_FIGURES
    ) -> tuple[bytes, str]:
        """The metrics and their content type, in the best format that `accept` allows.

        Args:
            accept: HTTP header; empty: the text format, which node_exporter reads too.
            figures: of all ranks of the only job; empty: unknown.
        """
        found = {name: quantiles(values) for name, values in figures.items()}
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no version
            encoder, content_type = choose_encoder("")
        known = self.made
        if known is not None and known[0] is state and known[1] == content_type and not figures:
            return known[2], content_type
        said = encoder(self._registry(state, found))
        self.made = (state, content_type, said)
        return said, content_type

    def _registry(self, state: FleetState, found: Quantiles) -> CollectorRegistry:
        samples = [Sample.of(job, found) for job in state.jobs]
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
