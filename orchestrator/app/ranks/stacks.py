"""`ndctl snapshot`: asks the leader of a running job where its ranks are."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.app.ask_leader import Request
from orchestrator.app.ranks.ask import Question, ask
from orchestrator.app.remote import Found
from orchestrator.contract.codec import encode
from orchestrator.contract.messages.agent_protocol import STACKS_PATH, RankStacks
from orchestrator.contract.messages.events import RankEvidence
from orchestrator.diagnosis.hang.report import where_words
from orchestrator.diagnosis.hang.verdicts import HangEvidence, RankFacts
from orchestrator.diagnosis.stacks.python_stacks import Place, main_stack, main_thread, place
from orchestrator.seams import Clock

ASK_S = 30.0
"""Longer than the leader waits for its agents."""
SHOWN = 4
"""Stacks that are printed in full: one for each place of the program."""


def rank_stacks(found: Found, environ: Mapping[str, str], clock: Clock) -> RankStacks:
    """Where the ranks of the job are now. They go on.

    Raises:
        JobError: no ranks run.
        BackendError: the leader could not be asked.
    """
    question = Question(
        request=Request(path=STACKS_PATH, purpose="stacks", body={}, timeout_s=ASK_S),
        in_a_pod=lambda copy: copy.snapshot(),
        if_over="`ndctl logs JOB` has its output",
        if_refused="try again when its ranks run",
    )
    return ask(found, environ, clock, question, RankStacks)


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
