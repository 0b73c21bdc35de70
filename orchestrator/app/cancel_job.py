"""From a wish to nothing left: `ndctl cancel`."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from ssl import SSLSocket

from orchestrator.agent.handshake import nonce_in, proof_headers
from orchestrator.app.commands import commands_for, commands_of
from orchestrator.app.remote import Found
from orchestrator.app.schedulers import clear, name_of, standing
from orchestrator.app.submission.submission_lock import refuse_while_submitting
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import CANCEL_PATH, CHALLENGE, Claim
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError, InUse, JobError, Unanswered
from orchestrator.job.stage import Submitted
from orchestrator.job.state import Run
from orchestrator.job_secret import JobSecret, client_context, is_pinned, secret_from
from orchestrator.journal.journal import Journal, has_writer
from orchestrator.journal.snapshot import known
from orchestrator.seams import Clock, Copy

CANCEL_TIMEOUT_S = 10.0
JSON = {"Content-Type": "application/json"}
ENDING_POLL_S = 0.1
LEAVE_S = 15.0
"""For the agents of a job that has ended to leave by themselves."""
ASK_AGAIN_S = 5.0
COME_BACK_S = 300.0
"""For a leader elsewhere that went away with the order to come back and carry it out."""
NOT_BEGUN = "before it began: its leader had not started yet"
LAST_WORDS_S = 20.0
"""For the end of a job of which nothing is left to come here."""


def cancel(
    run_dir: RunDir, environ: Mapping[str, str], clock: Clock, found: Found | None = None
) -> str:
    """Ask the leader to stop; without one, end what is left. What was done, in words.

    `found`: how the job was found, where its run directory may be elsewhere.
    """
    run = known(run_dir)
    name = run_dir.path.name
    if run.job is None:
        raise JobError(f"job {name} was never submitted to its end", fix="submit it again")
    elsewhere = found is not None and found.copy is not None
    if run.ending is not None:
        if elsewhere:
            raise _has_ended(name, run)
        return _end_what_is_left(run, run_dir, environ, clock)
    if found is not None and found.copy is not None:
        return _cancel_there(found.here(run), found.copy, environ, clock)
    led = has_writer(run_dir.journal)
    if led and _ask_to_cancel(run_dir, run.job.launch.launch, environ):
        return f"{name} is being cancelled: its ranks write a checkpoint and leave"
    refuse_while_submitting(run_dir)
    if not led:
        with suppress(InUse):  # else a leader has begun at this very moment
            return _cancel_without_leader(run, run_dir, environ, clock)
    clear(run, environ, clock)
    if known(run_dir).ending is not None:
        return f"{name} was ended by its scheduler: its leader could not be asked from here"
    if _record_cancel(run_dir, clock):
        return f"{name} was cancelled {NOT_BEGUN}"
    return f"{name} was cancelled: its leader could not be asked, so its processes were ended"


def _has_ended(name: str, run: Run) -> JobError:
    return JobError(f"job {name} has already ended: {run.state}", fix="nothing to cancel")


def _end_what_is_left(run: Run, run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> str:
    """Of a job that has ended: its scheduler may still have it, where it was not reached before."""
    name = run_dir.path.name
    try:
        left = standing(run, environ, clock)
        if left is None:
            raise _has_ended(name, run)
        clear(run, environ, clock)
    except BackendError as exc:
        raise _not_reached(run, run_dir, exc, environ, clock) from exc
    return f"{name} had already ended: {run.state}; what its scheduler still had is ended: {left}"


def _cancel_without_leader(
    run: Run, run_dir: RunDir, environ: Mapping[str, str], clock: Clock
) -> str:
    """Write the end down first: a job that is in a queue then leaves at once should it start.

    Raises InUse where a leader has the journal, and BackendError where the end is written down and
    the scheduler was not reached.
    """
    waiting = _record_cancel(run_dir, clock)
    try:
        left = standing(run, environ, clock)
        clear(run, environ, clock)
    except BackendError as exc:
        raise _not_reached(known(run_dir), run_dir, exc, environ, clock) from exc
    called = name_of(run, environ, clock)
    said = f"{run_dir.path.name} was cancelled {NOT_BEGUN if waiting else 'while it had no leader'}"
    if called is None:
        return said if waiting else f"{said}; what was left of it has been ended"
    return f"{said}; {called} {'had ended already' if left is None else 'has been ended'}"


def _not_reached(
    run: Run, run_dir: RunDir, exc: BackendError, environ: Mapping[str, str], clock: Clock
) -> BackendError:
    """The job's end is written down, and its scheduler may have something of it all the same."""
    called = name_of(run, environ, clock) or "something of it"
    again = commands_of(run_dir, environ).of("cancel")
    return type(exc)(
        f"{run_dir.path.name} is {run.state}, which is written down; its scheduler was not reached"
        f" and may still have {called}: {exc.message}",
        fix=f"when it answers again, `{again}` ends what is left; should the job start before that,"
        " it leaves at once",
    )


