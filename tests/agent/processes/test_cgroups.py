"""Counters of the control group: processes killed for memory, and CPU throttling."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.agent.processes.cgroups import Counted, oom_kills, throttlings, told
from orchestrator.diagnosis.classes import FailureSigns, classify

MOUNT = "30 23 0:28 {top} /sys/fs/cgroup{at} rw,nosuid shared:9 - {kind} {kind} rw{more}\n"
V2 = "low 0\nhigh 0\nmax 812\noom 4\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def machine(root: Path, groups: str, mounts: str, **files: str) -> Path:
    own = root / "proc/self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(groups)
    (own / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def mount(kind: str, at: str = "", top: str = "/", more: str = "") -> str:
    return MOUNT.format(kind=kind, at=at, top=top, more=more)


def test_a_slurm_step_with_cgroup_v2(tmp_path: Path) -> None:
    group = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    root = machine(
        tmp_path,
        f"0::/{group}\n",
        mount("cgroup2"),
        **{f"{group}/memory.events": V2.format(2), "memory.events": V2.format(99)},
    )
    assert oom_kills(root) == 2


def test_the_name_of_a_mount_may_have_any_bytes(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", mount("cgroup2"), **{"memory.events": V2.format(1)})
    info = root / "proc/self/mountinfo"
    info.write_bytes(b"40 22 0:9 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n" + info.read_bytes())
    assert oom_kills(root) == 1


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", mount("cgroup2"), **{"memory.events": V2.format(1)})
    assert oom_kills(root) == 1


def test_a_container_with_cgroup_v1_finds_its_group_by_the_host_path(tmp_path: Path) -> None:
    pod = "/kubepods/burstable/pod1/abc"
    mounts = mount("cgroup", "/cpu", pod, ",cpu") + mount("cgroup", "/memory", pod, ",memory")
    root = machine(
        tmp_path,
        f"4:memory:{pod}\n1:cpu,cpuacct:{pod}\n0::/\n",
        mounts + mount("cgroup2", "/unified"),
        **{"memory/memory.oom_control": V1.format(3)},
    )
    assert oom_kills(root) == 3, "cgroup v2 is mounted too, but without the memory controller"


def test_unreadable_counters_are_unknown(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    root = machine(tmp_path, "0::/a\n", mount("cgroup2"), **{"a/memory.events": "oom_kill many\n"})
    assert oom_kills(root) is None


CPU_V2 = "usage_usec 812\nuser_usec 9\nnr_periods 40\nnr_throttled {}\nthrottled_usec 5\n"
CPU_V1 = "nr_periods 40\nnr_throttled {}\nthrottled_time 5\n"


def test_throttling_by_an_outer_group_counts(tmp_path: Path) -> None:
    files = {"pod/cpu.stat": CPU_V2.format(30), "pod/job/cpu.stat": CPU_V2.format(2)}
    root = machine(tmp_path, "0::/pod/job\n", mount("cgroup2"), **files)
    assert throttlings(root) == 32


def test_throttling_with_cgroup_v1(tmp_path: Path) -> None:
    mounts = mount("cgroup", "/cpu", more=",cpu,cpuacct") + mount("cgroup2", "/unified")
    files = {"cpu/a/cpu.stat": CPU_V1.format(7), "unified/cpu.stat": "usage_usec 9\n"}
    root = machine(tmp_path, "1:cpu,cpuacct:/a\n0::/\n", mounts, **files)
    assert throttlings(root) == 7
    assert throttlings(tmp_path / "nowhere") is None


def test_only_growth_since_the_given_time_counts() -> None:
    counts = iter((4, 4, 9, 9))
    counted = Counted(lambda: next(counts), 0.0)
    assert not counted.grew(0.0, 20.0)
    assert counted.grew(15.0, 40.0)
    assert not counted.grew(41.0, 60.0)
    assert not Counted(lambda: None, 0.0).grew(0.0, 20.0)


def test_new_oom_kills_become_a_line_that_is_classified() -> None:
    (line,) = told(1, 3)
    assert line == "memory cgroup: oom_kill 1 -> 3: the kernel killed 2 processes of this group"
    found = classify(FailureSigns(lines=(line,)))
    assert found is not None
    assert found.rule.name == "host-out-of-memory"
    assert told(1, 1) == told(None, 3) == told(3, None) == ()


ALLOCATES = """
import sys
sys.stdin.read(1)
held = []
while True:
    held.append(bytearray(1 << 20))
"""
COUNTER = """
import os, subprocess, sys
from orchestrator.agent.processes.cgroups import oom_kills
open(sys.argv[1], "w").write(str(os.getpid()))
before = oom_kills()
eats = subprocess.run([sys.executable, "-c", sys.argv[2]], input=b"x")
print(before, eats.returncode, oom_kills())
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A real control group with a limit of 100 MiB."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = top / f"ndctl-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(100 << 20))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control group of memory can be made here")


@pytest.mark.process
def test_a_process_that_the_kernel_kills_for_memory_is_counted(small_group: Path) -> None:
    argv = [sys.executable, "-c", COUNTER, str(small_group / "cgroup.procs"), ALLOCATES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    before, code, after = map(int, done.stdout.split())
    assert (code, after) == (-9, before + 1)
