"""`ndctl snapshot` as the leader sees it: agents are asked, and the job goes on unchanged."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.messages.agent_protocol import STACKS_PATH, Evidence, Gather
from orchestrator.contract.messages.events import EvidenceGathered, RankEvidence
from orchestrator.leader.requests import stack_requests
from tests.agent.world import LAUNCH
from tests.leader.leader_world import PIN, LedJob, run_script


async def ask(job: LedJob, launch: int = LAUNCH) -> tuple[int, Any]:
    headers = await job.proof(STACKS_PATH, launch=launch)
    async with job.session.post(job.url + STACKS_PATH, headers=headers, ssl=PIN) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.text())


def evidence(host: str, order: Gather, *, rank: int | None = None) -> Evidence:
    stack = ('  File "/a/train.py", line 7 in step',)
    ranks = (
        ()
        if rank is None
        else (
            RankEvidence(
                rank=rank,
                pid=1,
                process_state="S",
                step=5,
                phase="train",
                age_s=0.1,
                stack=stack,
            ),
        )
    )
    missing = {"ranks": "no attempt runs here", "dump of rank 0": "none"} if rank is None else {}
    event = EvidenceGathered(attempt=order.attempt, host=host, ranks=ranks, missing=missing)
    return Evidence(event=event, for_a_person=order.for_a_person)


def test_all_agents_are_asked_and_the_journal_does_not_see_it(tmp_path: Path) -> None:
    async def script(job: LedJob) -> tuple[int, Any, int, int]:
        refused, words = await ask(job)
        assert "no ranks run now" in words
        zero, one = await job.start_both()
        asked = asyncio.create_task(ask(job))
        order = await zero.expect(Gather)
        assert await one.expect(Gather) == order
        assert order.for_a_person
        await zero.send(evidence("host-0", order, rank=0))
        await one.send(evidence("host-1", order))
        status, body = await asked
        # A late answer belongs to no question.
        await one.send(evidence("host-1", order, rank=1))
        other, _ = await ask(job, launch=99)
        assert other == 409
        return refused, body, status, len(job.events(EvidenceGathered))

    refused, body, status, journalled = run_script(tmp_path, script)
    assert (refused, status, journalled) == (409, 200, 0)
    assert body["attempt"] == 1
    assert body["traces"].endswith("traces/attempt-1")
    assert body["ranks"]["0"]["stack"] == ['  File "/a/train.py", line 7 in step']
    assert body["missing"] == {"ranks (host-1)": "no attempt runs here"}


def test_a_silent_agent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_requests, "ANSWER_S", 1.0)

    async def script(job: LedJob) -> Any:
        zero, _ = await job.start_both()
        asked = asyncio.create_task(ask(job))
        order = await zero.expect(Gather)
        await zero.send(evidence("host-0", order, rank=0))
        status, body = await asked
        assert status == 200
        return body["missing"]

    assert run_script(tmp_path, script) == {
        "ranks of host-1": "its agent sent nothing within 1 s",
    }
