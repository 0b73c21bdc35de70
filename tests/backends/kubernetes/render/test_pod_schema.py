"""Check that a pod template has only fields of pods."""

from importlib.metadata import version
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.backends.kubernetes.render import objects
from orchestrator.backends.kubernetes.render.checks import problems
from orchestrator.backends.kubernetes.render.pod_schema import FILE, strangers
from orchestrator.contract.codec import Problem
from tests.backends.kubernetes.render.pod_fields import written
from tests.backends.kubernetes.render.test_render import pods_of
from tests.backends.kubernetes.rendered import CASES, PLAIN, a_handover, a_launch


def wrong(spec: dict[str, Any]) -> list[Problem]:
    return list(strangers({"spec": spec}, "pod_template"))


def test_the_table_equals_that_of_the_client_it_names() -> None:
    if f"kubernetes {version('kubernetes')}," not in yaml.safe_load(FILE.read_text())["source"]:
        pytest.skip("another version of the client is installed than the table is of")
    assert FILE.read_text() == written()


@pytest.mark.parametrize("name", CASES)
def test_every_rendered_pod_has_only_known_fields(name: str) -> None:
    for pod in pods_of(objects(CASES[name])):
        assert wrong(dict(pod)) == []


@pytest.mark.parametrize(
    ("spec", "path", "words", "fix"),
    [
        ({"priorityClasName": "high"}, "priorityClasName", "a field", "priorityClassName?"),
        ({"nodename": "n1"}, "nodename", "a field that Kubernetes 1.", "mean nodeName?"),
        ({"container": []}, "container", "a field that Kubernetes", "containers?"),
        (
            {"containers": [{"name": "pytorch", "resource": {}}]},
            "containers[0].resource",
            "a field",
            "did you mean resources?",
        ),
        (
            {"tolerations": [{"key": "a", "operater": "Exists"}]},
            "tolerations[0].operater",
            "a field that Kubernetes",
            "operator?",
        ),
        ({"xyz": 1}, "xyz", "a field that Kubernetes", "kubectl explain"),
        ({"terminationGracePeriodSeconds": "45"}, "terminationGracePeriodSeconds", "a whole", "45"),
        ({"hostNetwork": "true"}, "hostNetwork", "true or false", "kubectl explain"),
        ({"hostNetwork": 1}, "hostNetwork", "true or false", "kubectl explain"),
        ({"priority": True}, "priority", "a whole number", "kubectl explain"),
        ({"nodeSelector": {"gpu": True}}, "nodeSelector.gpu", "text", '"true"'),
        ({"nodeSelector": ["gpu"]}, "nodeSelector", "key: value pairs", "kubectl explain"),
        ({"containers": {"name": "a"}}, "containers", "a list", "kubectl explain"),
        (
            {"containers": [{"name": "a", "env": [{"name": "N", "value": 5}]}]},
            "containers[0].env[0].value",
            "text",
            'put it in quotes: "5"',
        ),
        ({"securityContext": 5}, "securityContext", "key: value pairs", "kubectl explain"),
        ({"volumes": [{"name": "a"}, None]}, "volumes[1]", "a value", "not an item of a list"),
    ],
)
def test_a_field_that_no_pod_has_is_named_with_the_nearest(
    spec: dict[str, Any], path: str, words: str, fix: str
) -> None:
    (found,) = wrong(spec)
    assert found.path == f"pod_template.spec.{path}"
    assert words in found.limit
    assert fix in found.fix


@pytest.mark.parametrize(
    "spec",
    [
        {"tolerations": None, "nodeSelector": {"a": None}},
        {"containers": [{"name": "a", "resources": {"limits": {"cpu": 2, "memory": "4Gi"}}}]},
        {"containers": [{"name": "a", "livenessProbe": {"httpGet": {"port": 80}}}]},
        {"containers": [{"name": "a", "livenessProbe": {"httpGet": {"port": "http"}}}]},
        {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}}]},
        {"securityContext": {"supplementalGroups": [4242]}, "overhead": {"cpu": 1.5}},
    ],
)
def test_known_fields_of_pods_are_accepted(spec: dict[str, Any]) -> None:
    assert wrong(spec) == []


KEYS = [
    *("spec", "metadata", "containers", "volumes", "env", "name", "image", "value", "labels"),
    *("securityContext", "capabilities", "add", "initContainers", "volumeMounts", "resources"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inside: (
        st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inside, max_size=4)
    ),
    max_leaves=8,
)
CONTAINER = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)
TEMPLATES = VALUES | st.builds(
    lambda pod, ours: {"spec": {**pod, "containers": [{**ours, "name": "pytorch"}]}},
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    CONTAINER,
)


@settings(deadline=None)
@given(TEMPLATES)
def test_any_template_can_be_checked_and_what_is_accepted_can_be_rendered(template: Any) -> None:
    if isinstance(template, dict):
        spec = replace(PLAIN, pod_template=template)
        if not list(problems(a_launch(spec))):
            objects(a_handover(spec))


@pytest.mark.parametrize(
    ("patch", "path"),
    [({"spec": None}, "spec"), ({"spec": {"containers": None}}, "spec.containers")],
)
def test_a_null_may_not_remove_the_pods(patch: dict[str, Any], path: str) -> None:
    (found,) = problems(a_launch(replace(PLAIN, pod_template=patch)))
    assert found.path == f"cluster.kubernetes.pod_template.{path}"
    assert found.fix == "remove the key"
