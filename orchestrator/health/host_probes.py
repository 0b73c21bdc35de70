"""Facts about a host after a failure: devices, links, disk, memory, and the end of the kernel log.

Each probe has a timeout. A probe that fails is recorded with its reason.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.classes import FailureSigns, classify, with_class
from orchestrator.diagnosis.stacks.kernel_stacks import with_places
from orchestrator.health.host_check import Sight, Wanted, examine_host
from orchestrator.posix.run_with_timeout import within
from orchestrator.seams import Shell

KERNEL_LINES = 40
"""Lines of the kernel log that go to the traces."""
KERNEL_S = 3.0
MOST_TELLING = 8
STAMP = re.compile(r"^\[\s*(\d+\.\d+)\]")
"""Timestamp of a kernel line; close to the monotonic clock."""
STAMP_SLACK_S = 5.0
MEMORY = ("MemTotal", "MemAvailable", "SwapFree", "Shmem")


class HostProbe(Struct, frozen=True, kw_only=True):
    findings: tuple[Finding, ...] = ()
    memory: Mapping[str, str] | None = None
    """Fields of /proc/meminfo."""
    ranks_memory: Mapping[str, str] | None = None
    """Rank -> resident memory."""
    kernel: tuple[str, ...] = ()
    """The whole kernel log. `telling` selects lines for the leader. The important line may be far
    from the end: after a GPU falls off the bus, the driver may print one line per channel."""
    missing: tuple[str, ...] = ()
    """Probes that failed, with the reason."""


Probe = Callable[[Mapping[int, int], float], HostProbe]
"""Takes rank -> process id and a timeout in seconds."""


def no_probe(pids: Mapping[int, int], limit_s: float) -> HostProbe:
    """Probe of an agent without host probes."""
    return HostProbe(missing=("host probes: this agent has none",))


def prober(wanted: Wanted, environ: Mapping[str, str], sight: Sight) -> Probe:
    return partial(probe_host, wanted, environ, sight)


def probe_host(
    wanted: Wanted,
    environ: Mapping[str, str],
    sight: Sight,
    pids: Mapping[int, int],
    limit_s: float,
) -> HostProbe:
    """All probes, within about `limit_s` seconds."""
    missing: list[str] = []
    kernel = _kernel(sight.shell, min(KERNEL_S, limit_s), missing)
    found = examine_host(wanted, environ, sight, limit_s)
    meminfo = _fields(sight.root / "proc/meminfo", MEMORY)
    if not meminfo:
        missing.append("memory: cannot read /proc/meminfo")
    ranks = {
        str(rank): words
        for rank, pid in pids.items()
        if (words := _fields(sight.root / f"proc/{pid}/status", ("VmRSS",)).get("VmRSS"))
    }
    return HostProbe(
        findings=found,
        memory=meminfo,
        ranks_memory=ranks,
        kernel=kernel,
        missing=tuple(missing),
    )


async def probed(probe: Probe, pids: Mapping[int, int], limit_s: float) -> HostProbe:
    """Run the probe in a thread with a timeout, because a hanging driver would hang the caller."""
    try:
        return await within(limit_s + KERNEL_S, probe, pids, limit_s)
    except TimeoutError:
        return HostProbe(missing=(f"host probes: timed out after {limit_s + KERNEL_S:.0f} s",))


def telling(
    kernel: Iterable[str], since: float, own: tuple[FailureRule, ...] = ()
) -> tuple[str, ...]:
    """Kernel lines with a failure class, logged after `since` (monotonic clock).

    Older lines belong to earlier jobs, and lines without a timestamp are skipped. If there are more
    than `MOST_TELLING`, the first line of each class is preferred, and hardware errors among them.
    """
    seen: Counter[str] = Counter()
    found = []
    new = with_places([line for line in kernel if _is_new(line, since)])
    for number, line in enumerate(with_class(new, own)):
        one = classify(FailureSigns(lines=(line,)), own)
        if one is not None:
            found.append((seen[one.rule.name], one.rule.scope != "host", number, line))
            seen[one.rule.name] += 1
    return tuple(line for *_, line in sorted(sorted(found)[:MOST_TELLING], key=lambda it: it[2]))


def _is_new(line: str, since: float) -> bool:
    stamp = STAMP.match(line)
    return stamp is not None and float(stamp[1]) >= since - STAMP_SLACK_S


def _kernel(shell: Shell, limit_s: float, missing: list[str]) -> tuple[str, ...]:
    try:
        done = shell(["dmesg"], timeout=limit_s)
    except TimeoutError:
        missing.append(f"kernel log: dmesg timed out after {limit_s:.0f} s")
        return ()
    if done.code != 0:
        said = (done.err or done.out).strip().rpartition("\n")[2]
        missing.append(f"kernel log: {said or f'dmesg exited with code {done.code}'}")
        return ()
    return tuple(done.out.splitlines())


def _fields(path: Path, names: Iterable[str]) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: known[name].strip() for name in names if name in known}
