"""Every job that ndctl knows from here: of the run root, registered ones, and archived ones."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.regular_file import descriptor_of, open_regular
from orchestrator.app import remote
from orchestrator.app.remote import Found, Place
from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.dashboard.fleet.summary import JobSummary
from orchestrator.errors import JobError, NdctlError
from orchestrator.job_paths import folders, is_pattern, run_root_of, some_of
from orchestrator.journal.journal import from_line
from orchestrator.journal.run_dir_init import ARCHIVE
from orchestrator.posix.crew import Crew, Task
from orchestrator.registry.entry import Entry
from orchestrator.registry.store import Registered, own_entries, shared_entries
from orchestrator.registry.submitted import user_name
from orchestrator.seams import Clock

HANGS = "its file system does not respond"
ROOT_HANGS = "the file system of this run root does not respond, so its jobs are not listed"
LOOK_S = 60.0
"""Limit for looking into all run directories. Those that hang are not waited for."""


class Scope(Struct, frozen=True, kw_only=True):
    """Which jobs are meant."""

    patterns: tuple[str, ...] = ()
    """Names, patterns such as `sweep-*`, or names of groups; empty: all."""
    run_root: str | None = None
    """Only jobs in this folder. None: all that are known."""
    place: Place | None = None
    """Only jobs in this cluster."""
    user: str | None = None
    archived: bool = False
    """Also runs that `submit --new` moved away."""


class KnownJob(Struct, frozen=True, kw_only=True):
    path: Path
    """The run directory, or its copy here."""
    user: str
    found: Found | None = None
    """None: it cannot be read; `problem` says why."""
    entry: Entry | None = None
    problem: str = ""
    gone: bool = False
    archived: bool = False
    report: JobSummary | None = None
    """The last report of its leader to the shared index."""


def known_jobs(
    scope: Scope, environ: Mapping[str, str], clock: Clock, crew: Crew | None = None
) -> list[KnownJob]:
    """Each run directory once.

    Args:
        crew: looks into run directories, because the storage of one may hang. Who lists jobs again
            and again passes the same one.

    Raises:
        JobError: the shared index cannot be read, or a pattern matches no job.
        OSError: the run root cannot be read.
    """
    root = run_root_of(scope.run_root, environ)
    jobs = {str(job.path): job for job in _in_root(root, scope, environ, clock, crew or Crew())}
    mine = [job for job in jobs.values() if scope.user in (None, job.user)]
    if not scope.patterns:
        return mine
    meant: set[Path] = set()
    for pattern in scope.patterns:
        matching = _matching(pattern, mine)
        if not matching and not _matching(pattern, jobs.values()):
            raise _no_match(pattern, root, jobs.values())
        meant |= {job.path for job in matching}
    return [job for job in mine if job.path in meant]


def _in_root(
    root: Path, scope: Scope, environ: Mapping[str, str], clock: Clock, crew: Crew
) -> list[KnownJob]:
    """All jobs of a scope without its patterns; if one is there twice, the last one counts."""
    jobs = _at_the_root(root, scope, environ, clock, crew)
    if scope.run_root is None and scope.place is None:
        jobs += _elsewhere({str(job.path) for job in jobs}, scope, environ, clock, crew)
    if scope.archived:
        roots = {str(root.absolute()), *(str(job.path.parent) for job in jobs)}
        lost = {str(job.path) for job in jobs if job.problem == ROOT_HANGS}
        lost |= {str(job.path.parent) for job in jobs if job.problem == HANGS}
        for run_dir in _archived(sorted(roots - lost)):
            found = Found(run_dir)
            user = _owner(run_dir)
            jobs.append(KnownJob(path=run_dir.path, user=user, found=found, archived=True))
    return jobs


def _at_the_root(
    root: Path, scope: Scope, environ: Mapping[str, str], clock: Clock, crew: Crew
) -> list[KnownJob]:
    """The jobs in the run root, and the copies of jobs in clusters that are there."""
    if scope.place is not None:
        return [_copied(one) for one in remote.copies(root, "*", scope.place, environ, clock)]
    told: list[tuple[list[Path], list[KnownJob]] | OSError] = []

    def list_both() -> None:
        try:
            copies = [_copied_in(path, environ, clock) for path in known_mirrors(root)]
            told.append((folders(root), copies))
        except OSError as exc:  # a folder of another user
            told.append(exc)

    crew.give(("run root", root), list_both, root.absolute())
    crew.wait(LOOK_S)
    if not told:
        return [KnownJob(path=root.absolute(), user="", problem=ROOT_HANGS)]
    if isinstance(told[0], Exception):
        raise told[0]
    paths, copies = told[0]
    return [*_looked(crew, _here(paths)), *copies]


def _copied_in(path: Path, environ: Mapping[str, str], clock: Clock) -> KnownJob:
    try:
        return _copied(remote.at(path, environ, clock))
    except NdctlError as exc:  # it is damaged
        user = _owner(RunDir(path))
        return KnownJob(path=path, user=user, problem=f"{exc.message}; {exc.fix}")


def _copied(found: Found) -> KnownJob:
    return KnownJob(path=found.run_dir.path, user=_owner(found.run_dir), found=found)


def _elsewhere(
    known: set[str], scope: Scope, environ: Mapping[str, str], clock: Clock, crew: Crew
) -> list[KnownJob]:
    """The registered jobs that are not `known`."""
    calls = [
        (_with_problem(_of_entry(one), HANGS), partial(_of, one, environ, clock))
        for one in _registered(scope, environ)
        if one.entry.run_dir not in known
    ]
    jobs: dict[Path, KnownJob] = {}
    for job in _looked(crew, calls):
        if job.path not in jobs or jobs[job.path].gone:
            jobs[job.path] = job
    return list(jobs.values())


Calls = Sequence[tuple[KnownJob, Callable[[], "KnownJob | None"]]]
"""Calls that look for a job, each with the job that counts while the call hangs."""


def _looked(crew: Crew, calls: Calls) -> list[KnownJob]:
    found: dict[int, KnownJob | None] = {}

    def look(number: int, call: Callable[[], KnownJob | None]) -> None:
        found[number] = call()

    crew.give_all(
        Task((job.path, job.user), partial(look, number, call), job.path.parent)
        for number, (job, call) in enumerate(calls)
    )
    crew.wait(LOOK_S)
    jobs = (found.get(number, job) for number, (job, _) in enumerate(calls))
    return [job for job in jobs if job is not None]


def _here(paths: Sequence[Path]) -> Calls:
    def look(path: Path) -> KnownJob | None:
        run_dir = RunDir(path)
        with suppress(OSError):  # a folder of another user
            owner = _ask_storage(run_dir.journal).st_uid
            return KnownJob(path=path, user=user_name(owner), found=Found(run_dir))
        return None

    return [(KnownJob(path=one, user="", problem=HANGS), partial(look, one)) for one in paths]


def _ask_storage(journal: Path) -> os.stat_result:
    """What the file system says about a journal. Raises OSError if there is none.

    It also opens the file: a client of NFS may know from its cache what `stat` asks, but it asks
    the server when a file is opened. So a call that returns shows that the server responds.
    """
    seen = journal.stat()
    if stat.S_ISREG(seen.st_mode):
        with suppress(PermissionError):  # reading it says so
            os.close(descriptor_of(journal, os.O_RDONLY))
    return seen


def _matching(pattern: str, jobs: Iterable[KnownJob]) -> list[KnownJob]:
    """The jobs whose names match; without any, those of the group of this name."""
    jobs = list(jobs)
    named = [job for job in jobs if fnmatchcase(job.path.name, pattern)]
    if named or is_pattern(pattern):
        return named
    return [job for job in jobs if job.found and group_of(job.found.run_dir) == pattern]


def group_of(run_dir: RunDir) -> str:
    """The job's group, from the first line of its journal; empty: none."""
    try:
        with open_regular(run_dir.journal) as journal:
            event = from_line(journal.readline()).event
    except (OSError, ValueError):
        return ""
    return event.group if isinstance(event, JobSubmitted) else ""


