"""The errors of the command line, under the names that `ndctl` offers.

Error                base of all; `message` says what happened, `fix` what to do about it
├── SpecError        the spec is wrong: lists all that is wrong
├── PlanError        no plan fits the spec and the cluster
├── JobError         the job is unknown, or its state does not allow the call
├── BackendError     the scheduler refused, or is unreachable
└── WaitTimeout      `Job.wait` took longer than its `timeout`; also a TimeoutError
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from orchestrator.errors import BackendError, JobError, PlanError, SpecError
from orchestrator.errors import NdctlError as Error

__all__ = ["BackendError", "Error", "JobError", "PlanError", "SpecError", "WaitTimeout"]


P = ParamSpec("P")
T = TypeVar("T")


class WaitTimeout(Error, TimeoutError):
    """The job has not ended yet. It goes on."""


def explained(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, but a file that the user may not read is an `Error` with a fix, as on the command
    line."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except PermissionError as exc:
            from orchestrator.posix.denied import denied

            if exc.filename is None:
                raise
            raise denied(exc) from exc

    return called
