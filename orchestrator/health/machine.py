"""What on this machine would stop a job, each with its fix. Looks, and changes nothing."""

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
from orchestrator.contract.plan import Plan
from orchestrator.health.mounts import doubt, read_mounts
from orchestrator.posix.fd_limit import OWN, judge_files
from orchestrator.posix.locks import is_free, is_held_alone, share, try_lock
from orchestrator.posix.private_folder import SOCKET, private_folder
from orchestrator.seams import Clock, Shell

NEEDED = {"torch": (2, 11), "transformers": (5, 0), "aiohttp": (3, 10)}
"""Lower bounds of pyproject.toml, for what only a running job imports."""
RANK_BYTES = 600 << 20
"""What one rank's process holds before any model, on CPU: interpreter, torch and transformers."""
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
    """Every check; with a plan, also whether this machine can hold it. `files` are those that may
    have to be open at a time on the job's first host."""
    platform = _platform()
    if platform.verdict == "stops":
        return (platform,)  # the other checks ask Linux
    return (
        platform,
        *_packages(),
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
        fix = "run ndctl on Linux: it ties processes together by means of its kernel"
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
        fix="ask for fewer hosts or ranks: --set cluster.hosts=1",
    )


def _memory(plan: Plan | None) -> Finding:
    available = _meminfo("MemAvailable")
    if plan is None:
        return Finding(what="memory", verdict="ok", found=f"{_gib(available)} available")
    of_rank = plan.memory.peak_bytes + sum(plan.memory.host.values())
    need = plan.world_size * (of_rank + RANK_BYTES)
    found = f"{_gib(available)} available, {plan.world_size} ranks need about {_gib(need)}"
    verdict: Verdict = "ok" if need <= available else "stops"
    fix = "lower train.micro_batch_size, use a smaller model, or fewer ranks"
    return Finding(what="memory", verdict=verdict, found=found, fix=fix)


def _meminfo(key: str) -> int:
    """Bytes; 0 where the kernel does not say."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _run_root(run_root: Path, plan: Plan | None) -> Iterator[Finding]:
    """Is there room, may we write, and do locks hold there?"""
    place = run_root.absolute()
    try:
        while not place.exists():
            place = place.parent
    except PermissionError:
        found = f"{run_root.absolute()} lies in a folder that you may not enter"
        fix = "give --run-root, or NDCTL_RUN_ROOT, a directory that you may write to"
        yield Finding(what="disk", verdict="stops", found=found, fix=fix)
        return
    free = shutil.disk_usage(place).free
    need = DISK_BYTES
    if plan is not None:
        items = {**plan.memory.items, **plan.memory.host}
        state = items.get("parameters", 0) + items.get("optimizer", 0)
        need += 3 * state * plan.world_size  # two kept checkpoints and one being written
    verdict: Verdict = "ok" if free >= need else "stops"
    fix = "free some, or give --run-root a larger file system"
    found = f"{_gib(free)} free in {place}, {_gib(need)} wanted"
    yield Finding(what="disk", verdict=verdict, found=found, fix=fix)
    yield _locks(place)


def _locks(place: Path) -> Finding:
    """Makes the calls that agents make: what a file system refuses of them, it refuses here."""
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".ndctl-doctor-") as file:
            held = _hold(Path(file.name))
        mounts = read_mounts()
    except OSError as exc:
        fix = "give --run-root a directory that you may write to, on a file system with flock"
        return Finding(what="run root", verdict="stops", found=f"{place}: {exc}", fix=fix)
    if not held:
        fix = "give --run-root a directory on another file system"
        found = f"{place} is writable, but its locks keep nobody out"
        return Finding(what="run root", verdict="stops", found=found, fix=fix)
    if doubted := doubt(mounts, place.resolve()):
        found = f"{place} is writable, locks hold on this host, but it is {doubted[0]}"
        return Finding(what="run root", verdict="warns", found=found, fix=doubted[1])
    return Finding(what="run root", verdict="ok", found=f"{place} is writable, locks hold")


def _hold(path: Path) -> bool:
    """Whether locks hold: one alone, and a shared one."""
    alone = os.open(path, os.O_RDWR)
    held = try_lock(alone) and is_held_alone(path) and not is_free(path)
    os.close(alone)
    shared = share(path)
    held = held and not is_free(path) and not is_held_alone(path)
    os.close(shared)
    return held and is_free(path)


def _scratch(environ: Mapping[str, str]) -> Finding:
    """Ranks talk to their agent through a Unix socket in a folder of the agent's own."""
    try:
        with (
            private_folder(environ) as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
        ):
            sock.bind(str(folder / SOCKET))
    except OSError as exc:
        fix = "set TMPDIR to a short path on a local disk that you may write to"
        found = f"no safe place for a Unix socket: {exc}"
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
        fix = "allow TCP on the loopback interface: `ip link set lo up`, and see the firewall"
        return Finding(what="ports", verdict="stops", found=f"loopback: {exc}", fix=fix)
    return Finding(what="ports", verdict="ok", found="loopback answers")


def _clock(shell: Shell, clock: Clock) -> Finding:
    """Times in the journal come from this clock; decisions do not depend on it."""
    if clock.now() < EARLIEST:
        fix = "set the clock: `date -s …`, and start an NTP service"
        found = f"the clock says {clock.now():.0f} s after 1970: it was never set"
        return Finding(what="clock", verdict="warns", found=found, fix=fix)
    try:
        asked = shell(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], timeout=5.0)
    except TimeoutError:
        return Finding(what="clock", verdict="note", found="set; timedatectl did not answer")
    if asked.code != 0:
        return Finding(
            what="clock", verdict="note", found="set; whether it is synchronised, unknown"
        )
    if asked.out.strip() == "yes":
        return Finding(what="clock", verdict="ok", found="synchronised")
    fix = "start an NTP service: `timedatectl set-ntp true`"
    return Finding(what="clock", verdict="warns", found="not synchronised", fix=fix)


def _schedulers(environ: Mapping[str, str]) -> Iterator[Finding]:
    for command, cluster in (("sbatch", "Slurm"), ("kubectl", "Kubernetes")):
        path = shutil.which(command, path=environ.get("PATH"))
        found = path or f"not on PATH; needed for {cluster} alone"
        yield Finding(what=command, verdict="note", found=found)