def _no_match(pattern: str, root: Path, jobs: Iterable[KnownJob]) -> JobError:
    jobs = list(jobs)
    if any(job.problem == ROOT_HANGS for job in jobs):
        return JobError(
            f"no job matches {pattern!r}, but {root.absolute()} could not be searched: its file"
            " system does not respond",
            fix="try again when it does, or give another --run-root",
        )
    there = some_of(job.path.name for job in jobs)
    others = any(job.path.parent != root.absolute() for job in jobs)
    where = f"{root.absolute()}{' or among the other known jobs' if others else ''}"
    return JobError(
        f"no job matches {pattern!r} in {where}; jobs: {there}",
        fix="check the pattern, and --run-root or NDCTL_RUN_ROOT",
    )


def _registered(scope: Scope, environ: Mapping[str, str]) -> Iterator[Registered]:
    """One entry for each run directory and owner. Submitters and leaders on several machines may
    have written one each: the newest report counts, and this machine knows best what is here."""
    here = os.uname().nodename
    found: dict[tuple[str, int], Registered] = {}
    for one in sorted(
        [*own_entries(environ), *shared_entries(environ, scope.user)],
        key=lambda one: (one.entry.machine == here, one.entry.at),
    ):
        key = (one.entry.run_dir, one.owner)
        former = found.get(key)
        if former is not None and _reported_at(former) > _reported_at(one):
            one = replace(one, entry=replace(one.entry, report=former.entry.report))
        found[key] = one
    yield from found.values()


def _reported_at(one: Registered) -> float:
    report = _report(one)
    return -1.0 if report is None else report.updated_at


