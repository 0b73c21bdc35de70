"""Jobs whose run directory is elsewhere, seen through what is known of them here."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.dashboard.scheduler_status import Ask
from orchestrator.errors import BackendError, JobError, Unreachable
from orchestrator.job.state import Run
from orchestrator.job.step import fold
from orchestrator.job_paths import find_job, has_run, jobs
from orchestrator.journal.journal import read
from orchestrator.journal.run_dir_init import ARCHIVE
from orchestrator.journal.snapshot import known
from orchestrator.seams import Clock, Copy

REFRESH_S = 2.0
STOPPING_S = 0.5
"""The same while ranks stop: with its job a pod may be gone a moment after its last word."""
SKEW_S = 5.0
"""By which clocks of this machine and of the leader may differ."""
LAST_LINES_S = 2 * REFRESH_S
ABREAST = 8
"""Jobs that are asked for at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A part of a cluster, as the command line names it."""

    context: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A job by its name."""

    run_dir: RunDir
    copy: Copy | None = None
    """Where the run directory is elsewhere."""

    @property
    def stale(self) -> BackendError | None:
        """Why the copy could not be brought up to date at the last look; None: it was."""
        return self.copy.stale if self.copy is not None else None

    def here(self, run: Run) -> Run:
        """The job as this machine has to ask its scheduler for it."""
        if self.copy is None or run.job is None:
            return run
        return replace(run, job=replace(run.job, launch=self.copy.here(run.job.launch)))


