"""Requests of pods to the controller, and malformed text in the same ConfigMap."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.kubernetes.controller.pod_requests import (
    MOST_NODES,
    MOST_PODS,
    MOST_TEXT,
    NODE,
    GangRestart,
    InvalidRequest,
    nodes_in,
    pods_in,
    requests_of,
    restart_in,
)
from orchestrator.backends.kubernetes.render import names
from orchestrator.contract.spec.kubernetes_spec import Kind
from tests.backends.kubernetes.controller.world import config_map, job

UID = "9f0d2c9e-8f5b-4f0e-9d55-0b6f1f3e6c11"


def test_a_controller_reads_a_request_as_the_leader_wrote_it() -> None:
    request = GangRestart(by="job-master-0", at=1763800000.5, exclude=("node-7", "ip-10-0-0-1.ec2"))
    assert restart_in(request.text()) == request
    assert restart_in("{}") == GangRestart()
    assert nodes_in("") == ()
    assert nodes_in("node-7,ip-10-0-0-1.ec2") == ("node-7", "ip-10-0-0-1.ec2")


@pytest.mark.parametrize(
    ("kind", "pod"),
    [
        ("pytorchjob", "job-master-0"),
        ("pytorchjob", "job-worker-12"),
        ("jobset", "job-node-0-3-x7k2p"),
        ("trainjob", "job-node-0-3-x7k2p"),
    ],
)
def test_pods_are_named_with_their_uids(kind: Kind, pod: str) -> None:
    assert pods_in(kind, "job", f"{pod}/{UID}") == ((pod, UID),)
    for other in (f"{pod}", f"{pod}/", f"{pod}/{UID}x", f"x{pod}/{UID}", f"{pod}-b/{UID}"):
        with pytest.raises(InvalidRequest):
            pods_in(kind, "job", other)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("now", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"template": {}}', "with only by, at and exclude"),
        ('{"by": "\\u001b[2J"}', "by: '\\\\x1b[2J' is not the name"),
        ('{"by": 3}', "by: 3 is not the name"),
        ('{"at": "now"}', "at: 'now' is not a number"),
        ('{"at": true}', "at: True is not a number"),
        ('{"exclude": "node1"}', "is not a list of nodes"),
        ('{"exclude": ["a", 1]}', "1 is not a node name"),
        ('{"exclude": ["a,b"]}', "is not a node name"),
        ('{"exclude": ["%s"]}' % ("n" * 300), "is not a node name"),
        ("[" * 100_000, "is not JSON"),
        ('{"by": "%s"}' % ("a" * MOST_TEXT), "is not JSON"),
    ],
)
def test_a_malformed_gang_restart_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("[", r"\[")) as raised:
        restart_in(text)
    assert len(str(raised.value)) < 250
    assert "\x1b" not in str(raised.value)


def test_requests_have_limits() -> None:
    nodes = [f"node{number}" for number in range(MOST_NODES + 1)]
    assert len(nodes_in(",".join(nodes[1:]))) == MOST_NODES
    with pytest.raises(InvalidRequest, match=f"a job may avoid {MOST_NODES} at most"):
        nodes_in(",".join(nodes))
    with pytest.raises(InvalidRequest, match="at most"):
        pods_in("pytorchjob", "job", f"job-master-0/{UID}," * MOST_PODS)


@given(st.text(), st.text(), st.text())
def test_any_text_parses_to_a_request_of_this_job_or_none(one: str, two: str, three: str) -> None:
    asked = config_map(
        asks={names.AVOID_ANNOTATION: one, names.END_ANNOTATION: two, names.GANG_ANNOTATION: three}
    )
    found = requests_of("pytorchjob", job(), asked)
    assert all(NODE.fullmatch(host) for host in found.nodes)
    assert all(names.is_pod_of("pytorchjob", "job", pod) for pod, _ in found.end)


def test_a_config_map_of_another_job_is_ignored() -> None:
    asks = {names.AVOID_ANNOTATION: "node1"}
    mine = config_map(asks=asks)
    assert requests_of("jobset", job("jobset"), mine).avoid == ("node1",)
    nobodys: Any = config_map()
    nobodys["metadata"]["annotations"] = asks
    assert requests_of("jobset", job("jobset"), nobodys).avoid == ()
    assert requests_of("jobset", job("jobset", name="later"), mine).avoid == ()
    assert requests_of("jobset", job("jobset"), None).avoid == ()
