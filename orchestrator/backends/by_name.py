"""Create a backend by its name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.seams import Backend, Clock, Shell

HERE = "slurm-here"
"""Backend of a job in an existing Slurm allocation."""


def backend_named(
    name: str, environ: Mapping[str, str], clock: "Clock", shell: "Shell"
) -> "Backend":
    """Raises BackendError for a name that has no backend."""
    if name == "local":
        from orchestrator.backends.local import LocalBackend

        return LocalBackend(environ, clock)
    if name == "slurm":
        from orchestrator.backends.slurm.backend import SlurmBackend

        return SlurmBackend(environ, clock, shell)
    if name == HERE:
        from orchestrator.backends.slurm.here import HereBackend

        return HereBackend(environ, clock, shell)
    if name == "kubernetes":
        from orchestrator.backends.kubernetes.backend import KubernetesBackend

        return KubernetesBackend(environ, clock)
    from orchestrator.errors import BackendError

    raise BackendError(f"unknown backend {name!r}", fix="use local, slurm or kubernetes")
