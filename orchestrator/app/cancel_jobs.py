"""`ndctl cancel` of several jobs. All leaders are asked before the first wait."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from orchestrator.app.cancel_job import cancel, wait_until_ended
from orchestrator.app.commands import commands_for
from orchestrator.app.remote import MAX_PARALLEL, Found, kept_fresh
from orchestrator.dashboard.snapshot import is_unconfirmed
from orchestrator.errors import NdctlError
from orchestrator.journal.snapshot import replay
from orchestrator.seams import Clock


class Cancelled(Struct, frozen=True, kw_only=True):
    words: str
    """Which jobs were cancelled and which had ended before."""
    error: NdctlError | None
    """For the jobs that could not be cancelled."""


class _Outcome(Struct, frozen=True):
    found: Found
    ended: str = ""
    """State of a job that had ended before."""
    told: str = ""
    error: NdctlError | None = None

    @property
    def name(self) -> str:
        return self.found.run_dir.path.name


def cancel_all(
    jobs: Sequence[Found],
    environ: Mapping[str, str],
    clock: Clock,
    say: Callable[[str], object],
    *,
    wait: bool,
    by: str | None = None,
) -> Cancelled:
    """Cancel each job that has not ended. If one fails, the others are cancelled all the same.
    `by`: who cancels them; None: this user."""

    def told(found: Iterable[_Outcome]) -> list[_Outcome]:
        outcomes = []
        for outcome in found:
            if outcome.told:
                say(outcome.told)
            outcomes.append(outcome)
        return outcomes

    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        outcomes = told(pool.map(lambda found: _ask(found, environ, clock, by), jobs))
    if wait:
        asked = [one.found for one in outcomes if not one.ended and one.error is None]
        rest = [one for one in outcomes if one.ended or one.error is not None]
        # One after the other: they end at the same time, and Ctrl-C would not end threads.
        outcomes = [*told(_await(found, environ, clock) for found in asked), *rest]
    return _summary(outcomes, wait=wait)


def after_interrupt(jobs: Sequence[Found], environ: Mapping[str, str]) -> str:
    """What was asked of the jobs before Ctrl-C, according to their journals, and what to type."""
    lines = [] if jobs else ["no job was asked to end"]
    for found in jobs:
        run, commands = replay(found.run_dir), commands_for(found, environ)
        name = found.run_dir.path.name
        if run.ending is not None:
            lines.append(f"{name} has ended: {run.ending}")
        elif run.interruption.cancelled_by is not None:
            watch = commands.of("status")
            lines.append(f"{name} is being cancelled, also without this command; watch: {watch}")
        else:
            lines.append(f"{name} is not cancelled yet; to cancel it: {commands.of('cancel')}")
    return "\n".join(lines)


def _ask(found: Found, environ: Mapping[str, str], clock: Clock, by: str | None) -> _Outcome:
    try:
        run = replay(found.run_dir)
        if run.ending is not None and not is_unconfirmed(found.run_dir, run):
            return _Outcome(found, ended=run.ending)
        return _Outcome(found, told=cancel(found.run_dir, environ, clock, found, by))
    except NdctlError as exc:
        return _Outcome(found, error=exc)


def _await(found: Found, environ: Mapping[str, str], clock: Clock) -> _Outcome:
    try:
        with kept_fresh(found):
            return _Outcome(found, told=wait_until_ended(found.run_dir, environ, clock, found))
    except NdctlError as exc:
        return _Outcome(found, error=exc)


def _summary(outcomes: Sequence[_Outcome], *, wait: bool) -> Cancelled:
    done = sorted(one.name for one in outcomes if not one.ended and one.error is None)
    before = sorted(f"{one.name} ({one.ended})" for one in outcomes if one.ended)
    failed = [one for one in outcomes if one.error is not None]
    verb = "cancelled" if wait else "cancelling"
    words = [f"{verb}: {_named(done)}"]
    if before:
        words.append(f"already ended: {_named(before)}")
    if not failed:
        return Cancelled(words="\n".join(words), error=None)
    errors = {one.name: one.error for one in failed if one.error is not None}
    first = next(iter(errors.values()))
    told = "\n".join(f"{name}: {error}" for name, error in sorted(errors.items()))
    message = f"not cancelled: {_named(sorted(errors))}\n{told}"
    return Cancelled(words="\n".join(words), error=type(first)(message))


def _named(names: Sequence[str]) -> str:
    count = "1 job" if len(names) == 1 else f"{len(names)} jobs"
    return f"{count}: {', '.join(names)}" if names else "no jobs"
