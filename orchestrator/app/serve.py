"""`ndctl serve`: a server for pages and metrics of the jobs that `ndctl list` shows, and of those
in more run roots."""

import asyncio
import secrets
import signal
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator import host_strikes
from orchestrator.app import remote
from orchestrator.app.commands import commands_for
from orchestrator.app.fleet.known_jobs import HANGS, KnownJob, Scope, known_jobs
from orchestrator.app.fleet.summaries import Reader
from orchestrator.app.launch_statuses import launch_statuses
from orchestrator.app.remote import Found
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.fleet.row import OLD_S, JobRow
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.dashboard.scheduler_status import POLL_INTERVAL_S, is_quiet, needs_no_scheduler
from orchestrator.errors import BackendError, JobError, NdctlError
from orchestrator.job.stage import ENDED
from orchestrator.journal.journal import has_writer
from orchestrator.posix.crew import Crew
from orchestrator.seams import Clock, LaunchStatus
from orchestrator.web.access import Access, is_loopback
from orchestrator.web.fleet import Fleet, Others, Place, Strikes
from orchestrator.web.live.cancelling import CancelForms, cancel_routes
from orchestrator.web.live.hub import Hub
from orchestrator.web.live.routes import page_routes
from orchestrator.web.live.static import static_files
from orchestrator.web.live.streams import Streams
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.pages.render import Renderer
from orchestrator.web.server import (
    AddRoutes,
    Listening,
    Looker,
    application,
    keep_textfile,
    serving,
)

PORT = 9417
TOKEN = "NDCTL_SERVE_TOKEN"
LIST_S = 5.0
"""Seconds after which a new job is found."""
OTHERS_S = 60.0
"""Seconds after which jobs that ended long ago, or are out of reach, are looked at again."""
LIST_WAIT_S = 30.0
"""Limit for each part of listing. What comes later counts at the next listing."""
LIST_SHARE = 4.0
"""If listing is slow, as on a busy file system, the pause is so many times as long."""


class Serve(Struct, frozen=True, kw_only=True):
    """The command line of `ndctl serve`."""

    run_roots: tuple[Path, ...]
    bind: str = "127.0.0.1"
    port: int = PORT
    socket: Path | None = None
    token: str | None = None
    """None: no token is needed."""
    tls: tuple[Path, Path] | None = None
    """Files of the certificate and of its key (PEM)."""
    textfile: Path | None = None
    allow_cancel: bool = False
    """Pages have a button that cancels a job, with the rights of this process."""


def new_token() -> str:
    return secrets.token_urlsafe(24)


def check(wanted: Serve) -> None:
    """Raises JobError if others could read without a token."""
    if wanted.token is None and wanted.socket is None and not is_loopback(wanted.bind):
        raise JobError(
            f"--no-token with --bind {wanted.bind} would show all jobs to the whole network",
            fix="leave out --no-token, or bind to 127.0.0.1 or to a Unix socket (--socket)",
        )


