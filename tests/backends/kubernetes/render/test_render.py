"""A job as Kubernetes objects.

`python -m tests.backends.kubernetes.render.test_render` rewrites the golden files.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.backends.kubernetes.render import names, objects, text, token_secret
from orchestrator.backends.kubernetes.render.submission import PLAIN_BYTES
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.spec.kubernetes_spec import (
    KubernetesSpec,
    MountedVolume,
    TopologyRequest,
)
from orchestrator.contract.submission_payload import Handover, files_of, handover_from
from orchestrator.errors import BackendError
from tests.backends.kubernetes import structural
from tests.backends.kubernetes.rendered import CASES, CRDS, FULL, PLAIN, a_handover, a_launch
from tests.golden import changes

GOLDEN = Path(__file__).parent / "golden"
TOKEN = "a-token-that-nobody-may-read"


def pods_of(made: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """All pod specs in the objects."""

    def walk(item: Any) -> Iterator[Mapping[str, Any]]:
        if isinstance(item, Mapping):
            if "containers" in item:
                yield item
            for value in item.values():
                yield from walk(value)
        elif isinstance(item, list):
            for value in item:
                yield from walk(value)

    return walk(made)


def golden(name: str) -> tuple[str, str]:
    """The name and the content of the golden file: for a kind and for all options the whole text,
    for another case what it changes in the text of its kind."""
    whole = text(objects(CASES[name])) + "\n"
    kind, _, variant = name.partition("-")
    if variant in ("", "full"):
        return f"{name}.yaml", whole
    return f"{name}.diff", changes(text(objects(CASES[kind])), whole)


@pytest.mark.parametrize("name", CASES)
def test_the_rendered_text_equals_the_golden_file(name: str) -> None:
    file, content = golden(name)
    assert content == (GOLDEN / file).read_text()


@pytest.mark.parametrize("name", CASES)
def test_the_rendered_text_holds_exactly_the_objects(name: str) -> None:
    made = objects(CASES[name])
    assert list(yaml.load_all(text(made), yaml.CSafeLoader)) == made


@pytest.mark.parametrize(
    "value", ["y", "Y", "n", "N", "0X1f", "0_o7", "-0o7", "+0o7", "0_9", "-_2", "2E_8", "2.0_E0"]
)
def test_a_string_that_only_kubectl_reads_as_another_type_is_quoted(value: str) -> None:
    assert text([{value: value}]) == f"'{value}': '{value}'"


@pytest.mark.parametrize("name", CASES)
def test_each_custom_resource_has_only_fields_that_its_schema_knows(name: str) -> None:
    custom = [item for item in objects(CASES[name]) if item["kind"] in CRDS]
    assert custom
    for item in custom:
        for file in CRDS[item["kind"]]:
            assert structural.problems(item, file) == []


def test_the_schema_check_finds_what_an_old_server_would_drop() -> None:
    job = json.loads(json.dumps(objects(CASES["pytorchjob"])[-1]))
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["tolerationz"] = []
    pod["terminationGracePeriodSeconds"] = "45"
    pod["containers"][0]["env"].append(pod["containers"][0]["env"][0])
    found = structural.problems(job, "pytorchjobs-v1.9.4.yaml")
    assert len(found) == 3
    assert any("'tolerationz' was unexpected" in one for one in found)
    assert any("'45' is not of type 'integer'" in one for one in found)
    assert any("('NDCTL_NODE_NAME',) twice" in one for one in found)


def test_the_leader_reads_the_payload_as_it_was_submitted() -> None:
    handover = replace(a_handover(FULL), new=True)
    made = objects(handover)[0]
    assert handover_from({key: body.encode() for key, body in made["data"].items()}) == handover


def test_a_large_plan_is_compressed_and_one_that_is_too_large_is_refused() -> None:
    import base64

    handover = replace(a_handover(PLAIN), spec="# " + "x" * PLAIN_BYTES)
    made = objects(handover)[0]
    assert "data" not in made
    packed = {key: base64.b64decode(body) for key, body in made["binaryData"].items()}
    assert handover_from(packed) == handover
    assert objects(handover) == objects(handover)
    import random

    noise = random.Random(0).randbytes(1 << 20).hex()
    with pytest.raises(BackendError, match="a ConfigMap can hold at most 1048576") as failed:
        objects(replace(handover, spec=noise))
    assert "spec.yaml.gz alone has" in failed.value.message


def test_neither_time_nor_token_is_in_the_text_and_the_secret_has_the_token() -> None:
    handover = a_handover(PLAIN)
    assert json.loads(files_of(handover)["submission.json"])["job"]["at"] == 0.0
    assert TOKEN not in text(objects(handover))
    secret = token_secret(handover.launch, TOKEN)
    assert secret["stringData"] == {"token": TOKEN}
    (pod, *_) = pods_of(objects(handover))
    (reference,) = [one for one in pod["containers"][0]["env"] if one["name"] == "NDCTL_TOKEN"]
    assert reference["valueFrom"]["secretKeyRef"] == {
        "name": secret["metadata"]["name"],
        "key": "token",
        "optional": True,
    }


def test_every_pod_is_a_host_and_the_spares_are_among_them() -> None:
    replicas = objects(CASES["pytorchjob"])[-1]["spec"]["pytorchReplicaSpecs"]
    assert {role: one["replicas"] for role, one in replicas.items()} == {"Master": 1, "Worker": 2}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    jobset = objects(CASES["jobset"])[-1]["spec"]["replicatedJobs"]
    assert [one["template"]["spec"]["parallelism"] for one in jobset] == [3]
    trainjob = objects(CASES["trainjob"])[-1]["spec"]["trainer"]
    assert trainjob == {"numNodes": 3, "numProcPerNode": 8}


def test_hosts_excluded_by_the_launch_and_the_spec_get_no_pods() -> None:
    launch = a_launch(replace(PLAIN, exclude=("node-a",)), exclude=("node-c", "node-a"))
    (pod, *_) = pods_of(objects(replace(CASES["pytorchjob"], job=_with(launch))))
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-a", "node-c"]}
    ]


def _with(launch: Any) -> Any:
    return replace(CASES["pytorchjob"].job, launch=launch)


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_one_label_selects_every_object_and_every_pod(kind: Any) -> None:
    made = objects(a_handover(FULL, kind))
    assert all(item["metadata"]["labels"][names.JOB_LABEL] == "job" for item in made)
    templates = [one for one in _templates(made) if "containers" in one["spec"]]
    assert templates
    assert all(one["metadata"]["labels"][names.JOB_LABEL] == "job" for one in templates)
    assert all(one["metadata"]["annotations"][names.LAUNCH_ANNOTATION] == "1" for one in templates)


def _templates(item: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(item, Mapping):
        if isinstance(item.get("template"), Mapping) and "spec" in item["template"]:
            yield item["template"]
        for value in item.values():
            yield from _templates(value)
    elif isinstance(item, list):
        for value in item:
            yield from _templates(value)


def test_no_autoscaler_evicts_pods_unless_the_spec_allows_it() -> None:
    def notes(spec: KubernetesSpec) -> Mapping[str, str]:
        template = next(_templates(objects(a_handover(spec))))
        found: Mapping[str, str] = template["metadata"]["annotations"]
        return found

    kept = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    assert notes(PLAIN).items() >= kept.items()
    own = notes(replace(PLAIN, annotations={"karpenter.sh/do-not-disrupt": "false"}))
    assert own["karpenter.sh/do-not-disrupt"] == "false"
    without = {"metadata": {"annotations": dict.fromkeys(kept)}}
    assert not notes(replace(PLAIN, pod_template=without)).keys() & kept.keys()


def test_a_variable_stands_behind_those_that_it_refers_to() -> None:
    """Kubernetes replaces `$(NAME)` only by an earlier variable."""
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    patched = [node, {"name": "LAST", "value": "$(OUT)/$(LAST)"}, {"name": "X", "value": "$(Y)"}]
    spec = replace(
        PLAIN,
        env={"OUT": "/fsx/$(NODE)", "PLAIN": "$$(NODE)", "Y": "$(X)"},
        pod_template={"spec": {"containers": [{"name": "pytorch", "env": patched}]}},
    )
    for pod in pods_of(objects(a_handover(spec))):
        names = [one["name"] for one in pod["containers"][0]["env"]]
        assert names[-6:] == ["PLAIN", "NODE", "OUT", "LAST", "Y", "X"]


def test_an_ended_job_is_deleted_after_the_time_in_the_spec() -> None:
    job = objects(CASES["pytorchjob-guaranteed"])[-1]
    assert job["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 3600
    assert objects(CASES["jobset-guaranteed"])[-1]["spec"]["ttlSecondsAfterFinished"] == 3600
    at_once = replace(PLAIN, ttl_after_finished=0)
    assert objects(a_handover(at_once))[-1]["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 0
    for name in ("pytorchjob", "jobset", "trainjob"):
        assert "ttlSeconds" not in text(objects(CASES[name]))


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
SPECS = st.builds(
    KubernetesSpec,
    kind=st.sampled_from(["pytorchjob", "jobset", "trainjob"]),
    image=st.just("registry.example.org/ndctl:0.1"),
    runs=st.just(PLAIN.runs),
    rdma_resource=st.sampled_from([None, "rdma/hca"]),
    shm=st.sampled_from([None, "1Gi"]),
    memory=st.sampled_from([None, "4Gi"]),
    host_network=st.booleans(),
    env=st.dictionaries(st.from_regex(r"X[A-Z_]{0,8}", fullmatch=True), st.text(max_size=20)),
    annotations=st.dictionaries(NAMES, st.text(max_size=20)),
    volumes=st.lists(NAMES, unique=True, max_size=2).map(
        lambda found: tuple(
            MountedVolume(name=f"v-{name}", mount_path=f"/{name}", empty_dir="1Gi")
            for name in found
        )
    ),
    pod_template=st.sampled_from(
        [
            {},
            {"spec": {"containers": [{"name": "sidecar", "image": "busybox"}]}},
            {"spec": {"initContainers": [{"name": "first", "image": "busybox"}]}},
        ]
    ),
)


@settings(deadline=None, max_examples=25)
@given(spec=SPECS, hosts=st.integers(1, 5))
def test_laws_of_every_rendering(spec: KubernetesSpec, hosts: int) -> None:
    handover = a_handover(spec, spec.kind, hosts)
    made = objects(handover)
    again: Handover = handover_from({k: v.encode() for k, v in files_of(handover).items()})
    assert text(objects(again)) == text(made), "rendering must be deterministic"
    assert list(yaml.load_all(text(made), yaml.CSafeLoader)) == made
    pods = list(pods_of(made))
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        for one in [*pod["containers"], *pod.get("initContainers", ())]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"]["drop"] == ["ALL"]
        added = pod["containers"][0]["securityContext"]["capabilities"].get("add", [])
        assert added == (["IPC_LOCK"] if spec.rdma_resource else [])


@pytest.mark.parametrize(
    "said", [{"privileged": True}, {"capabilities": {"add": ["CAP_SYS_ADMIN"]}}]
)
@pytest.mark.parametrize("name", ["pytorch", "sidecar"])
def test_a_privileged_container_does_not_forbid_an_escalation(
    said: dict[str, Any], name: str
) -> None:
    """The API server refuses pods with both, and only once the operator creates them."""
    container = {"name": name, "image": "busybox", "securityContext": said}
    patch = {"spec": {"containers": [container]}}
    for pod in pods_of(objects(a_handover(replace(PLAIN, pod_template=patch), "pytorchjob", 2))):
        secured = {one["name"]: one["securityContext"] for one in pod["containers"]}
        assert "allowPrivilegeEscalation" not in secured[name]
        assert secured[name]["capabilities"]["drop"] == ["ALL"]
        others = [one for key, one in secured.items() if key != name]
        assert all(one["allowPrivilegeEscalation"] is False for one in others)


@pytest.mark.parametrize(
    ("kind", "value", "path"),
    [
        (MountedVolume, {"name": "a", "mount_path": "/a"}, ""),
        (MountedVolume, {"name": "a", "mount_path": "/a", "claim": "b", "secret": "c"}, ""),
        (TopologyRequest, {"required": "a", "preferred": "b"}, "preferred"),
        (TopologyRequest, {"slice": "a"}, "slice"),
    ],
)
def test_values_that_contradict_themselves_are_refused(
    kind: type, value: dict[str, str], path: str
) -> None:
    with pytest.raises(Invalid) as failed:
        decode(kind, value)
    assert [one.path for one in failed.value.problems] == [path]


def test_a_run_volume_has_one_source() -> None:
    with pytest.raises(Invalid, match=r"runs\.host_path: must be left out if claim is given"):
        decode(KubernetesSpec, {"runs": {"claim": "runs", "host_path": "/runs"}})
    assert decode(KubernetesSpec, encode(FULL)) == FULL


if __name__ == "__main__":
    for file, content in map(golden, CASES):
        (GOLDEN / file).write_text(content)
