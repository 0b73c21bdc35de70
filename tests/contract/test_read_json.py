"""JSON from other processes: hostile text is a ValueError, never a crash."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.read_json import MOST_DEPTH, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
)


@given(VALUES)
def test_json_that_ndctl_writes_is_read(value: Any) -> None:
    text = json.dumps(value)
    assert read_json(text) == value
    assert read_json(text.encode()) == value


@given(st.text() | st.binary())
def test_what_is_not_json_is_a_value_error(text: str | bytes) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            read_json(text)
    else:
        assert repr(read_json(text)) == repr(expected)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 200_000,
        '{"a":' * 900 + "1" + "}" * 900,
        "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1),
        "1" * 5_000,
        "\0" * 100,
        "",
    ],
    ids=str.__len__,
)
def test_hostile_json_is_a_value_error(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match=r"."):
            read_json(form)


def test_a_key_that_occurs_twice_is_refused_on_request() -> None:
    text = '{"step": 1, "step": 2}'
    assert read_json(text) == {"step": 2}
    assert read_json('[{"a": {"b": 1}, "b": 2}]', unique_keys=True) == [{"a": {"b": 1}, "b": 2}]
    with pytest.raises(ValueError, match="the key 'step' occurs twice"):
        read_json(f"[{text}]", unique_keys=True)


def test_depth_and_length_have_limits() -> None:
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert json.dumps(read_json(deep)) == deep
    assert read_json("[" * 3 + "]" * 3 + " " * 100) == [[[]]]
    assert read_json(json.dumps(["["] * 1000)) == ["["] * 1000
    assert read_json("[1]", most=3) == [1]
    with pytest.raises(ValueError, match="at most 3"):
        read_json("[12]", most=3)
