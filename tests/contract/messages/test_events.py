from orchestrator.contract.messages.events import HostStopped, RankExited, stamped


def test_only_the_leaders_clock_counts() -> None:
    sent = HostStopped(at=5.0, attempt=1, host="n1", finished=True)
    assert stamped(sent, 1000.0).at == 1000.0


def test_a_rank_exited_when_its_agent_noticed_not_when_the_leader_heard_of_it() -> None:
    sent = RankExited(attempt=1, rank=3, exit_code=1, signal=None, detected_after_s=1.5)
    assert stamped(sent, 1000.0).at == 998.5
