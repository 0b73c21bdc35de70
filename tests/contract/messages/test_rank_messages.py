"""Messages of ranks to their agent: malformed and impossible ones are refused."""

import pytest

from orchestrator.contract.messages.rank_messages import Beat, RankStarted, from_bytes, to_bytes


@pytest.mark.parametrize(
    "data",
    [b"[" * 60_000, b'{"kind":' * 7_000, b"\0" * 100, b"", b"[]", b"null", b"1" * 5_000, b"\xff"],
)
def test_a_malformed_datagram_is_a_value_error(data: bytes) -> None:
    """The agent drops it with a warning; another error would leave its loop."""
    with pytest.raises(ValueError, match=r"."):
        from_bytes(data)


BEAT = (
    '{"kind":"Beat","attempt":1,"rank":0,"step":%s,"phase":"train","loss":null,'
    '"tokens_per_second":null,"own_s":null}'
)


@pytest.mark.parametrize("step", ["-1", "9" * 30, '3,"step":4'], ids=["negative", "huge", "twice"])
def test_an_impossible_step_is_refused(step: str) -> None:
    assert from_bytes((BEAT % "3").encode()) == Beat(attempt=1, rank=0, step=3, phase="train")
    for spaces in ("", " "):  # msgspec reads the text without spaces, the codec the other one
        with pytest.raises(ValueError, match="step"):
            from_bytes((spaces + BEAT % step).encode())


@pytest.mark.parametrize("pid", [-1, 0, 10**30])
def test_an_impossible_process_id_is_refused(pid: int) -> None:
    """The agent signals this process. For `kill`, -1 is every process of the user."""
    with pytest.raises(ValueError, match="pid"):
        from_bytes(to_bytes(RankStarted(attempt=1, rank=0, local_rank=0, pid=pid)))


def test_a_datagram_survives_a_round_trip() -> None:
    sent = RankStarted(attempt=1, rank=0, local_rank=0, pid=12)
    assert from_bytes(to_bytes(sent)) == sent
