"""The leader's process also runs the agent of its host, and both end together."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.actions import Requeue
from orchestrator.leader.leader_main import _run_both

LEFT = Requeue(exclude=(), reason="2 of 4 hosts are left", whole=True)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (exit_codes.OK, exit_codes.REQUEUED),
        (exit_codes.REQUEUED, exit_codes.REQUEUED),
        (exit_codes.LEADER_LOST, exit_codes.FAILED),
    ],
    ids=["ordered", "ordered, hosts are replaced one by one", "lost"],
)
def test_an_agent_that_was_ordered_to_exit_may_do_so_before_its_leader(
    code: int, expected: int
) -> None:
    """The leader still waits for slow agents. Once, the exit of the first agent counted as a loss,
    with an exit code that the Kubernetes operator treats as final."""

    async def run_both() -> int:
        ordered = asyncio.Event()

        async def serves() -> Requeue:
            ordered.set()
            for _ in range(10):
                await asyncio.sleep(0)
            return LEFT

        async def follows() -> int:
            await ordered.wait()
            return code

        agent: Any = SimpleNamespace(leave=lambda code: None)
        return await _run_both(serves(), agent, asyncio.create_task(follows()))

    assert asyncio.run(run_both()) == expected
