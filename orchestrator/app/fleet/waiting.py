"""`ndctl wait`: until jobs have ended, or are in a given state."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from orchestrator.app.remote import Found, kept_fresh
from orchestrator.app.snapshots import asker
from orchestrator.contract.files import exit_codes
from orchestrator.dashboard.follow.follow_loop import EXIT_CODES, EndDetector
from orchestrator.job.stage import ENDED, State
from orchestrator.seams import Clock

POLL_S = 0.5


def wait_for(
    jobs: Sequence[Found],
    states: Collection[State],
    timeout_s: float | None,
    environ: Mapping[str, str],
    clock: Clock,
    say: Callable[[str], object],
) -> int:
    """Wait until each job is in one of `states`, and print that.

    A job that ends otherwise is not waited for any longer. Returns 0 if all jobs are in one of
    `states`, and by default, if these are the ends, SUCCEEDED. Otherwise the exit code of the first
    job that is not: 1 FAILED, 7 CANCELLED, 5 SUCCEEDED without the wanted state, 124 timed out.
    """
    deadline = None if timeout_s is None else clock.monotonic() + timeout_s
    codes: dict[str, int] = {}
    with ExitStack() as stack:
        watched = []
        for found in jobs:
            stack.enter_context(kept_fresh(found))
            watched.append((found, EndDetector(found.run_dir, clock, asker(found, environ, clock))))
        while watched:
            watched = [one for one in watched if not _is_done(*one, states, codes, say)]
            if watched and deadline is not None and clock.monotonic() >= deadline:
                for found, watch in watched:
                    name = found.run_dir.path.name
                    say(f"{name}: timed out, {watch.state() or 'ending'}")
                    codes[str(found.run_dir.path)] = exit_codes.TIMED_OUT
                break
            if watched:
                clock.sleep(POLL_S)
    ordered = [codes[str(found.run_dir.path)] for found in jobs]
    return next((code for code in ordered if code), exit_codes.OK)


def _is_done(
    found: Found,
    watch: EndDetector,
    states: Collection[State],
    codes: dict[str, int],
    say: Callable[[str], object],
) -> bool:
    state = watch.state()
    if state is None or (state not in states and state not in ENDED):
        return False
    say(f"{found.run_dir.path.name}: {state}")
    codes[str(found.run_dir.path)] = _code(state, states)
    return True


def _code(state: State, states: Collection[State]) -> int:
    if state in states:
        # Who waits for the end wants to know whether the job succeeded.
        return EXIT_CODES.get(state, exit_codes.OK) if set(states) == {*ENDED} else exit_codes.OK
    return EXIT_CODES[state] or exit_codes.BAD_JOB_STATE
