"""How much memory checkpoints may take, on hosts and in control groups of both versions."""

from pathlib import Path

import pytest

from ndctl.rank.memory.available import host_room

GIB = 1 << 30
# From Debian 12, cut.
MEMINFO = "MemTotal:       104857600 kB\nMemFree:         1048576 kB\nMemAvailable:   52428800 kB\n"


def host(root: Path, groups: str, files: dict[str, str]) -> Path:
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("0::/\n", {}, 50 - 10),
        # A job of Slurm: the limit is that of a group above the step's.
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
            {
                "system.slice/slurmstepd.scope/job_7/memory.max": str(20 * GIB),
                "system.slice/slurmstepd.scope/job_7/memory.current": str(5 * GIB),
                "system.slice/slurmstepd.scope/job_7/memory.stat": "anon 9\ninactive_file 0",
                "system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.max": "max",
                "system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.current": "9",
                "system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.stat": "anon 9",
            },
            20 - 5 - 2,
        ),
        # A container, in which its own group is mounted as the topmost one.
        (
            "0::/kubepods/pod1/c1\n",
            {
                "memory.max": str(8 * GIB),
                "memory.current": str(6 * GIB),
                "memory.stat": f"anon 9\nfile {3 * GIB}\ninactive_file {2 * GIB}",
            },
            # Pages of files that the kernel can drop count as free.
            8 - (6 - 2) - 0.8,
        ),
        # Version 1.
        (
            "5:cpu,cpuacct:/job\n4:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": str(10 * GIB),
                "memory/job/memory.usage_in_bytes": str(10 * GIB),
                "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}",
            },
            0,
        ),
    ],
    ids=["no limit", "Slurm", "container", "version 1"],
)
def test_available_memory_is_below_every_limit(
    tmp_path: Path, groups: str, files: dict[str, str], gib: float
) -> None:
    room = host_room(host(tmp_path, groups, files))
    assert room.available == pytest.approx(gib * GIB, abs=GIB / 100)


def test_this_machine_has_some() -> None:
    assert host_room().available > 0
