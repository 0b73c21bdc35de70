"""The state of jobs at their schedulers, combined with what is known on this machine."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from orchestrator.app.remote import Found
from orchestrator.app.schedulers import name_of, statuses_at_schedulers
from orchestrator.errors import BackendError, Unreachable
from orchestrator.job.state import Run
from orchestrator.seams import Clock, LaunchStatus


def launch_statuses(
    jobs: Sequence[tuple[Found, Run, bool, bool]], environ: Mapping[str, str], clock: Clock
) -> list[LaunchStatus]:
    """The state of each job at its scheduler.

    A cluster that was unreachable a moment ago is not asked again, because that would only wait for
    another timeout.

    Args:
        jobs: each with its run, whether its leader is alive, and whether it is quiet.
    """
    runs = [found.here(run) for found, run, _, _ in jobs]
    asked = [at for at, (found, *_) in enumerate(jobs) if not _is_unreachable(found)]
    seen = dict(
        zip(
            asked,
            statuses_at_schedulers([(runs[at], *jobs[at][2:]) for at in asked], environ, clock),
            strict=True,
        )
    )
    return [
        combined(
            found, seen[at] if at in seen else LaunchStatus(name_of(runs[at], environ, clock), True)
        )
        for at, (found, *_) in enumerate(jobs)
    ]


def _is_unreachable(found: Found) -> bool:
    return isinstance(found.stale, Unreachable)


def combined(found: Found, seen: LaunchStatus) -> LaunchStatus:
    """Marks the state as unknown if the copy is stale and the scheduler only knows that the hosts
    run."""
    if found.copy is None:
        return seen
    why: BackendError | None = found.stale
    if why is not None and (_is_unreachable(found) or seen.running or seen.unknown):
        seen = replace(seen, held=True, unknown=why.message, fix=why.fix)
    if seen.over is not None and not seen.leaving:
        found.copy.remember(seen.over, seen.words or "")
    return replace(seen, at=found.copy.led_at) if seen.unknown else seen
