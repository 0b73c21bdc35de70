"""A call that hangs blocks neither its caller beyond the limit nor the exit of the process."""

import asyncio
import subprocess
import sys
import threading

import pytest

from orchestrator.posix.run_with_timeout import Limit, within
from tests.agent.world import WAIT_S
from tests.e2e.job import ROOT

HANGS = """
import asyncio, threading
from orchestrator.posix.run_with_timeout import within
async def main():
    for _ in range(50):
        try:
            await within(0.001, threading.Event().wait)
        except TimeoutError:
            pass
    print(await within(None, str, "it goes on"))
asyncio.run(main())
"""


def fails() -> None:
    raise OSError(116, "stale file handle")


def test_the_result_or_error_of_a_call_is_passed_on() -> None:
    assert asyncio.run(within(WAIT_S, divmod, 7, 2)) == (3, 1)
    with pytest.raises(OSError, match="stale"):
        asyncio.run(within(None, fails))


def test_a_hanging_call_times_out() -> None:
    goes_on = threading.Event()

    async def look() -> list[str]:
        limit, said = Limit(0.05), []
        for _ in range(2):
            try:
                await limit.within(goes_on.wait, WAIT_S)
            except TimeoutError:
                said.append("too late")
        return said

    assert asyncio.run(look()) == ["too late", "too late"]
    assert not goes_on.is_set()
    goes_on.set()


@pytest.mark.process
def test_a_hanging_call_blocks_no_pool_and_no_exit() -> None:
    argv = [sys.executable, "-c", HANGS]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT, check=True
    )
    assert (done.stdout, done.stderr) == ("it goes on\n", "")
