"""The hosts that a job is planned for, depending on the command and the cluster."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.app.planning import forecasts, planned_hosts, plans
from orchestrator.app.submission import payload, submit_job
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.contract.plan import Plan
from orchestrator.errors import BackendError, PlanError, SpecError, Unreachable
from tests.backends.kubernetes.fake_api import FakeApi
from tests.inventory.kubernetes.objects import node

ROOT = Path(__file__).parents[3]
SPEC = """
name: job
model: {preset: llama-tiny}
data: {files: "{stdlib}/*.py", tokenizer: bytes, sequence_length: 128}
train: {steps: 10, global_batch_size: 64}
cluster:
  backend: kubernetes
  hosts: 2
  gpus_per_host: 8
  kubernetes:
    namespace: team-a
    image: registry.example.org/ndctl:0.1
    runs: {claim: runs}
"""
GPU = "cluster.gpu=h100-sxm-80gb"
QUEUE = "cluster.kubernetes.queue=train"
RACK = "topology.kubernetes.io/rack"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "job.yaml"
    found.write_text(SPEC)
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> "Clusters":
    return Clusters(monkeypatch)


class Clusters:
    """Replaces the Kubernetes API that a plan reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, **more: Any) -> FakeApi:
        api = FakeApi(**more)

        def reached(context: str | None, environ: object) -> ApiReader:
            return api

        self.monkeypatch.setattr(planned_hosts, "kubernetes_api", reached)
        return api

    def set_unreachable(self) -> None:
        """As without a kubeconfig."""

        def reached(context: str | None, environ: object) -> ApiReader:
            raise BackendError("there is no way to a Kubernetes cluster")

        self.monkeypatch.setattr(planned_hosts, "kubernetes_api", reached)


def plan(path: Path, *overrides: str, purpose: planned_hosts.Purpose = "submit") -> Plan:
    return plans.plan_spec(path, overrides, {}, purpose=purpose).plan


def rendered(path: Path, *overrides: str, purpose: planned_hosts.Purpose = "render") -> str:
    planned = plans.plan_spec(path, overrides, {}, purpose=purpose)
    submission = payload.Submission(planned=planned, run_root=path.parent)
    return submit_job.render(submission, {})


def test_render_prints_the_same_text_for_any_cluster_and_without_one(
    path: Path, cluster: Clusters
) -> None:
    cluster.set_unreachable()
    nowhere = rendered(path, GPU)
    for many in (0, 2, 7):
        nodes = [node(f"acme-{i}", {RACK: f"rack-{i}"}) for i in range(many)]
        api = cluster(objects={"nodes": nodes})
        assert rendered(path, GPU) == nowhere
        assert api.asked == [], "no cluster is asked"
        # If the spec is complete, `submit` sends exactly what `render` prints.
        assert rendered(path, GPU, purpose="submit") == nowhere
    assert "acme" not in nowhere
    assert "rack-" not in nowhere
    assert f"topologyKey: {RACK}" in nowhere, "pods are still placed near each other"


