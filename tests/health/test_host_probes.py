"""Probes of a host after a failure: memory, links, disk and the kernel log."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from orchestrator.contract.spec.failures import FailureRule
from orchestrator.health import host_probes
from orchestrator.health.host_check import Sight, Wanted
from orchestrator.health.host_probes import MOST_TELLING, HostProbe, probe_host, probed, telling
from orchestrator.seams import Completed
from tests.agent.world import WAIT_S

SAMPLES = Path(__file__).parents[1] / "captured" / "failures" / "samples.yaml"
OF_KERNELS = [
    line
    for sample in yaml.load(SAMPLES.read_text(), yaml.CSafeLoader)
    for line in sample["lines"]
    if sample.get("by") == "kernel" or "NVRM: Xid" in line
]


def a_host(tmp_path: Path, dmesg: Completed | None) -> Sight:
    """A machine without GPUs, as files in a folder. `dmesg` hangs if it is None."""
    for name, text in {
        "proc/meminfo": "MemTotal:  8 kB\nMemAvailable:  2 kB\nOther: 1 kB\n",
        "proc/7/status": "Name: python\nVmRSS:   512 kB\n",
        "proc/uptime": "5.0 1.0",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def shell(argv: Sequence[str], /, *, timeout: float) -> Completed:
        if list(argv) != ["dmesg"]:
            return Completed(127, "", "not found")
        if dmesg is None:
            raise TimeoutError
        return dmesg

    return Sight(
        shell=shell,
        root=tmp_path,
        scratch=tmp_path,
        name="h",
        free=lambda path: 1 << 40,
        resolve=lambda name: ("10.0.0.1",),
        owns=lambda address: True,
    )


def look(tmp_path: Path, dmesg: Completed | None) -> HostProbe:
    wanted = Wanted(devices=1, run_dir=tmp_path, address="10.0.0.1")
    return probe_host(wanted, {}, a_host(tmp_path, dmesg), {3: 7, 4: 8}, 5.0)


def test_memory_links_disk_and_the_kernels_log(tmp_path: Path) -> None:
    found = look(tmp_path, Completed(0, "".join(f"[1.0] line {i}\n" for i in range(99)), ""))
    assert found.memory == {"MemTotal": "8 kB", "MemAvailable": "2 kB"}
    assert found.ranks_memory == {"3": "512 kB"}, "the process of rank 4 is gone"
    assert found.kernel == tuple(f"[1.0] line {i}" for i in range(99)), (
        "what counts may be the first"
    )
    assert {"run dir", "/dev/shm"} <= {finding.what for finding in found.findings}
    assert found.missing == ()


@pytest.mark.parametrize(
    ("dmesg", "why"),
    [
        (Completed(1, "", "dmesg: read kernel buffer failed: Operation not permitted"), "permit"),
        (Completed(127, "", ""), "dmesg exited with code 127"),
        (None, "dmesg timed out after 3 s"),
    ],
)
def test_an_unreadable_kernel_log_is_reported_with_the_reason(
    tmp_path: Path, dmesg: Completed | None, why: str
) -> None:
    (said,) = look(tmp_path, dmesg).missing
    assert said.startswith("kernel log: ")
    assert why in said


def test_a_probe_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probes, "KERNEL_S", 0.0)

    over = threading.Event()

    def hangs(pids: object, limit_s: float) -> HostProbe:
        over.wait(WAIT_S)
        return HostProbe()

    async def look() -> HostProbe:
        try:
            return await probed(hangs, {}, 0.05)
        finally:
            over.set()

    found = asyncio.run(look())
    assert found.missing == ("host probes: timed out after 0 s",)


@pytest.mark.parametrize("line", OF_KERNELS, ids=lambda line: line[:60])
def test_the_leader_gets_every_kernel_line_with_a_class(line: str) -> None:
    said = f"[100.0] {line.rpartition('] ')[2]}"
    assert telling(["[99.0] usb 1-1: new device", said], since=98.0) == (said,)
    assert telling([said], since=200.0) == (), "it is of an earlier job"


def test_users_classes_sort_the_kernels_lines_too() -> None:
    line = "[100.0] pcieport 0000:00:01.0: AER: Uncorrected (Non-Fatal) error received"
    own = FailureRule(
        name="pcie", scope="host", action="replace", patterns=(r"AER: Uncorrected \(Non",)
    )
    assert telling([line], 0.0) == ()
    assert telling([line], 0.0, (own,)) == (line,)


def test_each_class_has_a_limit_of_lines() -> None:
    loud = [f"[{n}.0] NVRM: Xid (PCI:0000:1b:00): 31, pid={n}, MMU Fault" for n in range(20)]
    fallen = "[20.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus"
    killed = "[21.0] Memory cgroup out of memory: Killed process 7 (python)"
    assert telling([*loud, fallen, killed], 0.0) == (*loud[: MOST_TELLING - 2], fallen, killed)
