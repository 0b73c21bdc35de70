"""Incidents: what went wrong, who caused it, and what was done about it."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from ndctl.rank.phases import Phase
from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.diagnosis.cause.verdict import Culprit, Evidence, named_cause
from orchestrator.host_strikes import MOST_EVIDENCE

PREFLIGHT = "preflight"
"""Kind of the incident of a host that failed a check before ranks started on it."""

STOPPED = "stopped the job"

WARNED = "host-warned"
"""Kind of the incident of a host that was replaced because it warned of its own failure."""


class Incident(Struct, frozen=True, kw_only=True):
    """One failure and what followed from it."""

    id: int
    attempt: int
    at: float
    """When it happened, as near as is known."""
    kind: str
    cause: str
    culprit: Culprit
    evidence: Evidence
    action: str
    """What ndctl did about it."""
    step: int
    """The last step that the attempt is known to have done; 0: none."""
    saved: int | None = None
    """Step of the newest complete checkpoint at that time, and of the one that the next attempt
    resumed from once that is known: the steps since are lost. None if no rank ran, so that no step
    was lost, and for a user's program that does not say where it resumed. Its first step does not
    tell either: ndctl may count the steps of each attempt from 1."""
    in_memory: bool = False
    """The next attempt resumed from the memory of the hosts."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints, on the disk or in memory, that the next attempt could not use."""
    signature: str = ""
    """Exception, message and step: two incidents with the same one are a bug of the program."""
    detected_after_s: float
    recovered_after_s: float | None = None
    """Seconds from `at` to the first new step of a later attempt; None before that step."""
    runs_after_s: float | None = None
    """Of a program that has never reported a step: seconds until a later attempt was seen to run on
    all ranks."""
    drill: str | None = None
    """The drill that caused it."""
    failure: str = ""
    """The failure class."""
    scope: Scope = "rank"
    phase: Phase | None = None
    remedy: Remedy | None = None
    """The decision; None if a person decided."""
    rule: str = ""
    """The rule of the policy that decided."""
    advice: str = ""
    """What a person should do about it."""
    edits: tuple[str, ...] = ()
    """Options for `ndctl submit SPEC --resume` that avoid the failure, the best first."""
    confidence: float | None = None
    """0 to 1 if evidence was weighed; None if the cause was seen."""

    @property
    def resumed_after_s(self) -> float | None:
        """Seconds from `at` until the job went on, by its steps or else by its processes."""
        return self.runs_after_s if self.recovered_after_s is None else self.recovered_after_s

    @property
    def goes_on(self) -> str:
        """What the ranks do after it, once the job has resumed."""
        return "runs" if self.recovered_after_s is None else "trains"

    @property
    def decided(self) -> str:
        """What ndctl did, without the cause at its beginning, which is printed elsewhere."""
        if self.action == self.cause and self.remedy == "stop":
            return STOPPED
        action = self.action.removeprefix(f"{self.cause}: ")
        if self.remedy != "stop":
            return action
        why = action.removeprefix("the job was stopped").removeprefix(": ")
        return f"{STOPPED}: {why}" if why else STOPPED

    def is_told_by(self, reason: str) -> bool:
        """The reason of the job's state has the cause, so it is not printed again."""
        return self.cause in reason or named_cause(self.cause, self.culprit) in reason

    @property
    def lost_steps(self) -> int | None:
        """Steps that are repeated after a resume; None if no rank ran, or if that is unknown."""
        return None if self.saved is None else max(0, self.step - self.saved)


def newly_resumed(before: Sequence[Incident], after: Sequence[Incident]) -> Iterator[Incident]:
    """Of the incidents `before` those from which the job has resumed since, as they are `after`."""
    first = len(before) - len(open_last(before, lambda one: one.resumed_after_s is None))
    for old, new in zip(before[first:], after[first:], strict=False):
        if old.resumed_after_s is None and new.resumed_after_s is not None:
            yield new


def open_last(
    incidents: Sequence[Incident], is_open: Callable[[Incident], bool]
) -> Sequence[Incident]:
    """The last incidents that are all still open. A step closes all of them, so those before are
    closed, and a job of months has thousands."""
    first = len(incidents)
    while first and is_open(incidents[first - 1]):
        first -= 1
    return incidents[first:]


def with_last_changed(
    incidents: Sequence[Incident],
    is_open: Callable[[Incident], bool],
    change: Callable[[Incident], Incident],
) -> tuple[Incident, ...]:
    """`incidents` with the last open ones changed."""
    last = open_last(incidents, is_open)
    return (*incidents[: len(incidents) - len(last)], *map(change, last))


def evidence_lines(incident: Incident) -> tuple[str, ...]:
    """The evidence in a few lines: how the cause is known, and the end of the log."""
    found = incident.evidence
    left = MOST_EVIDENCE - len(found.notes[:MOST_EVIDENCE])
    tail = found.log_tail[-left:] if left else ()
    return (*found.notes[:MOST_EVIDENCE], *tail)


class History(Struct, frozen=True, kw_only=True):
    """Everything that went wrong so far, and how much of each budget is spent."""

    incidents: tuple[Incident, ...] = ()
    advanced: int = 0
    """Number of incidents before the newest checkpoint: training got past them."""
    forgiven: int = 0
    """Number of incidents before a person last submitted the job: they may be fixed."""
    restarts: int = 0
    fruitless: int = 0
    """Restarts since the newest checkpoint: the budget limits these."""
    allocations: int = 0
    """Allocations in a row without a new checkpoint, including the present one, since a person last
    submitted. With successors: leaders in a row without an attempt."""
    allocations_since: float = 0.0
    """When the first of these allocations began."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Events that cannot happen in the stage in which they came -> how often: `CancelRequested in
    Ended`. ndctl ignored them. Each one is a defect worth a report."""
