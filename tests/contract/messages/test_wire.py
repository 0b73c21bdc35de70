"""msgspec and the codec both read messages. They agree on every kind."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct, field, structs

from orchestrator.contract import codec
from orchestrator.contract.codec import Invalid, is_struct
from orchestrator.contract.messages import wire
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.agent_protocol import Order, Report
from orchestrator.contract.messages.events import CheckpointFailed, Event, JobSubmitted, StepReached
from orchestrator.contract.messages.rank_messages import Datagram
from orchestrator.contract.read_json import read_json
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost
from orchestrator.journal.journal import Entry, from_line, read, to_line
from tests.job.job_driver import submitted

UNIONS = (Event, Action, Report, Order, Datagram)
KINDS = [(union, kind) for union in UNIONS for kind in typing.get_args(union)]
OLD = Path(__file__).parents[2] / "captured" / "journals" / "quickstart-44a59389.jsonl"
"""Written by an older ndctl, whose codec also wrote journals."""
SEEN = CheckpointFailed(at=1.5, attempt=2, step=30, why="disk full")


SCALARS: Mapping[Any, st.SearchStrategy[Any]] = {
    float: st.floats(allow_nan=False, allow_infinity=False),
    int: st.integers(-(2**63), 2**64 - 1),
    str: st.text(max_size=8),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of `kind` that JSON can hold."""
    if kind in SCALARS:
        return SCALARS[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated and args[0] is int:
        return whole_numbers(args[1:])
    if origin is typing.Annotated:
        return values(args[0]).filter(lambda value: all(one.admits(value) for one in args[1:]))
    if is_struct(kind):
        return made(kind)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*map(values, args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if args:
        return st.one_of([values(one) for one in args])
    return st.from_type(kind)


def whole_numbers(limits: tuple[Any, ...]) -> st.SearchStrategy[int]:
    low = max((int(one.low) for one in limits if isinstance(one, AtLeast)), default=-(2**63))
    high = min((int(one.high) for one in limits if isinstance(one, AtMost)), default=2**63 - 1)
    return st.integers(low, high)


def made(kind: type[Struct]) -> st.SearchStrategy[Any]:
    if kind is JobSubmitted:  # a plan drawn field by field contradicts itself
        return st.builds(submitted, st.integers(1, 64), st.integers(1, 8))
    fields = {one.name: values(one.type) for one in structs.fields(kind)}

    def build(drawn: dict[str, Any]) -> Any:
        try:
            return kind(**drawn)
        except Invalid:
            return None

    return st.fixed_dictionaries(fields).map(build).filter(lambda value: value is not None)


@pytest.mark.parametrize(("union", "kind"), KINDS, ids=[kind.__name__ for _, kind in KINDS])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_both_readers_agree_on_every_kind(union: Any, kind: type, data: st.DataObject) -> None:
    value = data.draw(made(kind))
    text = wire.encode(value)
    assert text.startswith(b'{"kind":"%s"' % kind.__name__.encode())
    assert wire.Decoder(union).decode(text) == codec.decode(union, read_json(text)) == value
    assert wire.Decoder(union).decode_exact(text) == value, "msgspec reads it"
    if union in (Event, Action):
        event = value if union is Event else SEEN
        entry = Entry(seq=3, event=event, actions=() if union is Event else (value,))
        if 0 < event.at < 1e9:
            assert from_line(to_line(entry)) == entry


@pytest.mark.parametrize(
    "text",
    [
        b'{"kind":"CheckpointFailed","at":1.5,"attempt":2,"step":30,"why":"x","more":1}',
        b'{"kind":"CheckpointFailed","at":1.5,"attempt":2,"why":"x"}',
        b'{"kind":"CheckpointFailed","at":NaN,"attempt":2,"step":30,"why":"x"}',
        b'{"kind":"CheckpointFailed","at":1.5,"attempt":"2","step":30,"why":"x"}',
        b'{"kind":"Fire","at":1.5}',
        b'{"kind":"CheckpointFailed","at":1.5,"attempt":2,"step":30,"why":' + b"[" * 70_000,
        b'{"kind":"CheckpointFailed',
        b"\xff",
        b"",
    ],
)
def test_text_that_is_no_value_of_this_version_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        wire.Decoder(Event).decode(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"kind": "CheckpointFailed", "at": 1.5, "attempt": 2, "step": 30, "why": "disk full"}',
        b'{"at":1.5,"attempt":2,"kind":"CheckpointFailed","step":30,"why":"disk full"}',
    ],
)
def test_the_same_value_in_another_notation_is_read_too(text: bytes) -> None:
    assert wire.Decoder(Event).decode(text) == SEEN


class Limited(Struct, frozen=True):
    count: Annotated[int, AtLeast(2)] = 2
    share: Annotated[float, Above(0)] | None = None
    either: bool | Annotated[int, AtLeast(2)] = True
    each: tuple[Annotated[int, AtLeast(0)], ...] = ()
    named: Mapping[str, Annotated[float, AtMost(1)]] = field(default_factory=dict)
    inner: Window | None = None


class Unlimited(Struct, frozen=True):
    count: int = 0


@pytest.mark.parametrize(
    "broken",
    [
        Limited(count=1),
        Limited(share=0.0),
        Limited(either=1),
        Limited(each=(3, -1)),
        Limited(named={"a": 0.5, "b": 1.5}),
        Limited(inner=Window(first=0, last=3)),
    ],
    ids=str,
)
def test_both_readers_refuse_a_value_that_breaks_a_limit(broken: Limited) -> None:
    union = Limited | Unlimited
    text = wire.encode(broken)
    assert wire.Decoder(union).decode_exact(text) is None
    with pytest.raises(Invalid, match=r"must be .*(at least|at most|above)"):
        wire.Decoder(union).decode(text)


def test_a_value_within_its_limits_is_read() -> None:
    union = Limited | Unlimited
    full = Limited(share=0.5, each=(0,), named={"a": 1.0}, inner=Window(first=1, last=2))
    for value in (Limited(), full, Limited(either=False), Limited(either=2), Unlimited(count=-1)):
        assert wire.Decoder(union).decode_exact(wire.encode(value)) == value
        assert wire.Decoder(union).decode(wire.encode(value)) == value


def test_half_of_a_surrogate_pair_survives_a_round_trip() -> None:
    """A log that is not UTF-8, read with `surrogateescape`."""
    value = structs.replace(SEEN, why="\udc80")
    assert wire.Decoder(Event).decode(wire.encode(value)) == value


def test_a_loss_that_is_nan_is_read_as_no_loss() -> None:
    value = StepReached(at=1.5, attempt=1, step=2, loss=float("nan"), tokens_per_second=None)
    assert wire.Decoder(Event).decode(wire.encode(value)) == structs.replace(value, loss=None)


def test_a_journal_that_an_older_ndctl_wrote_is_read() -> None:
    entries = read(OLD)
    assert [entry.seq for entry in entries] == list(range(1, 36))
    assert entries[-1].actions[0].reason == "all ranks finished in attempt 2"
    again = [from_line(to_line(entry)) for entry in entries]
    assert again == list(entries)
