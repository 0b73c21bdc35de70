"""All errors that ndctl raises on purpose, with their exit codes.

    NdctlError
    ├── SpecError        the job spec cannot be read as a JobSpec
    ├── PlanError        no plan fits the spec and the cluster
    ├── JobError         the job is unknown, or its state does not allow the command
    │   ├── DrillError   a drill can never happen in this job
    │   └── InUse        another process writes its journal; trying again later may help
    ├── BackendError     the scheduler refused
    │   ├── Unanswered   the scheduler did not answer: nothing is known, and retrying may help
    │   │   └── Unreachable   no connection is possible, so the next question would fail too
    │   ├── Refused      the scheduler refused the job: nothing is queued, and nothing runs
    │   ├── Unsettled    the scheduler stopped answering midway: the request may be partly done
    │   ├── Ended        the scheduler no longer has the job: retrying does not help
    │   ├── MustLeave    the backend may not end an agent; the agent must exit itself
    │   └── CannotLead   the leader's host cannot ask the scheduler: the job ends
    └── TrainingError    the trainer refuses its configuration: retrying does not help

A message holds the offending value and the limit; `fix` says what to type or to change.
`contract/files/exit_codes.py` documents the exit codes.
"""

from collections.abc import Sequence
from typing import ClassVar

from orchestrator.contract.codec import Problem
from orchestrator.contract.files import exit_codes


class NdctlError(Exception):
    """`message` says what happened, `fix` what to do about it."""

    exit_code: ClassVar[int] = exit_codes.FAILED

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class SpecError(NdctlError):
    exit_code = exit_codes.BAD_SPEC

    def __init__(
        self,
        message: str,
        *,
        fix: str = "",
        placed: Sequence[tuple[str, Problem]] = (),
        also: Sequence[NdctlError] = (),
    ) -> None:
        """`placed`: the problems in the message, each with its place, for programs. `also`: the
        errors in the message that have no place."""
        super().__init__(message, fix=fix)
        self.placed, self.also = tuple(placed), tuple(also)


class PlanError(NdctlError):
    exit_code = exit_codes.NO_PLAN


class JobError(NdctlError):
    exit_code = exit_codes.BAD_JOB_STATE


class DrillError(JobError):
    exit_code = exit_codes.USAGE


class InUse(JobError):
    pass


class BackendError(NdctlError):
    exit_code = exit_codes.BACKEND


class Unanswered(BackendError):
    pass


class Unreachable(Unanswered):
    pass


class Refused(BackendError):
    pass


class Unsettled(BackendError):
    pass


class Ended(BackendError):
    pass


class MustLeave(BackendError):
    pass


class CannotLead(BackendError):
    pass


class TrainingError(NdctlError):
    exit_code = exit_codes.REFUSED
