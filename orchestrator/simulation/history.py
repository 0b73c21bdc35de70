"""A readable log of a simulated history."""

from dataclasses import dataclass, field

from orchestrator.simulation.clock import Timeline


@dataclass(slots=True)
class History:
    """Keeps lines only if `kept`, because most histories are never read."""

    timeline: Timeline
    keep_history: bool = False
    lines: list[str] = field(default_factory=list)

    def note(self, source: str, message: object) -> None:
        if self.keep_history:
            self.lines.append(f"{self.timeline.now:10.2f}  {source:<12} {message}")
