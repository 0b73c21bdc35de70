"""What is held against hosts: `ndctl hosts clear`."""

from pathlib import Path

from orchestrator.app.cancelling import user
from orchestrator.errors import JobError
from orchestrator.seams import Clock


def clear_host(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """Say that a host is in order again. Raises JobError when nothing is held against it."""
    from orchestrator import strikes

    now = clock.now()
    found = [
        name
        for name, held in strikes.records(run_root, now).items()
        if cluster in (None, name) and any(record.host == host for record in held)
    ]
    if not found:
        raise JobError(
            f"nothing is held against {host} in {(run_root / strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the hosts with strikes; is --run-root the right one?",
        )
    for name in found:
        cleared = strikes.Cleared(at=now, host=host, by=user())
        strikes.record(strikes.path_of(run_root, name), cleared)
    return f"{host} has no strikes any more in {', '.join(found)}"
