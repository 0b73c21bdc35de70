"""Asks the leader of a running job about its ranks, directly or in one of its pods."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from msgspec import Struct

from orchestrator.app.ask_leader import Request, ask_leader
from orchestrator.app.remote import Found
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError, JobError
from orchestrator.journal.snapshot import replay
from orchestrator.seams import Completed, JobCopy

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


def ask(found: Found, environ: Mapping[str, str], question: Question, kind: type[T]) -> T:
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
        raise BackendError(
            f"the leader of {name} could not be reached from here; the job is {run.state}",
            fix=f"`ndctl status {name}` says whether it is alive; if it is, run the command on a"
            " machine that reaches the hosts of the job",
        )
    if answer.status == HTTPStatus.CONFLICT:
        raise JobError(f"job {name}: {answer.text}", fix=question.if_refused)
    if answer.status != HTTPStatus.OK:
        raise BackendError(f"the leader of {name} refused: {answer.status} {answer.text}")
    return _decoded(answer.text, name, kind)


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