def _report(one: Registered) -> JobSummary | None:
    if bytes(one.entry.report) == b"null":
        return None
    try:
        return msgspec.json.decode(one.entry.report, type=JobSummary)
    except (ValueError, RecursionError):  # of another ndctl, or damaged
        return None


def _of(one: Registered, environ: Mapping[str, str], clock: Clock) -> KnownJob:
    """The job of an entry, without trust: another user may have written it."""
    known = _of_entry(one)
    path, entry, user = known.path, known.entry, known.user
    try:
        seen = _ask_storage(path / "journal.jsonl")
    except PermissionError:
        return _with_problem(known, f"the run directory belongs to {user}, and you have no access")
    except OSError as exc:
        return _missing(known, exc)
    # A pipe would block the reader, and a journal of somebody else says nothing about this job.
    if not stat.S_ISREG(seen.st_mode) or (one.shared and seen.st_uid != one.owner):
        return _with_problem(known, f"its journal is not a file of {user}")
    if not os.access(path / "journal.jsonl", os.R_OK, effective_ids=True):
        return _with_problem(known, f"its journal belongs to {user}, and you have no access")
    try:
        return KnownJob(path=path, user=user, entry=entry, found=remote.at(path, environ, clock))
    except NdctlError as exc:
        return _with_problem(known, exc.message)


def _of_entry(one: Registered) -> KnownJob:
    return KnownJob(
        path=Path(one.entry.run_dir),
        user=user_name(one.owner),
        entry=one.entry,
        report=_report(one),
    )


def _with_problem(job: KnownJob, problem: str, *, gone: bool = False) -> KnownJob:
    return replace(job, problem=problem, gone=gone)


def _missing(job: KnownJob, exc: OSError) -> KnownJob:
    assert job.entry is not None
    if not isinstance(exc, FileNotFoundError | NotADirectoryError):
        return _with_problem(job, str(exc))
    machine = job.entry.machine
    if job.path.exists():
        return _with_problem(job, f"{job.path} has no journal.jsonl any more")
    if machine != os.uname().nodename:
        words = f"{job.path} does not exist on this machine; it was submitted on {machine}"
    else:
        words = f"{job.path} does not exist: it was removed, or its file system is not mounted"
    return _with_problem(job, words, gone=True)


def _owner(run_dir: RunDir) -> str:
    try:
        return user_name(run_dir.journal.stat().st_uid)
    except OSError:
        return ""


def _archived(roots: list[str]) -> Iterator[RunDir]:
    for root in roots:
        for journal in sorted(Path(root, ARCHIVE).glob("*/journal.jsonl")):
            yield RunDir(journal.parent.absolute())


def locate(name: str, environ: Mapping[str, str], clock: Clock) -> Found | None:
    """The registered job of this name; None if there is none. A job of the user comes before jobs
    of others.

    Raises:
        JobError: there are several.
    """
    jobs = known_jobs(Scope(), environ, clock)
    named = [job for job in jobs if job.path.name == name and job.found is not None]
    own = [job for job in named if job.user == user_name(os.geteuid())]
    chosen = own or named
    if len(chosen) > 1:
        places = "; ".join(f"`{_choice(job)}` (user {job.user})" for job in chosen)
        raise JobError(f"{len(chosen)} jobs are named {name}", fix=f"choose one with {places}")
    return chosen[0].found if chosen else None


def _choice(job: KnownJob) -> str:
    """The options that choose a job among those of its name."""
    from shlex import join

    from orchestrator.backends.kubernetes.mirror.mirror_paths import options_of, run_root_above

    if job.found is None or job.found.copy is None:
        return join(("--run-root", str(job.path.parent)))
    root = run_root_above(job.path)
    return join(("--run-root", str(root), *options_of(root, job.path)))


def own_matching(pattern: str, environ: Mapping[str, str], clock: Clock) -> list[Found]:
    """The user's own registered jobs that match. Raises JobError if none does."""
    scope = Scope(patterns=(pattern,), user=user_name(os.geteuid()))
    return [job.found for job in known_jobs(scope, environ, clock) if job.found is not None]


def own_group(
    name: str,
    run_root: str | None,
    place: Place | None,
    environ: Mapping[str, str],
    clock: Clock,
) -> list[Found]:
    """The user's own jobs of the group `name`; empty: there is no such group."""
    if not name:  # `ndctl cancel "$JOB"` without JOB must not mean all jobs that are in no group
        return []
    scope = Scope(run_root=run_root, place=place, user=user_name(os.geteuid()))
    jobs = (job.found for job in known_jobs(scope, environ, clock) if job.found is not None)
    return [found for found in jobs if group_of(found.run_dir) == name]


def gone_words(name: str, environ: Mapping[str, str], clock: Clock) -> str:
    """What is known of a registered job that cannot be read; empty if there is none."""
    jobs = known_jobs(Scope(), environ, clock)
    return "; ".join(job.problem for job in jobs if job.path.name == name and job.problem)
