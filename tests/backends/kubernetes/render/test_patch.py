"""The user's changes to a pod template."""

from typing import Any

import pytest

from orchestrator.backends.kubernetes.render.patch import merged

MAIN = {"name": "pytorch", "env": [{"name": "A", "value": "1"}], "command": ["python", "-u"]}


@pytest.mark.parametrize(
    ("base", "patch", "expected"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
        (
            {"containers": [MAIN]},
            {"containers": [{"name": "pytorch", "env": [{"name": "B", "value": "2"}]}]},
            {
                "containers": [
                    {**MAIN, "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
                ]
            },
        ),
        (
            {"containers": [MAIN]},
            {"containers": [{"name": "log", "image": "x"}]},
            {"containers": [MAIN, {"name": "log", "image": "x"}]},
        ),
        (
            {"mounts": [{"name": "data", "mountPath": "/a"}]},
            {"mounts": [{"name": "data", "mountPath": "/b"}]},
            {"mounts": [{"name": "data", "mountPath": "/a"}, {"name": "data", "mountPath": "/b"}]},
        ),
        ({"command": ["a", "b"]}, {"command": ["c"]}, {"command": ["c"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, None),
    ],
)
def test_a_patch_changes_what_it_names(base: Any, patch: Any, expected: Any) -> None:
    assert merged(base, patch) == (patch if expected is None else expected)


def test_a_patch_does_not_change_its_base_in_place() -> None:
    base = {"a": {"b": [{"name": "x", "c": 1}]}}
    merged(base, {"a": {"b": [{"name": "x", "c": 2}]}})
    assert base == {"a": {"b": [{"name": "x", "c": 1}]}}
