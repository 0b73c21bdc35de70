"""Checks of a launch before any request, which report all problems at once."""

import subprocess
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.render import objects
from orchestrator.backends.kubernetes.render.checks import problems
from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.kubernetes_spec import (
    KubernetesSpec,
    MountedVolume,
    TopologyRequest,
)
from orchestrator.errors import SpecError
from tests.backends.handover import handover_of
from tests.backends.kubernetes.rendered import CASES, PLAIN, a_launch

WHOLE: dict[str, Any] = {"guaranteed": True, "cpu": "2", "memory": "4Gi"}
DATA = MountedVolume(name="data", mount_path="/data", claim="data")


def test_all_problems_are_reported_at_once_with_place_and_fix() -> None:
    with pytest.raises(SpecError) as failed:
        objects(handover_of(a_launch(KubernetesSpec(env={"PET_NNODES": "4"}))))
    assert isinstance(failed.value.__cause__, Invalid)
    assert [one.path for one in failed.value.__cause__.problems] == [
        "cluster.kubernetes.image",
        "cluster.kubernetes.runs",
        "cluster.kubernetes.env.PET_NNODES",
    ]
    assert str(failed.value).count("fix:") == 3


@pytest.mark.parametrize("name", CASES)
def test_a_good_job_has_no_problem(name: str) -> None:
    assert list(problems(CASES[name].launch)) == []


@pytest.mark.parametrize(
    ("kind", "hosts", "longest"),
    [
        ("pytorchjob", 1, 54),
        ("pytorchjob", 2, 54),
        ("pytorchjob", 12, 53),
        ("pytorchjob", 102, 52),
        ("jobset", 2, 48),
        ("jobset", 11, 47),
        ("trainjob", 1, 48),
    ],
)
def test_the_longest_pod_name_fits_a_label(kind: Any, hosts: int, longest: int) -> None:
    spec = replace(PLAIN, kind=kind)
    fits, over = (a_launch(spec, hosts, job="j" * (longest + more)) for more in (0, 1))
    assert list(problems(fits)) == []
    (found,) = problems(over)
    assert found.path == "name"
    assert f"at most {longest} long" in found.limit


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"namespace": "a.b"}, "namespace"),
        ({"env": {"RANK": "0"}}, "env.RANK"),
        ({"env": {"NDCTL_TOKEN": "x"}}, "env.NDCTL_TOKEN"),
        ({"env": {"9LIVES": "x"}}, "env.9LIVES"),
        ({"volumes": (replace(DATA, name="runs"),)}, "volumes[0].name"),
        ({"volumes": (replace(DATA, name="a.b"),)}, "volumes[0].name"),
        ({"volumes": (DATA, replace(DATA, mount_path="/b"))}, "volumes[1].name"),
        ({"volumes": (DATA, replace(DATA, name="b"))}, "volumes[1].mount_path"),
        ({"volumes": (replace(DATA, mount_path="/dev/shm"),)}, "volumes[0].mount_path"),
        ({"labels": {"ndctl.dev/job": "x"}}, "labels.ndctl.dev/job"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "labels.kueue.x-k8s.io/queue-name"),
        ({"kind": "jobset", "gang_scheduler": "coscheduling"}, "gang_scheduler"),
        ({"kind": "trainjob", "gang_scheduler": "volcano"}, "gang_scheduler"),
        ({"kind": "trainjob", "ttl_after_finished": 60}, "ttl_after_finished"),
        ({"guaranteed": True, "memory": "4Gi"}, "cpu"),
        ({"guaranteed": True, "cpu": "2"}, "memory"),
        ({"guaranteed": True, "cpu": "1500m", "memory": "4Gi"}, "cpu"),
        (
            {**WHOLE, "pod_template": {"spec": {"containers": [{"name": "a", "image": "b"}]}}},
            "pod_template.spec.containers[0].resources",
        ),
        (
            {
                **WHOLE,
                "pod_template": {
                    "spec": {
                        "containers": [{"name": "pytorch", "resources": {"requests": {"cpu": "1"}}}]
                    }
                },
            },
            "pod_template.spec.containers[0].resources",
        ),
        (
            {"topology": TopologyRequest(slice="rack", slice_size=2), "kind": "jobset"},
            "topology.slice",
        ),
        (
            {"topology": TopologyRequest(slice="rack", slice_size=2), "queue": "train"},
            "topology.slice",
        ),
        ({"pod_template": {"containers": []}}, "pod_template.containers"),
        ({"pod_template": {"spec": "x"}}, "pod_template.spec"),
        ({"pod_template": {"spec": {"containers": [{}]}}}, "pod_template.spec.containers"),
        ({"pod_template": {"spec": {"volumes": {"a": 1}}}}, "pod_template.spec.volumes"),
        (
            {"pod_template": {"spec": {"priorityClasName": "high"}}},
            "pod_template.spec.priorityClasName",
        ),
        (
            {"pod_template": {"spec": {"containers": [{"name": "main", "env": []}]}}},
            "pod_template.spec.containers[0].name",
        ),
        (
            {"pod_template": {"spec": {"initContainers": [{"name": "a", "image": "lab/Fetch"}]}}},
            "pod_template.spec.initContainers[0].image",
        ),
        (
            {"pod_template": {"spec": {"initContainers": [{"name": "pytorch"}]}}},
            "pod_template.spec.initContainers[0].name",
        ),
        (
            {"kind": "trainjob", "pod_template": {"spec": {"containers": [{"name": "pytorch"}]}}},
            "pod_template.spec.containers[0].name",
        ),
        (
            {
                "pod_template": {
                    "spec": {"containers": [{"name": "pytorch", "env": [{"name": "PET_NNODES"}]}]}
                }
            },
            "pod_template.spec.containers[0].env.PET_NNODES",
        ),
    ],
)
def test_values_that_kubernetes_would_refuse_or_drop_are_named(change: Any, path: str) -> None:
    (found,) = problems(a_launch(replace(PLAIN, **change)))
    assert found.path == f"cluster.kubernetes.{path}"
    assert found.fix


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_an_object_that_etcd_does_not_store_is_refused_before_any_request(kind: Any) -> None:
    env = {f"V{number}": "x" * 120_000 for number in range(14)}
    with pytest.raises(SpecError) as failed:
        objects(handover_of(a_launch(replace(PLAIN, kind=kind, env=env))))
    assert isinstance(failed.value.__cause__, Invalid)
    (found,) = failed.value.__cause__.problems
    assert found.path == "cluster.kubernetes.env"
    assert "at most 1,572,864 bytes" in found.limit
    assert "env_from" in found.fix


