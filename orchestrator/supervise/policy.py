"""What to do about a verdict: restart, or end the job."""

from collections import Counter
from dataclasses import dataclass

from orchestrator import strikes
from orchestrator.supervise.diagnose import Verdict
from orchestrator.supervise.state import Run


@dataclass(frozen=True, slots=True)
class Decision:
    restart: bool
    reason: str
    """Which rule decided, ready to print."""


def decide(run: Run, verdict: Verdict) -> Decision:
    """First rule that fits wins."""
    assert run.job is not None
    if verdict.final:
        return Decision(False, f"{verdict.cause}; a restart would meet the same refusal")
    if verdict.signature and verdict.signature in _signatures(run):
        return Decision(
            False, f"the same error twice, so it is the program's own: {verdict.signature}"
        )
    if run.fruitless >= run.job.max_restarts:
        budget = f"{run.fruitless} of max_restarts {run.job.max_restarts}"
        return Decision(
            False, f"no new checkpoint in {budget} restarts; last cause: {verdict.cause}"
        )
    origin = f"checkpoint step-{run.saved}" if run.saved else "the beginning: no checkpoint yet"
    return Decision(True, f"restart as attempt {run.attempt + 1} from {origin}")


def repeated_culprits(run: Run, at: float) -> dict[str, str]:
    """Hosts that have broken the job too often -> why they are not to be used.

    Never without a scheduler: its hosts would be all there are.
    """
    if run.allocation is None:
        return {}
    blamed = Counter(
        incident.culprit.host
        for incident in run.incidents[run.forgiven :]
        if strikes.counts(incident.kind, incident.evidence.signal, incident.drill)
        and at - incident.at <= strikes.WINDOW_S
    )
    return {
        host: f"it was the culprit of {times} incidents"
        for host, times in blamed.items()
        if host is not None and host not in run.always and times >= strikes.LIMIT
    }


def _signatures(run: Run) -> set[str]:
    """Of the incidents since a person last submitted the job."""
    return {incident.signature for incident in run.incidents[run.forgiven :]} - {""}