def test_two_renders_in_different_environments_print_the_same_bytes(
    path: Path, tmp_path: Path
) -> None:
    """In separate processes without a kubeconfig, with different folders, homes and time zones."""
    texts = []
    for number in (1, 2):
        home = tmp_path / f"home-{number}"
        home.mkdir()
        environ = {"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        environ |= {"TZ": "UTC"} if number == 1 else {"TZ": "Asia/Tokyo", "NDCTL_RUN_ROOT": "/x"}
        argv = [sys.executable, "-m", "orchestrator", "render", str(path), "--set", GPU]
        done = subprocess.run(
            argv, env=environ, cwd=home, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert texts[0].endswith(b"\n")


def test_render_needs_in_the_spec_what_a_cluster_would_tell(path: Path, cluster: Clusters) -> None:
    cluster.set_unreachable()
    with pytest.raises(SpecError) as refused:
        rendered(path, "cluster.kubernetes.namespace=null")
    message = str(refused.value)
    assert "cluster.gpu: must be given" in message
    assert "one of h100-sxm-80gb, " in message
    assert "cluster.kubernetes.namespace: must be given" in message
    rendered(path, GPU, "cluster.kubernetes.namespace=null", "cluster.kubernetes.service_account=a")


def test_gpus_that_differ_from_the_node_selector_are_refused(path: Path, cluster: Clusters) -> None:
    cluster.set_unreachable()
    a100 = "cluster.kubernetes.node_selector={nvidia.com/gpu.product: NVIDIA-A100-SXM4-80GB}"
    for purpose in ("look", "render", "submit"):
        with pytest.raises(SpecError, match=r"cluster\.gpu: must be a100-sxm-80gb"):
            plan(path, GPU, a100, purpose=purpose)
    assert plan(path, a100, purpose="render").profile == "a100-sxm-80gb"


def test_without_a_device_in_the_spec_a_submission_reads_the_nodes(
    path: Path, cluster: Clusters
) -> None:
    cluster(objects={"nodes": [node(f"n{i}") for i in range(3)]})
    found = plan(path)
    assert (found.hosts, found.profile) == (("n0", "n1"), "h100-sxm-80gb")


NONE_THERE: list[dict[str, Any]] = []


def test_for_an_empty_node_pool_the_plan_follows_from_the_spec(
    path: Path, cluster: Clusters
) -> None:
    cluster(objects={"nodes": NONE_THERE})
    assert len(plan(path, GPU).hosts) == 2
    with pytest.raises(PlanError) as refused:
        plan(path)
    assert "where nodes are created on demand, set cluster.gpu to one of" in refused.value.fix


@pytest.mark.parametrize("how", ["queue", "karpenter"])
def test_a_job_for_more_hosts_than_exist_waits_for_a_queue_or_autoscaler(
    path: Path, cluster: Clusters, how: str
) -> None:
    groups = {"/apis": {"groups": [{"name": "apps"}, {"name": "karpenter.sh"}]}}
    cluster(objects={"nodes": [node("n0")]}, paths=groups if how == "karpenter" else {})
    found = plan(path, *([QUEUE] if how == "queue" else []))
    assert found.hosts == ("node-0", "node-1")
    (note,) = [one for one in found.notes if "hosts exist" in one]
    brings = "queue train" if how == "queue" else "Karpenter"
    assert note == (
        "1 of the 2 hosts exist: planned for 2 of h100-sxm-80gb anyway,"
        f" because {brings} may add them"
    )


def test_without_an_autoscaler_too_few_nodes_are_refused_with_the_key_to_set(
    path: Path, cluster: Clusters
) -> None:
    cluster(objects={"nodes": [node("n0"), node("n1", unschedulable=True)]})
    with pytest.raises(PlanError) as refused:
        plan(path)
    assert "only 1 can be used (n1 is cordoned)" in refused.value.message
    assert refused.value.fix.endswith(
        "where nodes are created on demand, set cluster.gpu to h100-sxm-80gb: then none must exist"
        " yet"
    )


def test_a_user_who_cannot_list_nodes_submits_a_described_cluster(
    path: Path, cluster: Clusters
) -> None:
    cluster(refused=frozenset({"list nodes *"}))
    with pytest.raises(BackendError) as refused:
        plan(path)
    assert "set cluster.gpu to one of" in refused.value.fix
    assert len(plan(path, GPU).hosts) == 2


# What schedules all pods at once


def kueue(*queues: str, levels: tuple[str, ...] = ()) -> dict[str, Any]:
    group = {"preferredVersion": {"version": "v1beta1"}}
    topology = {"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": x} for x in levels]}}
    local = [{"metadata": {"name": name, "namespace": "team-a"}} for name in queues]
    return {
        "paths": {"/apis/kueue.x-k8s.io": group},
        "objects": {"localqueues": local, "topologies": [topology] if levels else []},
    }


