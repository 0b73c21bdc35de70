"""A readable log of a simulated history."""

from dataclasses import dataclass, field

from orchestrator.simulation.clock import Timeline


@dataclass(slots=True)
class History:
    """Keeps lines only if `kept`, because most histories are never read."""

    timeline: Timeline
    kept: bool = False
    lines: list[str] = field(default_factory=list)

    def note(self, who: str, words: object) -> None:
        if self.kept:
            self.lines.append(f"{self.timeline.now:10.2f}  {who:<12} {words}")
