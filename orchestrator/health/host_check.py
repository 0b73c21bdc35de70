"""Checks of this host before its agent registers."""

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.check_results import Finding, Verdict
from orchestrator.health.clocks_and_names import Resolve, addresses_of
from orchestrator.health.gpus import examine_devices
from orchestrator.health.links import examine_links
from orchestrator.seams import Shell

LIMIT_S = 45.0
"""Seconds for all checks, so that a hanging driver or name server does not hang the agent."""
SHM_BYTES = 1 << 30
"""NCCL uses about 33 MB of /dev/shm per pair of GPUs; data loaders use more."""
SHM_LEAST = 64 << 20
"""Default of containers. NCCL does not start with this."""
SHM_OF_ALL = 1 << 20
"""Minimum on CPUs: torchrun creates two semaphores of one page per rank."""
DISK_BYTES = 1 << 30
SCRATCH_BYTES = 64 << 20
"""Minimum for sockets and compiled kernels."""
PROBE = ".ndctl-preflight-"
"""Prefix of files that test whether a folder is writable."""


class Wanted(Struct, frozen=True, kw_only=True):
    """What the job needs of the host."""

    devices: int
    run_dir: Path
    address: str
    """Address for other hosts."""


class Sight(Struct, frozen=True, kw_only=True):
    """What the checks read of a host; tests replace it."""

    shell: Shell
    root: Path = Path("/")
    scratch: Path
    name: str
    free: Callable[[Path], int]
    """Free bytes of the file system of a path. Raises OSError."""
    resolve: Resolve
    owns: Callable[[str], bool]
    """Whether an address belongs to this host."""


def sight(shell: Shell) -> Sight:
    """This host itself."""
    return Sight(
        shell=shell,
        scratch=Path(tempfile.gettempdir()),
        name=socket.gethostname(),
        free=lambda path: shutil.disk_usage(path).free,
        resolve=addresses_of,
        owns=_owns,
    )


def _owns(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 0))
        return True
    return False


def examine_host(
    wanted: Wanted, environ: Mapping[str, str], sight: Sight, limit_s: float = LIMIT_S
) -> tuple[Finding, ...]:
    """All checks, within `limit_s` seconds.

    They run in a thread, because a process that waits in the kernel cannot be killed.
    """
    found: Future[tuple[Finding, ...]] = Future()

    def look() -> None:
        try:
            found.set_result(tuple(_examine(wanted, environ, sight)))
        except BaseException as exc:  # noqa: BLE001 - the caller gets the exception
            found.set_exception(exc)

    threading.Thread(target=look, daemon=True).start()
    with contextlib.suppress(TimeoutError):
        return found.result(limit_s)
    hung = Finding(
        what="preflight",
        verdict="stops",
        found=f"the checks timed out after {limit_s:.0f} s",
        fix="drain the host: a driver, a file system or the name service hangs",
    )
    return (hung,)


def _examine(wanted: Wanted, environ: Mapping[str, str], sight: Sight) -> Iterator[Finding]:
    yield from examine_devices(wanted.devices, environ, sight.root, sight.shell)
    yield _shared_memory(sight)
    yield _disk(wanted, sight)
    yield _scratch(sight)
    yield from examine_links(sight.root)
    yield _own_name(wanted, environ, sight)


def _shared_memory(sight: Sight) -> Finding:
    """Ranks need some shared memory to start. Ranks on GPUs need more, for NCCL."""
    place = sight.root / "dev/shm"
    fix = "remove files of dead jobs (`ls -l /dev/shm`), or mount it with a larger size"
    try:
        free = sight.free(place)
        with tempfile.NamedTemporaryFile(dir=place, prefix=PROBE) as file:
            file.write(b"\0")
            file.flush()
    except OSError as exc:
        fix += "; the user of the job needs write permission"
        found = f"not writable: {exc.strerror}"
        return Finding(what="/dev/shm", verdict="stops", found=found, fix=fix)
    found = f"{_mib(free)} free in {place}, {_mib(SHM_BYTES)} recommended"
    if free >= SHM_BYTES:
        return Finding(what="/dev/shm", verdict="ok", found=found)
    gpus = (sight.root / "proc/driver/nvidia/version").exists()
    least = SHM_LEAST if gpus else SHM_OF_ALL
    verdict: Verdict = "stops" if free < least else "warns"
    return Finding(what="/dev/shm", verdict=verdict, found=found, fix=fix)


def _disk(wanted: Wanted, sight: Sight) -> Finding:
    """A full run directory only warns: all hosts share it, so another host would not help."""
    try:
        free = sight.free(wanted.run_dir)
    except OSError as exc:
        fix = "mount the file system of the run root on this host"
        return Finding(what="run dir", verdict="stops", found=f"{wanted.run_dir}: {exc}", fix=fix)
    found = f"{_mib(free)} free for {wanted.run_dir}"
    if free >= DISK_BYTES:
        return Finding(what="run dir", verdict="ok", found=found)
    return Finding(what="run dir", verdict="warns", found=found, fix="remove old run directories")


def _scratch(sight: Sight) -> Finding:
    fix = f"free space in {sight.scratch}, or set TMPDIR to another disk of the host"
    try:
        free = sight.free(sight.scratch)
        with tempfile.NamedTemporaryFile(dir=sight.scratch, prefix=PROBE):
            pass
    except OSError as exc:
        return Finding(what="scratch", verdict="stops", found=f"{sight.scratch}: {exc}", fix=fix)
    found = f"{_mib(free)} free in {sight.scratch}"
    verdict: Verdict = "ok" if free >= SCRATCH_BYTES else "stops"
    return Finding(what="scratch", verdict=verdict, found=found, fix=fix)


def _own_name(wanted: Wanted, environ: Mapping[str, str], sight: Sight) -> Finding:
    """gloo listens at the address of the host name, unless GLOO_SOCKET_IFNAME is set."""
    fix = f"make {sight.name} resolve to {wanted.address} (DNS, /etc/hosts), or set"
    fix += " GLOO_SOCKET_IFNAME to the interface that other hosts can reach"
    found, alone = "", wanted.address.startswith("127.")
    try:
        addresses = sight.resolve(sight.name)
    except OSError as exc:
        found = f"{sight.name} has no address: {exc}"
    else:
        own = [address for address in addresses if sight.owns(address)]
        if not own:
            found = f"{sight.name} resolves to {', '.join(addresses)}, which is not this host"
        elif not alone and own[0].startswith("127."):
            found = f"{sight.name} resolves to {own[0]}, which other hosts cannot reach"
    if not found:
        return Finding(what="own name", verdict="ok", found=f"{sight.name} resolves to {own[0]}")
    verdict: Verdict = "note" if alone or "GLOO_SOCKET_IFNAME" in environ else "warns"
    return Finding(what="own name", verdict=verdict, found=found, fix=fix)


def _mib(count: int) -> str:
    return f"{count >> 20} MiB"
