"""What a person says about hosts: `ndctl hosts clear`, `pin` and `unpin`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.app.cancelling import user
from orchestrator.errors import JobError
from orchestrator.seams import Clock

if TYPE_CHECKING:
    from orchestrator.strikes import Line, Record


def clear_host(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """Say that a host is in order again. Raises JobError when nothing is held against it."""
    from orchestrator import strikes

    now = clock.now()
    found = _where(run_root, host, cluster, strikes.records(run_root, now), "strikes")
    if not found:
        raise JobError(
            f"nothing is held against {host} in {(run_root / strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the hosts with strikes; is --run-root the right one?",
        )
    for name in found:
        cleared = strikes.Cleared(at=now, host=host, by=user())
        _record(run_root, name, cleared)
    return f"{host} has no strikes any more in {', '.join(found)}"


def pin_host(
    run_root: Path,
    host: str,
    cluster: str | None,
    use: Literal["never", "always"],
    reason: str,
    clock: Clock,
) -> str:
    """Say that a host is never, or always, to be used. Raises JobError where it is not known of
    which cluster it is."""
    from orchestrator import strikes

    now = clock.now()
    if cluster == strikes.LOCAL:
        raise JobError(
            f"{host} cannot be pinned: the hosts of local jobs are only names",
            fix="--cluster NAME names a Slurm or Kubernetes cluster; `ndctl hosts` lists some",
        )
    records = strikes.records(run_root, now)
    known = [name for name in records if name != strikes.LOCAL]
    if cluster is None and len(known) != 1:
        there = f"there are {', '.join(known)}" if known else "there is none yet"
        raise JobError(
            f"{host} of which cluster? In {(run_root / strikes.FOLDER).absolute()} {there}",
            fix="--cluster NAME; of Slurm it is the ClusterName (`scontrol show config`)",
        )
    name = cluster or known[0]
    pinned = strikes.Pinned(at=now, host=host, use=use, by=user(), reason=reason)
    _record(run_root, name, pinned)
    return (
        f"{host} of {name} is {use} used from the next start on, until `ndctl hosts unpin {host}`"
    )


def unpin_host(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """Let its strikes decide again. Raises JobError when it is not pinned."""
    from orchestrator import strikes

    now = clock.now()
    found = _where(run_root, host, cluster, strikes.records(run_root, now), "pin")
    if not found:
        raise JobError(
            f"{host} is not pinned in {(run_root / strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the hosts that are; is --run-root the right one?",
        )
    for name in found:
        unpinned = strikes.Unpinned(at=now, host=host, by=user())
        _record(run_root, name, unpinned)
    return f"{host} is not pinned any more in {', '.join(found)}"


def _record(run_root: Path, cluster: str, line: "Line") -> None:
    from orchestrator import strikes

    with strikes.said_to_a_person():
        strikes.record(strikes.path_of(run_root, cluster), line)


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
