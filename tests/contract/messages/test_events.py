"""The time of an event is that of the leader's clock."""

from orchestrator.contract.messages.events import HostStopped, RankExited, stamped


def test_an_event_gets_the_time_of_the_leaders_clock() -> None:
    sent = HostStopped(at=5.0, attempt=1, host="n1", finished=True)
    assert stamped(sent, 1000.0).at == 1000.0


def test_an_exit_has_the_time_at_which_the_rank_ended() -> None:
    sent = RankExited(attempt=1, rank=3, exit_code=1, signal=None, detected_after_s=1.5)
    assert stamped(sent, 1000.0).at == 998.5
