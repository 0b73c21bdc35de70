"""Choose the implementation by the backend name in a launch.

Terminals get a `Scheduler`, agents and leaders an `AllocationBackend`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.backends.kubernetes.backend import KubernetesBackend
    from orchestrator.backends.local import LocalBackend
    from orchestrator.backends.slurm.backend import SlurmBackend
    from orchestrator.backends.slurm.here import HereBackend
    from orchestrator.errors import BackendError
    from orchestrator.seams import AllocationBackend, Clock, Scheduler, Shell, SubmittingScheduler

HERE = "slurm-here"
"""A job inside a Slurm allocation that the user already had."""


def submitter_named(
    name: str, environ: Mapping[str, str], clock: "Clock", shell: "Shell"
) -> "SubmittingScheduler":
    """Raises BackendError for a name that no spec can have."""
    if name == HERE:
        # `ndctl submit --here` starts this job itself; no scheduler can start it.
        raise _unknown(name)
    return implementation_named(name, environ, clock, shell)


def scheduler_named(
    name: str, environ: Mapping[str, str], clock: "Clock", shell: "Shell"
) -> "Scheduler":
    """Raises BackendError for an unknown name."""
    return (
        _here(environ, clock, shell)
        if name == HERE
        else implementation_named(name, environ, clock, shell)
    )


def backend_named(
    name: str, environ: Mapping[str, str], clock: "Clock", shell: "Shell"
) -> "AllocationBackend":
    """For agents and leaders. Raises BackendError for an unknown name."""
    return (
        _here(environ, clock, shell)
        if name == HERE
        else implementation_named(name, environ, clock, shell)
    )


# Each backend is imported when it is used: an agent must not pay for the other backends.


def _here(environ: Mapping[str, str], clock: "Clock", shell: "Shell") -> "HereBackend":
    from orchestrator.backends.slurm.here import HereBackend

    return HereBackend(environ, clock, shell)


def implementation_named(
    name: str, environ: Mapping[str, str], clock: "Clock", shell: "Shell"
) -> "LocalBackend | SlurmBackend | KubernetesBackend":
    """Raises BackendError for a name that no spec can have."""
    if name == "local":
        from orchestrator.backends.local import LocalBackend

        return LocalBackend(environ, clock)
    if name == "slurm":
        from orchestrator.backends.slurm.backend import SlurmBackend

        return SlurmBackend(environ, clock, shell)
    if name == "kubernetes":
        from orchestrator.backends.kubernetes.backend import KubernetesBackend

        return KubernetesBackend(environ, clock)
    raise _unknown(name)


def _unknown(name: str) -> "BackendError":
    from orchestrator.errors import BackendError

    return BackendError(f"unknown backend: {name!r}", fix="use local, slurm or kubernetes")
