"""The codec: every problem at once, and a round trip for every kind of value."""

import json
import signal
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, field

from orchestrator.contract.codec import Invalid, Problem, decode, encode, encode_tagged, words_of
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost, Matches, OneOf


class Inner(Struct, frozen=True, kw_only=True):
    count: Annotated[int, AtLeast(1)] = 1
    ratio: Annotated[float, Above(0), AtMost(1)] = 0.5
    word: Annotated[str, Matches(r"[a-z]+", "small letters", "abc")] = "a"


class Outer(Struct, frozen=True, kw_only=True):
    name: str
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = ()
    kind_: Literal["one", "two", 3] = "one"
    flag: bool = False
    degree: Annotated[int, AtLeast(1)] | Literal["auto"] = "auto"
    maybe: float | None = None
    table: Mapping[str, int] = field(default_factory=dict)
    colour: Annotated[str, OneOf(("red", "green"))] | None = None
    anything: Any = None


class Started(Struct, frozen=True, kw_only=True):
    at: float


class Ended(Struct, frozen=True, kw_only=True):
    code: int


Event = Started | Ended


class Light(Enum):
    RED = "stop, please"
    GREEN = "go"


class Crossing(Struct, frozen=True, kw_only=True):
    light: Light = Light.RED
    seen: Mapping[int, Light] = field(default_factory=dict)


inners = st.builds(
    Inner,
    count=st.integers(min_value=1),
    ratio=st.floats(min_value=0, max_value=1, exclude_min=True),
    word=st.from_regex(r"[a-z]+", fullmatch=True),
)
outers = st.builds(
    Outer,
    name=st.text(),
    inner=inners,
    many=st.lists(inners, max_size=3).map(tuple),
    kind_=st.sampled_from(["one", "two", 3]),
    flag=st.booleans(),
    degree=st.integers(min_value=1) | st.just("auto"),
    maybe=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    table=st.dictionaries(st.text(), st.integers(), max_size=3),
    colour=st.none() | st.sampled_from(["red", "green"]),
    anything=st.none() | st.integers() | st.lists(st.text(), max_size=2),
)


@settings(deadline=None)
@given(outers)
def test_what_is_encoded_decodes_to_an_equal_value(value: Outer) -> None:
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


@settings(deadline=None)
@given(st.builds(Started, at=st.floats(0, 1e9)) | st.builds(Ended, code=st.integers()))
def test_a_member_of_a_union_comes_back_as_its_own_class(event: Event) -> None:
    assert decode(Event, json.loads(json.dumps(encode_tagged(event)))) == event


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "inner", "many", "kind", "degree", "count"]) | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(json_values)
def test_any_json_value_is_decoded_or_refused_with_complete_problems(data: Any) -> None:
    exc = refusal_of(data)
    if exc is not None:
        assert exc.problems
        assert all(problem.limit and problem.fix for problem in exc.problems)
        assert all(str(problem) for problem in exc.problems)


def refusal_of(data: Any) -> Invalid | None:
    try:
        decode(Outer, data)
    except Invalid as exc:
        return exc
    return None


def problems_of(data: Any) -> dict[str, Problem]:
    with pytest.raises(Invalid) as caught:
        decode(Outer, data)
    return {problem.path: problem for problem in caught.value.problems}


def test_every_problem_is_reported_at_once_with_its_path() -> None:
    found = problems_of(
        {
            "inner": {"count": 0, "ratio": 2, "word": "A"},
            "many": [{}, {"count": "x"}],
            "kind": "three",
            "flag": "yes",
            "degree": 0,
            "maybe": "much",
            "table": {"a": 1.5},
            "colour": "gren",
            "nmae": 1,
        }
    )
    assert sorted(found) == [
        "colour",
        "degree",
        "flag",
        "inner.count",
        "inner.ratio",
        "inner.word",
        "kind",
        "many[1].count",
        "maybe",
        "name",
        "nmae",
        "table.a",
    ]


