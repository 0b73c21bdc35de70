"""The errors of the command line, under the names that `ndctl` offers.

Error                base of all; `message` says what happened, `fix` what to do about it
├── SpecError        the spec is wrong: lists all that is wrong
├── PlanError        no plan fits the spec and the cluster
├── JobError         the job is unknown, or its state does not allow the call
├── BackendError     the scheduler refused, or is unreachable
└── WaitTimeout      `Job.wait` took longer than its `timeout`; also a TimeoutError
"""

import functools
import json
import re
import shlex
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from orchestrator.errors import BackendError, JobError, PlanError, SpecError
from orchestrator.errors import NdctlError as Error

__all__ = ["BackendError", "Error", "JobError", "PlanError", "SpecError", "WaitTimeout"]


P = ParamSpec("P")
T = TypeVar("T")


class WaitTimeout(Error, TimeoutError):
    """The job has not ended yet. It goes on."""


# A traceback names the classes as `ndctl` does.
for _public in (BackendError, JobError, PlanError, SpecError, WaitTimeout):
    _public.__module__ = "ndctl"
Error.__module__, Error.__name__, Error.__qualname__ = "ndctl", "Error", "Error"


def explained(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, but its errors name keywords, and are shown without what is inside ndctl. A file that
    the user may not read is an `Error` with a fix, as on the command line."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except Error as exc:
            exc.fix = in_python(exc.fix)
            raise exc.with_traceback(None) from None
        except PermissionError as exc:
            from orchestrator.posix.denied import denied

            if exc.filename is None:
                raise
            raise denied(exc) from None

    return called


KEYWORDS = {
    "--backend kubernetes [-n NAMESPACE]": "namespace=NAMESPACE",
    "--run-root FOLDER": "run_root=FOLDER",
    "--run-root": "run_root=",
    "--context": "context=",
    "--namespace": "namespace=",
    "--resume": "resume=True",
    "--new": "new=True",
}
"""Options of the command line -> what they are in Python."""
_OPTION = re.compile("|".join(rf"{re.escape(one)}(?![\w-])" for one in KEYWORDS))
_COMMAND = re.compile(r"(`\w[^`]*`)")
"""A command in a text, such as `ndctl list`. Its options stay: it is for a terminal."""


def in_python(fix: str) -> str:
    """A fix of the command line, with keywords for options."""
    if fix.startswith("ndctl run "):
        return _call_of(fix)
    parts = _COMMAND.split(fix)
    parts[::2] = (_OPTION.sub(lambda found: KEYWORDS[found[0]], one) for one in parts[::2])
    return "".join(parts)


def _call_of(command: str) -> str:
    """`ndctl.run([...], hosts=2)` for `ndctl run --hosts 2 -- ...`."""
    options, _, program = command.removeprefix("ndctl run ").partition("-- ")
    words = shlex.split(options)
    sizes = {
        name[2:].replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    if "set" in sizes:  # it has a variable, and may be there several times
        return command
    more = "".join(f", {name}={value}" for name, value in sizes.items())
    return f"ndctl.run({json.dumps(shlex.split(program))}{more})"
