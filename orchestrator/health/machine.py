"""Checks of this machine for `ndctl doctor`, each with a fix. Changes nothing."""

import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from orchestrator.contract.check_results import Finding, Verdict
from orchestrator.contract.plan import IN_MEMORY, Plan
from orchestrator.health.mounts import doubt, read_mounts
from orchestrator.health.package_owners import other_owners
from orchestrator.posix.fd_limit import OWN, judge_files
from orchestrator.posix.locks import is_free, is_held_alone, share, try_lock
from orchestrator.posix.private_folder import SOCKET, private_folder
from orchestrator.seams import Clock, Shell

NEEDED = {"torch": (2, 13), "transformers": (5, 0), "aiohttp": (3, 10)}
"""Minimum versions from pyproject.toml of packages that only a running job imports."""
RANK_BYTES = 600 << 20
"""Memory of a rank process on CPU without a model: interpreter, torch and transformers."""
DISK_BYTES = 1 << 30
EARLIEST = 1_700_000_000
"""A clock before November 2023 has not been set."""


def examine(
    run_root: Path,
    plan: Plan | None,
    environ: Mapping[str, str],
    shell: Shell,
    clock: Clock,
    files: int = OWN,
) -> tuple[Finding, ...]:
    """All checks; with a plan, also whether this machine has the memory for it.

    Args:
        files: maximum number of open files on the first host of the job.
    """
    platform = _platform()
    if platform.verdict == "stops":
        return (platform,)  # the other checks need Linux
    return (
        platform,
        *_packages(),
        *other_owners(),
        _cores(plan),
        _memory(plan),
        *_run_root(run_root, plan),
        _scratch(environ),
        _ports(),
        judge_files(files),
        _clock(shell, clock),
        *_schedulers(environ),
    )


