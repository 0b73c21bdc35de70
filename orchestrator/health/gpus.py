"""GPUs of a host: how many the job may use, and whether their memory or bus is broken.

The parsers are pure and follow the documentation of nvidia-smi.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.check_results import Finding
from orchestrator.seams import Completed, Shell

SMI_TIMEOUT_S = 20.0
"""Seconds. Without persistence mode the driver loads for each call; a broken GPU never answers."""
QUERY = "pci.bus_id,name,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
REMAP_QUERY = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
FORMAT = "--format=csv,noheader,nounits"
XID_AGE_S = 3600.0
"""Older Xids are ignored: the GPU survived them or was reset."""
FATAL_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    64: "a row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "GSP (GPU system processor) timeout",
    120: "GSP (GPU system processor) error",
    140: "unrecovered ECC error",
}
"""Xids caused by hardware. Programs with bugs cause others (13, 31, 43, 45)."""
YES = ("yes", "1")


class Gpu(Struct, frozen=True, kw_only=True):
    bus_id: str
    name: str
    uncorrected: int | None
    """Uncorrected ECC errors since the driver was loaded; None without ECC."""
    pages_pending: bool
    """Memory pages will be retired at the next reset."""


class Xid(Struct, frozen=True, kw_only=True):
    bus_id: str
    number: int
    at_s: float
    """Seconds since boot."""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse `nvidia-smi --query-gpu=QUERY`. Other lines are skipped."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(
        Gpu(
            bus_id=_short(row[0]),
            name=row[1],
            uncorrected=int(row[2]) if row[2].isdigit() else None,
            pages_pending=row[3].lower() in YES,
        )
        for row in rows
        if len(row) == 4 and _is_bus_id(row[0])
    )


def parse_remapped(text: str) -> Mapping[str, str]:
    """Bus id -> problem with row remapping."""
    wrong = {}
    for line in text.splitlines():
        row = [cell.strip() for cell in line.split(",")]
        if len(row) != 3 or not _is_bus_id(row[0]):
            continue
        if row[2].lower() in YES:
            wrong[_short(row[0])] = "a row could not be remapped: replace the GPU"
        elif row[1].lower() in YES:
            wrong[_short(row[0])] = "rows are pending to be remapped: reset the GPU"
    return wrong


def parse_xids(text: str) -> tuple[Xid, ...]:
    """Parse the NVRM lines of `dmesg`."""
    found = re.finditer(
        r"^\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", text, re.MULTILINE
    )
    return tuple(
        Xid(bus_id=_short(m[2]), number=int(m[3]), at_s=float(m[1]))
        for m in found
        if _is_bus_id(m[2])
    )


def _is_bus_id(text: str) -> bool:
    return re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(\.\d)?", text) is not None


def short_bus_id(text: str) -> str | None:
    """The bus id that nvidia-smi prints, in the form of the kernel; None if it is none."""
    return _short(text) if _is_bus_id(text) else None


def _short(bus_id: str) -> str:
    """The form of the kernel. nvidia-smi prints 8 digits of the domain, and the function."""
    domain, bus, device = bus_id.lower().split(":")
    return f"{domain[-4:]}:{bus}:{device.split('.')[0]}"


def granted(environ: Mapping[str, str]) -> int | None:
    """Number of devices that the environment allows on this host; None: it does not say."""
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    counts = [int(on_node)] if on_node.isdigit() else []
    if visible and visible not in ("-1", "NoDevFiles"):
        counts.append(len(visible.split(",")))
    if not counts and "SLURM_GPUS_PER_NODE" in environ:
        return 0  # GPUs were requested, but Slurm set no variable that grants any
    return min(counts, default=None)


def examine_devices(
    wanted: int, environ: Mapping[str, str], root: Path, shell: Shell
) -> Iterator[Finding]:
    """Check the number and the health of devices. `root`: folder of /dev and /proc."""
    given = granted(environ)
    if given is None and environ.get("CUDA_VISIBLE_DEVICES") is not None:
        yield Finding(what="gpus", verdict="note", found="hidden: ranks run on CPUs")
        return
    driver = (root / "proc/driver/nvidia/version").exists()
    smi = _ask(shell, "nvidia-smi", f"--query-gpu={QUERY}", FORMAT)
    if smi is None:
        yield _mute(f"nvidia-smi timed out after {SMI_TIMEOUT_S:.0f} s")
        return
    if smi.code == 0:
        gpus = parse_gpus(smi.out)
        yield _count(wanted, given, len(gpus), "nvidia-smi")
        yield from _health(gpus, root, shell)
    elif smi.code != 127 and (driver or given is not None):
        yield _mute(f"nvidia-smi failed: {_last_line(smi)}")
    else:
        nodes = len([p for p in (root / "dev").glob("nvidia*") if p.name[6:].isdigit()])
        yield _count(wanted, given, nodes if nodes or driver else None, "/dev")


def _ask(shell: Shell, *argv: str) -> Completed | None:
    try:
        return shell(argv, timeout=SMI_TIMEOUT_S)
    except TimeoutError:
        return None


def _last_line(done: Completed) -> str:
    return (done.out + done.err).strip().rpartition("\n")[2] or f"exit code {done.code}"


def _mute(found: str) -> Finding:
    fix = "drain and reboot the host: the driver or a GPU hangs"
    return Finding(what="gpus", verdict="stops", found=found, fix=fix)


def _count(wanted: int, given: int | None, seen: int | None, by: str) -> Finding:
    known = {"granted": given, f"seen by {by}": seen}
    words = ", ".join(f"{count} {how}" for how, count in known.items() if count is not None)
    if not words:
        return Finding(what="gpus", verdict="note", found="none: ranks run on CPUs")
    if min(count for count in known.values() if count is not None) >= wanted:
        return Finding(what="gpus", verdict="ok", found=f"{words}, {wanted} needed")
    fix = "drain the host and look for the missing GPU: `nvidia-smi -L`, `dmesg | grep Xid`"
    return Finding(what="gpus", verdict="stops", found=f"{words}, {wanted} needed", fix=fix)


def _health(gpus: tuple[Gpu, ...], root: Path, shell: Shell) -> Iterator[Finding]:
    """Broken memory stops a job. An Xid in the kernel log warns: the GPU may have been reset."""
    wrong: dict[str, str] = {}
    for gpu in gpus:
        if gpu.uncorrected:
            wrong[gpu.bus_id] = f"{gpu.uncorrected} uncorrected ECC errors: reset the GPU"
        elif gpu.pages_pending:
            wrong[gpu.bus_id] = "memory pages are pending retirement: reset the GPU"
    remapped = _ask(shell, "nvidia-smi", f"--query-remapped-rows={REMAP_QUERY}", FORMAT)
    if remapped is not None and remapped.code == 0:
        wrong |= parse_remapped(remapped.out)
    for bus_id, why in sorted(wrong.items()):
        fix = f"`nvidia-smi --gpu-reset -i {bus_id}`, or drain the host"
        yield Finding(what="gpu memory", verdict="stops", found=f"GPU {bus_id}: {why}", fix=fix)
    kernel = _ask(shell, "dmesg")
    if kernel is None or kernel.code != 0:
        fix = "let Slurm run slurm/healthcheck.sh, which reads it as root and drains the node"
        yield Finding(
            what="xid", verdict="note", found="no permission to read the kernel log", fix=fix
        )
        return
    yield from judge_xids(parse_xids(kernel.out), _uptime(root))


def judge_xids(xids: tuple[Xid, ...], uptime_s: float) -> Iterator[Finding]:
    for xid in {(x.bus_id, x.number): x for x in xids}.values():
        ago = uptime_s - xid.at_s
        if xid.number in FATAL_XIDS and ago <= XID_AGE_S:
            yield Finding(
                what="xid",
                verdict="warns",
                found=f"GPU {xid.bus_id}: Xid {xid.number}, {FATAL_XIDS[xid.number]},"
                f" {ago:.0f} s ago",
                fix="drain the host and reset the GPU, unless it was reset since",
            )


def _uptime(root: Path) -> float:
    return float((root / "proc/uptime").read_text().split()[0])
