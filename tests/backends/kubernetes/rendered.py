"""Specs and launches for tests of rendering: plain ones, and one with all options."""

from typing import Any

from msgspec.structs import replace

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import (
    EnvFrom,
    Kind,
    KubernetesSpec,
    MountedVolume,
    RunVolume,
    Toleration,
    TopologyRequest,
    ValueFrom,
)
from orchestrator.contract.submission_payload import Handover
from tests.backends.handover import handover_of

CRDS: dict[str, tuple[str, ...]] = {
    "PyTorchJob": ("pytorchjobs-v1.8.1.yaml", "pytorchjobs-v1.9.4.yaml"),
    "JobSet": ("jobsets-v0.8.2.yaml", "jobsets-v0.12.0.yaml"),
    "TrainJob": ("trainer-trainjobs-v2.0.0.yaml",),
    "TrainingRuntime": ("trainer-trainingruntimes-v2.0.0.yaml",),
}
PLAIN = KubernetesSpec(image="registry.example.org/ndctl:0.1", runs=RunVolume(claim="runs"))
FULL = replace(
    PLAIN,
    namespace="training",
    runs=RunVolume(host_path="/mnt/lustre/runs"),
    run_root="/runs",
    image_pull_policy="Always",
    image_pull_secrets=("registry", "mirror"),
    python="/venv/bin/python",
    service_account="trainer",
    priority_class="high",
    rdma_resource="rdma/hca_shared_devices_a",
    rdma_count=8,
    cpu="96",
    memory="1500Gi",
    shm="256Gi",
    host_network=True,
    node_selector={"node.example.org/pool": "h100"},
    tolerations=(
        Toleration(key="dedicated", operator="Equal", value="ml", effect="NoSchedule"),
        Toleration(key="node.kubernetes.io/unreachable", effect="NoExecute", toleration_seconds=0),
    ),
    env={
        "NCCL_IB_HCA": "mlx5",
        "GREETING": "it's: {a} #1",
        "HF_TOKEN": ValueFrom(secret="hub-token", key="token"),
        "NCCL_ALGO": ValueFrom(config_map="nccl", key="algo"),
    },
    env_from=(EnvFrom(secret="wandb"), EnvFrom(config_map="proxies", prefix="PROXY_")),
    volumes=(
        MountedVolume(name="data", mount_path="/data", claim="corpus"),
        MountedVolume(name="tools", mount_path="/opt/tools", host_path="/opt/tools"),
        MountedVolume(name="hub", mount_path="/secrets/hub", secret="hub-token"),
        MountedVolume(name="nccl", mount_path="/etc/nccl", config_map="nccl"),
        MountedVolume(name="scratch", mount_path="/scratch", empty_dir="2Ti"),
    ),
    labels={"team": "language"},
    annotations={"cost-center": "a 42"},
    queue="train",
    exclude=("node-bad",),
    topology=TopologyRequest(
        required="topology.kubernetes.io/block",
        nodes={"nvidia.com/gpu.product": ("H100",)},
        prefer_nodes={"topology.kubernetes.io/rack": ("r1", "r2")},
    ),
    pod_template={
        "metadata": {"annotations": {"sidecar.example.org/inject": "false"}},
        "spec": {
            "runtimeClassName": "nvidia",
            "initContainers": [{"name": "warm", "image": "busybox", "command": ["true"]}],
            "securityContext": {"supplementalGroups": [4242]},
        },
    },
)
CPU = replace(PLAIN, gpu_resource=None, shm=None, cpu="2", memory="4Gi")
NEAR = replace(
    PLAIN,
    topology=TopologyRequest(
        required="nvidia.com/gpu.clique",
        levels=("topology.kubernetes.io/block", "topology.kubernetes.io/rack"),
    ),
)
SLICES = replace(
    PLAIN, queue="train", topology=TopologyRequest(slice="nvidia.com/gpu.clique", slice_size=2)
)
GUARANTEED = replace(
    PLAIN, guaranteed=True, cpu="96", memory="1500Gi", ttl_after_finished=3600, gpu_resource=None
)
GANG = replace(PLAIN, gang_scheduler="coscheduling")


def a_launch(spec: KubernetesSpec, hosts: int = 3, **more: Any) -> LaunchPlan:
    fields: dict[str, Any] = {
        "job": "job",
        "run_dir": f"{spec.run_root}/job",
        "launch": 1,
        "hosts": tuple(f"node-{i}" for i in range(hosts)),
        "devices_per_host": 8,
        "agent_timeout": 10.0,
        "kubernetes": spec,
    }
    return LaunchPlan(**{**fields, **more})


def a_handover(spec: KubernetesSpec, kind: Kind = "pytorchjob", hosts: int = 3) -> Handover:
    return handover_of(
        a_launch(replace(spec, kind=kind), hosts), backend="kubernetes", stop_grace=30.0
    )


CASES: dict[str, Handover] = {
    "pytorchjob": a_handover(PLAIN),
    "pytorchjob-one-host": a_handover(PLAIN, hosts=1),
    "pytorchjob-full": a_handover(FULL),
    "pytorchjob-cpu": a_handover(CPU),
    "pytorchjob-gang": a_handover(GANG),
    "pytorchjob-near": a_handover(NEAR),
    "jobset": a_handover(PLAIN, "jobset"),
    "jobset-full": a_handover(FULL, "jobset"),
    "jobset-guaranteed": a_handover(GUARANTEED, "jobset"),
    "pytorchjob-guaranteed": a_handover(GUARANTEED),
    "jobset-slices": a_handover(SLICES, "jobset", hosts=4),
    "trainjob": a_handover(PLAIN, "trainjob"),
    "trainjob-full": a_handover(FULL, "trainjob"),
    "trainjob-gang": a_handover(GANG, "trainjob"),
}
