"""`ndctl serve`: a server for pages and metrics of all jobs in some run roots."""

import asyncio
import secrets
import signal
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator import host_strikes
from orchestrator.app import remote
from orchestrator.app.commands import commands_for
from orchestrator.app.launch_statuses import launch_statuses
from orchestrator.app.remote import Found
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.dashboard.scheduler_status import POLL_INTERVAL_S, is_quiet
from orchestrator.errors import BackendError, JobError
from orchestrator.job.stage import ENDED
from orchestrator.seams import Clock, LaunchStatus
from orchestrator.web.access import Access, is_loopback
from orchestrator.web.fleet import Fleet, Place, Strikes
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.server import Listening, Looker, application, keep_textfile, serving

PORT = 9417
TOKEN = "NDCTL_SERVE_TOKEN"


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
    fleet = Fleet(served.places, clock, served.statuses, served.strikes)
    looker, exposition = Looker(fleet.look), Exposition()
    app = application(looker, _access(wanted), exposition)
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    listening = Listening(
        bind=wanted.bind, port=wanted.port, socket=wanted.socket, tls=_tls(wanted)
    )
    writing = None
    if wanted.textfile is not None:
        writing = asyncio.create_task(keep_textfile(looker, exposition, wanted.textfile))
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
        if writing is not None:
            writing.cancel()


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
    """The jobs of some run roots, and what their schedulers say. Used by one thread at a time."""

    def __init__(self, run_roots: Sequence[Path], environ: Mapping[str, str], clock: Clock) -> None:
        self.run_roots, self.environ, self.clock = run_roots, environ, clock
        self.found: dict[Path, Found] = {}
        self.commands: dict[Path, Commands] = {}
        self.refreshed = self.asked = float("-inf")
        self.told: dict[Path, LaunchStatus] = {}

    def places(self) -> list[Place]:
        found = {one.run_dir.path: one for root in self.run_roots for one in self._every(root)}
        # A copy keeps what it knows of its cluster, so the first one found stays.
        self.found = {path: self.found.get(path, one) for path, one in found.items()}
        now = self.clock.monotonic()
        if now - self.refreshed >= remote.REFRESH_S:
            remote.refresh_all(list(self.found.values()))
            self.refreshed = now
        return [
            Place(run_dir=one.run_dir, commands=self._commands(path, one))
            for path, one in self.found.items()
        ]

    def _every(self, root: Path) -> list[Found]:
        return remote.every(root, None, self.environ, self.clock)

    def _commands(self, path: Path, found: Found) -> Commands:
        if path not in self.commands:
            self.commands[path] = commands_for(found, self.environ)
        return self.commands[path]

    def statuses(self, jobs: Sequence[ReadJob]) -> Mapping[Path, LaunchStatus]:
        """What schedulers say about jobs that have no leader, or whose leader is quiet."""
        unsure = {job.path: job for job in jobs if _needs_scheduler(job)}
        now = self.clock.monotonic()
        if unsure.keys() - self.told.keys() or now - self.asked >= POLL_INTERVAL_S:
            self.asked = now
            asked = [
                (
                    self.found[path],
                    job.snapshot.seen.run,
                    job.snapshot.leader_alive,
                    is_quiet(job.snapshot.heard_at, job.snapshot.now),
                )
                for path, job in unsure.items()
            ]
            answers = launch_statuses(asked, self.environ, self.clock) if asked else []
            self.told = dict(zip(unsure, answers, strict=True))
        return {path: self.told[path] for path in unsure}

    def strikes(self) -> Strikes:
        return tuple(self._strikes())

    def _strikes(self) -> Iterator[tuple[tuple[str, ...], float]]:
        now = self.clock.now()
        for root in self.run_roots:
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
    if snapshot.is_local or snapshot.seen.run.state in ENDED:
        return False
    return not snapshot.leader_alive or is_quiet(snapshot.heard_at, snapshot.now)