def find(
    run_root: Path, name: str, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> Found:
    """In the run root, or else among the jobs that were seen from here; with a `place`, there.

    Raises JobError when there is no such job, or several.
    """
    from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors

    if place is not None:
        from orchestrator.backends.kubernetes.mirror.find_mirrors import seek_mirror

        return _of(seek_mirror(run_root, name, place.context, place.namespace, environ, clock))
    if has_run(run_root, name):
        return Found(find_job(run_root, name))
    known = known_mirrors(run_root, name)
    if len(known) == 1:
        from orchestrator.backends.kubernetes.mirror.find_mirrors import open_mirror

        return _of(open_mirror(known[0], environ, clock))
    if known:
        places = ", ".join(f"{path.parent.parent.name}/{path.parent.name}" for path in known)
        raise JobError(
            f"there are several jobs {name}: in {places}",
            fix="say which with --context and --namespace",
        )
    try:
        return Found(find_job(run_root, name))
    except JobError as exc:
        fix = f"{exc.fix}; `--backend kubernetes [-n NAMESPACE]` looks in the cluster"
        raise JobError(exc.message, fix=fix) from exc


def _of(copy: Copy) -> Found:
    return Found(copy.run_dir, copy)


def every(
    run_root: Path, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> list[Found]:
    """All jobs of the run root and those seen from here; with a `place`, those there."""
    from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors

    if place is not None:
        from orchestrator.backends.kubernetes.mirror.find_mirrors import mirrors_at

        found = mirrors_at(run_root, place.context, place.namespace, environ, clock)
        return [_of(one) for one in found]
    here = [Found(run_dir) for run_dir in jobs(run_root)]
    known = known_mirrors(run_root)
    if not known:
        return here
    from orchestrator.backends.kubernetes.mirror.find_mirrors import open_mirror

    return here + [_of(open_mirror(path, environ, clock)) for path in known]


def matching(
    run_root: Path, pattern: str, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> list[Found]:
    """Jobs whose names a shell's pattern, as `sweep-*`, matches. Raises JobError without any."""
    there = every(run_root, place, environ, clock)
    found = [one for one in there if fnmatchcase(one.run_dir.path.name, pattern)]
    if not found:
        names = ", ".join(sorted({one.run_dir.path.name for one in there})) or "none"
        raise JobError(
            f"no job matches {pattern!r} in {run_root.absolute()}; there are: {names}",
            fix="give --run-root or NDCTL_RUN_ROOT where they are elsewhere",
        )
    return found


def refresh(found: Found) -> None:
    """Bring a copy up to date; where that cannot be, it stays as it was, and `stale` says why.

    Raises BackendError where nothing is known at all.
    """
    if found.copy is None:
        return
    try:
        found.copy.refresh()
    except BackendError:
        if not found.run_dir.journal.exists():
            raise


def refresh_all(jobs: Sequence[Found]) -> None:
    """The same of many, side by side. A cluster that cannot be reached is asked once: to wait for
    it again for each of its jobs would take minutes."""
    copies = [found.copy for found in jobs if found.copy is not None]
    if not copies:
        return
    from concurrent.futures import ThreadPoolExecutor

    firsts = {copy.cluster: copy for copy in reversed(copies)}

    def bring(copy: Copy) -> None:
        first = firsts[copy.cluster].stale
        if copy not in firsts.values() and isinstance(first, Unreachable):
            copy.stale = first
            return
        with suppress(BackendError):
            copy.refresh()

    with ThreadPoolExecutor(ABREAST) as pool:
        list(pool.map(bring, firsts.values()))
        list(pool.map(bring, [copy for copy in copies if copy is not firsts[copy.cluster]]))


def await_begin(found: Found, ask: Ask, clock: Clock, say: Callable[[str], object]) -> bool:
    """Wait until the leader of a job that was handed over has begun its journal, and say what the
    scheduler says meanwhile; False where nothing of the job is left to wait for."""
    said = ""
    while found.copy is not None and not found.copy.has_begun:
        seen = ask(known(found.run_dir))
        words = seen and (seen.unknown or seen.words)
        if words and words != said:
            say(words)
            said = words
        with suppress(BackendError):
            found.copy.refresh()
        if not (seen and seen.held) and not found.copy.has_begun:
            say("its leader never began: `ndctl logs` and `kubectl get pods` may tell why")
            return False
        clock.sleep(REFRESH_S)
    return True


def lines_before(found: Found, handed_at: float) -> int:
    """Lines of the journal before the launch that has begun: they were told before.

    Raises JobError where that launch had ended before `handed_at`: its objects had been deleted,
    and its run directory had not.
    """
    entries = read(found.run_dir.journal)
    run = fold(entry.event for entry in entries)
    if run.job is not None and run.ending is not None and run.history.last_at < handed_at - SKEW_S:
        raise JobError(
            f"nothing was run: launch {run.job.launch.launch} of job {run.job.launch.job} had ended"
            f" before, in {run.job.launch.run_dir}: {run.state}, {run.stage.reason}",
            fix="--resume goes on from its newest checkpoint; --new starts over and keeps the old"
            f" run in {ARCHIVE}/",
        )
    return max(
        (at for at, one in enumerate(entries) if isinstance(one.event, JobSubmitted)), default=0
    )


def settled(found: Found, ended: Callable[[], bool], clock: Clock) -> Callable[[], bool]:
    """The same as `ended`, but that the last lines of a copy may come after it."""
    if found.copy is None:
        return ended
    since: float | None = None

    def is_over() -> bool:
        nonlocal since
        if not ended():
            return False
        since = clock.monotonic() if since is None else since
        return clock.monotonic() - since >= LAST_LINES_S

    return is_over


def fetch_logs(found: Found, rank: int | None, attempt: int | None) -> Sequence[str]:
    """Bring the logs of a copy, and say which could not be had; of one rank, only from the host
    that it is on in `attempt`."""
    if found.copy is None:
        return ()
    entries = read(found.run_dir.journal)
    starts = [
        action
        for entry in entries
        for action in entry.actions
        if isinstance(action, StartAttempt) and attempt in (None, action.attempt)
    ]
    if rank is None or not starts:
        return found.copy.fetch_logs()
    plan = fold(entry.event for entry in entries).plan
    node_rank = rank * len(plan.hosts) // plan.world_size
    return found.copy.fetch_logs(starts[-1].hosts[node_rank : node_rank + 1])


@contextmanager
def kept_fresh(found: Found, *, logs: bool = False) -> Iterator[None]:
    """A copy follows its job for as long as this is entered."""
    if found.copy is None:
        yield
        return
    over = threading.Event()
    copy = found.copy

    def follow() -> None:
        while not over.wait(STOPPING_S if copy.stopping else REFRESH_S):
            with suppress(BackendError):
                if logs:
                    copy.fetch_logs(follow=True)
                copy.refresh()

    thread = threading.Thread(target=follow, name="copy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
