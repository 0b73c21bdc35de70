"""The local machine: its devices, and the hosts that it plays."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.devices import PROFILE_NAMES
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import load_profile


def local_inventory(
    cluster: ClusterSpec,
    device_bytes: int | None = None,
    gpu: Profile | None = None,
    cpu: Profile | None = None,
) -> Inventory:
    """The hosts that `cluster` asks for, spares last: `host-0`, `host-1`, ….

    Args:
        device_bytes: memory for each rank. Leave it None for CPU ranks: they share the machine's
            memory, and the planner then keeps their micro batches small.
        gpu: the kind of GPU that each rank has, with its memory; None: ranks run on CPUs.
        cpu: the profile of ranks on CPUs; None: guessed.
    """
    count = cluster.hosts + cluster.spare_hosts
    profile = gpu or cpu or load_profile("cpu")
    if gpu is not None:
        device_bytes = gpu.memory_bytes
    return Inventory(
        hosts=tuple(
            Host(
                name=f"host-{i}",
                devices=cluster.gpus_per_host,
                device_bytes=device_bytes,
                profile=profile,
            )
            for i in range(count)
        )
    )


def gpu_of_ranks(
    cluster: ClusterSpec, environ: Mapping[str, str], driver: Path | None = None
) -> Profile | None:
    """The kind of GPU that the local backend gives to the ranks of `cluster`.

    None if there are fewer GPUs than ranks, so that ranks run on CPUs, or if no profile describes
    the GPUs: the planner then assumes as little as it does for CPUs.
    """
    wanted = (cluster.hosts + cluster.spare_hosts) * cluster.gpus_per_host
    if len(visible_gpus(environ)) < wanted:
        return None
    name = _profile_of(driver or DRIVER)
    return load_profile(name) if name in PROFILE_NAMES else None


DRIVER = Path("/proc/driver/nvidia/gpus")
MODELS: Mapping[str, str] = {
    r"H100 80GB HBM3": "h100-sxm-80gb",
    r"H200": "h200-sxm-141gb",
    r"A100-SXM.*80GB": "a100-sxm-80gb",
    r"A100-SXM.*40GB": "a100-sxm-40gb",
    r"\bB200": "b200-sxm-180gb",
    r"\bGB200": "gb200-186gb",
    r"\bB300.*": "b300-sxm-270gb",
    r"H100 PCIe": "h100-pcie-80gb",
    r"L40S": "l40s-48gb",
    r"RTX 4090": "rtx4090-24gb",
}
"""Ending of the driver's name of a device -> its profile. NVL cards end differently."""


def this_machine(environ: Mapping[str, str], driver: Path = DRIVER) -> Inventory:
    """This machine as one host with its GPUs, or its CPU cores if it has none."""
    gpus = visible_gpus(environ)
    name = (_profile_of(driver) if gpus else "cpu") or ""
    profile = load_profile(name) if name in PROFILE_NAMES else None
    host = Host(
        name=os.uname().nodename,
        devices=len(gpus) or os.cpu_count() or 1,
        device_bytes=profile.memory_bytes if profile and gpus else None,
        profile=profile,
    )
    return Inventory(hosts=(host,))


def _profile_of(driver: Path) -> str | None:
    """Profile of the devices that the driver lists; None if they differ or are unknown."""
    texts = [path.read_text() for path in sorted(driver.glob("*/information"))]
    lines = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts]
    models = {line[1] for line in lines if line}
    known = {
        next((name for end, name in MODELS.items() if re.search(rf"{end}$", model)), None)
        for model in models
    }
    return known.pop() if len(known) == 1 else None


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """NVIDIA devices that the user may use, found without any library."""
    granted = environ.get("CUDA_VISIBLE_DEVICES")
    if granted is not None:
        return tuple(name.strip() for name in granted.split(",") if name.strip())
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted(found, key=int))
