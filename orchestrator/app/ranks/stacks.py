"""`ndctl snapshot`: asks the leader of a running job where its ranks are."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from orchestrator.app.ask_leader import Request, ask_leader
from orchestrator.app.remote import Found
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.messages.agent_protocol import STACKS_PATH, RankStacks
from orchestrator.contract.messages.events import RankEvidence
from orchestrator.contract.read_json import read_json
from orchestrator.diagnosis.hang.report import where_words
from orchestrator.diagnosis.hang.verdicts import HangEvidence, RankFacts
from orchestrator.diagnosis.stacks.python_stacks import Place, main_stack, main_thread, place
from orchestrator.errors import BackendError, JobError
from orchestrator.journal.snapshot import replay
from orchestrator.seams import JobCopy

ASK_S = 30.0
"""Longer than the leader waits for its agents."""
SHOWN = 4
"""Stacks that are printed in full: one for each place of the program."""


def rank_stacks(found: Found, environ: Mapping[str, str]) -> RankStacks:
    """Where the ranks of the job are now. They go on.

    Raises:
        JobError: no ranks run.
        BackendError: the leader could not be asked.
    """
    run, name = replay(found.run_dir), found.run_dir.path.name
    if run.job is None or run.ending is not None:
        raise JobError(f"job {name} is not running: {run.state}", fix="`ndctl logs` has its output")
    if found.copy is not None:
        return _in_a_pod(found.copy, name)
    request = Request(path=STACKS_PATH, purpose="stacks", body={}, timeout_s=ASK_S)
    answer = ask_leader(found.run_dir, run.job.launch.launch, environ, request)
    if answer is None:
        raise BackendError(
            f"the leader of {name} could not be reached from here; the job is {run.state}",
            fix="run the command on a machine that reaches the hosts of the job",
        )
    if answer.status == HTTPStatus.CONFLICT:
        raise JobError(f"job {name}: {answer.text}", fix="try again when its ranks run")
    if answer.status != HTTPStatus.OK:
        raise BackendError(f"the leader of {name} refused: {answer.status} {answer.text}")
    return _decoded(answer.text, name)


def _in_a_pod(copy: JobCopy, name: str) -> RankStacks:
    done = copy.snapshot()
    if done is None:
        raise BackendError(
            f"no pod of {name} could be asked",
            fix="you need the right to create pods/exec in the namespace of the job",
        )
    if done.code:
        raise JobError(done.err.removeprefix("error: ") or f"{name}: exit code {done.code}")
    return _decoded(done.out, name)


def _decoded(text: str, name: str) -> RankStacks:
    try:
        body = read_json(text)
        body.pop("schema_version", None)
        taken: RankStacks = decode(RankStacks, body)
    except (ValueError, AttributeError, Invalid) as exc:
        raise BackendError(f"the answer of {name} is unreadable: {exc}") from exc
    return taken


def stacks_json(taken: RankStacks) -> dict[str, Any]:
    body: dict[str, Any] = encode(taken)
    return body


def describe_stacks(taken: RankStacks) -> str:
    """Where the ranks are, one line per place of the program, and a stack of each of these."""
    facts = {
        int(rank): RankFacts(rank=int(rank), stack=seen.stack) for rank, seen in taken.ranks.items()
    }
    seen = [taken.ranks[str(rank)] for rank in sorted(facts)]
    lines = [f"attempt {taken.attempt}: {_progress(seen)}"]
    lines += where_words(HangEvidence(facts=facts), ())
    places: dict[Place, int] = {}
    for rank in sorted(facts):
        if stack := main_stack(facts[rank].stack):
            places.setdefault(place(stack), rank)
    for rank in list(places.values())[:SHOWN]:
        lines += ["", f"stack of rank {rank}:"]
        lines += [f"  {line.rstrip()}" for line in main_thread(facts[rank].stack)]
    if taken.missing:
        lines += ["", *(f"missing: {what}: {why}" for what, why in sorted(taken.missing.items()))]
    return "\n".join([*lines, "", f"all stacks: {taken.traces}/rank-<r>.stacks"])


def _progress(seen: Sequence[RankEvidence]) -> str:
    if not seen:
        return "no rank answered"
    steps = sorted({one.step for one in seen})
    phases = sorted({one.phase for one in seen})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"{len(seen)} ranks, {span} done, in phase {', '.join(phases)}"
