"""Events on the cluster's job object: which changes of a job deserve one, and their short texts."""

from collections.abc import Callable, Iterator
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import CheckpointFailed, Event
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.hosts.acquittal import cleared
from orchestrator.job.incident import Incident, newly_resumed
from orchestrator.job.stage import Ended, Running, Starting
from orchestrator.job.state import Run

Reason = Literal["Started", "Incident", "Recovering", "Recovered", "CheckpointFailed", "Ended"]
MOST_TEXT = 480
"""Characters of a text: `kubectl describe` prints one line for each."""
BURST = 10
"""Events that may come together."""
ONE_EVERY_S = 30.0
"""Seconds between two events of a job that fails again and again."""
SAME_S = 600.0
"""Seconds before the same text is sent again."""


class News(Struct, frozen=True, kw_only=True):
    reason: Reason
    text: str
    warning: bool = False
    at: float


class Reporter(Protocol):
    """Sends the events of a job to its cluster. It never blocks and never raises: an event that
    cannot be sent is lost, and training continues."""

    def hear(self, before: Run, event: Event, after: Run) -> None:
        """`event` is in the journal, and changed the state from `before` to `after`."""

    def close(self) -> None:
        """Send what is left, within seconds."""


@runtime_checkable
class TellsCluster(Protocol):
    """A backend whose cluster shows events of its jobs."""

    def reporter(self, launch: LaunchPlan, run_dir: RunDir, guard: Callable[[], None]) -> Reporter:
        """The reporter of one leader. It calls `guard` before it sends anything; `guard` raises
        GivenUp if another leader has taken over."""


def news_of(before: Run, event: Event, after: Run) -> Iterator[News]:
    for incident in after.history.incidents[len(before.history.incidents) :]:
        text = short(_incident(incident))
        yield News(reason="Incident", text=text, warning=True, at=incident.at)
    for host, why in cleared(before, after):
        yield News(reason="Incident", text=f"{host} is cleared: {why}", at=event.at)
    for reason, text, warning in _told(before, event, after):
        yield News(reason=reason, text=short(text), warning=warning, at=event.at)


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 1]}…"


def _told(before: Run, event: Event, after: Run) -> Iterator[tuple[Reason, str, bool]]:
    if isinstance(event, CheckpointFailed) and event.attempt == before.attempt.number:
        yield "CheckpointFailed", f"checkpoint of step {event.step} failed: {event.why}", True
    if after.attempt.number != before.attempt.number and after.recovering:
        yield "Recovering", f"attempt {after.attempt.number} starts{_since(after)}", False
    for one in newly_resumed(before.history.incidents, after.history.incidents):
        took = f"{one.resumed_after_s:.0f} s after {one.kind}"
        yield "Recovered", f"attempt {after.attempt.number} {one.goes_on} again, {took}", False
    if (
        isinstance(after.stage, Running)
        and isinstance(before.stage, Starting)
        and not before.recovering
    ):
        ranks, hosts = after.plan.world_size, ", ".join(after.attempt.placement[:4])
        more = (
            f" and {len(after.attempt.placement) - 4} more"
            if len(after.attempt.placement) > 4
            else ""
        )
        where = f"{ranks} ranks on {hosts}{more}"
        yield "Started", f"attempt {after.attempt.number} trains{_since(after)}: {where}", False
    if isinstance(after.stage, Ended) and not isinstance(before.stage, Ended):
        steps = after.job.steps if after.job else 0
        done = (
            steps if after.ending == "SUCCEEDED" else max(after.attempt.step, after.progress.saved)
        )
        saved = (
            f", checkpoint step-{after.progress.saved}"
            if after.progress.saved
            else ", without a checkpoint"
        )
        of = f" of {steps}" if steps else ""
        text = (
            f"{after.state} at step {done or after.attempt.step}{of}{saved}: {after.stage.reason}"
        )
        yield "Ended", text, after.ending == "FAILED"


def _since(run: Run) -> str:
    if run.progress.saved:
        return f" from step {run.progress.saved}"
    # A user's program may have resumed from a checkpoint that ndctl does not know.
    return "" if run.is_own else " from the beginning"


def _incident(incident: Incident) -> str:
    who = "no culprit" if incident.culprit == NOBODY else f"culprit {incident.culprit}"
    drill = f" (drill {incident.drill})" if incident.drill else ""
    return f"{incident.kind}{drill} at step {incident.step}, {who}: {incident.cause}"


class Budget(Struct, frozen=True, kw_only=True):
    """A rate limit for events: no repetitions, and not too many. The cluster keeps the events of
    all jobs in one store."""

    tokens: float = BURST
    at: float = 0.0
    said: tuple[tuple[str, float], ...] = ()
    """Texts that were sent, and when."""
    withheld: int = 0
    """Events that were dropped since the last one that was sent."""


def admit(budget: Budget, news: News) -> tuple[Budget, News | None]:
    """The event to send; None if it is dropped. The next event says how many were dropped."""
    gained = max(0.0, news.at - budget.at) / ONE_EVERY_S if budget.at else 0.0
    tokens = min(float(BURST), budget.tokens + gained)
    said = tuple((text, at) for text, at in budget.said if news.at - at < SAME_S)
    budget = replace(budget, tokens=tokens, at=max(budget.at, news.at), said=said)
    known = f"{news.reason} {news.text}"
    if any(text == known for text, _ in said):
        return budget, None
    if tokens < 1.0 and news.reason != "Ended":  # there is only one of these
        return replace(budget, withheld=budget.withheld + 1), None
    more = f" ({budget.withheld} events before it were dropped)" if budget.withheld else ""
    told = replace(news, text=short(news.text + more))
    kept = (*said, (known, news.at))[-4 * BURST :]
    return replace(budget, tokens=tokens - 1.0, said=kept, withheld=0), told
