"""Asks the leader of a running job about its ranks, directly or in one of its pods."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from msgspec import Struct

from orchestrator.app.ask_leader import Request, ask_leader
from orchestrator.app.remote import Found
from orchestrator.app.snapshots import snapshot_of
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.read_json import read_json
from orchestrator.dashboard.job_view.standing import Standing
from orchestrator.errors import BackendError, JobError
from orchestrator.job.stage import ENDED
from orchestrator.journal.snapshot import replay
from orchestrator.seams import Clock, Completed, JobCopy

T = TypeVar("T")


class Question(Struct, frozen=True, kw_only=True):
    request: Request
    """For a leader that this machine reaches."""
    in_a_pod: Callable[[JobCopy], Completed | None]
    """For a job whose run directory only its pods have: runs the same command of ndctl there. None:
    no pod could be asked."""
    if_over: str
    """What to do if the job is not running. JOB stands for its name."""
    if_refused: str = ""
    """What to do if the leader cannot answer now."""


def ask(
    found: Found, environ: Mapping[str, str], clock: Clock, question: Question, kind: type[T]
) -> T:
    """The answer, of type `kind`.

    Raises:
        JobError: the job is not running, or its ranks cannot be asked now.
        BackendError: the leader could not be asked.
    """
    run, name = replay(found.run_dir), found.run_dir.path.name
    if run.job is None or run.ending is not None:
        raise JobError(
            f"job {name} is not running: {run.state}", fix=question.if_over.replace("JOB", name)
        )
    if found.copy is not None:
        return _decoded(_from_a_pod(found.copy, name, question), name, kind)
    answer = ask_leader(found.run_dir, run.job.launch.launch, environ, question.request)
    if answer is None:
        raise _unreached(snapshot_of(found, environ, clock).standing, name, question)
    if answer.status == HTTPStatus.CONFLICT:
        raise JobError(f"job {name}: {answer.text}", fix=question.if_refused)
    if answer.status != HTTPStatus.OK:
        raise BackendError(f"the leader of {name} refused: {answer.status} {answer.text}")
    return _decoded(answer.text, name, kind)


def _unreached(standing: Standing, name: str, question: Question) -> JobError | BackendError:
    """Why the leader of a job did not answer, as its scheduler knows it."""
    state, fix = ", ".join(filter(None, (standing.state, standing.reason))), standing.fix
    if standing.state == "PENDING":
        fix = f"try again when `ndctl status {name}` says that it runs"
        return JobError(f"job {name} has no ranks yet: {state}", fix=fix)
    if standing.state == "SUSPENDED":
        return JobError(f"the ranks of {name} are stopped: {state}", fix=f"to continue it: {fix}")
    if standing.state in ENDED:
        fix = question.if_over.replace("JOB", name)
        return JobError(f"job {name} is not running: {state}", fix=fix)
    return BackendError(
        f"the leader of {name} could not be reached from here; the job is {state}",
        fix=f"`ndctl status {name}` says whether it is alive; if it is, run the command on a"
        " machine that reaches the hosts of the job",
    )


def _from_a_pod(copy: JobCopy, name: str, question: Question) -> str:
    done = question.in_a_pod(copy)
    if done is None:
        raise BackendError(
            f"no pod of {name} could be asked",
            fix="you need the right to create pods/exec in the namespace of the job",
        )
    if done.code:
        raise JobError(done.err.removeprefix("error: ") or f"{name}: exit code {done.code}")
    return done.out


def _decoded(text: str, name: str, kind: type[T]) -> T:
    try:
        body: Any = read_json(text)
        body.pop("schema_version", None)
        taken: T = decode(kind, body)
    except (ValueError, AttributeError, Invalid) as exc:
        raise BackendError(f"the answer of {name} is unreadable: {exc}") from exc
    return taken
