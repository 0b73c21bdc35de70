"""`ndctl hosts clear`, `pin` and `unpin`."""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.app.cancel_job import user
from orchestrator.app.schedulers import scheduler_of
from orchestrator.errors import BackendError, JobError
from orchestrator.seams import Clock

if TYPE_CHECKING:
    from orchestrator.host_strikes import Line, Record


def clear_host(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """Clear the strikes of a host.

    With `cluster`, a host without strikes is cleared too: a job may have replaced it for a failure
    that is not a strike.

    Raises:
        JobError: the host has no strikes.
    """
    from orchestrator import host_strikes

    now = clock.now()
    records = host_strikes.records(run_root, now)
    found = _where(run_root, host, cluster, records, "strikes")
    if not found and cluster in {*records} - {host_strikes.LOCAL}:
        found = [str(cluster)]
    if not found:
        raise JobError(
            f"{host} has no strikes in {(run_root / host_strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the hosts with strikes; check --run-root. If a job replaced"
            " the host for a failure that is not a strike, add --cluster NAME",
        )
    for name in found:
        cleared = host_strikes.Cleared(at=now, host=host, by=user())
        _record(run_root, name, cleared)
    where = ", ".join(found)
    return (
        f"cleared {host} in {where}; a job that replaced it can use it again when its next leader"
        " starts"
    )


def cluster_to_pin(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """`cluster`, or the only known cluster. Raises JobError if there is not exactly one."""
    from orchestrator import host_strikes

    if cluster == host_strikes.LOCAL:
        raise JobError(
            f"{host} cannot be pinned: hosts of local jobs are not real hosts",
            fix="name a Slurm or Kubernetes cluster: --cluster NAME; see `ndctl hosts`",
        )
    records = host_strikes.records(run_root, clock.now())
    known = [name for name in records if name != host_strikes.LOCAL]
    if cluster is None and len(known) != 1:
        there = f"known clusters: {', '.join(known)}" if known else "no cluster is known yet"
        raise JobError(
            f"cluster of {host} unknown; {(run_root / host_strikes.FOLDER).absolute()}: {there}",
            fix="give --cluster NAME; for Slurm it is the ClusterName (`scontrol show config`)."
            " Hosts of local jobs cannot be pinned",
        )
    return cluster or known[0]


def pin_host(
    run_root: Path,
    host: str,
    cluster: str,
    use: Literal["never", "always"],
    reason: str,
    clock: Clock,
) -> str:
    """Pin a host: never or always use it."""
    from orchestrator import host_strikes

    pinned = host_strikes.Pinned(at=clock.now(), host=host, use=use, by=user(), reason=reason)
    _record(run_root, cluster, pinned)
    said = f"pinned {host} of {cluster}: {use} used from the next start"
    return f"{said}, until `ndctl hosts unpin {host}`"


def unknown_node_warning(host: str, cluster: str, environ: Mapping[str, str], clock: Clock) -> str:
    """A warning about a host that Slurm does not know; empty if this is not that Slurm cluster."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        return ""
    backend = scheduler_of("slurm", environ, clock)
    with contextlib.suppress(BackendError):
        if backend.cluster() == cluster and not backend.known([host]):
            return f"; warning: Slurm has no node {host}, so the pin has no effect; check the name"
    return ""


def unpin_host(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """Remove the pin. Raises JobError if the host is not pinned."""
    from orchestrator import host_strikes

    now = clock.now()
    found = _where(run_root, host, cluster, host_strikes.records(run_root, now), "pin")
    if not found:
        raise JobError(
            f"{host} is not pinned in {(run_root / host_strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the pinned hosts; check --run-root",
        )
    for name in found:
        unpinned = host_strikes.Unpinned(at=now, host=host, by=user())
        _record(run_root, name, unpinned)
    return f"unpinned {host} in {', '.join(found)}"


def _record(run_root: Path, cluster: str, line: "Line") -> None:
    from orchestrator import host_strikes

    with host_strikes.said_to_a_person():
        host_strikes.record(host_strikes.path_of(run_root, cluster), line)


def _where(
    run_root: Path,
    host: str,
    cluster: str | None,
    records: "Mapping[str, tuple[Record, ...]]",
    has: Literal["strikes", "pin"],
) -> list[str]:
    """The clusters that have strikes or a pin for `host`; with `cluster` only that one."""
    return [
        name
        for name, held in records.items()
        if cluster in (None, name)
        and any(record.host == host and getattr(record, has) for record in held)
    ]
