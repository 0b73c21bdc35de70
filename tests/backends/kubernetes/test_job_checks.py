"""The list of problems of a job, and how it refuses a submission."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden, RuntimeUnseen
from orchestrator.backends.kubernetes.checks.launch_checks import check, examine_job
from orchestrator.contract.check_results import Finding
from orchestrator.contract.codec import Invalid
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, TopologyRequest
from orchestrator.errors import BackendError, SpecError, Unanswered
from orchestrator.inventory.kubernetes.gpus import gpu_table
from tests.backends.kubernetes.fake_api import FakeApi
from tests.backends.kubernetes.rendered import PLAIN, a_handover
from tests.doctor.test_kubernetes import KUEUE, SPEC, healthy, served
from tests.inventory.kubernetes.objects import node

TABLE = gpu_table({})
A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}


def looked(api: FakeApi, spec: KubernetesSpec = SPEC, hosts: int = 2) -> tuple[Finding, ...]:
    handover = a_handover(spec, spec.kind, hosts)
    plan = replace(handover.job.plan, profile="h100-sxm-80gb")
    handover = replace(handover, job=replace(handover.job, plan=plan))
    return examine_job(api, "team-a", handover, TABLE)


def of(found: tuple[Finding, ...], what: str) -> list[Finding]:
    return [one for one in found if one.what == what]


def test_all_blocking_problems_are_reported_at_once_with_key_and_fix() -> None:
    spec = replace(SPEC, priority_class="high", queue="train")
    refusals = {"ConfigMap": Forbidden("ada may not patch configmaps", fix="ask")}
    with pytest.raises(BackendError) as refused:
        check(healthy(refusals=refusals), "team-a", a_handover(spec), TABLE)
    message = str(refused.value)
    assert message.startswith(
        "this job cannot run on Kubernetes (namespace team-a, https://10.0.0.1:6443):\n"
        "  ConfigMap job-launch: ada may not patch configmaps\n    fix: ask\n"
    )
    assert "  cluster.kubernetes.priority_class: must be a PriorityClass of the cluster" in message
    assert "cluster.kubernetes.queue=train, but Kueue is not installed" in message
    assert message.count("fix:") == 3


def test_a_trainjob_whose_runtime_is_not_made_yet_passes_the_dry_run() -> None:
    """Trainer's webhook looks for the runtime, which the dry run before it did not create."""
    spec = replace(SPEC, kind="trainjob")
    trainer = served("trainer.kubeflow.org", "v1alpha1", "trainjobs")
    unseen = healthy(paths=trainer, refusals={"TrainJob": RuntimeUnseen("not found")})
    refused = healthy(paths=trainer, refusals={"TrainJob": BackendError("not found")})
    assert [one.verdict for one in of(looked(unseen, spec), "dry run")] == ["ok"]
    assert [one.verdict for one in of(looked(refused, spec), "TrainJob job")] == ["stops"]


def test_mistakes_of_the_spec_raise_a_spec_error_with_all_other_problems() -> None:
    spec = replace(SPEC, priority_class="high", pod_template={"spec": {"nodename": "n"}})
    with pytest.raises(SpecError) as refused:
        check(healthy(), "team-a", a_handover(spec), TABLE)
    assert isinstance(refused.value.__cause__, Invalid)
    assert "pod_template.spec.nodename" in str(refused.value)
    assert "cluster.kubernetes.priority_class" in str(refused.value)


def test_mistakes_of_the_spec_are_found_without_a_server() -> None:
    class Silent(FakeApi):
        def get(self, *_: Any) -> Any:
            raise Unanswered("no answer")

    wrong = replace(SPEC, pod_template={"spec": {"nodename": "n"}})
    with pytest.raises(SpecError, match="nodename"):
        check(Silent(), "team-a", a_handover(wrong), TABLE)
    with pytest.raises(Unanswered):
        check(Silent(), "team-a", a_handover(SPEC), TABLE)


def test_a_reason_to_wait_does_not_block_a_job() -> None:
    found = check(healthy(objects={"nodes": []}), "team-a", a_handover(PLAIN), TABLE)
    warned = {one.what: one for one in found if one.verdict == "warns"}
    assert set(warned) == {"nodes", "gang scheduling"}
    assert "manifests/overlays/kueue" in warned["gang scheduling"].fix
    (tried,) = of(found, "dry run")
    assert tried.found == "https://10.0.0.1:6443 accepts the 7 objects of PyTorchJob team-a/job"


def test_one_host_or_an_explicit_null_gives_no_gang_warning() -> None:
    assert not of(looked(healthy(), PLAIN, hosts=1), "gang scheduling")
    assert not of(looked(healthy(), replace(PLAIN, gang_scheduler=None)), "gang scheduling")
    queued = replace(PLAIN, queue="train")
    assert not of(looked(healthy(paths=KUEUE), queued), "gang scheduling")


def test_the_servers_warnings_are_in_the_list() -> None:
    found = looked(healthy(warnings=('unknown field "spec.x"', "policy/v1beta1 is deprecated")))
    assert [one.found for one in of(found, "api server warns")] == [
        'unknown field "spec.x"',
        "policy/v1beta1 is deprecated",
    ]


def test_pods_that_may_get_another_kind_of_device_give_a_warning() -> None:
    api = healthy(objects={"nodes": [node("a"), node("b"), node("c", A100), node("d", A100)]})
    enough, other = of(looked(api), "nodes")
    assert enough.verdict == "ok"
    assert other.found == (
        "the plan is for h100-sxm-80gb, but pods may be scheduled to c, which is a100-sxm-80gb,"
        " as are 1 more of other kinds"
    )
    assert other.fix == (
        "set cluster.kubernetes.node_selector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}"
    )
    kept = TopologyRequest(nodes={"nvidia.com/gpu.product": ("NVIDIA-H100-80GB-HBM3",)})
    assert len(of(looked(api, replace(SPEC, topology=kept)), "nodes")) == 1


def test_an_operators_container_that_makes_workers_burstable_gives_a_warning() -> None:
    whole = replace(SPEC, guaranteed=True, cpu="8", memory="64Gi")
    (found,) = of(looked(healthy(), whole), "cluster.kubernetes.guaranteed")
    assert found.verdict == "warns"
    assert "workers are Burstable" in found.found
    assert not of(looked(healthy(), whole, hosts=1), "cluster.kubernetes.guaranteed")
    assert not of(looked(healthy(), replace(whole, kind="jobset")), "cluster.kubernetes.guaranteed")


def test_a_job_waits_for_nodes_that_an_autoscaler_makes() -> None:
    groups = {"/apis": {"groups": [{"name": "karpenter.sh"}]}}
    (found,) = of(looked(healthy(paths=groups, objects={"nodes": []})), "nodes")
    assert found.found.endswith("exist; its pods wait until Karpenter adds them")