def _cancel_there(run: Run, copy: Copy, environ: Mapping[str, str], clock: Clock) -> str:
    """In one of its own hosts; where none runs, what the scheduler has of it is ended."""
    name = copy.run_dir.path.name
    done = copy.cancel()
    if done is not None and done.code == 0:
        return done.out or f"{name} is being cancelled"
    with suppress(BackendError):
        copy.refresh()  # it may have ended since it was looked at
    if (ended := known(copy.run_dir)).ending is not None:
        raise JobError(f"job {name} has already ended: {ended.state}", fix="nothing to cancel")
    clear(run, environ, clock)
    copy.let_go()
    _record_cancel(copy.run_dir, clock)
    return f"{name} ran on no host that could be asked: what there was of it has been ended"


def _ask_to_cancel(run_dir: RunDir, launch: int, environ: Mapping[str, str]) -> bool:
    """Whether the leader took the order."""
    try:
        leader = read_json(run_dir.leader.read_text())
        if leader["launch"] != launch:
            return False  # of an earlier launch; another program may have its port by now
        secret = secret_from(environ.get(env.TOKEN) or run_dir.token.read_text())
        code, why = _post(leader["address"], leader["port"], secret, launch)
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return False
    if code == HTTPStatus.ACCEPTED:
        return True
    raise BackendError(
        f"the leader refused to cancel: {code} {why}",
        fix=f"use the secret in {run_dir.token}",
    )


def _post(address: str, port: int, secret: JobSecret, launch: int) -> tuple[int, str]:
    """Ask the job's leader, and no other program that has its port by now: the first request tells
    nothing, and its answer is what the second one proves something with."""
    connection = HTTPSConnection(address, port, timeout=CANCEL_TIMEOUT_S, context=client_context())
    with closing(connection):
        connection.connect()
        assert isinstance(connection.sock, SSLSocket)
        if not is_pinned(secret, connection.sock.getpeercert(binary_form=True)):
            raise ConnectionRefusedError("this is not the job's leader")
        connection.request("POST", CANCEL_PATH)
        asked = connection.getresponse()
        asked.read()
        claim = Claim(purpose="cancel", launch=launch)
        headers = proof_headers(
            secret, nonce_in({CHALLENGE: asked.getheader(CHALLENGE, "")}) or "", claim
        )
        body = json.dumps({"by": user()})
        connection.request("POST", CANCEL_PATH, body, {**headers, **JSON})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def wait_until_ended(
    run_dir: RunDir, environ: Mapping[str, str], clock: Clock, found: Found | None = None
) -> str:
    """Wait for the end of a job that was cancelled; its state and why, in words.

    A scheduler has nothing of it any more then.
    """
    alive, leads = True, _leads(run_dir, environ, clock, found)
    # From the snapshot each time: a copy's line that was guessed gives way to the leader's own.
    while (run := known(run_dir)).ending is None:
        if not alive:
            raise JobError(
                f"the leader of {run_dir.path.name} went away before the job had ended",
                fix=f"type `{commands_for(found or Found(run_dir), environ).of('cancel')}` again",
            )
        clock.sleep(ENDING_POLL_S)
        alive = leads()  # asked before the journal is read, which a leader ends
    run = found.here(run) if found is not None else run
    leaving = clock.monotonic()
    try:
        while standing(run, environ, clock) is not None and clock.monotonic() - leaving < LEAVE_S:
            clock.sleep(ENDING_POLL_S)
        if run.job is not None and run.job.backend != "local":
            clear(run, environ, clock)
    except Unanswered as exc:
        raise _not_reached(run, run_dir, exc, environ, clock) from exc
    return f"{run_dir.path.name}: {run.state}, {run.stage.reason}"


def _leads(
    run_dir: RunDir, environ: Mapping[str, str], clock: Clock, found: Found | None
) -> Callable[[], bool]:
    if found is None or found.copy is None:
        return partial(has_writer, run_dir.journal)
    return _may_end(found, environ, clock)


def _may_end(found: Found, environ: Mapping[str, str], clock: Clock) -> Callable[[], bool]:
    """Asks whether a leader in another place may still bring a job to its end: one that went away
    may come back, for as long as the scheduler has something of the job."""
    led_at = asked_at = clock.monotonic()
    held = True

    def may_end() -> bool:
        nonlocal led_at, asked_at, held
        now = clock.monotonic()
        if has_writer(found.run_dir.journal):
            led_at, held = now, True
        elif now - asked_at >= ASK_AGAIN_S:
            asked_at = now
            run = known(found.run_dir)
            with suppress(BackendError):
                held = standing(found.here(run), environ, clock) is not None
        return now - led_at < (COME_BACK_S if held else LAST_WORDS_S)

    return may_end


def _record_cancel(run_dir: RunDir, clock: Clock) -> bool:
    """The journal of a job without a leader gets its end from here. Whether its launch had yet to
    begin: a job that was submitted a second ago has no leader, and nothing is wrong with it."""
    from orchestrator.contract.messages.events import CancelRequested, LeaderStarted
    from orchestrator.journal.supervisor import Supervisor

    with Journal(run_dir.journal, clock) as journal:
        supervisor = Supervisor(journal)
        assert supervisor.run.job is not None
        waiting = isinstance(supervisor.run.stage, Submitted)
        host = supervisor.run.job.launch.leader
        supervisor.feed(LeaderStarted(at=clock.now(), host=host, pid=os.getpid()))
        supervisor.feed(CancelRequested(at=clock.now(), by=user()))
    return waiting


def user() -> str:
    import getpass

    return getpass.getuser()
