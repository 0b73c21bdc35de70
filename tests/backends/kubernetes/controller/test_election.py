"""Who acts, by each contender's own clock."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.kubernetes.controller.election import Record, Standing

DURATION_S = 15.0


def record(holder: str = "a", renewed: str = "1", version: str = "1") -> Record:
    return Record(
        holder=holder, renewed=renewed, duration_s=DURATION_S, transitions=0, version=version
    )


def standing(me: str = "b") -> Standing:
    return Standing(me=me, duration_s=DURATION_S)


def test_a_lease_is_free_where_there_is_none_or_it_was_given_back() -> None:
    me = standing()
    me.saw(None, 0)
    assert me.may_take(0)
    me.saw(record(holder=""), 1)
    assert me.may_take(1)


def test_another_ones_is_free_when_it_has_not_changed_for_its_duration() -> None:
    me = standing()
    me.saw(record(renewed="1970-01-01T00:00:00Z"), 100)  # its clock is of no matter
    assert not me.may_take(114.9)
    me.saw(record(renewed="1970-01-01T00:00:05Z", version="2"), 114.9)
    assert me.other_lives
    assert not me.may_take(129)
    assert me.may_take(130)


def test_a_holder_acts_for_two_thirds_from_when_it_sent_its_renewal() -> None:
    me = standing()
    me.renewed(record(holder="b"), 100)
    assert me.acts(109.9)
    assert not me.acts(110)
    me.saw(record(holder="a", version="3"), 105)
    assert not me.acts(105)


def test_the_spec_counts_who_held_it() -> None:
    me = standing()
    assert me.spec(0)["leaseTransitions"] == 0
    me.saw(record(), 0)
    assert me.spec(0.5) == {
        "holderIdentity": "b",
        "leaseDurationSeconds": 15,
        "renewTime": "1970-01-01T00:00:00.500000Z",
        "acquireTime": "1970-01-01T00:00:00.500000Z",
        "leaseTransitions": 1,
    }
    me.renewed(record(holder="b"), 1)
    assert "leaseTransitions" not in me.spec(2)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 9), st.floats(0, 20)), max_size=40))
def test_never_two_at_once(turns: list[tuple[str, float, float]]) -> None:
    """Each turn a contender looks and writes, with a delay on the way; clocks have no common
    zero."""
    contenders = {"a": standing("a"), "b": standing("b")}
    zero = {"a": 1e6, "b": -500.0}
    now, lease = 0.0, None
    for who, takes_s, pause_s in turns:
        me = contenders[who]
        me.saw(lease, now + zero[who])
        sent = now + zero[who]
        if me.may_take(sent):
            now += takes_s
            version = str(int(lease.version) + 1) if lease else "1"
            lease = record(holder=who, renewed=str(now), version=version)
            me.renewed(lease, sent)
        assert sum(one.acts(now + zero[name]) for name, one in contenders.items()) <= 1
        now += pause_s
        assert sum(one.acts(now + zero[name]) for name, one in contenders.items()) <= 1
