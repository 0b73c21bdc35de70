"""Objects that pods refer to and need, which are checked before the job is created."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.checks.references import Reference, missing, references
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CLAIMS,
    CONFIG_MAPS,
    PRIORITIES,
    RUNTIME_CLASSES,
    SECRETS,
)
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.kubernetes_spec import (
    EnvFrom,
    KubernetesSpec,
    MountedVolume,
    ValueFrom,
)
from orchestrator.errors import Unanswered
from tests.backends.kubernetes.fake_api import FakeApi
from tests.backends.kubernetes.rendered import PLAIN, a_handover

AT = "cluster.kubernetes"
THERE = FakeApi(
    objects={
        "secrets": [{"metadata": {"name": "hub"}, "data": {"token": "eA=="}}],
        "configmaps": [{"metadata": {"name": "site"}, "binaryData": {"proxy": "eA=="}}],
        "persistentvolumeclaims": [{"metadata": {"name": "runs"}}],
    }
)


def spec(**keys: Any) -> KubernetesSpec:
    return replace(PLAIN, **keys)


def named(one: KubernetesSpec) -> dict[Reference, str]:
    """References to objects that ndctl does not create."""
    found = references(a_handover(one, one.kind))
    return {key: place.removeprefix(f"{AT}.") for key, place in found.items()}


def lacks(one: KubernetesSpec, api: FakeApi = THERE) -> list[Finding]:
    return list(missing(api, "ns", a_handover(one, one.kind)))


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_a_plain_job_refers_only_to_its_volume(kind: Any) -> None:
    assert named(spec(kind=kind)) == {Reference(CLAIMS, "runs"): "runs.claim"}
    assert lacks(spec(kind=kind)) == []


def test_every_key_that_refers_to_an_object_is_checked() -> None:
    one = spec(
        env={"A": ValueFrom(secret="s", key="k"), "B": "text"},
        env_from=(EnvFrom(config_map="c"),),
        volumes=(
            MountedVolume(name="v", mount_path="/v", secret="mounted"),
            MountedVolume(name="d", mount_path="/d", claim="corpus"),
            MountedVolume(name="t", mount_path="/t", empty_dir="1Gi"),
        ),
        image_pull_secrets=("registry",),
        service_account="trainer",
        priority_class="high",
    )
    assert named(one) == {
        Reference(SECRETS, "s", "k"): "env.A",
        Reference(CONFIG_MAPS, "c"): "env_from[0]",
        Reference(SECRETS, "mounted"): "volumes[0]",
        Reference(CLAIMS, "runs"): "runs.claim",
        Reference(CLAIMS, "corpus"): "volumes[1].claim",
        Reference(SECRETS, "registry"): "image_pull_secrets[0]",
        Reference(ACCOUNTS, "trainer"): "service_account",
        Reference(PRIORITIES, "high"): "priority_class",
    }


def test_references_in_the_pod_template_are_checked_too() -> None:
    """Optional references are not checked."""
    optional = {"name": "maybe", "optional": True}
    pod = {
        "runtimeClassName": "gvisor",
        "imagePullSecrets": [{"name": "mirror"}],
        "containers": [
            {
                "name": "pytorch",
                "env": [
                    {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                    {"name": "B", "valueFrom": {"secretKeyRef": {**optional, "key": "k"}}},
                    {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                ],
                "envFrom": [{"secretRef": {"name": "wandb"}}, {"configMapRef": optional}],
            },
            {"name": "side", "image": "busybox", "envFrom": [{"configMapRef": {"name": "c"}}]},
        ],
        "volumes": [
            {"name": "hub", "secret": {"secretName": "hub", "items": [{"key": "a", "path": "b"}]}},
            {"name": "opt", "secret": {"secretName": "maybe", "optional": True}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}},
            {
                "name": "all",
                "projected": {"sources": [{"configMap": {"name": "site"}}, {"downwardAPI": {}}]},
            },
        ],
    }
    template = "pod_template.spec"
    assert named(spec(pod_template={"spec": pod})) == {
        Reference(CLAIMS, "runs"): "runs.claim",
        Reference(RUNTIME_CLASSES, "gvisor"): f"{template}.runtimeClassName",
        Reference(SECRETS, "mirror"): f"{template}.imagePullSecrets[mirror]",
        Reference(SECRETS, "s", "k"): f"{template}.containers[pytorch].env[A]",
        Reference(SECRETS, "wandb"): f"{template}.containers[pytorch].envFrom[0].secretRef",
        Reference(CONFIG_MAPS, "c"): f"{template}.containers[side].envFrom[0].configMapRef",
        Reference(SECRETS, "hub", "a"): f"{template}.volumes[hub].secret.items[0]",
        Reference(CLAIMS, "corpus"): f"{template}.volumes[data].persistentVolumeClaim",
        Reference(CONFIG_MAPS, "site"): f"{template}.volumes[all].projected.sources[0].configMap",
    }


def test_a_missing_source_stops_the_job_and_names_the_command_that_creates_it() -> None:
    wrong = spec(
        env={
            "A": ValueFrom(secret="hub", key="tokken"),
            "B": ValueFrom(secret="hub", key="token"),
            "C": ValueFrom(config_map="site", key="proxy"),
            "D": ValueFrom(secret="wandb", key="key"),
        }
    )
    one, other = lacks(wrong)
    assert (one.what, one.verdict) == (f"{AT}.env.A", "stops")
    assert one.found == (
        "must be a key of Secret hub of namespace ns; it has no tokken, only token"
    )
    assert "kubectl -n ns create secret generic hub --from-file=tokken=FILE" in one.fix
    assert other.found == "must be a Secret of namespace ns; wandb does not exist"


def test_a_forbidden_reference_is_skipped_and_no_answer_is_an_error() -> None:
    wrong = spec(image_pull_secrets=("registry",))
    assert lacks(wrong, FakeApi(objects=THERE.objects, refused=frozenset({"get secrets"}))) == []

    class Silent(FakeApi):
        def get(self, *_: Any) -> Any:
            raise Unanswered("no answer")

    with pytest.raises(Unanswered):
        lacks(wrong, Silent())