@pytest.mark.parametrize("in_template", [False, True])
def test_a_variable_with_which_linux_starts_no_program_is_refused(in_template: bool) -> None:
    def found(value: str) -> list[Problem]:
        change: dict[str, Any] = {"env": {"V": value}}
        if in_template:
            mine = {"name": "pytorch", "env": [{"name": "V", "value": value}]}
            change = {"pod_template": {"spec": {"containers": [mine]}}}
        return list(problems(a_launch(replace(PLAIN, **change))))

    longest = (128 << 10) - len("V=") - 1
    assert found("x" * longest) == []
    (one,) = found("x" * (longest + 1))
    assert one.path.endswith("env.V")
    assert "131,072 bytes" in one.said
    environ = {"V": "x" * longest}
    subprocess.run(["/bin/true"], env=environ, check=True)
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true"], env={"V": "x" * (longest + 1)}, check=True)


def test_a_container_with_another_name_is_extra_and_needs_an_image() -> None:
    mine = {"spec": {"containers": [{"name": "main", "resources": {}}]}}
    (found,) = problems(a_launch(replace(PLAIN, pod_template=mine)))
    assert found.limit.startswith("pytorch, ndctl's own container")
    assert found.fix.startswith("did you mean pytorch?")
    beside = {"spec": {"containers": [{"name": "main", "image": "busybox"}]}}
    assert list(problems(a_launch(replace(PLAIN, pod_template=beside)))) == []


@pytest.mark.parametrize(
    "container",
    [
        {"name": "pytorch", "env": []},
        {"name": "pytorch", "resources": {"limits": {"ephemeral-storage": "1Ti"}}},
        {"name": "a", "image": "b", "resources": {"limits": {"cpu": "0.1", "memory": "64Mi"}}},
        {
            "name": "a",
            "image": "b",
            "resources": {
                "limits": {"cpu": "0.1", "memory": "64Mi"},
                "requests": {"cpu": "100m", "memory": "64Mi"},
            },
        },
    ],
)
def test_pods_stay_guaranteed_if_extra_containers_request_their_limits(container: Any) -> None:
    spec = replace(PLAIN, **WHOLE, pod_template={"spec": {"containers": [container]}})
    assert list(problems(a_launch(spec))) == []


def test_shm_may_be_the_users_own_volume() -> None:
    own = replace(DATA, mount_path="/dev/shm")
    assert list(problems(a_launch(replace(PLAIN, shm=None, volumes=(own,))))) == []
