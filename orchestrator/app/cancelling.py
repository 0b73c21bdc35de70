"""From a wish to nothing left: `ndctl cancel`."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from ssl import SSLSocket

from orchestrator.agent.entering import nonce_in, proof_headers
from orchestrator.app.commands import commands_for
from orchestrator.app.remote import Found
from orchestrator.app.schedulers import clear, standing
from orchestrator.app.submission_lock import refuse_while_submitting
from orchestrator.contract import env
from orchestrator.contract.protocol import CANCEL_PATH, CHALLENGE, Claim
from orchestrator.contract.read_json import read_json
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, JobError
from orchestrator.job_secret import JobSecret, client_context, is_pinned, secret_from
from orchestrator.seams import Clock, Copy
from orchestrator.supervise.log import Journal, has_writer
from orchestrator.supervise.snapshot import known
from orchestrator.supervise.state import Run, Stage

CANCEL_TIMEOUT_S = 10.0
JSON = {"Content-Type": "application/json"}
ENDING_POLL_S = 0.1
LEAVE_S = 15.0
"""For the agents of a job that has ended to leave by themselves."""
ASK_AGAIN_S = 5.0
COME_BACK_S = 300.0
"""For a leader elsewhere that went away with the order to come back and carry it out."""
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
    if run.ending is not None:
        raise JobError(f"job {name} has already ended: {run.state}", fix="nothing to cancel")
    if run.job is None:
        raise JobError(f"job {name} was never submitted to its end", fix="submit it again")
    if found is not None and found.copy is not None:
        return _cancel_there(found.here(run), found.copy, environ, clock)
    led = has_writer(run_dir.journal)
    if led and _ask_to_cancel(run_dir, run.job.launch.launch, environ):
        return f"{name} is being cancelled: its ranks write a checkpoint and leave"
    refuse_while_submitting(run_dir)
    clear(run, environ, clock)
    if known(run_dir).ending is not None:
        return f"{name} was ended by its scheduler: its leader could not be asked from here"
    waiting = _record_cancel(run_dir, clock)
    if waiting:
        return f"{name} was cancelled before it began: its leader had not started yet"
    if led:
        return f"{name} was cancelled: its leader could not be asked, so its processes were ended"
    return f"{name} had no leader any more; what was left of it has been ended"


def _cancel_there(run: Run, copy: Copy, environ: Mapping[str, str], clock: Clock) -> str:
    """In one of its own hosts; where none runs, what the scheduler has of it is ended."""
    name = copy.run_dir.path.name
    done = copy.cancel()
    if done is not None and done.code == 0:
        return done.out or f"{name} is being cancelled"
    clear(run, environ, clock)
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
    while standing(run, environ, clock) is not None and clock.monotonic() - leaving < LEAVE_S:
        clock.sleep(ENDING_POLL_S)
    if run.job is not None and run.job.backend != "local":
        clear(run, environ, clock)
    return f"{run_dir.path.name}: {run.state}, {run.reason}"


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
    from orchestrator.contract.events import CancelRequested, LeaderStarted
    from orchestrator.supervise.loop import Supervisor

    with Journal(run_dir.journal, clock) as journal:
        supervisor = Supervisor(journal)
        assert supervisor.run.job is not None
        waiting = supervisor.run.stage is Stage.SUBMITTED
        host = supervisor.run.job.launch.leader
        supervisor.feed(LeaderStarted(at=clock.now(), host=host, pid=os.getpid()))
        supervisor.feed(CancelRequested(at=clock.now(), by=user()))
    return waiting


def user() -> str:
    import getpass

    return getpass.getuser()