def describe_findings(findings: Iterable[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:>5}  {finding.what:<14} {finding.found}")
        if finding.fix and finding.verdict in ("warns", "stops"):
            lines.append(f"{'':>5}  {'':<14} fix: {finding.fix}")
    return "\n".join(lines)


def _platform() -> Finding:
    found = f"{sys.platform}, Python {sys.version.split()[0]}"
    if sys.platform != "linux":
        fix = "run ndctl on Linux, because it uses features of the Linux kernel"
        return Finding(what="system", verdict="stops", found=found, fix=fix)
    return Finding(what="system", verdict="ok", found=found)


def _packages() -> Iterator[Finding]:
    for name, least in NEEDED.items():
        bound = ".".join(map(str, least))
        fix = f"pip install '{name}>={bound}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
            yield Finding(what=name, verdict="stops", found=found, fix=fix)
            continue
        have = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        verdict: Verdict = "ok" if have >= least else "stops"
        yield Finding(what=name, verdict=verdict, found=f"{version}, needs {bound}", fix=fix)


def _cores(plan: Plan | None) -> Finding:
    cores = len(os.sched_getaffinity(0))
    if plan is None or plan.world_size <= 2 * cores:
        return Finding(what="cores", verdict="ok", found=str(cores))
    return Finding(
        what="cores",
        verdict="warns",
        found=f"{cores} for {plan.world_size} ranks: steps will be slow",
        fix="use fewer hosts or ranks: --set cluster.hosts=1",
    )


def _memory(plan: Plan | None) -> Finding:
    available = _meminfo("MemAvailable")
    if plan is None:
        return Finding(what="memory", verdict="ok", found=f"{_size(available)} available")
    if plan.memory is None:
        ranks = f"{plan.world_size} ranks of your program need an unknown amount"
        return Finding(what="memory", verdict="ok", found=f"{_size(available)} available, {ranks}")
    of_rank = plan.memory.peak_bytes + sum(plan.memory.host.values())
    need = plan.world_size * (of_rank + RANK_BYTES)
    found = f"{_size(available)} available, {plan.world_size} ranks need about {_size(need)}"
    kept = plan.world_size * plan.memory.host.get(IN_MEMORY, 0)
    if kept:
        found += f", {_size(kept)} of that for checkpoints in memory"
    if need <= available or not kept:
        verdict: Verdict = "ok" if need <= available else "stops"
        fix = "lower train.micro_batch_size, use a smaller model, or fewer ranks"
        return Finding(what="memory", verdict=verdict, found=found, fix=fix)
    # Ranks keep fewer of them, or none, where the memory is short.
    if need - kept <= available:
        found += ", so fewer or none of those are kept"
        return Finding(what="memory", verdict="ok", found=found)
    fix = "lower train.micro_batch_size, use a smaller model, or fewer ranks"
    return Finding(what="memory", verdict="stops", found=found, fix=fix)


def _meminfo(key: str) -> int:
    """Bytes; 0 if the kernel has no such field."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def _size(count: int) -> str:
    mib = count / (1 << 20)
    return f"{mib / 1024:.1f} GiB" if mib >= 100 else f"{mib:.0f} MiB"


def _run_root(run_root: Path, plan: Plan | None) -> Iterator[Finding]:
    """Check free space, write permission and file locks of the run root."""
    place = run_root.absolute()
    try:
        while not place.exists():
            place = place.parent
    except PermissionError:
        found = f"{run_root.absolute()} is in a folder that you cannot access"
        fix = "set --run-root or NDCTL_RUN_ROOT to a directory that you can write to"
        yield Finding(what="disk", verdict="stops", found=found, fix=fix)
        return
    free = shutil.disk_usage(place).free
    need = DISK_BYTES
    if plan is not None and plan.memory is not None:
        items = {**plan.memory.items, **plan.memory.host}
        state = items.get("parameters", 0) + items.get("optimizer", 0)
        need += 3 * state * plan.world_size  # two kept checkpoints and one being written
    verdict: Verdict = "ok" if free >= need else "stops"
    fix = "free some space, or set --run-root to a larger file system"
    found = f"{_size(free)} free in {place}, {_size(need)} needed"
    yield Finding(what="disk", verdict=verdict, found=found, fix=fix)
    yield _locks(place)


def _locks(place: Path) -> Finding:
    """Try the file operations and locks that agents use."""
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".ndctl-doctor-") as file:
            held = _hold(Path(file.name))
        mounts = read_mounts()
    except OSError as exc:
        fix = "set --run-root to a directory that you can write to, on a file system with flock"
        return Finding(what="run root", verdict="stops", found=f"{place}: {exc}", fix=fix)
    if not held:
        fix = "set --run-root to a directory on another file system"
        found = f"{place} is writable, but file locks do not work"
        return Finding(what="run root", verdict="stops", found=found, fix=fix)
    if doubted := doubt(mounts, place.resolve()):
        found = f"{place} is writable and locks work on this host, but it is {doubted[0]}"
        return Finding(what="run root", verdict="warns", found=found, fix=doubted[1])
    return Finding(what="run root", verdict="ok", found=f"{place} is writable, locks work")


def _hold(path: Path) -> bool:
    """Whether an exclusive and a shared lock work."""
    alone = os.open(path, os.O_RDWR)
    held = try_lock(alone) and is_held_alone(path) and not is_free(path)
    os.close(alone)
    shared = share(path)
    held = held and not is_free(path) and not is_held_alone(path)
    os.close(shared)
    return held and is_free(path)


def _scratch(environ: Mapping[str, str]) -> Finding:
    """Ranks send messages to their agent through a Unix socket in a private folder."""
    try:
        with (
            private_folder(environ) as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
        ):
            sock.bind(str(folder / SOCKET))
    except OSError as exc:
        fix = "set TMPDIR to a short path on a local disk that you can write to"
        found = f"cannot create a Unix socket: {exc}"
        return Finding(what="scratch", verdict="stops", found=found, fix=fix)
    return Finding(what="scratch", verdict="ok", found=f"Unix sockets in {folder.parent}")


def _ports() -> Finding:
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen(1)
            with socket.create_connection(sock.getsockname(), timeout=2.0):
                pass
    except OSError as exc:
        fix = "allow TCP on the loopback interface: `ip link set lo up`, and check the firewall"
        return Finding(what="ports", verdict="stops", found=f"loopback: {exc}", fix=fix)
    return Finding(what="ports", verdict="ok", found="loopback works")


def _clock(shell: Shell, clock: Clock) -> Finding:
    """The journal uses this clock for its times. Decisions do not depend on it."""
    if clock.now() < EARLIEST:
        fix = "set the clock: `date -s …`, and start an NTP service"
        found = f"the clock was never set: it is at {clock.now():.0f} s after 1970"
        return Finding(what="clock", verdict="warns", found=found, fix=fix)
    try:
        asked = shell(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], timeout=5.0)
    except TimeoutError:
        return Finding(what="clock", verdict="note", found="set; timedatectl timed out")
    if asked.code != 0:
        return Finding(what="clock", verdict="note", found="set; synchronization unknown")
    if asked.out.strip() == "yes":
        return Finding(what="clock", verdict="ok", found="synchronized")
    fix = "start an NTP service: `timedatectl set-ntp true`"
    return Finding(what="clock", verdict="warns", found="not synchronized", fix=fix)


def _schedulers(environ: Mapping[str, str]) -> Iterator[Finding]:
    for command, cluster in (("sbatch", "Slurm"), ("kubectl", "Kubernetes")):
        path = shutil.which(command, path=environ.get("PATH"))
        found = path or f"not on PATH; only needed for {cluster}"
        yield Finding(what=command, verdict="note", found=found)
