"""Finds what can be killed in a job, and sees how far its checkpoints in memory are."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.memory.slot_file import SENDING, label_of, mark_of
from orchestrator.job.state import switches_of
from orchestrator.journal.snapshot import replay
from orchestrator.plan.placement.partners import partners_of
from tests.e2e.job import Ndctl, processes_of
from tests.e2e.kills.test_random_kills import KINDS

HOST = re.compile(r"--host[= ](\S+)")
MEMORY = "/memfd:ndctl-checkpoint"


@dataclass(frozen=True)
class Process:
    kind: str
    pid: int
    host: str


def processes(run_dir: Path) -> tuple[Process, ...]:
    """Processes of the job, without forks that have not set their title yet."""
    found = processes_of(run_dir)
    hosts = {pid: match[1] for pid, command in found.items() if (match := HOST.search(command))}
    return tuple(
        Process(kind, pid, _host_of(pid, hosts))
        for pid, command in found.items()
        for kind, title in KINDS.items()
        if title.search(command)
    )


def _host_of(pid: int, hosts: Mapping[int, str]) -> str:
    """The host of the agent above the process; empty if that has ended."""
    while pid > 1:
        if pid in hosts:
            return hosts[pid]
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            break
        pid = int(after_name.split()[1])
    return ""


def partners(ndctl: Ndctl) -> Mapping[str, Sequence[str]]:
    """Host -> the hosts that keep its copies in the newest attempt."""
    run = replay(RunDir(ndctl.run_dir))
    assert run.job is not None
    plan, hosts = run.current.plan, run.attempt.placement
    found = partners_of(plan.mesh, plan.ranks_per_host, hosts, switches_of(run), run.job.copies)
    return {host: [hosts[node] for node in nodes] for host, nodes in zip(hosts, found, strict=True)}


def slots(agent: int) -> Iterator[tuple[int, int]]:
    """Each slot that an agent has and that is not empty: an open file, which is closed after, and
    its inode."""
    for link in Path(f"/proc/{agent}/fd").iterdir():
        try:
            if not str(link.readlink()).startswith(MEMORY):
                continue
            file = os.open(link, os.O_RDWR)
        except OSError:  # closed meanwhile
            continue
        try:
            if os.fstat(file).st_size:
                yield file, os.fstat(file).st_ino
        finally:
            os.close(file)


def is_sending(agent: int) -> bool:
    """A slot of this host is complete, and its partners do not have it yet."""
    return any(label_of(file) and mark_of(file) == SENDING for file, _ in slots(agent))


def flip(agent: int, ranks: Collection[int]) -> int:
    """Change a byte in each complete slot of `ranks` that an agent has; returns how many."""
    changed = 0
    for file, _ in slots(agent):
        label = label_of(file)
        if label is not None and label.rank in ranks:
            at = os.fstat(file).st_size - 5000
            os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 0x10]), at)
            changed += 1
    return changed