@pytest.mark.parametrize(
    ("data", "path", "expected"),
    [
        ({"name": "x", "inner": {"count": 0}}, "inner.count", "set inner.count to 1 or more"),
        ({"name": "x", "inner": {"ratio": 2}}, "inner.ratio", "set inner.ratio to 1 or less"),
        ({"name": "x", "inner": {"ratio": 0}}, "inner.ratio", "a number above 0"),
        ({"name": "x", "inner": {"word": "A"}}, "inner.word", "something like abc"),
        ({"name": "x", "inner": {"count": 2.0}}, "inner.count", "set inner.count to 2"),
        ({"name": "x", "inner": {"count": "2"}}, "inner.count", "write 2 without quotes"),
        ({"name": "x", "inner": {"count": True}}, "inner.count", "got true"),
        ({"name": "x", "inner": 3}, "inner", "use the keys count, ratio, word"),
        ({"name": 5}, "name", 'put it in quotes: "5"'),
        ({"name": None}, "name", "got null"),
        ({"name": "x", "flag": "off"}, "flag", "set flag to false"),
        ({"name": "x", "colour": "gren"}, "colour", "did you mean green?"),
        ({"name": "x", "degree": "atuo"}, "degree", "did you mean auto?"),
        ({"name": "x", "degree": 0}, "degree", "a whole number (at least 1) or 'auto', got 0"),
        ({"name": "x", "maybe": float("nan")}, "maybe", "a finite number"),
        ({"name": "x", "many": 3}, "many", "write many as [...]"),
        ({"name": "x", "table": []}, "table", "write table as {key: value, …}"),
        ({"name": "x", "flagg": 1}, "flagg", "did you mean flag?"),
        ({"name": "x", "zzz": 1}, "zzz", "remove it, or use one of the keys name, inner"),
        ({}, "name", "add name: a string"),
        ([], "", "(top): must be key: value pairs, got []"),
    ],
)
def test_a_problem_names_value_limit_and_fix(data: Any, path: str, expected: str) -> None:
    assert expected in str(problems_of(data)[path])


def test_an_unknown_member_of_a_union_is_refused() -> None:
    with pytest.raises(Invalid, match="unknown kind 'Paused'"):
        decode(Event, {"kind": "Paused"})


def test_a_field_named_like_a_keyword_is_written_without_its_underscore() -> None:
    assert encode(Outer(name="x", kind_="two"))["kind"] == "two"


def test_a_long_value_is_shortened() -> None:
    assert "..." in str(Problem(path="a", value="x" * 200, limit="short", fix="cut it"))


def test_null_is_a_value_and_a_missing_key_is_not() -> None:
    assert "got" not in str(Problem(path="a", limit="given", fix="add it"))
    assert "got null" in str(Problem(path="a", value=None, limit="given", fix="add it"))


def test_types_are_described_in_words() -> None:
    assert words_of(tuple[int, ...]) == "a list"
    assert words_of(Mapping[str, int]) == "key: value pairs"
    assert words_of(int | None) == "a whole number or null"
    assert words_of(Inner) == "key: value pairs with the keys count, ratio, word"


def test_enums_are_written_by_name_and_whole_numbers_may_be_keys() -> None:
    crossing = Crossing(light=Light.GREEN, seen={7: Light.RED, -1: Light.GREEN})
    body = json.loads(json.dumps(encode(crossing)))
    assert body == {"light": "GREEN", "seen": {"7": "RED", "-1": "GREEN"}}
    assert decode(Crossing, body) == crossing


def test_an_unknown_enum_name_and_a_key_that_is_no_number_are_reported() -> None:
    with pytest.raises(Invalid) as caught:
        decode(Crossing, {"light": "go", "seen": {"seven": "RED", "1": "BLUE"}})
    assert [(problem.path, problem.limit) for problem in caught.value.problems] == [
        ("light", "'RED' or 'GREEN'"),
        ("seen.seven", "a whole number"),
        ("seen.1", "'RED' or 'GREEN'"),
    ]


def test_an_enum_that_is_a_number_is_written_as_a_number() -> None:
    expected = json.loads(json.dumps(encode(Ended(code=signal.SIGKILL))))
    assert expected == {"code": 9}
    assert decode(Ended, expected) == Ended(code=9)


def test_an_integer_too_large_for_a_float_is_not_finite() -> None:
    with pytest.raises(Invalid, match="must be a finite number"):
        decode(float, 10**400)


@pytest.mark.parametrize(
    ("written", "read"),
    [(True, "on"), (False, "off"), ("on", "on"), ("off", "off"), ("auto", "auto"), (3, 3)],
)
def test_a_switch_may_be_written_as_a_boolean(written: object, read: object) -> None:
    """YAML 1.1 reads `on` and `off` as booleans."""
    assert decode(MemoryCheckpointSpec, {"every": written}).every == read