def serve(
    wanted: Serve, environ: Mapping[str, str], clock: Clock, started: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        started: called with the address to open, once the server listens.

    Raises:
        JobError: see `check`; or the port or the certificate cannot be used.
    """
    check(wanted)
    asyncio.run(_serve(wanted, environ, clock, started))


async def _serve(
    wanted: Serve, environ: Mapping[str, str], clock: Clock, started: Callable[[str], None]
) -> None:
    served = ServedJobs(wanted.run_roots, environ, clock)
    fleet = Fleet(served.places, clock, served.statuses, served.strikes, served.others)
    looker, exposition = Looker(fleet.look), Exposition()
    more = pages_of(served, fleet, looker, allow_cancel=wanted.allow_cancel)
    app = application(looker, _access(wanted), exposition, more=more)
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    listening = Listening(
        bind=wanted.bind, port=wanted.port, socket=wanted.socket, tls=_tls(wanted)
    )
    tasks = [asyncio.create_task(_look_first(looker))]
    if wanted.textfile is not None:
        tasks.append(asyncio.create_task(keep_textfile(looker, exposition, wanted.textfile)))
    try:
        async with serving(app, listening) as port:
            started(_address(wanted, port))
            await over.wait()
    except OSError as exc:
        where = wanted.socket or f"{wanted.bind}:{wanted.port}"
        raise JobError(
            f"cannot listen at {where}: {exc.strerror or exc}", fix="choose another with --port"
        ) from exc
    finally:
        for task in tasks:
            task.cancel()


async def _look_first(looker: Looker) -> None:
    """Read the jobs before the first request, whose answer has the error if there is one."""
    with suppress(OSError, NdctlError):
        await looker(LIST_WAIT_S)


def pages_of(
    served: "ServedJobs", fleet: Fleet, looker: Looker, *, allow_cancel: bool
) -> list[AddRoutes]:
    """The routes of the pages."""
    static, forms = static_files(), CancelForms()
    hub = Hub(fleet, looker, Renderer(forms) if allow_cancel else Renderer())
    pages = page_routes(hub, static, Streams(hub))
    return [pages, cancel_routes(hub, static, forms, served.cancel)] if allow_cancel else [pages]


def _access(wanted: Serve) -> Access:
    if wanted.token is not None or wanted.socket is not None:
        return Access(token=wanted.token)
    return Access(names=frozenset({"localhost", "127.0.0.1", "[::1]", wanted.bind}))


def _tls(wanted: Serve) -> ssl.SSLContext | None:
    if wanted.tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = wanted.tls
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as exc:
        raise JobError(
            f"the certificate cannot be read: {exc}", fix="--tls takes two PEM files: CERT KEY"
        ) from exc
    return context


def _address(wanted: Serve, port: int) -> str:
    if wanted.socket is not None:
        return f"{wanted.socket} (curl --unix-socket {wanted.socket} http://localhost/metrics)"
    scheme = "https" if wanted.tls is not None else "http"
    host = f"[{wanted.bind}]" if ":" in wanted.bind else wanted.bind
    token = "" if wanted.token is None else f"?token={wanted.token}"
    return f"{scheme}://{host}:{port}/{token}"


class ServedJobs:
    """The jobs that are known from here, and what their schedulers say. Used by one thread at a
    time."""

    def __init__(self, run_roots: Sequence[Path], environ: Mapping[str, str], clock: Clock) -> None:
        """
        Args:
            run_roots: further folders with jobs.
        """
        self.run_roots, self.environ, self.clock = run_roots, environ, clock
        self.reader = Reader(environ, clock)
        self.listing = Crew(slow_s=LIST_WAIT_S)
        self.crews: dict[Scope, Crew] = {}
        """Of each way to list jobs."""
        self.crew = Crew()
        self.ways: dict[Scope, Sequence[KnownJob]] = {}
        self.problems: dict[Scope, str] = {}
        """What was found in each way, and why that may be incomplete."""
        self.is_idle: dict[Path, bool] = {}
        self.known: dict[Path, KnownJob] = {}
        self.problem = ""
        self.listed = self.refreshed = self.asked = float("-inf")
        self.told: dict[Path, LaunchStatus] = {}
        self.idle: set[Path] = set()
        self.other_rows: tuple[JobRow, ...] = ()
        self.other_jobs: set[tuple[Path, str]] = set()
        """Their run directories, and why they cannot be read."""
        self.others_until = float("-inf")

    def places(self) -> list[Place]:
        now = self.clock.monotonic()
        if now >= self.listed:
            self._list()
            took_s = self.clock.monotonic() - now
            self.listed = now + took_s + max(LIST_S, LIST_SHARE * took_s)
        found = self.found
        if now - self.refreshed >= remote.REFRESH_S:
            remote.refresh_all(list(found.values()))
            self.refreshed = now
        return [
            Place(
                run_dir=one.run_dir,
                commands=partial(commands_for, one, self.environ),
                idle=path in self.idle,
            )
            for path, one in found.items()
        ]

    @property
    def found(self) -> dict[Path, Found]:
        return {path: job.found for path, job in self.known.items() if job.found is not None}

    def _list(self) -> None:
        """Storage that hangs is not waited for: its jobs stay as they were."""
        ways = [Scope(), *(Scope(run_root=str(root)) for root in self.run_roots)]
        for scope in ways:
            self.listing.give(scope, partial(self._list_way, scope))
        self.listing.wait(LIST_WAIT_S)
        hang = [scope.run_root or "the registry" for scope in ways if self.listing.busy_s(scope)]
        problems = [self.problems.get(scope, "") for scope in ways]
        problems += [f"the file system of {root} does not respond" for root in hang]
        self.problem = "; ".join(filter(None, problems))
        listed = {job.path: job for scope in ways for job in self.ways.get(scope, ())}
        self.known = {path: self._kept(path, job) for path, job in listed.items()}
        for path, one in self.found.items():
            self.crew.give(path, partial(self._look_whether_idle, path, one.run_dir), path.parent)
        self.crew.wait(LIST_WAIT_S)
        self.idle = {path for path in self.known if self.is_idle.get(path, False)}

    def _list_way(self, scope: Scope) -> None:
        crew, problem = self.crews.setdefault(scope, Crew()), ""
        try:
            found = known_jobs(scope, self.environ, self.clock, crew)
        except NdctlError as exc:  # the site's index is out of reach: the rest is shown
            problem = exc.message
            alone = {name: text for name, text in self.environ.items() if name != env.INDEX}
            found = known_jobs(scope, alone, self.clock, crew)
        self.ways[scope], self.problems[scope] = found, problem

    def _kept(self, path: Path, job: KnownJob) -> KnownJob:
        former = self.known.get(path)
        if former is None or former.found is None:
            return job
        if job.problem == HANGS:  # it is shown as it was for a while: see `Fleet`
            return former
        # A copy keeps what it knows of its cluster, so the first one found stays.
        return job if job.found is None else replace(job, found=former.found)

    def _look_whether_idle(self, path: Path, run_dir: RunDir) -> None:
        """Whether nothing was written for so long that `ndctl list` hides the job."""
        self.is_idle[path] = False
        with suppress(OSError):
            changed = run_dir.journal.stat().st_mtime
            old = self.clock.now() - changed > OLD_S
            self.is_idle[path] = old and not has_writer(run_dir.journal)

    def others(self) -> Others:
        """The jobs that are not read here. `Reader` keeps the rows of those that have ended."""
        jobs = [job for path, job in self.known.items() if job.found is None or path in self.idle]
        now, which = self.clock.monotonic(), {(job.path, job.problem) for job in jobs}
        if now >= self.others_until or which != self.other_jobs:
            self.other_rows, self.other_jobs = tuple(self.reader.rows(jobs)[0]), which
            self.others_until = now + OTHERS_S
        return Others(rows=self.other_rows, problem=self.problem)

    def statuses(self, jobs: Sequence[ReadJob]) -> Mapping[Path, LaunchStatus]:
        """What schedulers say about jobs that have no leader, or whose leader is quiet."""
        unsure = {job.path: job for job in jobs if _needs_scheduler(job)}
        now = self.clock.monotonic()
        if unsure.keys() - self.told.keys() or now - self.asked >= POLL_INTERVAL_S:
            self.asked, found = now, self.found
            asked = [
                (
                    found[path],
                    job.snapshot.seen.run,
                    job.snapshot.leader_alive,
                    is_quiet(job.snapshot.heard_at, job.snapshot.now),
                )
                for path, job in unsure.items()
            ]
            answers = launch_statuses(asked, self.environ, self.clock) if asked else []
            self.told = dict(zip(unsure, answers, strict=True))
        return {path: self.told[path] for path in unsure}

    def cancel(self, path: Path, sender: str) -> str:
        """As `ndctl cancel --no-wait`. Raises NdctlError."""
        from orchestrator.app.cancel_job import cancel, user

        found, by = self.found[path], f"{sender} on the web page of {user()}"
        return cancel(found.run_dir, self.environ, self.clock, found, by)

    def strikes(self) -> Strikes:
        return tuple(self._strikes())

    def _strikes(self) -> Iterator[tuple[tuple[str, ...], float]]:
        now = self.clock.now()
        for root in sorted({*self.run_roots, *(path.parent for path in self.found)}):
            try:
                found = host_strikes.records(root, now)
            except (JobError, BackendError):
                continue  # unreadable strikes must not hide the other metrics
            for cluster, records in found.items():
                for one in records:
                    if one.score > 0:
                        yield (str(root.absolute()), cluster, one.host), one.score


def _needs_scheduler(job: ReadJob) -> bool:
    """As in `dashboard/scheduler_status.py`: the journal alone does not tell the state."""
    snapshot = job.snapshot
    run = snapshot.seen.run
    if needs_no_scheduler(run, snapshot.leader_alive) or run.state in ENDED:
        return False
    return not snapshot.leader_alive or is_quiet(snapshot.heard_at, snapshot.now)
