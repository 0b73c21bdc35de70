import pytest

from orchestrator.contract.messages.rank_messages import RankStarted, from_bytes, to_bytes


@pytest.mark.parametrize(
    "data",
    [b"[" * 60_000, b'{"kind":' * 7_000, b"\0" * 100, b"", b"[]", b"null", b"1" * 5_000, b"\xff"],
)
def test_a_datagram_that_makes_no_sense_is_a_value_error(data: bytes) -> None:
    """The agent drops it with a warning; another error would leave its loop."""
    with pytest.raises(ValueError, match=r"."):
        from_bytes(data)


def test_a_datagram_comes_back_as_it_was_sent() -> None:
    sent = RankStarted(attempt=1, rank=0, local_rank=0, pid=12)
    assert from_bytes(to_bytes(sent)) == sent
