"""Find jobs by name, also jobs in a cluster if this machine has a copy of their journal."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.dashboard.scheduler_status import Ask
from orchestrator.errors import BackendError, JobError, Unreachable
from orchestrator.job.state import Run
from orchestrator.job.transitions import fold
from orchestrator.job_paths import find_job, has_run, jobs, some_of
from orchestrator.journal.journal import read
from orchestrator.journal.run_dir_init import ARCHIVE
from orchestrator.journal.snapshot import replay
from orchestrator.seams import Clock, JobCopy

REFRESH_S = 2.0
"""Seconds between two refreshes of a copy."""
STOPPING_S = 0.5
"""Seconds between two refreshes while ranks stop: the pod may be deleted right after the end."""
SKEW_S = 5.0
"""Maximum difference of the clocks of this machine and the leader."""
LAST_LINES_S = 2 * REFRESH_S
"""Seconds to wait for log lines that arrive after the end of the job."""
MAX_PARALLEL = 8
"""Jobs that are refreshed or cancelled at the same time."""


class Place(Struct, frozen=True, kw_only=True):
    """Context and namespace of a cluster, from the command line."""

    context: str | None = None
    namespace: str | None = None


class Found(Struct, frozen=True):
    """A job that was found by its name."""

    run_dir: RunDir
    copy: JobCopy | None = None
    """Set if the run directory is in a cluster."""

    @property
    def stale(self) -> BackendError | None:
        """Why the last refresh of the copy failed; None: it succeeded."""
        return self.copy.stale if self.copy is not None else None

    def here(self, run: Run) -> Run:
        """The job with the launch that this machine uses to ask the scheduler."""
        if self.copy is None or run.job is None:
            return run
        return replace(run, job=replace(run.job, launch=self.copy.here(run.job.launch)))


def find(
    run_root: Path, name: str, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> Found:
    """Find a job in the run root, else among known jobs in clusters; with `place`, in that cluster.

    Raises:
        JobError: no job or several jobs have this name.
    """
    from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors

    if place is not None:
        from orchestrator.backends.kubernetes.mirror.find_mirrors import seek_mirror

        return _of(seek_mirror(run_root, name, place.context, place.namespace, environ, clock))
    if has_run(run_root, name):
        # Somebody may give the folder of a copy as the run root.
        return at(run_root.absolute() / name, environ, clock)
    known = known_mirrors(run_root, name)
    if len(known) == 1:
        from orchestrator.backends.kubernetes.mirror.find_mirrors import open_mirror

        return _of(open_mirror(known[0], environ, clock))
    if known:
        places = ", ".join(f"{path.parent.parent.name}/{path.parent.name}" for path in known)
        raise JobError(
            f"several jobs are named {name}: in {places}",
            fix="choose one with --context and --namespace",
        )
    try:
        return Found(find_job(run_root, name))
    except JobError as exc:
        between = "" if exc.fix.endswith("?") else ";"
        fix = f"{exc.fix}{between} `--backend kubernetes [-n NAMESPACE]` searches the cluster"
        raise JobError(exc.message, fix=fix) from exc


def at(path: Path, environ: Mapping[str, str], clock: Clock) -> Found:
    """The job whose run directory, or whose copy on this machine, is `path`.

    Raises:
        JobError: there is none, for example because it was removed.
    """
    from orchestrator.backends.kubernetes.mirror.mirror_paths import is_mirror

    if is_mirror(path):
        from orchestrator.backends.kubernetes.mirror.find_mirrors import open_mirror

        return _of(open_mirror(path, environ, clock))
    return Found(find_job(path.parent, path.name))


def _of(copy: JobCopy) -> Found:
    return Found(copy.run_dir, copy)


def every(
    run_root: Path, pattern: str, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> list[Found]:
    """The jobs in the run root and the known jobs in clusters whose names match a shell pattern
    such as `sweep-*`; with `place`, the jobs there. Copies of other jobs are not opened: one may be
    damaged."""
    here = [] if place is not None else [Found(run_dir) for run_dir in jobs(run_root)]
    named = [one for one in here if fnmatchcase(one.run_dir.path.name, pattern)]
    return named + copies(run_root, pattern, place, environ, clock)


def copies(
    run_root: Path, pattern: str, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> list[Found]:
    """The known jobs in clusters whose names match a pattern; with `place`, those there."""
    from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors

    if place is not None:
        from orchestrator.backends.kubernetes.mirror.find_mirrors import mirrors_at

        found = mirrors_at(run_root, place.context, place.namespace, environ, clock)
        return [_of(one) for one in found if fnmatchcase(one.run_dir.path.name, pattern)]
    known = [path for path in known_mirrors(run_root) if fnmatchcase(path.name, pattern)]
    if not known:
        return []
    from orchestrator.backends.kubernetes.mirror.find_mirrors import open_mirror

    return [_of(open_mirror(path, environ, clock)) for path in known]


def matching(
    run_root: Path, pattern: str, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> list[Found]:
    """Jobs whose names match a shell pattern such as `sweep-*`. Raises JobError if none do."""
    found = every(run_root, pattern, place, environ, clock)
    if not found:
        names = _names(run_root, place, environ, clock)
        raise JobError(
            f"no job matches {pattern!r} in {run_root.absolute()}; jobs: {some_of(names)}",
            fix="check the pattern, and --run-root or NDCTL_RUN_ROOT",
        )
    return found


def _names(
    run_root: Path, place: Place | None, environ: Mapping[str, str], clock: Clock
) -> list[str]:
    from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors

    if place is not None:
        return [one.run_dir.path.name for one in copies(run_root, "*", place, environ, clock)]
    here = [run_dir.path.name for run_dir in jobs(run_root)]
    return here + [path.name for path in known_mirrors(run_root)]


def refresh(found: Found) -> None:
    """Refresh a copy. If that fails, the copy stays as it is and `stale` has the reason.

    Raises:
        BackendError: the refresh failed, and there is no copy yet.
    """
    if found.copy is None:
        return
    try:
        found.copy.refresh()
    except BackendError:
        if not found.run_dir.journal.exists():
            raise


def refresh_all(jobs: Sequence[Found]) -> None:
    """Refresh many copies in parallel. An unreachable cluster is asked once, because waiting for a
    timeout per job would take minutes."""
    copies = [found.copy for found in jobs if found.copy is not None]
    if not copies:
        return
    from concurrent.futures import ThreadPoolExecutor

    firsts = {copy.cluster: copy for copy in reversed(copies)}

    def refresh_one(copy: JobCopy) -> None:
        first = firsts[copy.cluster].stale
        if copy not in firsts.values() and isinstance(first, Unreachable):
            copy.stale = first
            return
        with suppress(BackendError):
            copy.refresh()

    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        list(pool.map(refresh_one, firsts.values()))
        list(pool.map(refresh_one, [copy for copy in copies if copy is not firsts[copy.cluster]]))


def await_begin(found: Found, ask: Ask, clock: Clock, say: Callable[[str], object]) -> bool:
    """Wait until the leader of a submitted job starts its journal, and print the state at the
    scheduler meanwhile. False if the scheduler no longer has the job."""
    said = ""
    while found.copy is not None and not found.copy.has_begun:
        seen = ask(replay(found.run_dir))
        words = seen and (seen.unknown or seen.words)
        if words and words != said:
            say(words)
            said = words
        with suppress(BackendError):
            found.copy.refresh()
        if not (seen and seen.held) and not found.copy.has_begun:
            say("its leader did not start: see `ndctl logs` and `kubectl get pods`")
            return False
        clock.sleep(REFRESH_S)
    return True


def lines_before(found: Found, handed_at: float) -> int:
    """Number of journal lines before the current launch. They belong to earlier launches.

    Raises:
        JobError: the current launch ended before `handed_at`. Its Kubernetes objects had been
            deleted but not its run directory, so the submission started nothing.
    """
    entries = read(found.run_dir.journal)
    run = fold(entry.event for entry in entries)
    if run.job is not None and run.ending is not None and run.last_at < handed_at - SKEW_S:
        raise JobError(
            f"nothing was started: launch {run.job.launch.launch} of job {run.job.launch.job} in"
            f" {run.job.launch.run_dir} had already ended: {run.state}, {run.stage.reason}",
            fix="--resume continues from its newest checkpoint; --new starts over and moves the old"
            f" run to {ARCHIVE}/",
        )
    return max(
        (at for at, one in enumerate(entries) if isinstance(one.event, JobSubmitted)), default=0
    )


def settled(found: Found, ended: Callable[[], bool], clock: Clock) -> Callable[[], bool]:
    """Like `ended`, but waits `LAST_LINES_S` longer for the last log lines of a copy."""
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
    """Fetch the logs of a copy. Returns a message for each log that could not be read. For one
    rank, only its host in `attempt` is asked."""
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
    """Refresh a copy in the background while the context is active."""
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
