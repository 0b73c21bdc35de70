"""Hosts described only by a spec."""

from typing import Any

import pytest

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.devices import GPU_NAMES
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.inventory.described import described_device, described_hosts
from orchestrator.inventory.profiles import load_profile


def cluster(**keys: Any) -> ClusterSpec:
    made: ClusterSpec = decode(ClusterSpec, keys)
    return made


PRODUCT = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@pytest.mark.parametrize(
    ("keys", "device"),
    [
        ({}, None),
        ({"gpu": "h200-sxm-141gb"}, "h200-sxm-141gb"),
        ({"backend": "slurm"}, None),
        ({"backend": "slurm", "gpu": "a100-sxm-40gb"}, "a100-sxm-40gb"),
        ({"backend": "kubernetes"}, None),
        ({"backend": "kubernetes", "gpu": "b200-sxm-180gb"}, "b200-sxm-180gb"),
        ({"backend": "kubernetes", "kubernetes": {"gpu_resource": None}}, "cpu"),
        ({"backend": "kubernetes", "kubernetes": {"node_selector": PRODUCT}}, "h100-sxm-80gb"),
        (
            {
                "backend": "kubernetes",
                "kubernetes": {
                    "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-b200"}
                },
            },
            "b200-sxm-180gb",
        ),
        (
            {
                "backend": "kubernetes",
                "kubernetes": {"node_selector": {"node.kubernetes.io/instance-type": "m5.large"}},
            },
            None,
        ),
        ({"backend": "kubernetes", "kubernetes": {"node_selector": {"pool": "h100"}}}, None),
        ({"kubernetes": {"node_selector": PRODUCT}}, None),
    ],
)
def test_the_device_comes_from_the_spec(keys: dict[str, Any], device: str | None) -> None:
    assert described_device(cluster(**keys)) == device


def test_a_described_cluster_has_as_many_equal_hosts_as_the_job_needs() -> None:
    found = described_hosts(
        cluster(backend="kubernetes", hosts=2, spare_hosts=1, gpus_per_host=8, gpu=GPU_NAMES[0])
    )
    assert found is not None
    assert [host.name for host in found.hosts] == ["node-0", "node-1", "node-2"]
    profile = load_profile(GPU_NAMES[0])
    alike = (8, profile.memory_bytes, profile)
    assert all((one.devices, one.device_bytes, one.profile) == alike for one in found.hosts)
    assert described_hosts(cluster(hosts=2)) is None


def test_ranks_on_cpus_have_no_memory_of_their_own() -> None:
    found = described_hosts(cluster(backend="kubernetes", kubernetes={"gpu_resource": None}))
    assert found is not None
    assert [host.device_bytes for host in found.hosts] == [None]


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Invalid) as refused:
        cluster(gpu="h100")
    (problem,) = refused.value.problems
    assert problem.path == "gpu"
    assert all(name in problem.fix for name in GPU_NAMES)
    assert "cpu" not in problem.fix


def test_gpus_of_a_kind_and_ranks_on_cpus_exclude_each_other() -> None:
    with pytest.raises(Invalid, match=r"gpu: must be left out if kubernetes\.gpu_resource is"):
        cluster(backend="kubernetes", gpu=GPU_NAMES[0], kubernetes={"gpu_resource": None})
    cluster(backend="slurm", gpu=GPU_NAMES[0], kubernetes={"gpu_resource": None})