def settled(path: Path, *overrides: str, purpose: planned_hosts.Purpose = "submit") -> Any:
    return plans.plan_spec(path, (GPU, *overrides), {}, purpose=purpose)


def test_the_only_queue_of_a_namespace_is_used_and_reported(path: Path, cluster: Clusters) -> None:
    cluster(**kueue("train", levels=(RACK, "kubernetes.io/hostname")))
    found = settled(path)
    spec = found.spec.cluster.kubernetes
    assert (spec.queue, spec.topology.preferred, spec.topology.levels) == ("train", RACK, ())
    (note,) = found.notes
    assert "the job goes into train" in note
    assert "cluster.kubernetes.queue: train states it in the spec" in note
    for key in ("cluster.kubernetes.gang_scheduler=null", "cluster.hosts=1"):
        assert settled(path, key).spec.cluster.kubernetes.queue is None
    rendered_for = settled(path, purpose="render")
    assert (rendered_for.spec.cluster.kubernetes.queue, rendered_for.notes) == (None, ())


def test_without_an_answer_about_queues_nothing_is_submitted(path: Path, cluster: Clusters) -> None:
    """No answer does not mean that there is no queue, and a second question would wait as long."""
    cluster(paths={"/apis/kueue.x-k8s.io": Unreachable("no answer in 30 s")})
    with pytest.raises(Unreachable):
        settled(path)


def test_of_several_queues_none_is_selected(path: Path, cluster: Clusters) -> None:
    cluster(**kueue("train", "test"))
    assert settled(path).spec.cluster.kubernetes.queue is None


@pytest.mark.parametrize(
    ("group", "kind", "taken"),
    [
        ("scheduling.volcano.sh", "pytorchjob", "volcano"),
        ("scheduling.x-k8s.io", "pytorchjob", "coscheduling"),
        ("scheduling.x-k8s.io", "trainjob", "coscheduling"),
        ("scheduling.volcano.sh", "trainjob", "auto"),
        ("scheduling.x-k8s.io", "jobset", "auto"),
    ],
)
def test_a_gang_scheduler_is_used_by_the_kinds_that_support_it(
    path: Path, cluster: Clusters, group: str, kind: str, taken: str
) -> None:
    cluster(paths={f"/apis/{group}": {"versions": []}})
    found = settled(path, f"cluster.kubernetes.kind={kind}")
    assert found.spec.cluster.kubernetes.gang_scheduler == taken
    assert bool(found.notes) is (taken != "auto")


# Other backends


def test_plan_needs_no_slurm_if_the_spec_names_the_device(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> Any:
        raise BackendError("scontrol: command not found")

    monkeypatch.setattr(planned_hosts, "slurm", unreachable)
    slurm = "cluster.backend=slurm"
    assert plan(path, GPU, slurm, purpose="look").profile == "h100-sxm-80gb"
    for overrides, purpose in (((slurm,), "look"), ((GPU, slurm), "submit")):
        with pytest.raises(BackendError, match="scontrol"):
            plan(path, *overrides, purpose=purpose)  # type: ignore[arg-type]


def test_a_local_job_takes_the_device_from_the_spec(path: Path) -> None:
    local = "cluster.backend=local"
    assert plan(path, local).profile == "cpu"
    found = plan(path, GPU, local)
    assert (found.profile, found.hosts) == ("h100-sxm-80gb", ("host-0", "host-1"))


def test_a_forecast_needs_no_cluster(path: Path, cluster: Clusters) -> None:
    cluster.set_unreachable()
    asked = forecasts.Asked(
        days=1.0, rates="llama3", repair_h=24.0, queue_s=600.0, histories=2, seed=1
    )
    told = forecasts.forecast_spec(path, (GPU,), {}, None, asked)
    assert told.basis.setting.hosts == 2
