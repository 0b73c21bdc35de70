"""`ndctl profile` as the leader sees it: agents are asked, and the job goes on unchanged."""

import asyncio
from pathlib import Path
from typing import Any

from orchestrator.contract.messages.agent_protocol import PROFILE_PATH, ProfileRanks
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_messages import Profiled
from tests.agent.world import LAUNCH
from tests.leader.leader_world import PIN, LedJob, run_script


async def ask(job: LedJob, launch: int = LAUNCH, **wish: Any) -> tuple[int, Any]:
    headers = await job.proof(PROFILE_PATH, launch=launch)
    body = {"ranks": [0, 1], "steps": 3, "wait_s": 5.0, **wish}
    async with job.session.post(
        job.url + PROFILE_PATH, headers=headers, ssl=PIN, json=body
    ) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.text())


def profiled(order: ProfileRanks, rank: int, **more: Any) -> Profiled:
    values: dict[str, Any] = {"request": order.request, "first_step": 7}
    values |= {"files": (f"/r/rank-{rank}.step-7.trace.json.gz",), **more}
    return Profiled(attempt=order.attempt, rank=rank, **values)


def test_ranks_are_profiled_and_the_journal_does_not_see_it(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        assert (await ask(job))[0] == 409, "no ranks run yet"
        zero, one = await job.start_both()
        journalled = job.run_dir.journal.read_text()
        asked = asyncio.create_task(ask(job))
        order = await zero.expect(ProfileRanks)
        assert await one.expect(ProfileRanks) == order
        assert (order.attempt, order.ranks, order.steps) == (1, (0, 1), 3)
        # A second request is refused, and a late answer to another one is ignored.
        status, words = await ask(job)
        assert status == 409
        assert words.startswith("another request for profiles is being served")
        await one.send(profiled(order, 1, request="another"))
        await one.send(profiled(order, 1, files=(), why="failed to write the profile: full"))
        await zero.send(profiled(order, 0))
        status, body = await asked
        assert status == 200
        assert body["attempt"] == 1
        assert body["ranks"]["0"]["files"] == ["/r/rank-0.step-7.trace.json.gz"]
        assert body["missing"] == {"1": "failed to write the profile: full"}
        assert job.run_dir.journal.read_text() == journalled

    run_script(tmp_path, script)


def test_what_cannot_be_profiled_is_said(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        await job.start_both()
        status, words = await ask(job, ranks=[1, 900])
        assert status == 409
        assert words.endswith("it has no rank 900: its ranks are 0 to 1")
        status, words = await ask(job, ranks=[700, 0, 900])
        assert words.endswith("it has no rank 700 or 900: its ranks are 0 to 1")
        assert (await ask(job, launch=99))[0] == 409
        for wrong in ({"steps": 0}, {"ranks": [-1]}, {"ranks": "all"}, {"wait_s": "long"}):
            status, words = await ask(job, **wrong)
            assert status == 400, wrong
        status, body = await ask(job, wait_s=0.5)
        assert body["ranks"] == {}
        why = "it has not done 3 steps within 0.5 s"
        assert body["missing"] == {"0": why, "1": why}

    run_script(tmp_path, script)


def test_a_request_ends_with_its_attempt(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, _ = await job.start_both()
        asked = asyncio.create_task(ask(job, ranks=[0], wait_s=600.0))
        order = await zero.expect(ProfileRanks)
        await zero.send(RankExited(attempt=order.attempt, rank=0, exit_code=1, signal=None, step=5))
        status, body = await asked
        assert status == 200
        assert body["missing"] == {"0": "attempt 1 ended before it had done 3 steps"}

    run_script(tmp_path, script)
