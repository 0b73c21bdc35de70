"""All that begins a launch, for a leader that has to write the run directory itself."""

from dataclasses import dataclass

from orchestrator.contract.events import JobSubmitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What `submit` writes into a run directory where it can: carried to where the job runs."""

    job: JobSubmitted
    """Its `at` says nothing: the leader that opens the parcel sets it."""
    spec: str
    """spec.yaml."""
    plan: str
    """plan-<n>.json."""
    trainer: str
    """trainer-<n>.json."""
    new: bool = False
    """A run of the same name is archived first."""
