"""What a person says about hosts: `ndctl hosts clear`, `pin` and `unpin`."""

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
    """Say that a host is in order again, to jobs that replaced it for what is no strike as well,
    where `cluster` is named. Raises JobError when nothing is held against it."""
    from orchestrator import host_strikes

    now = clock.now()
    records = host_strikes.records(run_root, now)
    found = _where(run_root, host, cluster, records, "strikes")
    if not found and cluster in {*records} - {host_strikes.LOCAL}:
        found = [str(cluster)]
    if not found:
        raise JobError(
            f"nothing is held against {host} in {(run_root / host_strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the hosts with strikes; is --run-root the right one? A job may"
            " have replaced it for what is no strike: --cluster NAME clears it for that, too",
        )
    for name in found:
        cleared = host_strikes.Cleared(at=now, host=host, by=user())
        _record(run_root, name, cleared)
    where = ", ".join(found)
    return (
        f"{host} has no strikes any more in {where}; a job that replaced it may use it from its"
        " next leader on"
    )


def cluster_to_pin(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """`cluster`, or the only one that is known. Raises JobError where there is no telling."""
    from orchestrator import host_strikes

    if cluster == host_strikes.LOCAL:
        raise JobError(
            f"{host} cannot be pinned: the hosts of local jobs are only names",
            fix="--cluster NAME names a Slurm or Kubernetes cluster; `ndctl hosts` lists some",
        )
    records = host_strikes.records(run_root, clock.now())
    known = [name for name in records if name != host_strikes.LOCAL]
    if cluster is None and len(known) != 1:
        there = f"there are {', '.join(known)}" if known else "there is none yet"
        raise JobError(
            f"{host} of which cluster? In {(run_root / host_strikes.FOLDER).absolute()} {there}",
            fix="--cluster NAME; of Slurm it is the ClusterName (`scontrol show config`)",
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
    """Say that a host is never, or always, to be used."""
    from orchestrator import host_strikes

    pinned = host_strikes.Pinned(at=clock.now(), host=host, use=use, by=user(), reason=reason)
    _record(run_root, cluster, pinned)
    said = f"{host} of {cluster} is {use} used from the next start on"
    return f"{said}, until `ndctl hosts unpin {host}`"


def doubt(host: str, cluster: str, environ: Mapping[str, str], clock: Clock) -> str:
    """On a machine of that Slurm cluster: what to say of a host that it does not know."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        return ""
    backend = scheduler_of("slurm", environ, clock)
    with contextlib.suppress(BackendError):
        if backend.cluster() == cluster and not backend.known([host]):
            return f"; but Slurm has no node {host}, and until it has the pin does nothing: a typo?"
    return ""


def unpin_host(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """Let its strikes decide again. Raises JobError when it is not pinned."""
    from orchestrator import host_strikes

    now = clock.now()
    found = _where(run_root, host, cluster, host_strikes.records(run_root, now), "pin")
    if not found:
        raise JobError(
            f"{host} is not pinned in {(run_root / host_strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the hosts that are; is --run-root the right one?",
        )
    for name in found:
        unpinned = host_strikes.Unpinned(at=now, host=host, by=user())
        _record(run_root, name, unpinned)
    return f"{host} is not pinned any more in {', '.join(found)}"


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
    """The clusters, or `cluster` alone, that have such a thing of `host`."""
    return [
        name
        for name, held in records.items()
        if cluster in (None, name)
        and any(record.host == host and getattr(record, has) for record in held)
    ]
