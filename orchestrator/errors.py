"""Every error that ndctl raises on purpose, and the exit code of each.

    NdctlError
    ├── SpecError        the job spec cannot be read as a JobSpec
    ├── PlanError        no plan fits the spec and the cluster
    ├── JobError         the job is unknown, or not in a state that allows the verb
    │   └── InUse        another process writes its journal: later it may not
    ├── BackendError     the cluster refused
    │   ├── Unanswered   it did not answer: nothing is known, and to ask again may help
    │   │   └── Unreachable   no connection to it can be made: the next question would fail as well
    │   ├── Refused      it does not take the job: nothing of it is queued, and nothing runs
    │   ├── Unsettled    it stopped answering in the middle: some of what was asked may be done
    │   ├── Ended        it has nothing of the job any more: to ask again does not help
    │   ├── MustLeave    it may not end an agent, which can leave by itself
    │   └── CannotLead   from where the leader runs it cannot be asked: the job ends there
    └── TrainingError    the trainer refuses its configuration; trying again would not help

A message holds the offending value and the limit; `fix` says what to type or to change.
The codes are listed in `contract/files/exit_codes.py`, the one place that documents them.
"""

from collections.abc import Sequence
from typing import ClassVar

from orchestrator.contract.codec import Problem
from orchestrator.contract.files import exit_codes


class NdctlError(Exception):
    """What happened, and in `fix` what to do about it."""

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
        self, message: str, *, fix: str = "", placed: Sequence[tuple[str, Problem]] = ()
    ) -> None:
        """`placed`: the problems that the message tells, each with its place, for programs."""
        super().__init__(message, fix=fix)
        self.placed = tuple(placed)


class PlanError(NdctlError):
    exit_code = exit_codes.NO_PLAN


class JobError(NdctlError):
    exit_code = exit_codes.BAD_JOB_STATE


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
