"""Log text for the end of an attempt on a host."""

import pytest

from orchestrator.agent.attempts import how_it_went
from orchestrator.contract.messages.events import HostStopped


@pytest.mark.parametrize(
    ("finished", "why", "expected"),
    [
        (True, "", "all ranks returned 0 after the last step"),
        (False, "torchrun ended with code 1\nits last lines", "torchrun ended with code 1"),
        (False, "", "stopped before the last step"),
    ],
)
def test_each_end_of_an_attempt_has_its_text(finished: bool, why: str, expected: str) -> None:
    stopped = HostStopped(attempt=1, host="n1", finished=finished, why=why)
    assert how_it_went(stopped) == expected
