"""What to do about a verdict: restart, or end the job."""

from collections import Counter
from dataclasses import dataclass

from orchestrator import strikes
from orchestrator.contract.failures import Remedy
from orchestrator.supervise.diagnose import Verdict
from orchestrator.supervise.state import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    action: Remedy
    rule: str
    """Which rule decided, by its name."""
    reason: str
    """What is done and why, ready to print; the rule is in it."""
    wait_s: float = 0.0
    """Before the next attempt."""
    counts: bool = True
    """Whether it is taken from the budget by progress."""


def decide(run: Run, verdict: Verdict) -> Decision:
    """First rule that fits wins."""
    assert run.job is not None
    if verdict.final:
        reason = f"{verdict.cause}; a restart would meet the same refusal"
        return Decision(action="stop", rule="refused", reason=reason)
    if verdict.signature and verdict.signature in _signatures(run):
        reason = f"the same error twice, so it is the program's own: {verdict.signature}"
        return Decision(action="stop", rule="same-error-twice", reason=reason)
    if run.fruitless >= run.job.max_restarts:
        budget = f"{run.fruitless} of max_restarts {run.job.max_restarts}"
        reason = f"no new checkpoint in {budget} restarts; last cause: {verdict.cause}"
        return Decision(action="stop", rule="max_restarts", reason=reason)
    origin = f"checkpoint step-{run.saved}" if run.saved else "the beginning: no checkpoint yet"
    reason = f"restart as attempt {run.attempt + 1} from {origin}"
    return Decision(action="restart", rule="restart", reason=reason)


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
        if host is not None and times >= strikes.LIMIT
    }


def _signatures(run: Run) -> set[str]:
    """Of the incidents since a person last submitted the job."""
    return {incident.signature for incident in run.incidents[run.forgiven :]} - {""}
